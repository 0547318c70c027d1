"""The eviction benchmark: what it counts, what it refuses, and how it is called."""

import json
from random import Random

import click
import pytest
from click.testing import CliRunner

from mooncake_zmq.bench.command import bench
from mooncake_zmq.bench.eviction import bench_eviction, generated_trace, read_trace
from mooncake_zmq.kv.eviction import POLICIES
from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.laboratory.hit_ratio import hit_ratio, infinite_hit_ratio


def trace_file(path, *prompts):
    lines = [json.dumps({"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": ids}) for ids in prompts]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_hit_has_all_its_parents_there(tmp_path):
    trace = read_trace(trace_file(tmp_path / "t", [1, 2, 3], [1, 2, 4], [9, 2, 3], [1, 2, 3]))
    assert infinite_hit_ratio(trace) == (0 + 2 + 0 + 3) / 12
    for policy in POLICIES:
        assert hit_ratio(trace, Slots(100, policy)) == infinite_hit_ratio(trace)


def test_lru_keeps_the_root_and_evicts_the_leaf(tmp_path):
    trace = read_trace(trace_file(tmp_path / "t", [1, 2, 3], [7], [1, 2, 3]))
    slots = Slots(3)
    assert hit_ratio(trace, slots) == 2 / 7
    slots.check()


def test_a_prompt_longer_than_the_pool_fills_it_and_no_more(tmp_path):
    trace = read_trace(trace_file(tmp_path / "t", [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]))
    slots = Slots(3)
    assert hit_ratio(trace, slots) == 3 / 10
    assert slots.pinned == 0
    slots.check()


def test_a_block_twice_in_one_prompt_is_stored_once(tmp_path):
    slots = Slots(3)
    hit_ratio(read_trace(trace_file(tmp_path / "t", [1, 1, 2], [1, 1, 2])), slots)
    assert len(slots.committed_keys()) == 2
    slots.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_a_pool_that_never_evicts_and_none_leaks(policy):
    trace = generated_trace(Random(1), 300)
    slots = Slots(500, policy)
    assert 0 < hit_ratio(trace, slots) < infinite_hit_ratio(trace)
    assert slots.pinned == 0
    slots.check()


def test_the_generated_trace_repeats_itself():
    assert generated_trace(Random(5), 50) == generated_trace(Random(5), 50)
    assert 0.2 < infinite_hit_ratio(generated_trace(Random(5), 500)) < 0.9


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "asks for no block"),
        ('{"hash_ids": [1]}\nnonsense\n', "line 2"),
        ('{"hash_ids": [-1]}\n', "line 1.*>= 0"),
        ('{"ids": [1]}\n', "line 1.*hash_ids"),
        (f'{{"hash_ids": [{1 << 130}]}}\n', "line 1"),
    ],
)
def test_a_trace_that_is_none_is_refused_with_its_line(tmp_path, text, complaint):
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(click.ClickException, match=complaint):
        read_trace(path)


def test_a_trace_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(click.ClickException, match="cannot read the trace"):
        bench_eviction(tmp_path / "none", [1], ["lru"], print)


def test_the_command_prints_one_row_for_each_policy_and_capacity(tmp_path):
    path = trace_file(tmp_path / "t", [1, 2, 3], [1, 2, 3])
    arguments = ["eviction", "--trace", str(path), "--capacity", "3", "--capacity", "2", "--policy", "lru", "--policy", "lfu"]
    ran = CliRunner().invoke(bench, [*arguments, "--json"])
    assert ran.exit_code == 0, ran.output
    rows = json.loads(ran.stdout)["rows"]
    assert [(row["name"], row["value"]) for row in rows] == [
        ("lru, 2 blocks", 2 / 6),
        ("lru, 3 blocks", 3 / 6),
        ("lfu, 2 blocks", 2 / 6),
        ("lfu, 3 blocks", 3 / 6),
    ]
    assert {row["reference"] for row in rows} == {3 / 6}


def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = trace_file(tmp_path / "t", [1, 2, 3], [1, 2, 3])
    report = bench_eviction(path, [2, 3], ["lru", "sieve"], lambda _: None)
    report.show(as_json=True, plot=tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
