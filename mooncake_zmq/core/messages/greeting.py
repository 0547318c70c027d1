"""The first and the last message of a conversation, and the envelope that each frame holds."""

from typing import Annotated, Literal

from msgspec import Meta

from mooncake_zmq.core.messages.fields import MAX_BODIES, MAX_MESSAGE_BYTES, Count, Name, Record, TaggedRecord, Text


class SegmentRef(Record, frozen=True):
    """Places where a node's block slots can be read: a shared-memory file on its host, a data endpoint from other hosts.

    Slots in GPU memory have the UUID of the `device` and the IPC `handle` of the whole slab, both empty for slots in the file.
    """

    path: Text
    endpoint: Text
    slots: Count
    device: Annotated[bytes, Meta(max_length=16)] = b""
    handle: Annotated[bytes, Meta(max_length=64)] = b""


Part = Literal["both", "prefill", "decode"]
"""The part of its requests that a vLLM computes."""


MAX_MODELS = 32
"""The most models of one deployment."""
Fingerprints = Annotated[str, Meta(max_length=MAX_MODELS * 128)]


class Hello(TaggedRecord, frozen=True):
    """The first message of every conversation. A peer with other fingerprints is refused.

    A node that serves several models has the fingerprints of all of them, separated by spaces, and its peers those of some.
    """

    protocol: Count
    role: Name
    host: Name
    model: Fingerprints
    tokenizer: Fingerprints
    layout: Fingerprints
    segment: SegmentRef | None = None
    may_become: Annotated[str, Meta(max_length=64)] = ""
    """The role to which a conductor may change it; empty: none."""
    part: Part = "both"
    """A vLLM's part: it prefills for others, decodes for others, or does both."""


class Goodbye(TaggedRecord, frozen=True):
    """The last message of a process that ends in order: its peers end the conversation at once, as if it had been silent."""


class Envelope(Record, frozen=True):
    """The content of one ZeroMQ frame: its sender, the conversation and encoded messages, of which the first has the number
    `sequence`; without messages it is a ping.

    `core.session` describes the fields' rules.
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
    """Recent lateness of the sender's loop."""
