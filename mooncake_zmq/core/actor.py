"""What an actor can learn (events) and ask for (effects). PURE: no socket, clock, thread, GPU or `random`.

`handle(now, event) -> list[Effect]` runs to completion; the runtime carries the effects out in their order. Long work is
`Start`ed with an id and a deadline, and its outcome returns as `WorkDone` on every path, failure included.
"""

from typing import Any, Protocol

from msgspec import Struct

from mooncake_zmq.core.asks import Answer, Ask
from mooncake_zmq.core.messages import Hello, Message, Sampling
from mooncake_zmq.core.shell import Tally
from mooncake_zmq.core.work import Progress, Result, Work
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.events import KvEvent

TimerKey = tuple[str | int, ...]


class PeerUp(Struct, frozen=True):
    """A fresh conversation with `peer` began: nothing said before it counts any more."""

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


class WorkDone(Struct, frozen=True):
    """The end of a `Start`ed work; `WorkFailed` when it could not be done or missed its deadline."""

    work_id: int
    result: Result


class Started(Struct, frozen=True):
    """The first event of an actor's life."""


class DrainWanted(Struct, frozen=True):
    """The operator wants this process gone: accept nothing new, finish the rest."""


class RestWanted(Struct, frozen=True):
    """The operator wants this process to accept nothing new, finish the rest and stay; or, not `resting`, to accept again."""

    resting: bool


class DrainTimedOut(Struct, frozen=True):
    """The time that a drain may take is over: hand over what is left, now. The process ends as soon as that is heard."""


class ShelfTold(Struct, frozen=True):
    """Cache-node only: its store came to hold blocks of vLLMs, and to hold some no more."""

    stored: tuple[Key, ...]
    removed: tuple[Key, ...]


class FromClient(Struct, frozen=True):
    """Gateway only: something from the client's connection at the HTTP edge; the types are in `gateway.requests.requests`."""

    request_id: str
    input: Any


class Asked(Struct, frozen=True):
    """The operator of this machine wants something of this node; exactly one `Answered` with the same id goes back."""

    ask_id: str
    ask: Ask


Event = (
    PeerUp
    | PeerDown
    | Received
    | TimerFired
    | WorkProgress
    | WorkDone
    | Started
    | DrainWanted
    | RestWanted
    | DrainTimedOut
    | FromClient
    | ShelfTold
    | Asked
)


class Send(Struct, frozen=True):
    """Send to a peer. To a peer that is down it is dropped and counted. `lossy`: may be dropped, never retransmitted."""

    to: str
    message: Message
    lossy: bool = False


class SetTimer(Struct, frozen=True):
    """(Re)arm the timer `key` to fire once after `delay_s`."""

    key: TimerKey
    delay_s: float


class CancelTimer(Struct, frozen=True):
    key: TimerKey


class Start(Struct, frozen=True):
    """Begin long work. Ids are the actor's own, never reused in its life."""

    work_id: int
    work: Work
    deadline_s: float


class CancelWork(Struct, frozen=True):
    """Ask a work to stop early. It still ends with a `WorkDone`: bytes in flight cannot be unsent. A `DecodeStep` ends at its
    next border, and that is no failure."""

    work_id: int


class Fence(Struct, frozen=True):
    """Set slot generations in this process's own segment, before any later effect of the same list is carried out."""

    generations: tuple[tuple[int, int], ...]


class OpenSequence(Struct, frozen=True):
    """Allocate the KV of a running sequence. `past`: what `sampling` reads of the tokens before those that are fed singly.
    `filled_tokens`: that come at once, of the capacity. `tenant`: whose it is."""

    sequence: int
    capacity_tokens: int
    sampling: Sampling | None = None
    past: bytes = b""
    filled_tokens: int = 0
    tenant: str = ""


class CloseSequence(Struct, frozen=True):
    """Free a sequence's KV. The actor promises that no work on it is in flight."""

    sequence: int


class ToClient(Struct, frozen=True):
    """Gateway only: something for the client's connection at the HTTP edge; the types are in `gateway.requests.requests`."""

    request_id: str
    output: Any


class Publish(Struct, frozen=True):
    """Cache-node only: one batch of KV events for whoever subscribed, in the order they happened."""

    events: tuple[KvEvent, ...]


class Answered(Struct, frozen=True):
    """What came of an `Asked`."""

    ask_id: str
    answer: Answer


class Drained(Struct, frozen=True):
    """Nothing is left to finish: the process may exit. `become`: the role in which it then begins its next life, if any."""

    become: str = ""


Effect = (
    Send
    | SetTimer
    | CancelTimer
    | Start
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
    """Put one frame on the wire to `to`; losing it is allowed. No actor asks for it: it is what becomes of its `Send`s."""

    to: str
    frame: bytes


Outer = Transmit | Effect
"""What a runtime carries out: everything an actor asks for but `Send`, which the session has turned into `Transmit`."""


class Actor(Protocol):
    """A pure state machine; the same object runs over ZeroMQ and in the simulation."""

    counts: Tally
    """Monotonic counters, exported as `mooncake_<name>_total`; a label goes in brackets: `misses[reason=evicted]`."""

    def handle(self, now: float, event: Event) -> list[Effect]:
        """React to one event at time `now` (seconds of a monotonic clock)."""

    def check(self, now: float) -> None:
        """Assert the actor's own invariants; raises AssertionError."""

    def gauges(self, now: float) -> dict[str, float]:
        """Current levels for metrics; all zero when idle unless named `capacity_*` or `cached_*`."""

    def dump(self, now: float) -> dict[str, Any]:
        """JSON-able picture of the whole state, for debugging."""
