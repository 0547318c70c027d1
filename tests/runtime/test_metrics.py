"""Names, labels and the endpoint."""

import http.client

from prometheus_client import CollectorRegistry, generate_latest

from mooncake_zmq.runtime.metrics import families, parse_name, serve


def test_names_carry_labels() -> None:
    assert parse_name("misses") == ("misses", {})
    assert parse_name("misses[reason=evicted,tier=dram]") == ("misses", {"reason": "evicted", "tier": "dram"})


def test_names_that_share_a_base_share_a_family() -> None:
    (family,) = families({"misses[reason=a]": 1, "misses[reason=b]": 2}, "counter")
    assert family.name == "mooncake_misses"
    assert [(sample.name, sample.labels, sample.value) for sample in family.samples] == [
        ("mooncake_misses_total", {"reason": "a"}, 1),
        ("mooncake_misses_total", {"reason": "b"}, 2),
    ]
    assert generate_latest(CollectorRegistry()) == b""


def test_the_endpoint_serves_counts_and_gauges_and_ends() -> None:
    from socket import socket

    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    close = serve(port, lambda: ({"frames[kind=ping]": 3}, {"queue": 2.0}))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    assert 'mooncake_frames_total{kind="ping"} 3.0' in text
    assert "mooncake_queue 2.0" in text
    connection.close()
    close()
