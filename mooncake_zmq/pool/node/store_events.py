"""Events and effects of a store's actor beside those of `core.actor`: its clients' connections and streams. PURE.

Streams are named by numbers that are never used again. No record refers to itself, so the garbage collector need not look at
any.
"""

from dataclasses import dataclass, field

from msgspec import Struct

from mooncake_zmq.core.actor import (
    Drained,
    DrainWanted,
    EngineBlocksReported,
    Fence,
    SetTimer,
    Start,
    Started,
    TimerFired,
    WorkDone,
)
from mooncake_zmq.core.work import StoreResult, StoreWork
from mooncake_zmq.pool.rules.entries import Found
from mooncake_zmq.store import protocol, stream_messages

# --- events


class Greeted(Struct, frozen=True, gc=False):
    """A Hello. `path`: of the memory, if it is on this host; `runs`: it is, and the process that holds its lock file exists;
    `token`: made for a client not known yet; `stream`: where streams connect. `user`: the name of the connection's key; empty:
    it has none, and came by TCP; None: no key is required."""

    connection: bytes
    hello: protocol.Hello
    path: str
    runs: bool
    token: bytes
    stream: str
    user: str | None = None


class Asked(Struct, frozen=True, gc=False):
    """Any other request of a connection. `user`: as above."""

    connection: bytes
    request: protocol.Request
    user: str | None = None


class StreamBegan(Struct, frozen=True, gc=False):
    """A stream began; `client` and `token` are what it claims."""

    stream: int
    attach: stream_messages.Attach


class StreamAsked(Struct, frozen=True, gc=False):
    """Only after a `Serve`."""

    stream: int
    request: stream_messages.Request


class StreamEnded(Struct, frozen=True, gc=False):
    """The stream ended; its thread touches no cell any more."""

    stream: int


class ValuesSent(Struct, frozen=True, gc=False):
    stream: int


class ValuesCame(Struct, frozen=True, gc=False):
    """Values arrived on a stream: the checksums that the client sent, and those of the bytes in the cells."""

    stream: int
    sent: list[int]
    made: list[int]


class ChecksumsMade(Struct, frozen=True, gc=False):
    stream: int
    checksums: list[int]


class ClientDied(Struct, frozen=True, gc=False):
    """A client of this host, probed: it writes nothing any more. `closed`: it had said goodbye to the file system."""

    client: bytes
    closed: bool


Event = (
    Started
    | Greeted
    | Asked
    | StreamBegan
    | StreamAsked
    | StreamEnded
    | ValuesSent
    | ValuesCame
    | ChecksumsMade
    | ClientDied
    | WorkDone[StoreResult]
    | TimerFired
    | DrainWanted
)

# --- effects


class Reply(Struct, frozen=True, gc=False):
    connection: bytes
    reply: protocol.Reply


class Serve(Struct, frozen=True, gc=False):
    """Send a stream's client the answer, if there is one, and then take its next request."""

    stream: int
    answer: stream_messages.Attached | stream_messages.Ended | None = None


class SendValues(Struct, frozen=True, gc=False):
    """Answer for some keys, and send the bytes of those found. Ends with `ValuesSent`, or with the stream once its time is
    over."""

    stream: int
    sizes: list[int]
    checksums: list[int]
    found: list[Found]
    within_s: float


class MakeChecksums(Struct, frozen=True, gc=False):
    """Compute the checksums of these values, as they stand now. Ends with `ChecksumsMade`."""

    stream: int
    found: list[Found]


class ReceiveValues(Struct, frozen=True, gc=False):
    """Take values of these sizes to their offsets, -1 for those that are not wanted. Ends with `ValuesCame`.

    `codes`: sent to the client before; `sent`: the checksums that it sent with its request, or None if they are to come.
    """

    stream: int
    sizes: list[int]
    offsets: list[int]
    codes: list[int] | None
    sent: list[int] | None
    within_s: float


class Dismiss(Struct, frozen=True, gc=False):
    """End the stream. `stranger`: answer that its client is not known; `garbage`: it sent nonsense."""

    stream: int
    reason: str
    stranger: bool = False
    garbage: bool = False


class Probe(Struct, frozen=True, gc=False):
    """Check whether these clients of this host still run. `ClientDied` reports those that do not."""

    clients: list[bytes]


ToStream = Serve | SendValues | MakeChecksums | ReceiveValues | Dismiss
Effect = Fence | Reply | ToStream | Probe | Start[StoreWork] | SetTimer | Drained | EngineBlocksReported


@dataclass(slots=True)
class Turn:
    """The state that parts of the actor share while it handles an event: the time, and the effects so far."""

    now: float = 0.0
    effects: list[Effect] = field(default_factory=list)
