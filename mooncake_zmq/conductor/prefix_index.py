"""Records which nodes hold which block keys, and whether on SSD alone, as they announced it. A stale entry costs a miss, never
a wrong answer. PURE.

It is a table from key to a bit mask of nodes, so that matching all nodes at once costs one lookup per key. At `max_keys` keys
the ones not announced or looked up for longest are evicted by the clock algorithm: a key that was looked up since it was added
is passed over once. A node that leaves is masked out at once and its bits are swept out piece by piece, since a pass over
millions of keys takes too long. The table is many small dicts, by the key's first byte: a dict that grows moves all it holds,
which takes a tenth of a second for millions.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final

from mooncake_zmq.kv.block_hash import Key

Run = tuple[int, int]
"""A number of blocks, and the mask of the nodes that hold so many."""
SHARDS: Final = 256
"""The number of dicts: with two million keys, one that grows then takes half a millisecond."""
PIECE_KEYS: Final = 512
"""The keys that the clock handles at a time."""
SWEPT_AT_ONCE: Final = 2048
"""The keys swept when a node leaves, about 0.5 ms of work; the others follow piece by piece."""


def bits_of(mask: int) -> list[int]:
    """Return the numbers of the bits that are set, lowest first."""
    bits: list[int] = []
    while mask:
        low = mask & -mask
        bits.append(low.bit_length() - 1)
        mask ^= low
    return bits


def lowest_bit(mask: int) -> int:
    """Return the number of the lowest bit that is set, -1 if there is none."""
    return (mask & -mask).bit_length() - 1


class PrefixIndex:
    """The index. Each node has the lowest bit that was free; `runs` returns nodes as bits, other methods by name."""

    def __init__(self, *, max_keys: int) -> None:
        self.max_keys = max_keys
        self.evicted = 0
        """The number of keys evicted at the limit."""
        self._holders: list[dict[Key, int]] = [{} for _ in range(SHARDS)]
        """The masks of holders, by the first byte of the key. A mask of 0 is a ghost: no node holds the key any more, and the
        log still has it."""
        self._count = 0
        """The number of keys that any node holds."""
        self._disk: list[dict[Key, int]] = [{} for _ in range(SHARDS)]
        """The masks of holders that have a key on SSD alone."""
        self._tiered = False
        """Whether any key was ever on SSD alone."""
        self._bits: dict[str, int] = {}
        """The number of each node's bit."""
        self._names: list[str] = []
        """The node names by bit; empty if the bit is free or being swept out."""
        self._held: list[int] = []
        """The number of keys held, by bit."""
        self._live = 0
        self._private = 0
        """The bits of holders that are no pools."""
        self._dead = 0
        self._sweeping = 0
        self._sweep_left = 0
        self._log: deque[tuple[Key, ...]] = deque()
        """Every key of the index and every ghost, each once, in pieces, the oldest first."""
        self._logged = 0
        self._asked: list[set[Key]] = [set() for _ in range(SHARDS)]
        """Keys looked up since the clock last passed them; kept only while the index is more than half full."""

    def __len__(self) -> int:
        return self._count

    @property
    def counts(self) -> dict[str, int]:
        """The number of keys held, by node."""
        return {name: self._held[bit] for name, bit in sorted(self._bits.items())}

    @property
    def is_sweeping(self) -> bool:
        """Whether `sweep` has anything to do."""
        return bool(self._dead)

    def join(self, node: str, *, pool: bool = True) -> int:
        """Return the number of the node's bit; a new node gets the lowest free one. `pool`: whether others can fetch from it
        and copies can be made there; keys that an engine holds only for itself count in `runs` alone."""
        bit = self._bits.get(node)
        if bit is None:
            bit = lowest_bit(~(self._live | self._dead))
            if bit == len(self._names):
                self._names.append("")
                self._held.append(0)
            self._bits[node], self._names[bit] = bit, node
            self._live |= 1 << bit
            self._private = self._private & ~(1 << bit) | (not pool) << bit
        return bit

    def name_of(self, bit: int) -> str:
        """Return the node that has this bit."""
        return self._names[bit]

    def stored(self, node: str, keys: Sequence[Key]) -> None:
        """Record that `node` now holds `keys` in DRAM."""
        self._take(node, keys)
        if self._tiered:
            self._forget_disk(~(1 << self._bits[node]), keys)

    def on_disk(self, node: str, keys: Sequence[Key]) -> None:
        """Record that `node` now holds `keys` on SSD alone."""
        self._take(node, keys)
        bit = 1 << self._bits[node]
        self._tiered = True
        for key in keys:
            if self._holders[key[0]].get(key):
                disk = self._disk[key[0]]
                disk[key] = disk.get(key, 0) | bit

    def removed(self, node: str, keys: Sequence[Key]) -> None:
        """Record that `node` no longer holds `keys`; unknown ones are ignored."""
        number = self._bits.get(node)
        if number is None or not keys:
            return
        bit, tables, gone = 1 << number, self._holders, 0
        for key in keys:
            table = tables[key[0]]
            held = table.get(key, 0)
            if held & bit:
                gone += 1
                table[key] = held ^ bit
                if held == bit:
                    self._count -= 1
                    self._asked[key[0]].discard(key)
        self._held[number] -= gone
        if self._tiered:
            self._forget_disk(~bit, keys)

    def drop(self, node: str) -> None:
        """Remove everything of `node`: at once from all answers, and from memory in `sweep`."""
        number = self._bits.pop(node, None)
        if number is None:
            return
        held, self._held[number], self._names[number] = self._held[number], 0, ""
        self._live &= ~(1 << number)
        if held:
            self._dead |= 1 << number
            self.sweep(SWEPT_AT_ONCE)

    def sweep(self, keys: int) -> None:
        """Clear the bits of nodes that left in about so many keys."""
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
        """Return how long a leading run of `keys` each node holds: (blocks, the mask of the nodes whose run ends there), the
        shortest first; nodes without the first key are left out."""
        tables = self._holders
        alive = tables[keys[0][0]].get(keys[0], 0) & self._live if keys else 0
        if not alive:
            return []
        found: list[Run] = []
        count = 0
        for key in keys:
            still = alive & tables[key[0]].get(key, 0)
            if still != alive:
                found.append((count, alive ^ still))
                if not still:
                    return found
                alive = still
            count += 1
        found.append((count, alive))
        return found

    def on_disk_alone(self, keys: Sequence[Key]) -> Sequence[int]:
        """Return for each of `keys` the mask of the nodes that have it on SSD alone; empty if no node has any of them
        there."""
        if not self._tiered:
            return ()
        masks = [self._disk[key[0]].get(key, 0) & self._live for key in keys]
        return masks if any(masks) else ()

    def match(self, keys: Sequence[Key]) -> dict[str, int]:
        """Return the length of the leading run of `keys` that each node holds, in name order; nodes without the first key are
        left out."""
        by_bit = {bit: blocks for blocks, mask in self.runs(keys) for bit in bits_of(mask)}
        return {node: by_bit[bit] for node, bit in sorted(self._bits.items()) if bit in by_bit}

    def touch(self, keys: Sequence[Key]) -> None:
        """Note that `keys` were looked up, so that they are evicted later."""
        if 2 * self._count > self.max_keys:
            for key in keys:
                if self._mask(key):
                    self._asked[key[0]].add(key)

    def holders(self, keys: Sequence[Key]) -> list[str]:
        """Return the pools that hold every one of `keys`, of which there is at least one, in name order."""
        held = self._mask(keys[-1]) & self._live & ~self._private
        for key in keys:
            if not held:
                return []
            held &= self._mask(key)
        return sorted([self._names[bit] for bit in bits_of(held)])

    def holds(self, node: str, key: Key) -> bool:
        """Return whether this node holds this block."""
        number = self._bits.get(node)
        return number is not None and bool(self._mask(key) >> number & 1)

    def held_by(self, node: str) -> int:
        """Return how many keys this node holds."""
        number = self._bits.get(node)
        return 0 if number is None else self._held[number]

    def copies(self, key: Key) -> int:
        """Return how many pools hold this block."""
        return (self._mask(key) & self._live & ~self._private).bit_count()

    def check(self) -> None:
        """Assert that counts, masks and log agree, and that every mask contains known nodes only."""
        assert self._count <= self.max_keys
        assert not self._live & self._dead
        assert self._live == sum(1 << bit for bit in self._bits.values())
        masks: dict[Key, int] = {}
        for shard in filter(None, self._holders):
            masks |= shard
        assert _in_their_shards(self._holders)
        assert _in_their_shards(self._disk)
        assert _in_their_shards(self._asked)
        alike = Counter(masks.values())  # few masks differ, and this runs after every event of a seed
        for node, bit in self._bits.items():
            assert self._names[bit] == node
            assert self._held[bit] == sum(keys for held, keys in alike.items() if held >> bit & 1), node
        known = self._live | self._dead
        assert not any(held & ~known for held in alike)
        assert self._count == len(masks) - alike[0]
        for shard in filter(None, self._disk):
            for key, held in shard.items():
                assert held, "on SSD alone is what somebody holds"
                assert not held & ~masks.get(key, 0)
        assert all(map(masks.get, chain.from_iterable(filter(None, self._asked))))
        logged = list(chain.from_iterable(self._log))
        assert self._logged == len(logged) == len(masks)
        assert masks.keys() == set(logged)
        assert self._logged <= 2 * self.max_keys + PIECE_KEYS

    # --- leaves

    def _take(self, node: str, keys: Sequence[Key]) -> None:
        number = self.join(node)
        bit, tables = 1 << number, self._holders
        new: list[Key] = []
        added = came = 0
        for key in keys:
            table = tables[key[0]]
            held = table.get(key)
            if held is None:
                table[key] = bit
                new.append(key)
            elif not held & bit:
                table[key] = held | bit
                added += 1
                if not held:  # a ghost counts as just looked up
                    came += 1
                    self._asked[key[0]].add(key)
        self._held[number] += added + len(new)
        self._count += came + len(new)
        for start in range(0, len(new), PIECE_KEYS):
            self._log.append(tuple(new[start : start + PIECE_KEYS]))
        self._logged += len(new)
        if new or came:
            self._make_room(came + len(new))

    def _mask(self, key: Key) -> int:
        return self._holders[key[0]].get(key, 0)

    def _forget_disk(self, others: int, keys: Iterable[Key]) -> None:
        for key in keys:
            disk = self._disk[key[0]]
            held = disk.get(key)
            if held is not None:
                left = held & others
                if left:
                    disk[key] = left
                else:
                    del disk[key]

    def _make_room(self, came: int) -> None:
        """Evict keys beyond the limit, and drop from the log keys that are gone; the work is bounded by `came`."""
        spared = 2 * came + PIECE_KEYS
        while (over := self._count - self.max_keys) > 0:
            piece = self._pop()
            if len(piece) > over:  # the others keep their place; without ghosts, this evicts exactly the excess
                self._log.appendleft(piece[over:])
                self._logged += len(piece) - over
                self._sweep_left += len(piece) - over
                piece = piece[:over]
            asked = [key for key in piece if key in self._asked[key[0]]] if spared > 0 else []
            if asked:
                spared -= len(asked)
                for key in asked:
                    self._asked[key[0]].discard(key)
                self._push(asked)
                again = frozenset(asked)
                piece = tuple([key for key in piece if key not in again])
            self._evict(piece)
        left = 2 * came
        while self._logged > 2 * self.max_keys or (left > 0 and self._logged > 2 * self._count + PIECE_KEYS):
            piece = self._pop()
            left -= len(piece)
            self._push(piece)

    def _pop(self) -> tuple[Key, ...]:
        piece = self._log.popleft()
        self._logged -= len(piece)
        self._sweep_left -= len(piece)
        return piece

    def _push(self, keys: Iterable[Key]) -> None:
        """Append keys to the log as its newest, without ghosts; a sweep under way need not visit them again."""
        kept = tuple([key for key in keys if self._keep(key, ~self._sweeping)])
        if kept:
            self._log.append(kept)
            self._logged += len(kept)

    def _keep(self, key: Key, others: int) -> bool:
        """Clear all bits but `others` in the key's mask, and remove the key if none is left; return whether it stays."""
        table = self._holders[key[0]]
        held = table[key]
        left = held & others
        if left != held and self._tiered:
            self._forget_disk(others, (key,))
        if left:
            table[key] = left
            return True
        self._count -= held > 0
        self._asked[key[0]].discard(key)
        del table[key]
        return False

    def _evict(self, keys: Iterable[Key]) -> None:
        for key in keys:
            held = self._mask(key)
            self.evicted += held > 0
            for bit in bits_of(held & self._live):
                self._held[bit] -= 1
            self._keep(key, 0)


def _in_their_shards(shards: Sequence[Iterable[Key]]) -> bool:
    return not [key for first, shard in enumerate(shards) if shard for key in shard if key[0] != first]
