"""Whole replays on a small cluster: the same decisions through either link, nothing lost, the same again."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from lab_bench import NODE, shifting_trace, small_setup, small_trace

from mooncake_zmq.laboratory import machine as modelled
from mooncake_zmq.laboratory import replay as replaying
from mooncake_zmq.laboratory.cluster import CHUNK_TOKENS
from mooncake_zmq.laboratory.machine import LAYERS
from mooncake_zmq.laboratory.metrics import summarize
from mooncake_zmq.laboratory.replay import Replay, run
from mooncake_zmq.laboratory.study import Arrival, NodeProfile, RequestRecord, RunResult, Setup


def quiet(share: float) -> None:
    pass


def records(result: RunResult) -> list[dict[str, object]]:
    return [asdict(record) for record in result.requests]


def replay(setup: Setup, arrivals: list[Arrival], link: str) -> tuple[list[object], RunResult, Replay]:
    one = Replay(setup, arrivals, link=link)
    one.placed = []
    result = one.run(quiet)
    placed: list[object] = [(p.request_id, p.attempt, p.prefill, p.decode, p.reuse_blocks, p.sources) for p in one.placed]
    return placed, result, one


def test_sessions_and_direct_give_the_same_placements_and_the_same_steps() -> None:
    arrivals = small_trace()
    placed, result, _ = replay(small_setup(), arrivals, "direct")
    by_session, slower, _ = replay(small_setup(), arrivals, "sessions")
    assert placed == by_session
    assert len(placed) >= len(arrivals)
    for one, other in zip(result.requests, slower.requests, strict=True):
        assert one.ttft_s == pytest.approx(other.ttft_s, abs=1e-9)
        assert one.tbt_s == pytest.approx(other.tbt_s, abs=1e-9)
        assert one.end_s == pytest.approx(other.end_s, abs=1e-9)
    assert result.prefill_busy_s == pytest.approx(slower.prefill_busy_s)
    assert result.decode_busy_s == pytest.approx(slower.decode_busy_s)


def check_record(arrival: Arrival, record: RequestRecord) -> None:
    assert (record.input_tokens, record.output_tokens) == (arrival.input_tokens, arrival.output_tokens)
    assert record.outcome in ("finished", "rejected", "failed")
    assert 0 <= record.hit_own + record.hit_dram + record.hit_disk + record.hit_remote < record.input_tokens
    if record.outcome == "finished":
        assert 0 < record.ttft_s <= record.end_s
        assert (record.tbt_s > 0) == (record.output_tokens > 1)
        assert record.queue_s + record.prefill_s <= record.ttft_s + 1e-9


@pytest.mark.parametrize("speed", [1.0, 20.0])
def test_every_arrival_ends_in_one_record_and_engines_compute_no_longer_than_time_passes(speed: float) -> None:
    arrivals = small_trace(60)
    result = run(small_setup(speed=speed, hardware=_node(decode_tokens=600_000)), arrivals)
    assert len(result.requests) == len(arrivals)
    for arrival, record in zip(arrivals, result.requests, strict=True):
        check_record(arrival, record)
        assert record.at_s == pytest.approx(arrival.at_s / speed, abs=1e-6)
    assert all(record.outcome == "finished" for record in result.requests)
    for busy_s in (*result.prefill_busy_s.values(), *result.decode_busy_s.values()):
        assert 0 < busy_s <= result.virtual_s
    assert sum(record.hit_dram for record in result.requests) > 0
    assert result.errors["ttft_s"][0] == len(arrivals)
    assert len(result.loads) >= result.virtual_s / 10 - 1


@pytest.mark.parametrize("pause_s", [100.0, 109.5])  # a sample comes every 10 s: before the arrival, or just after it
def test_a_pause_in_the_trace_longer_than_any_request_may_take_ends_no_replay(
    pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "TIMEOUT_S", 50.0)
    arrivals = [replace(arrival, at_s=index * pause_s) for index, arrival in enumerate(small_trace(4))]
    assert [each.outcome for each in run(small_setup(), arrivals).requests] == ["finished"] * 4


def test_a_loaded_cluster_is_slower_and_a_lone_request_takes_what_it_costs() -> None:
    lone = run(small_setup(), [Arrival(0.0, 4000, 11, tuple(range(8)))]).requests[0]
    costs = NODE.costs
    assert lone.ttft_s == pytest.approx(costs.compute_s(4000, 0), abs=0.01)
    # The last layers' KV of the last chunk, after all compute.
    handed_over_s = (4000 - CHUNK_TOKENS) / LAYERS * costs.kv_bytes_per_token / NODE.network_bytes_per_s
    assert lone.tbt_s == pytest.approx(handed_over_s + costs.step_s(1, 4001), abs=0.002)
    assert lone.end_s == pytest.approx(lone.ttft_s + sum(costs.step_s(1, 4001 + step) for step in range(10)), abs=0.02)
    crowd = run(small_setup(), [Arrival(0.0, 4000, 11, tuple(range(n * 8, n * 8 + 8))) for n in range(8)])
    assert max(record.ttft_s for record in crowd.requests) > 3 * lone.ttft_s


def test_requests_refused_on_arrival_are_recorded_and_cost_nothing() -> None:
    arrivals = [Arrival(0.0, 8000, 5, tuple(range(n * 16, n * 16 + 16))) for n in range(40)]
    result = run(small_setup(admission="early", ttft_slo_s=3.0, tbt_slo_s=1.0), arrivals)
    outcomes = [record.outcome for record in result.requests]
    assert set(outcomes) == {"finished", "rejected"}
    assert all(record.ttft_s == -1 and record.reason for record in result.requests if record.outcome == "rejected")
    assert sum(result.prefill_busy_s.values()) == pytest.approx(outcomes.count("finished") * NODE.costs.compute_s(8000, 0))


def test_a_repeated_prompt_is_loaded_and_not_computed() -> None:
    ids = tuple(range(20))
    first, again = run(small_setup(), [Arrival(0.0, 10_240, 2, ids), Arrival(30.0, 10_240, 2, ids)]).requests
    assert first.hit_dram == 0
    assert again.hit_own == 19 * 512
    assert again.ttft_s < first.ttft_s / 3


@pytest.mark.parametrize("block_tokens", [512, 256, 128])
def test_smaller_blocks_hit_no_less(block_tokens: int) -> None:
    ids = tuple(range(5))
    setup = small_setup(block_tokens=block_tokens, overrides={"prefill.own_reuse": False})
    _, again = run(setup, [Arrival(0.0, 2200, 2, ids), Arrival(30.0, 2200, 2, ids)]).requests
    assert again.hit_dram + again.hit_remote == 2200 // block_tokens * block_tokens


def test_bandwidth_that_nobody_shares_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: with it, fetching and handing over cost nothing, and a congested run looks like an idle one."""
    arrivals = small_trace(60)
    setup = small_setup(speed=20.0, hardware=_node(network_bytes_per_s=1e7))
    honest = run(setup, arrivals)
    monkeypatch.setattr(modelled, "through", lambda now, size_bytes, resources: now)
    planted = run(setup, arrivals)
    gaps = [sum(record.end_s - record.ttft_s for record in result.requests) for result in (honest, planted)]
    assert gaps[1] < gaps[0] * 0.9


def test_tiers_below_dram_serve_what_dram_evicted() -> None:
    arrivals = small_trace(60)
    node = {"dram_tokens": 8_000}
    pooled = {"prefill.own_reuse": False}
    dram = run(small_setup(hardware=_node(**node), overrides=pooled), arrivals)
    ssd = run(small_setup(hardware=_node(**node, disk_tokens=100_000), overrides=pooled), arrivals)
    hits = [sum(r.hit_own + r.hit_dram + r.hit_disk + r.hit_remote for r in result.requests) for result in (dram, ssd)]
    assert hits[1] > hits[0]
    assert sum(record.hit_disk for record in dram.requests) == 0 < sum(record.hit_disk for record in ssd.requests)


def _node(**changes: Any) -> NodeProfile:
    return replace(NODE, **changes)


SCRIPT = """
import json
from dataclasses import asdict
from lab_bench import small_setup, small_trace
from mooncake_zmq.laboratory.replay import run
print(json.dumps([asdict(record) for record in run(small_setup(speed=5.0), small_trace()).requests]))
"""


def test_the_same_run_gives_the_same_records_whatever_the_hash_seed() -> None:
    here = Path(__file__).parent
    expected = json.loads(json.dumps(records(run(small_setup(speed=5.0), small_trace()))))
    for seed in ("0", "1234"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{here}:{here.parent.parent}", "PATH": "/usr/bin"}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == expected


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (small_setup(block_tokens=300), "block_tokens"),
        (small_setup(policy="by horoscope"), "policy"),
        (small_setup(overrides={"conductor.no_such": 1}), "no setting conductor.no_such"),
        (small_setup(overrides={"prefill": 1}), "no setting prefill"),
        (small_setup(overrides={"prefill.chunk_tokens": "long"}), "prefill.chunk_tokens cannot be"),
    ],
)
def test_a_setup_that_cannot_be_is_refused(setup: Setup, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(setup, small_trace(3))


def test_an_override_reaches_the_actor() -> None:
    setup = small_setup(overrides={"prefill.pool.fetch_s": 2.5, "laboratory.decode_pools": True, "cache-node.probe_s": 2})
    cluster = Replay(setup, small_trace(3)).cluster
    assert (cluster.prefill.pool.fetch_s, cluster.lab.decode_pools, cluster.cache_node.probe_s) == (2.5, True, 2)


def test_nodes_that_change_their_role_serve_a_load_that_shifts_better_than_fixed_ones() -> None:
    arrivals = shifting_trace()
    results = {}
    for after_s in (0.0, 10.0):
        changing = {"laboratory.change_roles": True, "laboratory.change_s": 5.0, "conductor.role_change_after_s": after_s}
        setup = small_setup(prefill=4, decode=4, admission="prediction", ttft_slo_s=5.0, overrides=changing)
        results[after_s] = run(setup, arrivals)
    fixed, changed = (summarize(result) for result in results.values())
    assert len(results[10.0].prefill_busy_s) > 4
    assert len(results[10.0].decode_busy_s) > 4
    assert len(results[0.0].prefill_busy_s) == len(results[0.0].decode_busy_s) == 4
    assert changed.goodput_per_s > 1.15 * fixed.goodput_per_s
    assert changed.failed == 0, "a drain breaks no request"


def test_a_change_of_role_ends_no_request_early() -> None:
    """Every token that a drained decode sent last is on its way when its process ends."""
    changing = {"laboratory.change_roles": True, "laboratory.change_s": 1.0, "conductor.role_change_after_s": 2.0}
    setup = small_setup(
        prefill=4, decode=4, ttft_slo_s=5.0, admission="early", hardware=_node(decode_tokens=600_000), overrides=changing
    )
    one = Replay(setup, shifting_trace(120.0))
    result = one.run(quiet)
    assert sum(process.starts > 1 for process in one.world.processes.values()) >= 4
    finished = [record for record in result.requests if record.outcome == "finished"]
    refused = ("ttft_slo", "tbt_slo", "refused by the decode")
    assert all(record.reason in refused for record in result.requests if record.outcome != "finished")
    # Who was on the way to a node that had just begun to drain is placed once more.
    assert 0 < sum(record.attempts > 1 for record in finished) < len(finished) / 10
    assert all(record.wasted_prefill_s == 0 for record in finished)
