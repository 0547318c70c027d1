"""A process reports what it uses and which release it runs, under names that have a meaning."""

from mooncake_zmq import __version__
from mooncake_zmq.runtime.facts import Facts
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
