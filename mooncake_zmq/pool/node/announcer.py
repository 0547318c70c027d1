"""Announcements of what one event changed in the pool: to the conductors and, as KV events, to routers outside. PURE.

A conductor is sent, for each block, the quickest tier of this host that holds it; KV events name every tier.
"""

from collections.abc import Callable, Iterable, Sequence

from mooncake_zmq.core.actor import Effect, Publish, Send
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import BlocksAnnounced
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.events import BlocksRemoved, BlocksStored, KvEvent, Medium

IN_DRAM, ON_DISK = Medium.CPU, Medium.DISK
MAX_ANNOUNCED = 4096
"""Keys in one message, about a millisecond of a conductor's time: a schedule behind it does not wait for longer."""


class Announcer:
    """Collects changes; `tiers(keys)`: the quickest tier that each block can be read from now, if any."""

    def __init__(self, tiers: Callable[[Sequence[Key]], list[Medium | None]], counts: Tally) -> None:
        self._tiers = tiers
        self._counts = counts
        self._stored: list[BlocksStored] = []
        self._new: list[Key] = []
        self.gone: list[Key] = []
        """Keys that the last flush found in no tier any more."""

    @property
    def pending(self) -> bool:
        """Is there something to announce?"""
        return bool(self._stored)

    def stored(self, events: Iterable[BlocksStored], new: Iterable[Key]) -> None:
        """These blocks came to stand in a tier; `new`: those that stood in no quicker one."""
        self._stored += events
        self._new += new

    def flush(self, evicted: Sequence[tuple[Medium, Sequence[Key]]], conductors: Iterable[str]) -> list[Effect]:
        """Announce all changes since the last call: blocks that came, and blocks that left the tier they were announced in."""
        self.gone = []
        if not self._stored and not any(keys for _, keys in evicted):
            return []
        events: list[KvEvent] = list(self._stored)
        events += [BlocksRemoved(tuple(keys), medium) for medium, keys in evicted if keys]
        stored: list[Key] = []
        on_disk: list[Key] = []
        removed: list[Key] = []
        came = tuple(dict.fromkeys(self._new))
        for key, tier in zip(came, self._tiers(came), strict=True):
            if tier is IN_DRAM:
                stored.append(key)
            elif tier is ON_DISK:
                on_disk.append(key)  # what came and went at once is announced below, if it was known before
        went = tuple(dict.fromkeys([key for _, keys in evicted for key in keys]))
        new = frozenset(came)
        for key, tier in zip(went, self._tiers(went), strict=True):
            if tier is None:
                removed.append(key)
            elif tier is ON_DISK and key not in new:
                on_disk.append(key)  # in DRAM still, or again, it left the disk alone, or is announced above
        self.gone = removed
        self._stored.clear()
        self._new.clear()
        effects: list[Effect] = [Publish(tuple(events))]
        messages = announcements(stored, removed, on_disk)
        if messages:
            self._counts.add("announced_blocks[change=stored]", len(stored))
            self._counts.add("announced_blocks[change=on_disk]", len(on_disk))
            self._counts.add("announced_blocks[change=removed]", len(removed))
            effects += [Send(conductor, message) for message in messages for conductor in conductors]
        return effects


def announcements(stored: Sequence[Key], removed: Sequence[Key] = (), on_disk: Sequence[Key] = ()) -> list[BlocksAnnounced]:
    """Any number of keys in as many messages as it takes."""
    if len(stored) + len(removed) + len(on_disk) <= MAX_ANNOUNCED:
        whole = BlocksAnnounced(stored=tuple(stored), removed=tuple(removed), on_disk=tuple(on_disk))
        return [whole] if stored or removed or on_disk else []
    return [
        *(BlocksAnnounced(removed=keys) for keys in _pieces(removed)),
        *(BlocksAnnounced(stored=keys) for keys in _pieces(stored)),
        *(BlocksAnnounced(on_disk=keys) for keys in _pieces(on_disk)),
    ]


def _pieces(keys: Sequence[Key]) -> list[tuple[Key, ...]]:
    return [tuple(keys[start : start + MAX_ANNOUNCED]) for start in range(0, len(keys), MAX_ANNOUNCED)]
