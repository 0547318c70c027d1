"""Which cache-nodes hold which block keys, as announced. A stale entry costs a miss, never a wrong answer. PURE."""

from collections.abc import Iterable, Sequence

from mooncake_zmq.kv.block_hash import Key


class PrefixIndex:
    """One dict from key to a bit mask of nodes, so that matching all nodes at once costs one lookup per key.

    At `max_keys` distinct keys a new one is dropped: `stored` returns how many were. Such blocks are computed again.
    """

    def __init__(self, *, max_keys: int) -> None:
        self.max_keys = max_keys
        self._holders: dict[Key, int] = {}
        self._bits: dict[str, int] = {}
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def counts(self) -> dict[str, int]:
        """Keys held, by node."""
        return dict(self._counts)

    def stored(self, node: str, keys: Iterable[Key]) -> int:
        """`node` holds `keys` now. Returns how many of them were dropped at the limit."""
        bit = self._bit(node)
        holders = self._holders
        room = self.max_keys - len(holders)
        added = dropped = 0
        for key in keys:
            held = holders.get(key, 0)
            if held & bit:
                continue
            if not held:
                if room <= 0:
                    dropped += 1
                    continue
                room -= 1
            holders[key] = held | bit
            added += 1
        self._counts[node] += added
        return dropped

    def removed(self, node: str, keys: Iterable[Key]) -> None:
        """`node` no longer holds `keys`; those never taken in are ignored."""
        bit = self._bits.get(node, 0)
        holders = self._holders
        for key in keys:
            held = holders.get(key, 0)
            if not held & bit:
                continue
            if held == bit:
                del holders[key]
            else:
                holders[key] = held ^ bit
            self._counts[node] -= 1

    def drop(self, node: str) -> None:
        """Forget everything of `node`. One pass over the index; nothing to do for a node that holds nothing."""
        bit = self._bits.pop(node, 0)
        if self._counts.pop(node, 0):
            self._holders = {key: held & ~bit for key, held in self._holders.items() if held != bit}

    def match(self, keys: Sequence[Key]) -> dict[str, int]:
        """Length of the leading run of `keys` each node holds, in name order; nodes without the first key are left out."""
        lookup = self._holders.get
        alive = lookup(keys[0], 0) if keys else 0
        first = alive
        ends: list[tuple[int, int]] = []
        for count, key in enumerate(keys):
            held = lookup(key, 0)
            if alive & ~held:
                ends.append((alive & ~held, count))
                alive &= held
                if not alive:
                    break
        ends.append((alive, len(keys)))
        return {
            node: next(count for gone, count in ends if gone & bit) for node, bit in sorted(self._bits.items()) if first & bit
        }

    def holders(self, keys: Sequence[Key]) -> list[str]:
        """Nodes that hold every one of `keys`, in name order; at least one key."""
        lookup = self._holders.get
        held = lookup(keys[-1], 0)
        for key in keys:
            if not held:
                return []
            held &= lookup(key, 0)
        return [node for node, bit in sorted(self._bits.items()) if held & bit]

    def held_by(self, node: str) -> int:
        """How many keys this node holds."""
        return self._counts.get(node, 0)

    def copies(self, key: Key) -> int:
        """How many nodes hold this block."""
        return self._holders.get(key, 0).bit_count()

    def check(self) -> None:
        """Counts and masks agree, and every mask names known nodes only."""
        assert len(self._holders) <= self.max_keys
        known = 0
        for node, bit in self._bits.items():
            assert not known & bit, "two nodes share a bit"
            known |= bit
            assert self._counts[node] == sum(1 for held in self._holders.values() if held & bit)
        assert self._bits.keys() == self._counts.keys()
        assert all(held and not held & ~known for held in self._holders.values())

    def _bit(self, node: str) -> int:
        """The node's bit; a new node gets the lowest free one."""
        if node not in self._bits:
            taken = sum(self._bits.values())
            self._bits[node] = ~taken & (taken + 1)
            self._counts[node] = 0
        return self._bits[node]
