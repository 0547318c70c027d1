"""The first message of every conversation, and the envelope that each frame holds."""

from typing import Annotated, Literal

from msgspec import Meta

from mooncake_zmq.core.messages.fields import MAX_BODIES, MAX_MESSAGE_BYTES, Count, Name, Record, TaggedRecord, Text


class SegmentRef(Record, frozen=True):
    """Where a node's block slots can be read: a shared-memory file on its host, a data endpoint from elsewhere.

    Slots in GPU memory: the UUID of the `device` and the IPC `handle` of the whole slab, both empty for slots in the file.
    """

    path: Text
    endpoint: Text
    slots: Count
    device: Annotated[bytes, Meta(max_length=16)] = b""
    handle: Annotated[bytes, Meta(max_length=64)] = b""


Part = Literal["both", "prefill", "decode"]
"""What a vLLM does of the requests that it gets."""


class Hello(TaggedRecord, frozen=True):
    """The first message of every conversation. Fingerprints must be equal, or the peer is refused."""

    protocol: Count
    role: Name
    host: Name
    model: Text
    tokenizer: Text
    layout: Text
    segment: SegmentRef | None = None
    may_become: Annotated[str, Meta(max_length=64)] = ""
    """The role that a conductor may ask it to change to; empty: none."""
    part: Part = "both"
    """Of a vLLM: whether others go on with what it prefills, or it with what others do."""


class Envelope(Record, frozen=True):
    """What one ZeroMQ frame holds: who speaks, in which conversation, and encoded messages, `sequence` being the first's; none
    is a ping.

    The fields' rules are told in `core.session`.
    """

    version: Count
    sender: Name
    incarnation: Count
    epoch: Count
    to_incarnation: Count
    floor: Count
    sequence: Count
    ack_epoch: Count
    ack: Count
    bodies: Annotated[tuple[Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)], ...], Meta(max_length=MAX_BODIES)] = ()
    late_ms: Count = 0
    """How late the sender's loop was recently."""
