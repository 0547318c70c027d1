"""The edge between HTTP calls and the gateway's actor: limits, request ids, mailboxes. It never waits for a peer.

Everything here runs on one asyncio loop, the loop to which the runtime is attached: no locks. An HTTP call holds its
slots and its requests in a `Call`; leaving the call, in whatever way, cancels what has not ended.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any, Protocol

from mooncake_zmq.core.actor import FromClient, ToClient
from mooncake_zmq.core.messages import Hello
from mooncake_zmq.gateway.metrics import EdgeMetrics, RequestTimes
from mooncake_zmq.gateway.requests import ClientGone, ClientOutput, ClientRequest, Failed, StopFound, TokenOut
from mooncake_zmq.kv.block_hash import extend_keys, namespace


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
    times: RequestTimes


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
        self.metrics = EdgeMetrics(
            model.id,
            waiting_and_running=self.waiting_and_running,
            counts=lambda: {**self.backing.counts(), **self.counts},
            gauges=lambda: {
                **self.backing.gauges(),
                "edge_open_requests": self.open_requests,
                "edge_slots_taken": self.slots_taken,
            },
        )
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
        self.metrics.observe(request.times, output, self.clock())
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
        running = sum(request.times.first_token_at is not None for request in self._open.values())
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
        self._open[request_id] = _Open(call, index, RequestTimes(call.began_at, len(request.tokens) // 4))
        self.backing.inject(FromClient(request_id, request))

    def cancel(self, request_id: str, finished_reason: str) -> None:
        """Cancel at every hop, unless it has ended. `finished_reason`: as the metrics shall count it."""
        request = self._open.pop(request_id, None)
        if request is not None:
            self.metrics.count_end(request.times, finished_reason, self.clock())
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
