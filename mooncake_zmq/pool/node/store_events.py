"""What a store's actor can learn (events), ask for (effects) and have done by the disk (works). PURE.

A work is begun once and ends once, with its result or `DiskFailed`. Streams are named by numbers that are never used again.
No record refers to itself, so the garbage collector need not look at any.
"""

from dataclasses import dataclass, field

from msgspec import Struct

from mooncake_zmq.core.actor import Drained, DrainWanted, Fence, SetTimer, Started, TimerFired
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.pool.rules.entries import Found
from mooncake_zmq.pool.rules.object_record import ObjectRecord
from mooncake_zmq.store import protocol, stream_messages

# --- works: one that changes the disk at a time, several that read


class ReadValue(Struct, frozen=True, gc=False):
    """Where a value stands, and at which offset of the memory it is wanted."""

    key: str
    record: ObjectRecord
    offset: int


class ReadValues(Struct, frozen=True, gc=False):
    """Into their cells, one after the other. Ends with `ValuesRead`."""

    values: tuple[ReadValue, ...]


class WrittenValue(Struct, frozen=True, gc=False):
    """`record`: all but its checksum, which whoever writes it makes."""

    key: str
    record: ObjectRecord
    offset: int


class WriteValues(Struct, frozen=True, gc=False):
    """Records that follow one another up to `end`. Found by nobody before their commit. Ends with `ValuesWritten`."""

    values: tuple[WrittenValue, ...]
    end: int


class CommitValues(Struct, frozen=True, gc=False):
    """What was written last is durable, and found from now on."""

    rows: tuple[tuple[str, ObjectRecord], ...]


class MoveValues(Struct, frozen=True, gc=False):
    """Copy records to the newest segment, `(key, from, to)`, and have them found there; those of `gone`, by sequence, not at
    all any more."""

    moved: tuple[tuple[str, ObjectRecord, ObjectRecord], ...]
    gone: tuple[int, ...]


class ForgetValues(Struct, frozen=True, gc=False):
    """Records, by sequence, that nobody is to find, durably."""

    sequences: tuple[int, ...]


class CreateSegment(Struct, frozen=True, gc=False):
    """A file with all its room."""

    segment: int
    length: int


class RemoveSegments(Struct, frozen=True, gc=False):
    """Files, durably. `instead`: so many values could not be forgotten otherwise, and come back if this fails too."""

    segments: tuple[int, ...]
    instead: int = 0


Work = ReadValues | WriteValues | CommitValues | MoveValues | ForgetValues | CreateSegment | RemoveSegments

GOOD, BAD, BUSY, UNREAD = "good", "bad", "busy", "unread"
"""What becomes of a value that is read. Bad: not what its record says; busy: the system could not read it now."""


class Done(Struct, frozen=True, gc=False):
    """It is so."""


class ValuesRead(Struct, frozen=True, gc=False):
    """One of GOOD, BAD, BUSY and UNREAD a value; `fault`: why the disk is not to be trusted any more."""

    outcomes: tuple[str, ...]
    fault: str = ""


class ValuesWritten(Struct, frozen=True, gc=False):
    """The checksums of what stands on disk."""

    checksums: tuple[int, ...]


class DiskFailed(Struct, frozen=True, gc=False):
    """It is not so, or not all of it. `full`: for want of room alone."""

    reason: str
    full: bool = False


Result = Done | ValuesRead | ValuesWritten | DiskFailed

# --- events


class Greeted(Struct, frozen=True, gc=False):
    """A Hello. `path`: of the memory, if it is on this host; `lives`: it is, and holds the lock of its life; `token`: made
    for a client not known yet; `stream`: where streams connect. `user`: the name of the connection's key; empty: it has none,
    and came by TCP; None: nobody asks for one."""

    connection: bytes
    hello: protocol.Hello
    path: str
    lives: bool
    token: bytes
    stream: str
    user: str | None = None


class Asked(Struct, frozen=True, gc=False):
    """Any other request of a connection. `user`: as above."""

    connection: bytes
    request: protocol.Request
    user: str | None = None


class StreamBegan(Struct, frozen=True, gc=False):
    """Who it says it is."""

    stream: int
    attach: stream_messages.Attach


class StreamAsked(Struct, frozen=True, gc=False):
    """Only after a `Say` or a `Hear`."""

    stream: int
    request: stream_messages.Request


class StreamEnded(Struct, frozen=True, gc=False):
    """Whoever served it touches no cell any more."""

    stream: int


class ValuesSent(Struct, frozen=True, gc=False):
    stream: int


class ValuesCame(Struct, frozen=True, gc=False):
    """The checksums that the client told, and those of what stands in the cells."""

    stream: int
    told: list[int]
    made: list[int]


class ChecksumsMade(Struct, frozen=True, gc=False):
    stream: int
    checksums: list[int]


class ClientDied(Struct, frozen=True, gc=False):
    """A client of this host, probed: it writes nothing any more. `closed`: it had said goodbye to the file system."""

    client: bytes
    closed: bool


class WorkDone(Struct, frozen=True, gc=False):
    work_id: int
    result: Result


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
    | WorkDone
    | TimerFired
    | DrainWanted
)

# --- effects


class ShelfChanged(Struct, frozen=True, gc=False):
    """Blocks of vLLMs that the store came to hold, and such as it holds no more."""

    stored: tuple[Key, ...]
    removed: tuple[Key, ...]


class Reply(Struct, frozen=True, gc=False):
    connection: bytes
    reply: protocol.Reply


class Say(Struct, frozen=True, gc=False):
    """This, and then take the stream's next request."""

    stream: int
    message: stream_messages.Attached | stream_messages.Ended


class Hear(Struct, frozen=True, gc=False):
    """Take the stream's next request."""

    stream: int


class SendValues(Struct, frozen=True, gc=False):
    """Tell of some keys, and send the bytes of those found. Ends with `ValuesSent`, or with the stream: once so much time is
    over."""

    stream: int
    sizes: list[int]
    checksums: list[int]
    found: list[Found]
    within_s: float


class MakeChecksums(Struct, frozen=True, gc=False):
    """Of these values, as they stand now. Ends with `ChecksumsMade`."""

    stream: int
    found: list[Found]


class ReceiveValues(Struct, frozen=True, gc=False):
    """Take values of these sizes to their offsets, -1 for those that nobody wants. Ends with `ValuesCame`.

    `codes`: what the client is told before; `told`: what checksums it told with its request, or None if they are to come.
    """

    stream: int
    sizes: list[int]
    offsets: list[int]
    codes: list[int] | None
    told: list[int] | None
    within_s: float


class Dismiss(Struct, frozen=True, gc=False):
    """End the stream. `stranger`: tell it that its client is not known; `garbage`: it spoke nonsense."""

    stream: int
    reason: str
    stranger: bool = False
    garbage: bool = False


class Probe(Struct, frozen=True, gc=False):
    """Do these clients of this host live? Only of those that do not, `ClientDied` tells."""

    clients: list[bytes]


class Start(Struct, frozen=True, gc=False):
    """Ids are never used again. What changes the disk is begun one at a time."""

    work_id: int
    work: Work


ToStream = Say | Hear | SendValues | MakeChecksums | ReceiveValues | Dismiss
Effect = Fence | Reply | ToStream | Probe | Start | SetTimer | Drained | ShelfChanged


@dataclass(slots=True)
class Turn:
    """What the parts of the actor share while it handles an event: the time, and the effects so far."""

    now: float = 0.0
    effects: list[Effect] = field(default_factory=list)
