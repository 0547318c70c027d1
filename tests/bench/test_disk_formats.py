"""The benchmark of the SSD tier's two formats: what it counts, and that neither takes more than it is given."""

import json
from random import Random

import pytest
from click.testing import CliRunner

from mooncake_zmq.bench.command import bench
from mooncake_zmq.bench.disk_formats import FIGURES, LogTier, SlotTier, hit_ratio
from mooncake_zmq.bench.eviction import generated_trace
from mooncake_zmq.kv.layout import PAGE_BYTES
from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.laboratory.hit_ratio import infinite_hit_ratio

BLOCK_BYTES = 64 << 10
STRIDE = PAGE_BYTES + BLOCK_BYTES
TIERS = [SlotTier, LogTier]


@pytest.fixture(scope="module")
def trace():
    return generated_trace(Random(1), 300)


def distinct(trace):
    return len({key for keys in trace for key in keys})


@pytest.mark.parametrize("kind", TIERS)
def test_a_tier_with_room_for_all_hits_as_one_that_never_evicts_and_writes_each_block_once(trace, kind):
    tier = kind(2 * distinct(trace) * STRIDE, BLOCK_BYTES)
    memory = Slots(max(map(len, trace)))
    assert hit_ratio(trace, memory, tier) == infinite_hit_ratio(trace)
    kept = distinct(trace) - len([key for key in memory.committed_keys() if not tier.holds(key)])
    assert tier.written.admitted == kept
    assert tier.written.bytes == kept * STRIDE


@pytest.mark.parametrize("kind", TIERS)
def test_a_small_tier_keeps_to_its_room_and_beats_memory_alone(trace, kind):
    capacity = distinct(trace) // 8
    tier = kind(capacity * STRIDE, BLOCK_BYTES)
    alone = hit_ratio(trace, Slots(100), SlotTier(0, BLOCK_BYTES))
    assert alone < hit_ratio(trace, Slots(100), tier) < infinite_hit_ratio(trace)
    assert sum(tier.holds(key) for key in {key for keys in trace for key in keys}) <= capacity
    assert tier.written.bytes >= tier.written.admitted * STRIDE


def test_a_log_keeps_its_own_rules(trace):
    tier = LogTier(distinct(trace) // 8 * STRIDE, BLOCK_BYTES)
    hit_ratio(trace, Slots(100), tier)
    log = tier._log
    log.check()
    assert sum(segment.length for segment in log._segments.values()) <= log.settings.bytes
    assert tier.written.bytes > tier.written.admitted * STRIDE, "what was read has moved"


def test_the_command_prints_a_row_for_each_figure_and_capacity(tmp_path):
    path = tmp_path / "trace"
    path.write_text("".join(json.dumps({"hash_ids": [*range(at, at + 40)]}) + "\n" for at in (0, 0, 100, 200, 0)))
    options = ["--trace", str(path), "--capacity", "400,800", "--block-kib", "64", "--directory", str(tmp_path), "--json"]
    ran = CliRunner().invoke(bench, ["disk", *options])
    assert ran.exit_code == 0, ran.output
    rows = json.loads(ran.stdout)["rows"]
    assert [row["name"] for row in rows] == [f"{name}, {blocks} blocks" for blocks in (400, 800) for name in FIGURES]
    assert {row["value"] for row in rows if row["name"].startswith("hits")} == {80 / 200}
    assert [path] == list(tmp_path.iterdir())
