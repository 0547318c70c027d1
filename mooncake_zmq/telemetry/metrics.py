"""Counters and gauges of actors as Prometheus metrics, and a page of them for processes without HTTP."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from mooncake_zmq.telemetry.metric_texts import text_of

_NAME = re.compile(r"([^\[\]]+)(?:\[(.*)\])?")

MICROSECONDS = "_microseconds"
"""The end of the names of counters of time."""

Snapshot = Callable[[], tuple[Mapping[str, float], Mapping[str, float]]]
"""A function that returns (counts, gauges); it is called from any thread that makes the page."""


def parse_name(name: str) -> tuple[str, dict[str, str]]:
    """Return name and labels of a counter's key: `misses[reason=evicted]` as ("misses", {"reason": "evicted"})."""
    match = _NAME.fullmatch(name)
    assert match, f"{name!r} is no metric name"
    return match[1], dict(pair.split("=", 1) for pair in match[2].split(",")) if match[2] else {}


def exposed_name(plain: str) -> str:
    """Return the name in Prometheus of a counter or gauge without labels, without `_total`."""
    if plain.endswith(MICROSECONDS):
        plain = plain.removesuffix(MICROSECONDS) + "_seconds"
    return "mooncake_" + re.sub(r"\W", "_", plain, flags=re.ASCII)


def families(values: Mapping[str, float], kind: str) -> Iterator[Metric]:
    """Yield metrics of `values`: `misses[reason=evicted]` becomes `mooncake_misses_total{reason="evicted"}`; names that share
    a base share a family. Counters are whole numbers, so times are counted in microseconds; they are shown in seconds, as
    Prometheus wants."""
    metrics: dict[str, Metric] = {}
    for name, value in sorted(values.items()):
        plain, labels = parse_name(name)
        base = exposed_name(plain)
        if plain.endswith(MICROSECONDS):
            value *= 1e-6
        metric = metrics.setdefault(base, Metric(base, f"{text_of(plain)}.", kind))
        metric.add_sample(f"{base}_total" if kind == "counter" else base, labels, value)
    return iter(metrics.values())


def as_vllm(model_name: str, counts: Mapping[str, float], gauges: Mapping[str, float]) -> Iterator[Metric]:
    """Yield counters of an engine node under vLLM's names, so that dashboards and routers made for vLLM find them."""
    cached = sum(value for name, value in counts.items() if name.startswith("prompt_tokens_cached["))
    prompt = cached + counts.get("prompt_tokens_computed", 0)
    used, there = _kv_usage(gauges)
    values = [
        ("num_requests_running", "Requests being computed", "gauge", gauges.get("requests_running", 0)),
        ("num_requests_waiting", "Requests that wait for that", "gauge", gauges.get("requests_waiting", 0)),
        (
            "kv_cache_usage_perc",
            "KV memory in use that no other request can have, 0 to 1",
            "gauge",
            used / there if there else 0,
        ),
        ("num_preemptions", "Requests set back for lack of KV memory", "counter", counts.get("preemptions", 0)),
        ("prompt_tokens", "Prompt tokens, computed or reused", "counter", prompt),
        ("generation_tokens", "Tokens sampled", "counter", counts.get("generation_tokens", 0)),
        ("prefix_cache_queries", "Prompt tokens looked up", "counter", prompt),
        ("prefix_cache_hits", "Prompt tokens whose KV was reused", "counter", cached),
    ]
    for name, text, kind, value in values:
        metric = Metric(f"vllm:{name}", f"{text}.", kind)
        metric.add_sample(metric.name + "_total" * (kind == "counter"), {"model_name": model_name, "engine": "0"}, value)
        yield metric


def _kv_usage(gauges: Mapping[str, float]) -> tuple[float, float]:
    """Return used and total KV, of a decode in tokens, of a prefill in blocks. Cached KV that no request uses counts as
    free."""
    if "reserved_tokens" in gauges:
        return gauges["reserved_tokens"], gauges["capacity_tokens"]
    held = gauges.get("pinned_blocks", 0) + gauges.get("writing_blocks", 0)
    return held, gauges.get("capacity_blocks", 0)


class _Snapshots(Collector):
    def __init__(self, snapshot: Snapshot, also: Callable[[], Iterable[Metric]], engine_of: str) -> None:
        self._snapshot, self._also, self._engine_of = snapshot, also, engine_of

    def describe(self) -> list[Metric]:
        """Return nothing: registering must not call a process that does not run yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        counts, gauges = self._snapshot()
        yield from families(counts, "counter")
        yield from families(gauges, "gauge")
        if self._engine_of:
            yield from as_vllm(self._engine_of, counts, gauges)
        yield from self._also()


def page_of(snapshot: Snapshot, also: Callable[[], Iterable[Metric]] = tuple, *, engine_of: str = "") -> Callable[[], bytes]:
    """Return a function that writes `snapshot`, and what `also` returns, as text. `engine_of`: the model of an engine node,
    whose metrics also have vLLM's names."""
    registry = CollectorRegistry()
    registry.register(_Snapshots(snapshot, also, engine_of))
    return lambda: generate_latest(registry)
