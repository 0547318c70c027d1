"""The messages between store clients and a store's server. PURE; versioned, flat, bounded; no clock readings.

    client DEALER  -- [request] --> ROUTER of the store server
                   <-- [reply] ---

A client on the server's host maps its segment and copies by itself: `Reserve`, copy, `Commit`; `Lease`, copy, `Release`. It
asks so on a stream, where no other threads stand between that have to be woken: a get of 64 KiB takes 80 to 100 us instead of
120 to 145. Another client exchanges bytes with the server on streams, see `stream.py`. Requests carry ids that the client never
uses twice for two things; a request sent again with its id is answered again and changes nothing more.
"""

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from mooncake_zmq.core.records import NotAMessage as NotAMessage
from mooncake_zmq.core.records import decoder as decoder
from mooncake_zmq.core.records import encode as encode

PROTOCOL_VERSION = 7
MAX_KEYS = 1024
"""Keys in one request; clients split longer lists."""
PIECE_BYTES = 1 << 20
"""The size of the pieces that are copied: small enough to stay in the CPU's cache until it is hashed."""
MAX_FRAME_BYTES = 2 << 20
"""Longest frame either side takes: 1024 keys of 1024 bytes with what goes with each."""
REMOVED_AT_ONCE = 16_384
"""Objects that one `RemoveAll` removes at most: a long one would keep all clients waiting."""

Id = Annotated[int, Meta(ge=0, le=(1 << 62))]
Size = Annotated[int, Meta(ge=0, le=(1 << 48))]
U64 = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=3600)]
Text = Annotated[str, Meta(max_length=512)]
# Keys are checked one by one where they are stored; what is only looked up needs no check.
Keys = Annotated[list[str], Meta(max_length=MAX_KEYS)]
Sizes = Annotated[list[Size], Meta(max_length=MAX_KEYS)]
Ids = Annotated[list[Id], Meta(max_length=MAX_KEYS)]
U64s = Annotated[list[U64], Meta(max_length=MAX_KEYS)]
Ints = Annotated[list[int], Meta(max_length=MAX_KEYS)]


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Encodes as [tag, field, ...]."""


class Hello(_Message, frozen=True, tag=1):
    """The first message of a connection. `shared`: the client maps the segment and holds the lock of its lock file."""

    id: Id
    protocol: Size
    boot_id: Text
    shared: bool


class Welcome(_Message, frozen=True, tag=2):
    """The server's answer to Hello. `path` is empty where it cannot share memory.

    `stream`: where streams connect, `tcp://*:PORT` at the address of this connection or `ipc://PATH`; with `token` and `secret`
    they are the client's. `sealed`: they are encrypted. `host`: equal for the stores of one host alone.
    """

    id: Id
    protocol: Size
    name: Text
    incarnation: Size
    path: Text
    cluster: Text
    memory_bytes: Size
    entries: Size
    max_object_bytes: Size
    max_ttl_s: Seconds
    shared: bool
    stream: Text
    token: Annotated[bytes, Meta(max_length=64)]
    secret: Annotated[bytes, Meta(max_length=64)] = b""
    sealed: bool = False
    host: Text = ""


class Stranger(_Message, frozen=True, tag=3):
    """The server does not know this connection: say Hello (it restarted, or forgot an idle client). In answer to that: it does
    not take this client, for a `reason`."""

    id: Id
    reason: Text = ""


class Exist(_Message, frozen=True, tag=4):
    """Which of these can be read? Answered by `Codes` with 1 or 0 a key."""

    id: Id
    keys: Keys


class Codes(_Message, frozen=True, tag=5):
    """One signed byte a key, or none when the request as a whole could not be followed."""

    id: Id
    codes: Annotated[bytes, Meta(max_length=MAX_KEYS)]


class Numbers(_Message, frozen=True, tag=6):
    """One number a key."""

    id: Id
    numbers: Ints


class Reserve(_Message, frozen=True, tag=7):
    """Cells for these values, under put `id`. `pins`: see `objects.Pin`."""

    id: Id
    keys: Keys
    sizes: Sizes
    pins: Annotated[int, Meta(ge=0, le=7)]
    ttl_s: Seconds


class Reserved(_Message, frozen=True, tag=8):
    """Columns, one row a key: code, entry, offset, generation."""

    id: Id
    codes: Ints
    entries: Ids
    offsets: Sizes
    generations: Sizes


class Commit(_Message, frozen=True, tag=9):
    """End put `put_id`: the values at `indexes` are written; the others are given up. Answered by `Numbers` (codes)."""

    id: Id
    put_id: Id
    indexes: Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_KEYS)]], Meta(max_length=MAX_KEYS)]
    checksums: U64s


class Lease(_Message, frozen=True, tag=10):
    """Keep these readable for `ttl_s` under lease `id`."""

    id: Id
    keys: Keys
    ttl_s: Seconds


class Leased(_Message, frozen=True, tag=11):
    """Columns, one row a key: size (0: not here), entry (0: on disk only), offset, generation, checksum (0: none was made).
    A client that does not map the memory gets the sizes alone.

    What is on disk only is not leased; a stream takes a `Promote`.
    """

    id: Id
    sizes: Sizes
    entries: Ids
    offsets: Sizes
    generations: Sizes
    checksums: U64s


class Release(_Message, frozen=True, tag=12):
    """Not answered. These leases are over; so are these puts, of which nothing was committed."""

    leases: Ids
    puts: Ids


class SizesOf(_Message, frozen=True, tag=13):
    """Answered by `Numbers`: sizes, or NOT_FOUND."""

    id: Id
    keys: Keys


class Remove(_Message, frozen=True, tag=14):
    """Answered by `Numbers`: codes."""

    id: Id
    keys: Keys


class RemoveAll(_Message, frozen=True, tag=15):
    """Answered by `Numbers` with one number: how many went. Ask again while it is REMOVED_AT_ONCE."""

    id: Id


class ListKeys(_Message, frozen=True, tag=16):
    """A page of the readable keys from `cursor` on, 0 at first."""

    id: Id
    cursor: Size
    limit: Annotated[int, Meta(ge=1, le=MAX_KEYS)]


class KeysListed(_Message, frozen=True, tag=17):
    """`cursor`: where to go on, 0 at the end."""

    id: Id
    keys: Keys
    cursor: Size


class ReportCorrupt(_Message, frozen=True, tag=18):
    """Not answered. These copies did not verify."""

    entries: Ids
    generations: Sizes


Request = Hello | Exist | Reserve | Commit | Lease | Release | SizesOf | Remove | RemoveAll | ListKeys | ReportCorrupt
Identified = Hello | Exist | Reserve | Commit | Lease | SizesOf | Remove | RemoveAll | ListKeys
"""Requests answered by one reply that echoes their id."""
OfMemory = Reserve | Commit | Lease | Release | ReportCorrupt
"""Requests of a client that maps the memory, which copies by itself."""
Note = Release | ReportCorrupt
"""Not answered."""
Reply = Welcome | Stranger | Codes | Numbers | Reserved | Leased | KeysListed

decode_request: Callable[[bytes | memoryview], Request] = decoder(Request)  # type: ignore[arg-type]
decode_reply: Callable[[bytes | memoryview], Reply] = decoder(Reply)  # type: ignore[arg-type]
