"""The benchmark of decisions: what it replays, what it counts, and how it is called."""

import json
import logging

import pytest
from click.testing import CliRunner

from mooncake_zmq.bench import schedule
from mooncake_zmq.bench.command import bench
from mooncake_zmq.bench.schedule import COSTS, generated, read_trace, replay, router_choices
from mooncake_zmq.bench.schedule_load import ClusterLoad, of_models
from mooncake_zmq.bench.schedule_zmq import times_over_zmq
from mooncake_zmq.core.actor import Started
from mooncake_zmq.telemetry.log import logs_from

LINES = [
    {"timestamp": 0, "input_length": 1200, "output_length": 20, "hash_ids": [1, 2, 3]},
    {"timestamp": 0, "input_length": 1800, "output_length": 5, "hash_ids": [1, 2, 4, 5]},
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n")
    return path


def test_a_trace_gives_the_complete_blocks_of_each_prompt(trace):
    asked = read_trace(trace)
    assert [(len(each.keys), each.tokens, each.output_tokens) for each in asked] == [(2, 1200, 20), (3, 1800, 5)]
    assert asked[0].keys == asked[1].keys[:2]


def test_every_kind_of_event_is_replayed_and_every_request_decided():
    timings = replay(generated(300), 4)
    assert len(timings.by_kind["Schedule"]) == 300
    assert {"BlocksAnnounced", "PrefillLoad", "DecodeLoad", "RequestEnded"} <= timings.by_kind.keys()
    assert timings.updated > 300
    assert timings.decisions_per_s > 0


def test_chats_of_several_models_keep_theirs_and_share_no_key():
    asked = generated(300)
    several = of_models(asked, 3, 20)
    assert len({each.adapter for each in several}) == 21
    assert [len(each.keys) for each in several] == [len(each.keys) for each in asked]
    owner = {}
    for each in several:
        assert {owner.setdefault(key, each.adapter) for key in each.keys} <= {each.adapter}
    assert sum(each.keys[-1] in later.keys for at, each in enumerate(several) for later in several[at + 1 : at + 40]) > 50


def test_vllms_with_adapters_decide_every_request():
    timings = replay(of_models(generated(300), 3, 20), 4, vllms=True)
    assert len(timings.by_kind["Schedule"]) == 300
    assert {"BlocksAnnounced", "PrefillLoad", "DecodeLoad", "RequestEnded"} <= timings.by_kind.keys()


def test_the_same_trace_gives_the_same_events():
    def first(count):
        load = ClusterLoad(generated(50), hosts=2, costs=COSTS)
        return [event for event, _ in zip(load.events(), range(count), strict=False)]

    assert first(40) == first(40)


def test_the_command_prints_rows_and_events(trace):
    run = CliRunner().invoke(bench, ["schedule", "--trace", str(trace), "--hosts", "2,3", "--json"])
    assert run.exit_code == 0, run.output
    told = json.loads(run.stdout)
    assert [row["name"] for row in told["rows"]][:2] == ["decisions, 2 hosts", "index updates, 2 hosts"]
    assert {row["kind"] for row in told["events"]["3"]} >= {"Schedule"}


def test_a_real_conductor_answers_every_request_over_zmq(capfd):
    with logs_from(logging.WARNING):
        took_s, answered_per_s = times_over_zmq(generated(120), per_s=400)
    assert len(took_s) == 120
    assert min(took_s) > 0
    assert 0 < answered_per_s < 500
    assert capfd.readouterr().out == "", "standard output is the report's"


def test_the_collectors_pauses_are_not_the_events(monkeypatch):
    clock = iter([0.0, 0.25, 1.0, 2.0])
    monkeypatch.setattr(schedule.time, "thread_time", lambda: next(clock))
    collector, timings = schedule.Collector(), schedule.Timings()

    class Collecting:
        def handle(self, now, event):
            collector("start", {})
            collector("stop", {})
            return []

    schedule.timed(Collecting(), timings, collector, 0.0, Started(), "Schedule")
    assert timings.by_kind == {"collector": [0.75], "Schedule": [1.25]}
    assert timings.decisions_per_s == pytest.approx(1 / 2.0)


def test_a_line_that_is_no_request_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input_length": 0}\n')
    run = CliRunner().invoke(bench, ["schedule", "--trace", str(path), "--hosts", "2"])
    assert run.exit_code == 2
    assert "line 1" in run.output


def test_a_python_without_the_router_is_told(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(Exception, match="no such module"):
        router_choices(generated(3), 2, str(python))
