"""Names, labels and the endpoint."""

import http.client

from prometheus_client import CollectorRegistry, generate_latest

from mooncake_zmq.runtime.metrics import as_vllm, families, parse_name, serve


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
    close = serve(
        "127.0.0.1",
        port,
        lambda: ({"frames[kind=ping]": 3, "steps": 1}, {"queue": 2.0, "reserved_tokens": 25, "capacity_tokens": 100}),
        engine_of="toy",
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    assert 'mooncake_frames_total{kind="ping"} 3.0' in text
    assert "mooncake_queue 2.0" in text
    assert "# HELP mooncake_steps_total Decode steps." in text
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="toy"} 0.25' in text
    connection.close()
    close()


def told_as_vllm(counts: dict[str, float], gauges: dict[str, float]) -> dict[str, float]:
    return {sample.name: sample.value for metric in as_vllm("m", counts, gauges) for sample in metric.samples}


def test_a_prefill_is_full_of_what_is_in_use_and_not_of_what_is_cached() -> None:
    counts = {"prompt_tokens_cached[source=own]": 30, "prompt_tokens_cached[source=local]": 10, "prompt_tokens_computed": 60}
    told = told_as_vllm(counts, {"capacity_blocks": 10, "cached_blocks": 9, "pinned_blocks": 1, "writing_blocks": 1})
    assert told["vllm:kv_cache_usage_perc"] == 0.2
    assert told["vllm:prompt_tokens_total"] == told["vllm:prefix_cache_queries_total"] == 100
    assert told["vllm:prefix_cache_hits_total"] == 40


def test_a_node_that_knows_nothing_of_its_engine_tells_zeros() -> None:
    assert set(told_as_vllm({}, {}).values()) == {0}
