"""Watching a node: answered by `core.node`, never by the actors."""

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
    """Gateway -> anybody: report now and each second, until `for_s` have passed since this came. Said again it lasts from
    then."""

    for_s: Annotated[float, Meta(gt=0, le=MAX_WATCH_S)]


class Moved(Record, frozen=True):
    """KV that a node has moved in this life. `peer`: where from, of a `put` where to; empty: its own SSD."""

    kind: Annotated[str, Meta(min_length=1, max_length=16)]
    peer: Annotated[str, Meta(max_length=64)]
    bytes: Count


class Report(TaggedRecord, frozen=True):
    """How a node is, for those who watch it (lossy)."""

    uptime_s: Seconds
    draining: bool = False
    gauges: Levels = ()
    counts: Levels = ()
    moved: Annotated[tuple[Moved, ...], Meta(max_length=MAX_TRANSFER_STATS)] = ()
    refused: Annotated[tuple[tuple[Name, Text], ...], Meta(max_length=MAX_REFUSALS)] = ()
    """Peers that it does not talk with, and why."""
    left_off: Count = 0
    """Of all these, what a report has no room for."""
    resting: bool = False
    """It drains because an operator asked it to, and stays."""


class SetResting(TaggedRecord, frozen=True):
    """Gateway -> anybody: an operator wants you to accept nothing new, finish what you have and stay; or, not
    `resting`, to accept again. Reports tell of it. Said twice it is as if said once."""

    resting: bool


class AskState(TaggedRecord, frozen=True):
    """Gateway -> anybody: tell all of your state, once."""

    ask_id: Count


class StateTold(TaggedRecord, frozen=True):
    """The answer: JSON, or why there is none."""

    ask_id: Count
    state: Annotated[bytes, Meta(max_length=MAX_DUMP_BYTES)] = b""
    error: Text = ""
