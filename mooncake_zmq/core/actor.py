"""Events that an actor handles and effects that it returns. PURE: no socket, clock, thread, GPU or `random`.

`handle(now, event) -> list[Effect]` runs to completion; the runtime carries the effects out in their order. Long work is
`Start`ed with an id and a deadline, and its outcome returns as `WorkDone` on every path, failure included.
"""

import math
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.commands import Answer, Ask
from mooncake_zmq.core.messages import Hello, Message, Sampling
from mooncake_zmq.core.work import Progress, Result, Work
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.events import KvEvent

TimerKey = tuple[str | int, ...]
WorkT = TypeVar("WorkT", covariant=True)
ResultT = TypeVar("ResultT", covariant=True)


class PeerUp(Struct, frozen=True):
    """A new conversation with `peer` began: messages before it no longer count."""

    peer: str
    incarnation: int
    hello: Hello


class PeerDown(Struct, frozen=True):
    """The conversation with `peer` is over: messages either way may be lost; leases and jobs shared with it are void."""

    peer: str
    reason: str


class Received(Struct, frozen=True):
    """A message, delivered at most once and in order within a conversation."""

    sender: str
    message: Message


class TimerFired(Struct, frozen=True):
    key: TimerKey


class WorkProgress(Struct, frozen=True):
    work_id: int
    progress: Progress


class WorkDone(Struct, Generic[ResultT], frozen=True, gc=False):
    """The end of a `Start`ed work; `WorkFailed` when it could not be done or missed its deadline."""

    work_id: int
    result: ResultT


class Started(Struct, frozen=True):
    """The first event of an actor."""


class DrainWanted(Struct, frozen=True):
    """Request of the operator to end this process: accept nothing new and finish what is running."""


class CordonWanted(Struct, frozen=True):
    """Request of the operator to cordon this process: accept nothing new, finish what is running and stay; or, if not
    `cordoned`, to accept again."""

    cordoned: bool


class DrainTimedOut(Struct, frozen=True):
    """The drain's timeout has passed: hand over what is left now. The process ends as soon as that is acknowledged."""


class EngineBlocksReported(Struct, frozen=True, gc=False):
    """Cache-node only: blocks of vLLMs that its store has stored and removed."""

    stored: tuple[Key, ...]
    removed: tuple[Key, ...]


class FromClient(Struct, frozen=True):
    """Gateway only: input from the client's HTTP connection; the types are in `gateway.requests.requests`."""

    request_id: str
    input: Any


class Asked(Struct, frozen=True):
    """A request of this machine's operator to this node; exactly one `Answered` with the same id answers it."""

    ask_id: str
    ask: Ask


Event = (
    PeerUp
    | PeerDown
    | Received
    | TimerFired
    | WorkProgress
    | WorkDone[Result]
    | Started
    | DrainWanted
    | CordonWanted
    | DrainTimedOut
    | FromClient
    | EngineBlocksReported
    | Asked
)


class Send(Struct, frozen=True):
    """Send to a peer; a message to a peer that is down is dropped and counted. `lossy`: may be lost, never retransmitted."""

    to: str
    message: Message
    lossy: bool = False


class SetTimer(Struct, frozen=True):
    """(Re)arm the timer `key` to fire once after `delay_s`."""

    key: TimerKey
    delay_s: float


class CancelTimer(Struct, frozen=True):
    key: TimerKey


class Start(Struct, Generic[WorkT], frozen=True, gc=False):
    """Begin long work. The actor chooses the ids and never reuses one."""

    work_id: int
    work: WorkT
    deadline_s: float = math.inf


class CancelWork(Struct, frozen=True):
    """Stop a work early. It still ends with a `WorkDone`: bytes in flight cannot be unsent. A `DecodeStep` ends before its
    next step, and that is no failure."""

    work_id: int


class Fence(Struct, frozen=True):
    """Set slot generations in this process's own segment, before any later effect of the same list is carried out."""

    generations: tuple[tuple[int, int], ...]


class OpenSequence(Struct, frozen=True):
    """Allocate the KV of a running sequence. `past`: the part of the tokens before those fed singly that `sampling` reads.
    `filled_tokens`: the part of the capacity that is filled at once. `tenant`: its owner. `dropped_tokens`: those of its prompt
    whose KV nothing holds, behind whose positions it goes on."""

    sequence: int
    capacity_tokens: int
    sampling: Sampling | None = None
    past: bytes = b""
    filled_tokens: int = 0
    tenant: str = ""
    dropped_tokens: int = 0


class CloseSequence(Struct, frozen=True):
    """Free a sequence's KV. The actor promises that no work on it is in flight."""

    sequence: int


class ToClient(Struct, frozen=True):
    """Gateway only: output for the client's HTTP connection; the types are in `gateway.requests.requests`."""

    request_id: str
    output: Any


class Publish(Struct, frozen=True):
    """Cache-node only: one batch of KV events for the subscribers, in the order they happened."""

    events: tuple[KvEvent, ...]


class Answered(Struct, frozen=True):
    """The answer to an `Asked`."""

    ask_id: str
    answer: Answer


class Drained(Struct, frozen=True):
    """Nothing is left to finish: the process may exit. `become`: the role of its next incarnation, if it changes its role."""

    become: str = ""


Effect = (
    Send
    | SetTimer
    | CancelTimer
    | Start[Work]
    | CancelWork
    | Fence
    | OpenSequence
    | CloseSequence
    | ToClient
    | Publish
    | Answered
    | Drained
)


class Transmit(Struct, frozen=True):
    """Put one frame on the wire to `to`; it may be lost. No actor returns it: the session makes it from `Send`s."""

    to: str
    frame: bytes


Outer = Transmit | Effect
"""Effects that a runtime carries out: all of an actor's but `Send`, which the session has turned into `Transmit`."""


class Actor(Protocol):
    """A pure state machine; the same object runs over ZeroMQ and in the simulation."""

    counts: Tally
    """Monotonic counters, exported as `mooncake_<name>_total`; a label goes in brackets: `misses[reason=evicted]`."""

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Handle one event at time `now` (seconds of a monotonic clock)."""

    def check(self, now: float) -> None:
        """Check the actor's own invariants. Raises AssertionError."""

    def gauges(self, now: float) -> dict[str, float]:
        """Return the current levels for metrics; all are zero when idle unless named `capacity_*` or `cached_*`."""

    def dump(self, now: float) -> dict[str, Any]:
        """Return the whole state, JSON-able, for debugging."""
