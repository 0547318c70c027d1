"""Names, labels and the endpoint."""

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

import pytest
import waiting
from prometheus_client import CollectorRegistry, generate_latest

from mooncake_zmq.telemetry import metrics_endpoint
from mooncake_zmq.telemetry.metrics import as_vllm, families, page_of, parse_name
from mooncake_zmq.telemetry.metrics_endpoint import MAX_CONNECTIONS, MAX_HEAD_BYTES, MetricsEndpoint

PATIENCE_S = 20.0


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


def test_times_are_counted_in_microseconds_and_shown_in_seconds() -> None:
    (family,) = families({"actual_microseconds[of=ttft]": 2_500_000}, "counter")
    assert [(sample.name, sample.labels, sample.value) for sample in family.samples] == [
        ("mooncake_actual_seconds_total", {"of": "ttft"}, pytest.approx(2.5))
    ]


@contextmanager
def served(page: Callable[[], bytes] = lambda: b"page", host: str = "127.0.0.1") -> Iterator[MetricsEndpoint]:
    threads = threading.active_count()
    endpoint = MetricsEndpoint(host, 0, page)
    try:
        yield endpoint
    finally:
        endpoint.close()
    assert threading.active_count() == threads


def asked(endpoint: MetricsEndpoint, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=PATIENCE_S)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def connected(endpoint: MetricsEndpoint) -> socket.socket:
    return socket.create_connection(("127.0.0.1", endpoint.port), timeout=PATIENCE_S)


def is_ended(connection: socket.socket) -> bool:
    """Waits for the other side to end it."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_the_endpoint_serves_counts_and_gauges() -> None:
    page = page_of(
        lambda: ({"frames[kind=ping]": 3, "steps": 1}, {"queue": 2.0, "reserved_tokens": 25, "capacity_tokens": 100}),
        engine_of="toy",
    )
    with served(page) as endpoint:
        status, body = asked(endpoint)
    text = body.decode()
    assert status == 200
    assert 'mooncake_frames_total{kind="ping"} 3.0' in text
    assert "mooncake_queue 2.0" in text
    assert "# HELP mooncake_steps_total Decode steps." in text
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="toy"} 0.25' in text


def test_a_node_whose_loop_does_not_answer_is_unavailable() -> None:
    def page() -> bytes:
        raise TimeoutError

    with served(page) as endpoint:
        assert asked(endpoint) == (503, b"Service Unavailable\n")


def test_the_endpoint_answers_nothing_but_a_read_of_its_page_by_a_name_of_this_machine() -> None:
    with served() as endpoint:
        assert asked(endpoint, "/metrics?name=x", Host=f"localhost:{endpoint.port}") == (200, b"page")
        for host in ("localhost", "127.0.0.1", "[::1]", "[::1]:9"):
            assert asked(endpoint, Host=host) == (200, b"page")
        for host in ("evil.example", "[2001:db8::1]", ""):
            assert asked(endpoint, Host=host)[0] == 403
        assert asked(endpoint, method="HEAD") == (200, b"")
        assert asked(endpoint, "/")[0] == 404
        assert asked(endpoint, method="POST")[0] == 405
        assert asked(endpoint, Host=f"evil.example:{endpoint.port}")[0] == 403
        with connected(endpoint) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1:1\r\nHost: evil.example:80\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 403 ")
    with served(host="0.0.0.0") as endpoint:  # noqa: S104
        assert asked(endpoint, Host=f"prefill-a.example:{endpoint.port}") == (200, b"page")


def test_idle_connections_to_the_endpoint_make_room_for_a_call_and_start_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint, "CALL_S", 3600.0)
    with served() as endpoint:
        threads = threading.active_count()
        idle = [connected(endpoint) for _ in range(3 * MAX_CONNECTIONS)]
        assert asked(endpoint) == (200, b"page")
        assert threading.active_count() == threads
        assert all(is_ended(each) for each in idle[:MAX_CONNECTIONS])
        for each in idle:
            each.close()


def test_a_call_of_the_endpoint_that_is_not_whole_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint, "CALL_S", 0.05)
    with served() as endpoint, connected(endpoint) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert is_ended(connection)


def test_an_answer_of_the_endpoint_that_is_not_read_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint, "CALL_S", 0.05)
    with served(lambda: bytes(64 << 20)) as endpoint, connected(endpoint) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        eventually(lambda: endpoint._made)
        eventually(lambda: not endpoint._calls)


def test_a_head_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint, "CALL_S", 3600.0)
    with served() as endpoint, connected(endpoint) as connection:
        connection.sendall(b"x" * (MAX_HEAD_BYTES + 1))
        assert is_ended(connection)


def test_many_calls_of_the_endpoint_do_not_make_a_page_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint, "PAGE_S", 3600.0)
    made: list[None] = []
    with served(lambda: made.append(None) or b"page") as endpoint:  # type: ignore[func-returns-value]
        assert [asked(endpoint) for _ in range(5)] == [(200, b"page")] * 5
        assert len(made) == 1
        monkeypatch.setattr(metrics_endpoint, "PAGE_S", 0.0)
        asked(endpoint)
        assert len(made) == 2


def test_the_endpoint_says_that_its_port_is_taken() -> None:
    with served() as endpoint, pytest.raises(OSError, match="in use"):
        MetricsEndpoint("127.0.0.1", endpoint.port, bytes)


eventually = partial(waiting.eventually, timeout_s=PATIENCE_S)


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
