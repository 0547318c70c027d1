"""What was possible, by hand and by looking at every pair; and what runs come to beside it."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_bench import COSTS, small_setup, small_trace

from mooncake_zmq.laboratory import zoo
from mooncake_zmq.laboratory.clairvoyant import computed_tokens, foresee, least_ttft_s
from mooncake_zmq.laboratory.keys import block_keys
from mooncake_zmq.laboratory.metrics import Summary, summarize
from mooncake_zmq.laboratory.profiles import A800
from mooncake_zmq.laboratory.runs import run_one
from mooncake_zmq.laboratory.study import Arrival, RequestRecord, RunResult, Setup


def arrival(tokens: int, *ids: int) -> Arrival:
    return Arrival(0.0, tokens, 10, ids)


def served(each: Arrival, **changes: object) -> RequestRecord:
    known = {"outcome": "finished", "ttft_s": 1.0, "tbt_s": 0.05, "prefill": "p", "attempts": 1}
    return RequestRecord(each.at_s, each.input_tokens, each.output_tokens, **(known | changes))  # type: ignore[arg-type]


def possible(arrivals: list[Arrival], block_tokens: int = 512, refused: tuple[int, ...] = ()) -> list[int]:
    records = [served(each, prefill="" if at in refused else "p") for at, each in enumerate(arrivals)]
    foresee(arrivals, records, block_tokens)
    return [each.possible for each in records]


def test_complete_blocks_that_an_earlier_prompt_has_are_possible() -> None:
    trace = [arrival(1024, 1, 2), arrival(1100, 1, 2, 3), arrival(1500, 1, 4, 5), arrival(1536, 1, 4, 6)]
    assert possible(trace) == [0, 1024, 512, 1024]


def test_a_begun_block_is_nobodys() -> None:
    assert possible([arrival(700, 1, 2), arrival(1024, 1, 2), arrival(700, 1, 2)]) == [0, 512, 512]


def test_of_a_prompt_that_is_all_there_one_token_is_computed() -> None:
    assert possible([arrival(1024, 1, 2), arrival(1024, 1, 2)]) == [0, 1023]
    assert possible([arrival(1, 1), arrival(1, 1)]) == [0, 0]


def test_equal_ids_behind_different_ones_are_different_tokens() -> None:
    assert possible([arrival(1024, 1, 2), arrival(1024, 3, 2)]) == [0, 0]


def test_smaller_blocks_are_complete_earlier() -> None:
    assert possible([arrival(700, 1, 2), arrival(1024, 1, 2)], 64) == [0, 640]


def test_a_refused_prompt_gives_nothing_and_has_nothing() -> None:
    trace = [arrival(1024, 1, 2), arrival(1100, 1, 2, 3), arrival(1100, 1, 2, 4)]
    assert possible(trace, refused=(0,)) == [-1, 0, 1024]


@given(seed=st.integers(0, 500), block_tokens=st.sampled_from([64, 256, 512]))
def test_the_same_comes_of_looking_at_every_pair(seed: int, block_tokens: int) -> None:
    trace = small_trace(25, seed)
    keys = [block_keys(each.hash_ids, each.input_tokens, block_tokens) for each in trace]
    found = []
    for at, each in enumerate(trace):
        before = {key for earlier in keys[:at] for key in earlier}
        leading = next((place for place, key in enumerate(keys[at]) if key not in before), len(keys[at]))
        found.append(min(leading * block_tokens, each.input_tokens - 1))
    assert possible(trace, block_tokens) == found


def test_an_idle_machine_loads_and_computes_at_once() -> None:
    loading = served(arrival(100_000), possible=99_999)
    assert least_ttft_s(loading, COSTS) == pytest.approx(99_999 * 1000 / 1e9)
    computing = served(arrival(1_000), possible=512)
    assert least_ttft_s(computing, COSTS) == pytest.approx(1e-4 * 488 + 1e-9 * (1000**2 - 512**2))


def test_what_an_earlier_attempt_of_the_same_request_computed_was_not_found() -> None:
    once, twice = (served(arrival(1024), hit_dram=512, hit_remote=256, possible=512, attempts=n) for n in (1, 2))
    assert computed_tokens(once) == 256
    assert computed_tokens(twice) == 512


def summary_of(arrivals: list[Arrival], found: list[int], **changes: object) -> Summary:
    records = [served(each, hit_own=hit, **changes) for each, hit in zip(arrivals, found, strict=True)]
    foresee(arrivals, records, 512)
    return summarize(RunResult(small_setup(), records))


def test_regret_is_what_was_computed_over_the_least() -> None:
    trace = [arrival(1124, 1, 2, at) for at in (3, 4, 5)]
    found = summary_of(trace, [0, 0, 512])
    assert (found.computed_tokens, found.least_tokens) == (3 * 1124 - 512, 1124 + 2 * 100)
    assert found.regret == pytest.approx(2860 / 1324)
    assert found.hits_of_possible == pytest.approx(512 / 2048)
    assert found.possible_ratio == pytest.approx(2048 / 3372)
    whole, rest = 1e-4 * 1124 + 1e-9 * 1124**2, 1e-4 * 100 + 1e-9 * (1124**2 - 1024**2)
    assert found.least_ttft_s == pytest.approx((whole + 2 * rest) / 3)
    assert summary_of(trace, [0, 1024, 1024]).regret == 1.0


def test_where_nothing_was_possible_nothing_was_missed() -> None:
    found = summary_of([arrival(600, 1, 2), arrival(600, 3, 4)], [0, 0])
    assert (found.regret, found.hits_of_possible, found.possible_ratio) == (1.0, 1.0, 0.0)


def test_only_prefilled_requests_count() -> None:
    trace = [arrival(1124, 1, 2, at) for at in (3, 4)]
    records = [served(trace[0]), served(trace[1], outcome="rejected", prefill="", ttft_s=-1.0)]
    foresee(trace, records, 512)
    found = summarize(RunResult(small_setup(), records))
    assert (found.computed_tokens, found.least_tokens) == (1124, 1124)


def test_the_first_gap_is_of_requests_with_two_tokens() -> None:
    trace = [arrival(100, 1)] * 3
    records = [served(each, first_gap_s=gap) for each, gap in zip(trace, (0.2, 0.4, -1.0), strict=True)]
    assert summarize(RunResult(small_setup(), records)).first_gap_s.mean == pytest.approx(0.3)


@pytest.mark.parametrize("policy", ["global", "local", "match", "load", "round-robin", "random", "vllm", "vllm-prefix"])
def test_no_run_computes_less_than_the_least(policy: str) -> None:
    random = Random(policy)
    for setup in (small_setup(policy=policy), small_setup(policy=policy, prefill=1, decode=1)):
        for speed in (1.0, 20.0):
            result = run_one(replace(setup, speed=speed), small_trace(40, random.randrange(1000)), lambda share: None)
            found = summarize(result)
            assert found.regret >= 1.0
            assert found.hits_of_possible <= 1.0
            assert found.ttft_s.mean >= found.least_ttft_s
            gaps = [each for each in result.requests if each.output_tokens > 1 and each.outcome == "finished"]
            assert all(0 < each.first_gap_s < each.end_s - each.ttft_s + 1e-9 for each in gaps)


def test_a_burst_that_computes_its_prefix_each_time_has_a_regret() -> None:
    """vLLM without a prefix cache finds nothing, so every request computes all of its prompt."""
    trace = zoo.arrivals_of(zoo.parse_workload("bursts:requests=8,prefix=1024,own=100,gap=1"))
    setup = Setup(prefill=1, decode=1, hardware=A800, policy="vllm")
    found = summarize(run_one(setup, trace, lambda share: None))
    assert found.hit_ratio == 0.0
    assert found.regret == pytest.approx(8 * 1124 / (8 * 1124 - 7 * 1024))
