"""The verdict's numbers: which of them are bad, since when, and what several gateways' histories come to."""

import pytest

from mooncake_zmq.gateway.requests.cluster_snapshot import verdict
from mooncake_zmq.gateway.requests.history import (
    MINUTE,
    STEP_S,
    STEPS,
    TTFT,
    TTFT_BOUNDS_S,
    History,
    histogram,
    merged,
    numbers,
)
from mooncake_zmq.gateway.requests.slowness import ACTIONS, slow

QUIET = {"requests": 10, "requests_slo_met[of=ttft]": 10, "requests_slo_met[of=tbt]": 10}


def predicted(*, count: int, predicted_s: float, actual_s: float) -> dict[str, int]:
    means = {"predicted_microseconds": predicted_s, "actual_microseconds": actual_s}
    return {"predictions[of=ttft]": count, **{f"{name}[of=ttft]": round(count * mean * 1e6) for name, mean in means.items()}}


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ({}, ""),
        (QUIET, ""),
        ({"requests_failed[code=attempts_exhausted]": 2}, "2 requests failed in the last minute (attempts_exhausted 2)"),
        ({"requests_failed[code=constraint_stuck]": 2}, ""),
        (
            {"requests_rejected[reason=ttft_slo]": 1, "requests_failed[code=ttft_slo]": 1},
            "1 request was refused in the last minute (ttft_slo 1)",
        ),
        (
            {"edge_rejected[reason=full]": 3, "tenant_limited[tenant=alice]": 4, "tenant_limited[tenant=bob]": 1},
            "8 requests were refused in the last minute (limited 5, full 3)",
        ),
        (
            {**QUIET, "requests_slo_missed[of=ttft]": 1},
            "TTFT missed its SLO in 1 of 11 requests of the last minute",
        ),
        ({"requests_slo_met[of=ttft]": 199, "requests_slo_missed[of=ttft]": 1}, ""),
        (
            {**QUIET, "requests_slo_missed[of=tbt]": 10},
            "TBT missed its SLO in 10 of 20 requests of the last minute",
        ),
        (predicted(count=9, predicted_s=1.19, actual_s=5.31), "TTFT was 5.31 s where 1.19 s was predicted"),
        (predicted(count=9, predicted_s=1.19, actual_s=2.0), ""),
        (predicted(count=9, predicted_s=0.01, actual_s=0.1), ""),
        (predicted(count=2, predicted_s=1.19, actual_s=5.31), ""),
    ],
)
def test_a_number_of_the_last_minute_that_is_bad_is_named(step, text):
    assert [each.text for each in slow([step])] == ([text] if text else [])


def test_the_verdict_says_the_number_and_for_how_long():
    failed = {"requests_failed[code=no_decode]": 1}
    (found,) = slow([failed, *[QUIET] * MINUTE, failed, QUIET, failed, QUIET])
    assert found.since_s == 4 * STEP_S, "an older failure, with a good minute after it, is another one"
    assert found.action == ACTIONS["failed"]
    assert verdict("ok", [], (), [found]) == "It serves, but 2 requests failed in the last minute (no_decode 2), for 20 s."
    (always,) = slow([failed] * STEPS)
    assert verdict("ok", [], (), [always]).endswith("for 5 min or longer.")
    assert slow([failed, *[QUIET] * MINUTE]) == []


def test_a_history_holds_rises_and_no_more_than_five_minutes_of_them():
    history = History()
    for second in range(2 * STEPS):
        history.sample({"requests": 3 * second, "frames": second, "edge_rejected[reason=full]": 0})
    assert history.steps == [{"requests": 3}] * STEPS


def test_histories_of_gateways_add_up_at_their_ends():
    assert merged([[{"requests": 1}, {"requests": 2}], [{"requests": 10, "tokens": 5}], []]) == [
        {"requests": 1},
        {"requests": 12, "tokens": 5},
    ]


def test_numbers_are_rates_quantiles_and_counts_a_minute():
    first = [0] * (len(TTFT_BOUNDS_S) + 1)
    first[TTFT_BOUNDS_S.index(1)] = 98
    first[-1] = 2
    step = {"requests": 50, "tokens": 1000, "requests_rejected[reason=no_room]": 2, **histogram(TTFT, first)}
    found = numbers([{}, step])
    assert found["requests_per_s"] == {"now": 5.0, "past": [0.0, 10.0]}
    assert found["tokens_per_s"]["now"] == 100.0
    assert found["ttft_p50_s"]["past"][0] is None
    assert 0.75 < found["ttft_p50_s"]["now"] < 1
    assert found["ttft_p99_s"]["now"] == TTFT_BOUNDS_S[-1], "the last bucket has no end"
    assert (found["gap_p99_s"]["now"], found["failed_per_min"]["now"]) == (None, 0)
    assert found["refused_per_min"]["past"][1] == 24
