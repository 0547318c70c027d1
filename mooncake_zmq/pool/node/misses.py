"""Why blocks that were asked for were not to be had: one reason for each, so that they add up. PURE.

What a pool once held and holds no more it remembers for a while, of blocks that went last.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.events import Medium

MAX_GONE = 65_536
"""Blocks that are remembered: some MiB."""
NEVER_STORED, EVICTED, CORRUPT, DISK_FAILED = "never_stored", "evicted", "corrupt", "disk_failed"
"""Held nowhere that was looked at, and why."""
LACKS, FAILED, SLOW, NO_ROOM, TOO_LATE = "source_lacks", "fetch_failed", "slower_than_computing", "no_room", "too_late"
"""Looked for on the SSD or at another host."""
BEHIND, DENIED, MET = "behind_another", "denied", "computed_meanwhile"
REASONS = (NEVER_STORED, EVICTED, CORRUPT, DISK_FAILED, LACKS, FAILED, SLOW, NO_ROOM, TOO_LATE, BEHIND, DENIED, MET)


class Misses:
    """Keys that are gone from a pool, and why."""

    def __init__(self) -> None:
        self._gone: dict[Key, str] = {}
        self._going: dict[Key, str] = {}
        """Keys that go in this event for another reason than want of room, and that reason."""

    def __len__(self) -> int:
        return len(self._gone)

    def going(self, keys: Iterable[Key], why: str) -> None:
        """A tier lets these go, and not to make room."""
        self._going.update(dict.fromkeys(keys, why))

    def left(self, gone: Iterable[Key]) -> None:
        """These are in no tier any more since this event."""
        for key in gone:
            self._gone.pop(key, None)
            self._gone[key] = self._going.get(key, EVICTED)
        self._going.clear()
        while len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def count(
        self, missed: Sequence[Key], tiers: Sequence[Medium | None], *, coming: Collection[Key], lost: Mapping[Key, str]
    ) -> Counter[str]:
        """How many of the blocks `missed`, from the first one on, for which reason. `tiers`: where they are now; `coming`: on
        their way; `lost`: why they did not come."""
        reasons = Counter[str]()
        for place, (key, tier) in enumerate(zip(missed, tiers, strict=True)):
            why = lost.get(key)
            if key in coming:
                why = TOO_LATE
            elif tier is not None:
                why = why or (BEHIND if place else NO_ROOM)
            elif why is None or why == LACKS:  # that it was here once says more
                why = self._gone.get(key, why or NEVER_STORED)
            reasons[why] += 1
        return reasons
