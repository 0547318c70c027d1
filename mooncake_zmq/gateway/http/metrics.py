"""A gateway's Prometheus metrics of what its clients see: vLLM's names for them, `mooncake_*` for our own."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from mooncake_zmq.gateway.requests.answer import TOKEN
from mooncake_zmq.gateway.requests.client_events import ClientOutput, Failed, Finished
from mooncake_zmq.gateway.requests.history import GAP, GAP_BOUNDS_S, TOKENS, TTFT, TTFT_BOUNDS_S, histogram
from mooncake_zmq.telemetry.metrics import families

LABELS = ("model_name", "engine")
REQUEST_BUCKETS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


@dataclass(slots=True)
class RequestTimes:
    """The times of one request that its metrics need until its end."""

    began_at: float
    """When its HTTP call came."""
    prompt_tokens: int
    """0 where another answer to the same prompt counts them."""
    model: str = ""
    """The identity of the model that answers; empty: the only one."""
    first_token_at: float | None = None
    last_token_at: float = 0.0


class EdgeMetrics(Collector):
    """The metrics of one gateway, in a registry of their own."""

    def __init__(
        self,
        models: Mapping[str, str],
        *,
        waiting_and_running: Callable[[str], tuple[int, int]],
        counts: Callable[[], Mapping[str, float]],
        gauges: Callable[[], Mapping[str, float]],
    ) -> None:
        """`models`: the name of each model by its identity. The callables are asked at scrape time: `core.actor` says how
        counts and gauges are named."""
        self.registry = CollectorRegistry()
        self._waiting_and_running, self._counts, self._gauges = waiting_and_running, counts, gauges
        shared = _Shared(self.registry)
        self._of = {identity: _OfModel({"model_name": name, "engine": "0"}, shared) for identity, name in models.items()}
        self.registry.register(self)

    def observe(self, times: RequestTimes, output: ClientOutput, now: float) -> None:
        """Something is about to go to the client."""
        self._of[times.model].observe(times, output, now)

    def count_end(self, times: RequestTimes, finished_reason: str, now: float) -> None:
        self._of[times.model].count_end(times, finished_reason, now)

    def collect(self) -> Iterator[Metric]:
        """Read at scrape time: the levels, and whatever the actor counts."""
        levels = [(model.labels, self._waiting_and_running(identity)) for identity, model in self._of.items()]
        for place, name, documentation in (
            (0, "vllm:num_requests_waiting", "Requests without a first token."),
            (1, "vllm:num_requests_running", "Requests between first token and end."),
        ):
            metric = Metric(name, documentation, "gauge")
            for labels, both in levels:
                metric.add_sample(name, labels, both[place])
            yield metric
        yield from self._of_tokens()
        yield from families(self._counts(), "counter")
        yield from families(self._gauges(), "gauge")

    def _of_tokens(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens delivered.", labels=LABELS)
        first = HistogramMetricFamily(
            "vllm:time_to_first_token_seconds", "Seconds from a call to its first token.", labels=LABELS
        )
        gaps = HistogramMetricFamily("vllm:inter_token_latency_seconds", "Seconds between two tokens.", labels=LABELS)
        for model in self._of.values():
            values = tuple(model.labels.values())
            tokens.add_metric(values, model.tokens)
            first.add_metric(values, _buckets(TTFT_BOUNDS_S, model.first), model.first_s)
            gaps.add_metric(values, _buckets(GAP_BOUNDS_S, model.gaps), model.gaps_s)
        yield from (tokens, first, gaps)

    def counted(self) -> dict[str, float]:
        """Return the tokens and both histograms of all models as counters, for `gateway.requests.history`."""
        models = self._of.values()
        first = [sum(counts) for counts in zip(*(model.first for model in models), strict=True)]
        gaps = [sum(counts) for counts in zip(*(model.gaps for model in models), strict=True)]
        return {TOKENS: sum(model.tokens for model in models), **histogram(TTFT, first), **histogram(GAP, gaps)}

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask the actor, which may not run yet."""
        return []

    def exposition(self) -> bytes:
        """The text of a scrape."""
        return generate_latest(self.registry)


class _Shared:
    """The library's metrics, in which each model has its labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.e2e = self._histogram("e2e_request_latency_seconds", "Seconds from a call to its end.")
        self.queue = self._histogram("request_queue_time_seconds", "Seconds that a request waited for its prefill.")
        self.prefill = self._histogram("request_prefill_time_seconds", "Seconds that a prompt was computed, loads included.")
        self.decode = self._histogram("request_decode_time_seconds", "Seconds from first to last token.")
        self.prompt = self._counter("prompt_tokens", "Prompt tokens of requests that began to answer.")
        self.queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the KV pool.")
        self.hits = self._counter("prefix_cache_hits", "Prompt tokens whose KV was loaded and verified.")
        self.ends = self._counter("request_success", "Requests ended, by reason.", "finished_reason")

    def _histogram(self, name: str, documentation: str) -> Histogram:
        return Histogram(f"vllm:{name}", documentation, LABELS, buckets=REQUEST_BUCKETS_S, registry=self._registry)

    def _counter(self, name: str, documentation: str, *more: str) -> Counter:
        return Counter(f"vllm:{name}", documentation, (*LABELS, *more), registry=self._registry)


class _OfModel:
    """The metrics of the requests for one model."""

    def __init__(self, labels: dict[str, str], shared: _Shared) -> None:
        self.labels = labels
        # Of every token: what the library does for a histogram would take a tenth of the time that a token is given here.
        self.tokens = 0
        self.first, self.first_s = [0] * (len(TTFT_BOUNDS_S) + 1), 0.0
        self.gaps, self.gaps_s = [0] * (len(GAP_BOUNDS_S) + 1), 0.0
        self._e2e, self._queue = shared.e2e.labels(**labels), shared.queue.labels(**labels)
        self._prefill, self._decode = shared.prefill.labels(**labels), shared.decode.labels(**labels)
        self._prompt, self._queries = shared.prompt.labels(**labels), shared.queries.labels(**labels)
        self._hits, self._ends = shared.hits.labels(**labels), shared.ends

    def observe(self, times: RequestTimes, output: ClientOutput, now: float) -> None:
        """Something is about to go to the client."""
        if type(output) is TOKEN:
            self.tokens += 1
            if times.first_token_at is None:
                times.first_token_at = now
                ttft_s = now - times.began_at
                self.first[bisect_left(TTFT_BOUNDS_S, ttft_s)] += 1
                self.first_s += ttft_s
                self._prompt.inc(times.prompt_tokens)
            else:
                gap_s = now - times.last_token_at
                self.gaps[bisect_left(GAP_BOUNDS_S, gap_s)] += 1
                self.gaps_s += gap_s
            times.last_token_at = now
            return
        match output:
            case Finished():
                if times.prompt_tokens:
                    self._queries.inc(output.prompt_tokens)
                    self._hits.inc(output.cached_own + output.cached_local + output.cached_remote)
                self._queue.observe(output.queue_s)
                self._prefill.observe(output.prefill_s)
                if times.first_token_at is not None:
                    self._decode.observe(times.last_token_at - times.first_token_at)
                self.count_end(times, output.reason, now)
            case Failed():
                self.count_end(times, "error", now)

    def count_end(self, times: RequestTimes, finished_reason: str, now: float) -> None:
        """Count the end of a request."""
        self._ends.labels(*self.labels.values(), finished_reason).inc()
        self._e2e.observe(now - times.began_at)


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return the cumulative buckets of a histogram."""
    ends = [*map(floatToGoString, (*bounds, math.inf))]
    return [*zip(ends, accumulate(counts), strict=True)]
