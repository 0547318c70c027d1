"""Counters and gauges of actors as Prometheus metrics, and an optional endpoint of them for processes without HTTP."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_NAME = re.compile(r"([^\[\]]+)(?:\[(.*)\])?")

Snapshot = Callable[[], tuple[Mapping[str, float], Mapping[str, float]]]
"""Returns (counts, gauges); called from the endpoint's thread."""


def parse_name(name: str) -> tuple[str, dict[str, str]]:
    """`misses[reason=evicted]` as ("misses", {"reason": "evicted"})."""
    match = _NAME.fullmatch(name)
    assert match, f"{name!r} is no metric name"
    return match[1], dict(pair.split("=", 1) for pair in match[2].split(",")) if match[2] else {}


def families(values: Mapping[str, float], kind: str) -> Iterator[Metric]:
    """`misses[reason=evicted]` becomes `mooncake_misses_total{reason="evicted"}`; names that share a base share a family."""
    metrics: dict[str, Metric] = {}
    for name, value in sorted(values.items()):
        plain, labels = parse_name(name)
        base = "mooncake_" + re.sub(r"\W", "_", plain, flags=re.ASCII)
        metric = metrics.setdefault(base, Metric(base, plain.replace("_", " ").capitalize() + ".", kind))
        metric.add_sample(f"{base}_total" if kind == "counter" else base, labels, value)
    return iter(metrics.values())


class _Snapshots(Collector):
    def __init__(self, snapshot: Snapshot, also: Callable[[], Iterable[Metric]]) -> None:
        self._snapshot, self._also = snapshot, also

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask a process that does not run yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        counts, gauges = self._snapshot()
        yield from families(counts, "counter")
        yield from families(gauges, "gauge")
        yield from self._also()


def serve(port: int, snapshot: Snapshot, also: Callable[[], Iterable[Metric]] = tuple) -> Callable[[], None]:
    """Serve `snapshot` and what `also` gives on 127.0.0.1:`port`; returns what ends it. Both are called from the endpoint's
    thread. Raises OSError when the port is taken."""
    registry = CollectorRegistry()
    registry.register(_Snapshots(snapshot, also))
    server, thread = start_http_server(port, "127.0.0.1", registry)

    def close() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    return close
