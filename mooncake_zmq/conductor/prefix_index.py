"""Which cache-nodes hold which block keys, and whether on SSD alone, as announced. A stale entry costs a miss, never a wrong
answer. PURE.

One dict from key to a bit mask of nodes, so that matching all nodes at once costs one lookup per key. At `max_keys` keys those
neither announced nor asked for longest go, as a clock has it: what was asked for since it came is passed over once. A node
that leaves is masked out at once and its bits are swept out piece by piece, since a pass over millions of keys takes too long.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from mooncake_zmq.kv.block_hash import Key

Run = tuple[int, int]
"""Blocks, and the mask of the nodes that have so many."""
PIECE_KEYS = 512
"""Keys that the clock handles at a time."""
SWEPT_AT_ONCE = 2048
"""Keys swept when a node leaves, about 0.5 ms; the others piece by piece."""


def bits_of(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class PrefixIndex:
    """Nodes have bits, the lowest free one each; `runs` speaks of them by bit, the rest by name."""

    def __init__(self, *, max_keys: int) -> None:
        self.max_keys = max_keys
        self.evicted = 0
        """Keys forgotten at the limit."""
        self._holders: dict[Key, int] = {}
        self._disk: dict[Key, int] = {}
        """Those of the holders that have it on SSD alone."""
        self._bits: dict[str, int] = {}
        """The number of each node's bit."""
        self._names: list[str] = []
        """By number of the bit; empty if it is free or swept out."""
        self._held: list[int] = []
        """Keys held, likewise."""
        self._live = 0
        self._dead = 0
        self._sweeping = 0
        self._sweep_left = 0
        self._log: deque[list[Key]] = deque()
        """Every key of the index and every ghost, each once, in pieces: the oldest first."""
        self._logged = 0
        self._ghosts: set[Key] = set()
        """Keys that nobody holds any more and that the log still has."""
        self._asked: set[Key] = set()
        """Keys asked for since the clock last passed them; kept only while the index is more than half full."""

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def counts(self) -> dict[str, int]:
        """Keys held, by node."""
        return {name: self._held[bit] for name, bit in sorted(self._bits.items())}

    @property
    def is_sweeping(self) -> bool:
        """Whether `sweep` has anything to do."""
        return bool(self._dead)

    def join(self, node: str) -> int:
        """The number of the node's bit; a new node gets the lowest free one."""
        bit = self._bits.get(node)
        if bit is None:
            bit = next(bits_of(~(self._live | self._dead)))
            if bit == len(self._names):
                self._names.append("")
                self._held.append(0)
            self._bits[node], self._names[bit] = bit, node
            self._live |= 1 << bit
        return bit

    def name_of(self, bit: int) -> str:
        """The node that has this bit."""
        return self._names[bit]

    def stored(self, node: str, keys: Sequence[Key]) -> None:
        """`node` holds `keys` in DRAM now."""
        self._take(node, keys)
        if self._disk:
            self._forget_disk(~(1 << self._bits[node]), keys)

    def on_disk(self, node: str, keys: Sequence[Key]) -> None:
        """`node` holds `keys` on SSD alone now."""
        self._take(node, keys)
        bit, disk, holders = 1 << self._bits[node], self._disk, self._holders
        for key in keys:
            if key in holders:
                disk[key] = disk.get(key, 0) | bit

    def removed(self, node: str, keys: Sequence[Key]) -> None:
        """`node` no longer holds `keys`; those never taken in are ignored."""
        number = self._bits.get(node)
        if number is None or not keys:
            return
        bit = 1 << number
        holders, lookup = self._holders, self._holders.get
        gone = 0
        ghost = self._ghosts.add
        for key in keys:
            held = lookup(key, 0)
            if not held & bit:
                continue
            gone += 1
            if held == bit:
                del holders[key]
                ghost(key)
            else:
                holders[key] = held ^ bit
        self._held[number] -= gone
        if self._disk:
            self._forget_disk(~bit, keys)
        if self._asked:
            self._asked.difference_update(keys)

    def drop(self, node: str) -> None:
        """Forget everything of `node`: at once for all who ask, and bit by bit in `sweep`."""
        number = self._bits.pop(node, None)
        if number is None:
            return
        held, self._held[number], self._names[number] = self._held[number], 0, ""
        self._live &= ~(1 << number)
        if held:
            self._dead |= 1 << number
            self.sweep(SWEPT_AT_ONCE)

    def sweep(self, keys: int) -> None:
        """Take the bits of nodes that left out of about so many keys."""
        if self._dead and not self._sweeping:
            self._sweeping, self._sweep_left = self._dead, self._logged
        while self._sweeping and keys > 0 and self._sweep_left > 0:
            piece = self._pop()
            keys -= len(piece)
            self._push(piece)
        if self._sweeping and self._sweep_left <= 0:
            self._dead &= ~self._sweeping
            self._sweeping = 0

    def runs(self, keys: Sequence[Key]) -> list[Run]:
        """How long a leading run of `keys` each node holds: (blocks, the mask of the nodes whose run ends there), the shortest
        first; nodes without the first key are left out."""
        lookup = self._holders.get
        alive = lookup(keys[0], 0) & self._live if keys else 0
        if not alive:
            return []
        found: list[Run] = []
        count = 0
        for key in keys:
            still = alive & lookup(key, 0)
            if still != alive:
                found.append((count, alive ^ still))
                if not still:
                    return found
                alive = still
            count += 1
        found.append((count, alive))
        return found

    def on_disk_alone(self, keys: Sequence[Key]) -> list[int]:
        """For each of `keys` the mask of the nodes that have it on SSD alone; nothing if nobody has any there."""
        disk = self._disk
        if not disk:
            return []
        masks = [disk.get(key, 0) & self._live for key in keys]
        return masks if any(masks) else []

    def match(self, keys: Sequence[Key]) -> dict[str, int]:
        """Length of the leading run of `keys` each node holds, in name order; nodes without the first key are left out."""
        by_bit = {bit: blocks for blocks, mask in self.runs(keys) for bit in bits_of(mask)}
        return {node: by_bit[bit] for node, bit in sorted(self._bits.items()) if bit in by_bit}

    def touch(self, keys: Sequence[Key]) -> None:
        """`keys` were asked for: they stay longer."""
        if 2 * len(self._holders) > self.max_keys:
            self._asked.update([key for key in keys if key in self._holders])

    def holders(self, keys: Sequence[Key]) -> list[str]:
        """Nodes that hold every one of `keys`, in name order; at least one key."""
        lookup = self._holders.get
        held = lookup(keys[-1], 0) & self._live
        for key in keys:
            if not held:
                return []
            held &= lookup(key, 0)
        return sorted([self._names[bit] for bit in bits_of(held)])

    def holds(self, node: str, key: Key) -> bool:
        """Whether this node holds this block."""
        number = self._bits.get(node)
        return number is not None and bool(self._holders.get(key, 0) >> number & 1)

    def held_by(self, node: str) -> int:
        """How many keys this node holds."""
        number = self._bits.get(node)
        return 0 if number is None else self._held[number]

    def copies(self, key: Key) -> int:
        """How many nodes hold this block."""
        return (self._holders.get(key, 0) & self._live).bit_count()

    def check(self) -> None:
        """Counts, masks and log agree, and every mask names known nodes only."""
        assert len(self._holders) <= self.max_keys
        assert not self._live & self._dead
        assert self._live == sum(1 << bit for bit in self._bits.values())
        for node, bit in self._bits.items():
            assert self._names[bit] == node
            assert self._held[bit] == sum(held >> bit & 1 for held in self._holders.values()), node
        known = self._live | self._dead
        assert all(held and not held & ~known for held in self._holders.values())
        assert all(held and not held & ~self._holders.get(key, 0) for key, held in self._disk.items())
        assert self._asked <= self._holders.keys()
        logged = [key for piece in self._log for key in piece]
        assert self._logged == len(logged) == len(self._holders) + len(self._ghosts)
        assert set(logged) == self._holders.keys() | self._ghosts
        assert self._logged <= 2 * self.max_keys + PIECE_KEYS

    # --- leaves

    def _take(self, node: str, keys: Sequence[Key]) -> None:
        number = self.join(node)
        bit = 1 << number
        holders, lookup = self._holders, self._holders.get
        new: list[Key] = []
        added = 0
        for key in keys:
            held = lookup(key)
            if held is None:
                holders[key] = bit
                new.append(key)
            elif not held & bit:
                holders[key] = held | bit
                added += 1
        came = len(new)
        self._held[number] += added + came
        if new and self._ghosts:
            new = self._without_ghosts(new)
        for start in range(0, len(new), PIECE_KEYS):
            self._log.append(new[start : start + PIECE_KEYS])
        self._logged += len(new)
        if came:
            self._make_room(came)

    def _forget_disk(self, others: int, keys: Sequence[Key]) -> None:
        disk = self._disk
        for key in keys:
            held = disk.get(key)
            if held is not None:
                left = held & others
                if left:
                    disk[key] = left
                else:
                    del disk[key]

    def _make_room(self, came: int) -> None:
        """Evict what is over the limit, and drop from the log what is gone; work bounded by what came."""
        spared = 2 * came + PIECE_KEYS
        while (over := len(self._holders) - self.max_keys) > 0:
            piece = self._pop()
            if len(piece) > over:  # the rest keeps its place, and it is as many as there are too many, ghosts apart
                self._log.appendleft(piece[over:])
                self._logged += len(piece) - over
                self._sweep_left += len(piece) - over
                del piece[over:]
            asked = self._asked.intersection(piece) if self._asked and spared > 0 else ()
            if asked:
                spared -= len(asked)
                self._asked -= asked
                self._push([key for key in piece if key in asked])
                piece = [key for key in piece if key not in asked]
            self._evict(piece)
        left = 2 * came
        while self._logged > 2 * self.max_keys or (left > 0 and self._logged > 2 * len(self._holders) + PIECE_KEYS):
            piece = self._pop()
            left -= len(piece)
            self._push(piece)

    def _without_ghosts(self, new: list[Key]) -> list[Key]:
        """Those of the new keys that the log does not have; the others are as good as just asked for."""
        back = self._ghosts.intersection(new)
        if not back:
            return new
        self._ghosts -= back
        self._asked |= back
        return [key for key in new if key not in back]

    def _pop(self) -> list[Key]:
        piece = self._log.popleft()
        self._logged -= len(piece)
        self._sweep_left -= len(piece)
        return piece

    def _push(self, keys: list[Key]) -> None:
        """Back into the log as its newest, without ghosts; a sweep that is under way need not come by again."""
        if self._ghosts:
            kept = [key for key in keys if key in self._holders]
            self._ghosts.difference_update(keys)
            keys = kept
        if self._sweeping:
            keys = self._without(self._sweeping, keys)
        if keys:
            self._log.append(keys)
            self._logged += len(keys)

    def _without(self, dead: int, keys: list[Key]) -> list[Key]:
        """Take the bits in `dead` out of these keys; returns those that anybody still holds."""
        holders, kept = self._holders, []
        for key in keys:
            held = holders.get(key)
            if held is None:
                continue
            left = held & ~dead
            if left:
                if left != held:
                    holders[key] = left
                kept.append(key)
            else:
                del holders[key]
                self._asked.discard(key)
            if self._disk:
                self._forget_disk(~dead, (key,))
        return kept

    def _evict(self, keys: list[Key]) -> None:
        holders, counts = self._holders, self._held
        before = len(holders)
        for key in keys:
            held = holders.pop(key, 0)
            if held & (held - 1):
                for bit in bits_of(held & self._live):
                    counts[bit] -= 1
            elif held & self._live:
                counts[held.bit_length() - 1] -= 1
        self.evicted += before - len(holders)
        for others in (self._ghosts, self._asked):
            if others:
                others.difference_update(keys)
        if self._disk:
            self._forget_disk(0, keys)
