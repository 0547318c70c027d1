"""The edge between HTTP calls and the gateway's actor: limits, request ids, mailboxes, metrics. It never waits for a peer.

Everything here runs on one asyncio loop, the loop to which the runtime is attached: no locks. An HTTP call holds its
slots and its requests in a `Call`; leaving the call, in whatever way, cancels what has not ended.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from mooncake_zmq.gateway.requests import ClientGone, ClientOutput, ClientRequest, Failed, Finished, StopFound, TokenOut
from mooncake_zmq.kv.block_hash import extend_keys, namespace
from mooncake_zmq.messages import Hello
from mooncake_zmq.runtime.actor import FromClient, ToClient
from mooncake_zmq.runtime.metrics import families


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """Limits of the HTTP edge, all checked before a prompt is tokenized."""

    max_body_bytes: int = 8 << 20
    """Bytes of one HTTP body. The longest prompt a message carries, 512 Ki token ids, is about 4 MiB of JSON."""
    body_timeout_s: float = 30.0
    """Seconds a client may take to send its body: a stalled one must not keep its slot."""
    max_open_requests: int = 256
    """Requests (choices, not HTTP calls) open at once; one more is answered 503. As many as the actor takes by default."""
    max_choices: int = 64
    """Choices (prompts times n) of one HTTP call: one call must not take every slot."""
    full_retry_after_s: float = 1.0
    """Retry-After of a 503 for want of a slot: about the time in which a busy gateway ends some request."""
    max_buffered_outputs: int = 8192
    """Tokens waiting for one HTTP call's reader; one more and the client is cut off as too slow. About 1 MiB."""
    send_timeout_s: float = 60.0
    """Seconds one write to a client that reads nothing may take before it counts as gone."""
    inline_body_bytes: int = 32 << 10
    """A longer body is parsed and tokenized in a thread: tens of milliseconds would otherwise stop every stream."""
    tokenize_threads: int = 2
    """Threads for long bodies: one long prompt does not hold up another, and the engines keep their cores."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_open_requests", "max_choices", "max_buffered_outputs", "tokenize_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("body_timeout_s", "full_retry_after_s", "send_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive")
        if self.inline_body_bytes < 0:
            raise ValueError("inline_body_bytes must not be negative")
        if self.max_choices > self.max_open_requests:
            raise ValueError("max_choices must not exceed max_open_requests, or such a call could never be served")


class TextStream(Protocol):
    """Incremental text of one answer; what comes out never ends inside a character."""

    def push(self, token: int) -> str: ...
    def flush(self) -> str: ...


class Tokenizer(Protocol):
    """What the edge needs of a tokenizer; `engine.tokenizer.Tokenizer` is one. `encode` and `chat` run in threads too."""

    eos_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def stream(self) -> TextStream: ...
    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Raises ValueError when the chat template refuses the messages."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The one model of this cluster, as clients and the block keys see it."""

    id: str
    max_model_len: int
    """Tokens of prompt and output together."""
    vocab_size: int
    """Ids that both the engine and the tokenizer know."""
    block_tokens: int
    model_fingerprint: str
    layout_fingerprint: str
    tokenizer: Tokenizer

    def hash_prompt(self, tokens: bytes, salt: str) -> tuple[bytes, tuple[bytes, ...]]:
        """Namespace and keys of the complete blocks of `tokens` (int32 bytes)."""
        root = namespace(model=self.model_fingerprint, layout=self.layout_fingerprint, salt=salt)
        return root, tuple(extend_keys(root, tokens, self.block_tokens))


class Backing(Protocol):
    """What the edge asks of the process it is the face of. Called on the loop; every method returns at once."""

    def inject(self, event: FromClient) -> None:
        """Give the actor an event. Its effects may come back through `Edge.deliver` before this returns."""

    def peers(self) -> Mapping[str, Hello]:
        """The peers in conversation with this gateway: `Session.up_peers`."""

    def refusals(self) -> Mapping[str, str]:
        """Why a peer was refused, by name: `Session.refusals`."""

    def counts(self) -> Mapping[str, float]:
        """Monotonic counters of actor, session and runtime, named as `Actor.counts` says."""

    def gauges(self) -> Mapping[str, float]:
        """Current levels, named likewise."""


class Full(Exception):
    """No slot is free, or the gateway drains: HTTP 503 with Retry-After."""


class HungUp(Exception):
    """The client is gone; there is nobody to answer."""


@dataclass(slots=True)
class _Open:
    """One request in the actor's hands."""

    call: "Call"
    index: int
    prompt_tokens: int
    last_token_at: float | None = None


class Edge:
    """Between many HTTP calls and one actor."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        model: ServedModel,
        settings: EdgeSettings,
        backing: Backing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.settings = settings
        self.backing = backing
        self.metrics = EdgeMetrics(self)
        self.clock = clock
        self.draining = False
        self.counts: dict[str, float] = {}
        """Counters of the edge itself, named as the actor's are."""
        self._id_prefix = f"{name}-{incarnation:x}"
        self._numbers = count(1)
        self._open: dict[str, _Open] = {}
        self._slots_taken = 0

    def call(self) -> "Call":
        """Take a slot for a new HTTP call; raises Full."""
        return Call(self)

    def deliver(self, effect: ToClient) -> None:
        """The actor has something for a client. What comes after a cancel is dropped."""
        request = self._open.get(effect.request_id)
        if request is None:
            self.count("edge_outputs_dropped")
            return
        output: ClientOutput = effect.output
        self.metrics.observe(request, output, self.clock())
        if not isinstance(output, TokenOut):
            del self._open[effect.request_id]
        request.call.receive(request.index, output)

    def drain(self) -> None:
        """Refuse new calls; the open ones go on. The actor hears of it from the runtime."""
        self.draining = True

    @property
    def open_requests(self) -> int:
        """Requests in the actor's hands: zero when idle."""
        return len(self._open)

    @property
    def slots_taken(self) -> int:
        """Slots that open calls hold: zero when idle."""
        return self._slots_taken

    def waiting_and_running(self) -> tuple[int, int]:
        """Requests without and with a first token."""
        running = sum(request.last_token_at is not None for request in self._open.values())
        return len(self._open) - running, running

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether the cluster can serve, as far as this gateway knows, and what is missing."""
        up: dict[str, list[str]] = {"conductor": [], "prefill": [], "decode": []}
        for name, hello in self.backing.peers().items():
            if hello.role in up:
                up[hello.role].append(name)
        missing = [role for role, names in up.items() if not names]
        ok = not missing and not self.draining
        detail = {
            "status": "ok" if ok else "draining" if self.draining else "unavailable",
            "missing": missing,
            "model": self.model.id,
            "peers": {role: sorted(names) for role, names in up.items()},
            "refused": dict(self.backing.refusals()),
            "open_requests": self.open_requests,
        }
        return ok, detail

    def new_id(self) -> str:
        """Unique among all lives of all gateways."""
        return f"{self._id_prefix}-{next(self._numbers):x}"

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def take_slots(self, wanted: int) -> None:
        """Raises Full."""
        if self.draining:
            self.count("edge_rejected[reason=draining]")
            raise Full("the gateway is draining: try another one")
        if self._slots_taken + wanted > self.settings.max_open_requests:
            self.count("edge_rejected[reason=full]")
            raise Full(f"the gateway serves {self._slots_taken} requests and has no room for {wanted} more")
        self._slots_taken += wanted

    def give_slots(self, slots: int) -> None:
        self._slots_taken -= slots
        assert self._slots_taken >= 0

    def open(self, request_id: str, call: "Call", index: int, request: ClientRequest) -> None:
        self._open[request_id] = _Open(call, index, len(request.tokens) // 4)
        self.backing.inject(FromClient(request_id, request))

    def cancel(self, request_id: str, finished_reason: str) -> None:
        """Cancel at every hop, unless it has ended. `finished_reason`: as the metrics shall count it."""
        request = self._open.pop(request_id, None)
        if request is not None:
            self.metrics.count_end(request, finished_reason, self.clock())
            self.backing.inject(FromClient(request_id, ClientGone()))

    def stop(self, request_id: str) -> None:
        """A stop string was found: the actor cancels the rest and still gives its account."""
        if request_id in self._open:
            self.backing.inject(FromClient(request_id, StopFound()))


class Call:
    """One HTTP call: its slots, its requests (one for each choice) and the mailbox of their outputs."""

    def __init__(self, edge: Edge) -> None:
        edge.take_slots(1)
        self._edge = edge
        self._slots = 1
        self._ids: list[str] = []
        self._outputs: list[tuple[int, ClientOutput]] = []
        self._wake = asyncio.Event()
        self._gone = False
        self._too_slow = False
        self.began_at = edge.clock()

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._cancel_all("abort")
        self._edge.give_slots(self._slots)

    def submit(self, requests: Sequence[ClientRequest]) -> None:
        """Hand the choices to the actor; raises Full when they are more than there are slots, HungUp when nobody waits."""
        if self._gone:
            raise HungUp
        self._edge.take_slots(len(requests) - 1)
        self._slots += len(requests) - 1
        self._ids = [self._edge.new_id() for _ in requests]
        for index, request in enumerate(requests):
            if not self._too_slow:
                self._edge.open(self._ids[index], self, index, request)

    def receive(self, index: int, output: ClientOutput) -> None:
        """From the edge. A reader that lags too far behind loses everything but an explicit error."""
        if len(self._outputs) >= self._edge.settings.max_buffered_outputs and not self._too_slow:
            self._too_slow = True
            self._edge.count("edge_clients_too_slow")
            self._cancel_all("abort")
            self._outputs = [(index, Failed(status=503, code="client_too_slow", message="the client reads too slowly"))]
        if not self._too_slow:
            self._outputs.append((index, output))
        self._wake.set()

    async def take(self) -> list[tuple[int, ClientOutput]]:
        """Everything that has come, at least one; raises HungUp when the client is gone."""
        while not self._outputs and not self._gone:
            self._wake.clear()
            await self._wake.wait()
        if self._gone:
            raise HungUp
        outputs, self._outputs = self._outputs, []
        return outputs

    def hang_up(self) -> None:
        """The client is gone."""
        self._gone = True
        self._cancel_all("abort")
        self._wake.set()

    def stop(self, index: int) -> None:
        """A stop string ended this choice: the rest of it is not wanted."""
        self._edge.stop(self._ids[index])

    def _cancel_all(self, finished_reason: str) -> None:
        for request_id in self._ids:
            self._edge.cancel(request_id, finished_reason)


TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
ITL_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
E2E_BUCKETS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


class EdgeMetrics(Collector):
    """Prometheus metrics in a registry of their own: vLLM's names for what clients see, `mooncake_*` for our own."""

    def __init__(self, edge: Edge) -> None:
        self.registry = CollectorRegistry()
        self._edge = edge
        self._labels = {"model_name": edge.model.id, "engine": "0"}
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to first token.", TTFT_BUCKETS_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Time between two tokens.", ITL_BUCKETS_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Time from a request to its end.", E2E_BUCKETS_S)
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests that began to answer.")
        self._generated = self._counter("generation_tokens", "Tokens delivered.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the KV pool.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens whose KV was loaded and verified.")
        names = (*self._labels, "finished_reason")
        self._ends = Counter("vllm:request_success", "Requests ended, by reason.", names, registry=self.registry)
        self.registry.register(self)

    def observe(self, request: _Open, output: ClientOutput, now: float) -> None:
        """Something is about to go to the client."""
        match output:
            case TokenOut():
                if request.last_token_at is None:
                    self._ttft.observe(now - request.call.began_at)
                    self._prompt.inc(request.prompt_tokens)
                else:
                    self._itl.observe(now - request.last_token_at)
                request.last_token_at = now
                self._generated.inc()
            case Finished():
                self._queries.inc(output.prompt_tokens)
                self._hits.inc(output.cached_own + output.cached_local + output.cached_remote)
                self.count_end(request, output.reason, now)
            case Failed():
                self.count_end(request, "error", now)

    def count_end(self, request: _Open, finished_reason: str, now: float) -> None:
        self._ends.labels(*self._labels.values(), finished_reason).inc()
        self._e2e.observe(now - request.call.began_at)

    def collect(self) -> Iterator[Metric]:
        """Read at scrape time: the levels, and whatever the actor counts."""
        waiting, running = self._edge.waiting_and_running()
        for name, documentation, value in (
            ("vllm:num_requests_waiting", "Requests without a first token.", waiting),
            ("vllm:num_requests_running", "Requests between first token and end.", running),
        ):
            metric = Metric(name, documentation, "gauge")
            metric.add_sample(name, self._labels, value)
            yield metric
        yield from families({**self._edge.backing.counts(), **self._edge.counts}, "counter")
        yield from families(
            {
                **self._edge.backing.gauges(),
                "edge_open_requests": self._edge.open_requests,
                "edge_slots_taken": self._edge.slots_taken,
            },
            "gauge",
        )

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
