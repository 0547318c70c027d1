"""Messages for watching a node, which `core.node` answers, never the actors."""

from typing import Annotated

from msgspec import Meta

from mooncake_zmq.core.messages.fields import Count, Name, Record, Seconds, TaggedRecord, Text

MAX_WATCH_S = 120.0
MAX_LEVELS = 512
"""Counters and gauges that one report may name."""
MAX_TRANSFER_STATS = 256
MAX_REFUSALS = 32
MAX_DUMP_BYTES = 1 << 20
Label = Annotated[str, Meta(min_length=1, max_length=160)]
MAX_LEVEL = 1e18
Levels = Annotated[tuple[tuple[Label, Annotated[float, Meta(ge=-MAX_LEVEL, le=MAX_LEVEL)]], ...], Meta(max_length=MAX_LEVELS)]
"""Counters or gauges by name, as `core.actor.Actor` names them."""


class Watch(TaggedRecord, frozen=True):
    """Request of a gateway to any node to report now and each second for `for_s` from its receipt. A repetition extends it."""

    for_s: Annotated[float, Meta(gt=0, le=MAX_WATCH_S)]


class Moved(Record, frozen=True):
    """KV bytes that a node has moved since it started. `peer`: their source, or their target for a `put`; empty: its own
    SSD."""

    kind: Annotated[str, Meta(min_length=1, max_length=16)]
    peer: Annotated[str, Meta(max_length=64)]
    bytes: Count


class Report(TaggedRecord, frozen=True):
    """State of a node for its watchers (lossy)."""

    uptime_s: Seconds
    draining: bool = False
    gauges: Levels = ()
    counts: Levels = ()
    moved: Annotated[tuple[Moved, ...], Meta(max_length=MAX_TRANSFER_STATS)] = ()
    refused: Annotated[tuple[tuple[Name, Text], ...], Meta(max_length=MAX_REFUSALS)] = ()
    """Peers whose conversation it refuses, and why."""
    left_off: Count = 0
    """Number of entries that the report has no room for."""
    cordoned: bool = False
    """Whether an operator has cordoned the node."""


class SetCordon(TaggedRecord, frozen=True):
    """Request of an operator, sent by a gateway to any node, to cordon it: accept nothing new, finish what is running and stay;
    or, if not `cordoned`, to accept again. Reports show the result. Idempotent."""

    cordoned: bool


class AskState(TaggedRecord, frozen=True):
    """Request of a gateway to any node to send its state once."""

    ask_id: Count
    part: Text = ""
    """The part of the state that is wanted, of a node that has parts; empty: the whole."""


class StateReported(TaggedRecord, frozen=True):
    """Reply to `AskState`: JSON, or an error."""

    ask_id: Count
    state: Annotated[bytes, Meta(max_length=MAX_DUMP_BYTES)] = b""
    error: Text = ""
