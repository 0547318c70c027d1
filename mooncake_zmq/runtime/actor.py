"""What an actor can learn (events) and ask for (effects). PURE: no socket, clock, thread, GPU or `random`.

`handle(now, event) -> list[Effect]` runs to completion; the runtime carries the effects out in their order. Long work is
`Start`ed with an id and a deadline, and its outcome returns as `WorkDone` on every path, failure included.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from mooncake_zmq.kv.events import KvEvent
from mooncake_zmq.messages import Hello, Message
from mooncake_zmq.work import Progress, Result, Work

TimerKey = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A fresh conversation with `peer` began: nothing said before it counts any more."""

    peer: str
    incarnation: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The conversation with `peer` is over: messages either way may be lost; leases and jobs shared with it are void."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """A message, delivered at most once and in order within a conversation."""

    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class TimerFired:
    key: TimerKey


@dataclass(frozen=True, slots=True)
class WorkProgress:
    work_id: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class WorkDone:
    """The end of a `Start`ed work; `WorkFailed` when it could not be done or missed its deadline."""

    work_id: int
    result: Result


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of an actor's life."""


@dataclass(frozen=True, slots=True)
class DrainWanted:
    """The operator wants this process gone: accept nothing new, finish the rest."""


@dataclass(frozen=True, slots=True)
class FromClient:
    """Gateway only: something from the client's connection at the HTTP edge; the types are in `gateway.requests`."""

    request_id: str
    input: Any


Event = PeerUp | PeerDown | Received | TimerFired | WorkProgress | WorkDone | Started | DrainWanted | FromClient


@dataclass(frozen=True, slots=True)
class Send:
    """Send to a peer. To a peer that is down it is dropped and counted. `lossy`: may be dropped, never retransmitted."""

    to: str
    message: Message
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class SetTimer:
    """(Re)arm the timer `key` to fire once after `delay_s`."""

    key: TimerKey
    delay_s: float


@dataclass(frozen=True, slots=True)
class CancelTimer:
    key: TimerKey


@dataclass(frozen=True, slots=True)
class Start:
    """Begin long work. Ids are the actor's own, never reused in its life."""

    work_id: int
    work: Work
    deadline_s: float


@dataclass(frozen=True, slots=True)
class CancelWork:
    """Ask a work to stop early. It still ends with a `WorkDone`: bytes in flight cannot be unsent."""

    work_id: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Set slot generations in this process's own segment, before any later effect of the same list is carried out."""

    generations: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """Allocate the KV of a running sequence."""

    sequence: int
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class CloseSequence:
    """Free a sequence's KV. The actor promises that no work on it is in flight."""

    sequence: int


@dataclass(frozen=True, slots=True)
class ToClient:
    """Gateway only: something for the client's connection at the HTTP edge; the types are in `gateway.requests`."""

    request_id: str
    output: Any


@dataclass(frozen=True, slots=True)
class Publish:
    """Cache-node only: one batch of KV events for whoever subscribed, in the order they happened."""

    events: tuple[KvEvent, ...]


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is left to finish: the process may exit."""


Effect = (
    Send | SetTimer | CancelTimer | Start | CancelWork | Fence | OpenSequence | CloseSequence | ToClient | Publish | Drained
)


class Actor(Protocol):
    """A pure state machine; the same object runs over ZeroMQ and in the simulation."""

    counts: dict[str, int]
    """Monotonic counters, exported as `mooncake_<name>_total`; a label goes in brackets: `misses[reason=evicted]`."""

    def handle(self, now: float, event: Event) -> list[Effect]:
        """React to one event at time `now` (seconds of a monotonic clock)."""

    def check(self, now: float) -> None:
        """Assert the actor's own invariants; raises AssertionError."""

    def gauges(self, now: float) -> dict[str, float]:
        """Current levels for metrics; all zero when idle unless named `capacity_*` or `cached_*`."""

    def dump(self, now: float) -> dict[str, Any]:
        """JSON-able picture of the whole state, for debugging."""
