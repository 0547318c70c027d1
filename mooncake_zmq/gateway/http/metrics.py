"""A gateway's Prometheus metrics of what its clients see: vLLM's names for them, `mooncake_*` for our own."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from mooncake_zmq.gateway.requests.client_events import ClientOutput, Failed, Finished, TokenOut
from mooncake_zmq.gateway.requests.history import GAP, GAP_BOUNDS_S, TOKENS, TTFT, TTFT_BOUNDS_S, histogram
from mooncake_zmq.telemetry.metrics import families

REQUEST_BUCKETS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


@dataclass(slots=True)
class RequestTimes:
    """The times of one request that its metrics need until its end."""

    began_at: float
    """When its HTTP call came."""
    prompt_tokens: int
    """0 where another answer to the same prompt counts them."""
    first_token_at: float | None = None
    last_token_at: float = 0.0


class EdgeMetrics(Collector):
    """The metrics of one gateway, in a registry of their own."""

    def __init__(
        self,
        model_name: str,
        *,
        waiting_and_running: Callable[[], tuple[int, int]],
        counts: Callable[[], Mapping[str, float]],
        gauges: Callable[[], Mapping[str, float]],
    ) -> None:
        """The callables are asked at scrape time: `core.actor` says how counts and gauges are named."""
        self.registry = CollectorRegistry()
        self._waiting_and_running, self._counts, self._gauges = waiting_and_running, counts, gauges
        self._labels = {"model_name": model_name, "engine": "0"}
        # Of every token: what the library does for a histogram would take a tenth of the time that a token is given here.
        self._tokens = 0
        self._first, self._first_s = [0] * (len(TTFT_BOUNDS_S) + 1), 0.0
        self._gaps, self._gaps_s = [0] * (len(GAP_BOUNDS_S) + 1), 0.0
        self._e2e = self._histogram("e2e_request_latency_seconds", "Seconds from a call to its end.", REQUEST_BUCKETS_S)
        self._queue = self._histogram(
            "request_queue_time_seconds", "Seconds that a request waited for its prefill.", REQUEST_BUCKETS_S
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Seconds that a prompt was computed, loads included.", REQUEST_BUCKETS_S
        )
        self._decode = self._histogram("request_decode_time_seconds", "Seconds from first to last token.", REQUEST_BUCKETS_S)
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests that began to answer.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the KV pool.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens whose KV was loaded and verified.")
        names = (*self._labels, "finished_reason")
        self._ends = Counter("vllm:request_success", "Requests ended, by reason.", names, registry=self.registry)
        self.registry.register(self)

    def observe(self, times: RequestTimes, output: ClientOutput, now: float) -> None:
        """Something is about to go to the client."""
        match output:
            case TokenOut():
                self._tokens += 1
                if times.first_token_at is None:
                    times.first_token_at = now
                    ttft_s = now - times.began_at
                    self._first[bisect_left(TTFT_BOUNDS_S, ttft_s)] += 1
                    self._first_s += ttft_s
                    self._prompt.inc(times.prompt_tokens)
                else:
                    gap_s = now - times.last_token_at
                    self._gaps[bisect_left(GAP_BOUNDS_S, gap_s)] += 1
                    self._gaps_s += gap_s
                times.last_token_at = now
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
        self._ends.labels(*self._labels.values(), finished_reason).inc()
        self._e2e.observe(now - times.began_at)

    def collect(self) -> Iterator[Metric]:
        """Read at scrape time: the levels, and whatever the actor counts."""
        waiting, running = self._waiting_and_running()
        for name, documentation, value in (
            ("vllm:num_requests_waiting", "Requests without a first token.", waiting),
            ("vllm:num_requests_running", "Requests between first token and end.", running),
        ):
            metric = Metric(name, documentation, "gauge")
            metric.add_sample(name, self._labels, value)
            yield metric
        yield from self._of_tokens()
        yield from families(self._counts(), "counter")
        yield from families(self._gauges(), "gauge")

    def _of_tokens(self) -> Iterator[Metric]:
        labels, values = tuple(self._labels), tuple(self._labels.values())
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens delivered.", labels=labels)
        tokens.add_metric(values, self._tokens)
        yield tokens
        for name, text, bounds, counts, sum_s in (
            ("time_to_first_token", "Seconds from a call to its first token.", TTFT_BOUNDS_S, self._first, self._first_s),
            ("inter_token_latency", "Seconds between two tokens.", GAP_BOUNDS_S, self._gaps, self._gaps_s),
        ):
            family = HistogramMetricFamily(f"vllm:{name}_seconds", text, labels=labels)
            ends = [*map(floatToGoString, (*bounds, math.inf))]
            family.add_metric(values, [*zip(ends, accumulate(counts), strict=True)], sum_s)
            yield family

    def counted(self) -> dict[str, float]:
        """Return the tokens and both histograms as counters, for `gateway.requests.history`."""
        ttft, gaps = histogram(TTFT, self._first), histogram(GAP, self._gaps)
        return {TOKENS: self._tokens, **ttft, **gaps}

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask the actor, which may not run yet."""
        return []

    def exposition(self) -> bytes:
        """The text of a scrape."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        whole = Histogram(f"vllm:{name}", documentation, tuple(self._labels), buckets=buckets, registry=self.registry)
        return whole.labels(**self._labels)

    def _counter(self, name: str, documentation: str) -> Counter:
        whole = Counter(f"vllm:{name}", documentation, tuple(self._labels), registry=self.registry)
        return whole.labels(**self._labels)
