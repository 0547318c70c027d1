"""What one event changed in the pool, told to the conductors and, as KV events, to routers outside. PURE.

A conductor hears which blocks its host can serve from any tier; KV events name the tier.
"""

from collections.abc import Callable, Iterable, Sequence

from mooncake_zmq.core.actor import Effect, Publish, Send
from mooncake_zmq.core.messages import MAX_BLOCKS, BlocksAnnounced
from mooncake_zmq.core.shell import Tally
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.events import BlocksRemoved, BlocksStored, KvEvent, Medium


class Announcer:
    """Collects changes; `holds(key)`: can the block be read from any tier now?"""

    def __init__(self, holds: Callable[[Key], bool], counts: Tally) -> None:
        self._holds = holds
        self._counts = counts
        self._stored: list[BlocksStored] = []
        self._new: list[Key] = []

    def stored(self, events: Iterable[BlocksStored], new: Iterable[Key]) -> None:
        """These blocks came to stand in a tier; `new`: those that stood in no other."""
        self._stored += events
        self._new += new

    def flush(self, evicted: Sequence[tuple[Medium, Sequence[Key]]], conductors: Iterable[str]) -> list[Effect]:
        """Tell of everything since the last call. A key that came and went at once is not told to conductors."""
        if not self._stored and not any(keys for _, keys in evicted):
            return []
        events: list[KvEvent] = list(self._stored)
        events += [BlocksRemoved(tuple(keys), medium) for medium, keys in evicted if keys]
        stored = tuple(dict.fromkeys(key for key in self._new if self._holds(key)))
        removed = tuple(dict.fromkeys(key for _, keys in evicted for key in keys if not self._holds(key)))
        self._stored.clear()
        self._new.clear()
        effects: list[Effect] = [Publish(tuple(events))]
        if stored or removed:
            self._counts.add("announced_blocks[change=stored]", len(stored))
            self._counts.add("announced_blocks[change=removed]", len(removed))
            for message in announcements(stored, removed):
                effects += [Send(conductor, message) for conductor in conductors]
        return effects


def announcements(stored: Sequence[Key], removed: Sequence[Key] = ()) -> list[BlocksAnnounced]:
    """Any number of keys in as many messages as it takes."""
    return [
        BlocksAnnounced(stored=tuple(stored[i : i + MAX_BLOCKS]), removed=tuple(removed[i : i + MAX_BLOCKS]))
        for i in range(0, max(len(stored), len(removed)), MAX_BLOCKS)
    ]
