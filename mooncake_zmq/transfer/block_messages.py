"""Messages between a reader of blocks and the data server of their owner; the blocks' bytes follow the replies.

reader DEALER  -- StreamWanted ----------------> ROUTER of the data server     protected by keys, where there are any
               <- StreamOffered ---------------                                or StreamDenied
reader's stream -- ReadRequest ----------------> the server's, see `stream.py`; any number of them
               <- ReadReply, the layers' bytes -                               one after another, in the requests' order
"""

from collections.abc import Callable
from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from mooncake_zmq.core.messages import Checksum, Count
from mooncake_zmq.core.records import decoder

PROTOCOL_VERSION = 2
MAX_REQUEST_BYTES = 256
MAX_OFFER_BYTES = 2048
MAX_REPLY_BYTES = 1 << 20
MAX_LAYERS = 65_536


class StreamWanted(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """Request for a stream to this incarnation of the server."""

    protocol: Count
    incarnation: Count


class StreamOffered(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """Endpoint of the stream, `tcp://*:PORT` at the address of this connection or `ipc://PATH`, and the ticket for it."""

    where: Annotated[str, Meta(max_length=512)]
    token: Annotated[bytes, Meta(max_length=64)]
    secret: Annotated[bytes, Meta(max_length=64)]
    sealed: bool


class StreamDenied(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """Refusal: the server is another incarnation, or has another protocol."""

    protocol: Count
    incarnation: Count


class ReadRequest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Request for layers `[first_layer, stop_layer)` of this copy. If not `committed`, the next generation is valid as well."""

    read_id: Count
    slot: Count
    generation: Count
    committed: bool
    first_layer: Count
    stop_layer: Count


class ReadStatus(Enum):
    """Whether bytes follow, or the reason why not."""

    OK = 0
    OUT_OF_RANGE = 1
    OTHER_GENERATION = 2
    NO_STAGING = 3


class ReadReply(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Reply to a ReadRequest. `checksums`: those of all layers' parts, so that the reader can fold them to the block checksum
    that it expects."""

    read_id: Count
    status: ReadStatus
    checksums: Annotated[tuple[Checksum, ...], Meta(max_length=MAX_LAYERS)] = ()


decode_wanted = decoder(StreamWanted)
decode_offer: Callable[[bytes | memoryview], StreamOffered | StreamDenied] = decoder(
    StreamOffered | StreamDenied  # type: ignore[arg-type]
)
decode_request = decoder(ReadRequest)
decode_reply = decoder(ReadReply)
