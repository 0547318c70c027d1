"""A process reports what it uses and which release it runs, under names that have a meaning."""

import resource
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from mooncake_zmq import __version__
from mooncake_zmq.runtime import notify
from mooncake_zmq.runtime.facts import Facts
from mooncake_zmq.runtime.node_process import NodeProcess
from mooncake_zmq.telemetry.metric_texts import TEXTS
from mooncake_zmq.telemetry.metrics import parse_name


def test_a_process_says_its_cpu_its_memory_and_its_release():
    counts, gauges = Facts(node="p0", host="h0", role="prefill").of_itself()
    assert counts["process_cpu_seconds"] > 0
    assert gauges["process_resident_bytes"] > 1 << 20
    (release,) = [labels for name, labels in map(parse_name, gauges) if name == "release"]
    assert release.pop("code") in ("machine", "python")
    assert release == {"node": "p0", "host": "h0", "role": "prefill", "version": __version__}
    assert {parse_name(name)[0] for name in (*counts, *gauges)} <= TEXTS.keys()


@contextmanager
def no_descriptor_left():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_without_a_free_descriptor_lives_on(monkeypatch, tmp_path):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
    facts = Facts(node="p0", host="h0", role="prefill")
    with no_descriptor_left():
        notify.alive("serving")
        _, gauges = facts.of_itself()
    assert gauges["process_resident_bytes"] > 1 << 20


def test_an_error_of_a_look_for_another_thread_is_raised_there_and_not_in_the_loop():
    turns = []

    def look():
        raise OSError("no descriptor left")

    def call(in_loop):
        in_loop()
        turns.append(1)

    process = SimpleNamespace(runtime=SimpleNamespace(call=call))
    with pytest.raises(OSError, match="no descriptor left"):
        NodeProcess.in_loop(process, look)
    assert turns, "the loop has ended"
