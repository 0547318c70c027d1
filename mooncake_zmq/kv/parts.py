"""A table that finds the blocks of earlier prompts anywhere in a prompt, to reuse their KV behind other tokens.

Such KV is exact in the earlier prompt, whose keys lead to it, and approximate in the other one, where it must get no key. A
tenant finds the blocks of its own prompts only, by hash and then by their tokens. PURE.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.kv.block_hash import Key

MOST_TOKENS, MOST_BLOCKS, MOST_TENANTS = 1_048_576, 16_384, 256
"""The bounds of a table unless it is given others: tokens of all tenants' parts together, blocks of one tenant's, and tenants.
Beyond its blocks a tenant's least recently used parts are forgotten, and beyond the others whole tenants', likewise."""
MOST_TRIED = 8
"""The parts with one block that are tried, those that were added last: their blocks may be gone."""
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse modulo 2**64
_INVERSE = np.uint64(pow(int(_BASE), -1, 2**64))
Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a prompt: tokens `start` to `stop` are those from `skipped` on of an earlier one whose blocks have `keys`, from
    its first block on. `skipped` and `stop - start` are whole blocks."""

    start: int
    stop: int
    skipped: int
    keys: tuple[Key, ...]


@dataclass(slots=True)
class _Tenant:
    """The parts of one root by their last key, the least recently used first; and by its hash, the first place of a block in
    each part that has it, the part that was added last behind the others."""

    parts: "OrderedDict[Key, tuple[Tokens, tuple[Key, ...]]]" = field(default_factory=OrderedDict)
    places: dict[int, dict[Key, int]] = field(default_factory=dict)
    blocks: int = 0


class PartTable:
    """Parts that were seen, by tenant. `find` takes time in proportion to the prompt, whatever the table has."""

    def __init__(
        self,
        block_tokens: int,
        *,
        most_tokens: int = MOST_TOKENS,
        most_blocks: int = MOST_BLOCKS,
        most_tenants: int = MOST_TENANTS,
    ) -> None:
        if min(block_tokens, most_tokens // block_tokens, most_blocks, most_tenants) < 1:
            raise ValueError("a table of parts has room for one block of one tenant at least")
        self.block_tokens, self.most_tenants = block_tokens, most_tenants
        self._most_together = most_tokens // block_tokens
        self.most_blocks = min(most_blocks, self._most_together)
        self._tenants: OrderedDict[bytes, _Tenant] = OrderedDict()
        self._blocks = 0

    def add(self, root: bytes, tokens: Tokens, keys: Sequence[Key]) -> None:
        """Remember the blocks of a prompt that have `keys`, `most_blocks` of them at most, in place of prompts that it goes on
        from; nothing of a prompt that a known one goes on from."""
        count = min(len(tokens) // self.block_tokens, len(keys), self.most_blocks)
        if not count:
            return
        tenant = self._tenants.setdefault(root, _Tenant())
        self._tenants.move_to_end(root)
        keys = tuple(keys[:count])
        name = keys[-1]
        covering = name if name in tenant.parts else self._going_on(tenant, tokens, keys)
        if covering is not None:
            tenant.parts.move_to_end(covering)
            return
        for shorter in [key for key in dict.fromkeys(keys) if key in tenant.parts]:
            self._forget(tenant, shorter)
        own = np.array(tokens[: count * self.block_tokens], dtype=np.int32)
        while tenant.blocks + count > self.most_blocks:
            self._forget(tenant, next(iter(tenant.parts)))
        while len(self._tenants) > self.most_tenants or self._blocks + count > self._most_together:
            self._forget_oldest_tenant()
        tenant.parts[name] = own, keys
        tenant.blocks += count
        self._blocks += count
        for block, number in enumerate(self._block_hashes(own)):
            tenant.places.setdefault(number, {}).setdefault(name, block)

    def find(self, root: bytes, tokens: Tokens, here: Callable[[Key], bool] = lambda _: True) -> list[Part]:
        """Return the known parts, or runs of their blocks, in a prompt, as far as their blocks are `here`. They do not overlap.
        Each is as long as it can be from where it begins, in the part that was added last of those whose first block is here,
        and from the first place there: another part may have more of the prompt."""
        tenant = self._tenants.get(root)
        if tenant is None:
            return []
        self._tenants.move_to_end(root)
        return list(self._found(tenant, np.asarray(tokens, dtype=np.int32), here))

    def _found(self, tenant: _Tenant, tokens: Tokens, here: Callable[[Key], bool]) -> Iterator[Part]:
        size, free = self.block_tokens, 0
        for offset, number in enumerate(window_hashes(tokens, size).tolist()):
            places = _latest(tenant, number) if offset >= free else []
            name, block = next((each for each in places if here(tenant.parts[each[0]][1][each[1]])), (None, 0))
            if name is None:
                continue
            known, keys = tenant.parts[name]
            equal = _equal(known[block * size :], tokens[offset:], size) // size
            count = len(list(takewhile(here, keys[block : block + equal])))
            if count:  # else two blocks have one hash
                tenant.parts.move_to_end(name)
                free = offset + count * size
                yield Part(offset, free, block * size, keys)

    def _going_on(self, tenant: _Tenant, tokens: Tokens, keys: Sequence[Key]) -> Key | None:
        """Return the name of a part that has all of these keys and more, if one is found."""
        last, stop = len(keys) - 1, len(keys) * self.block_tokens
        (number,) = self._block_hashes(tokens[stop - self.block_tokens : stop])
        parts = (name for name, _ in _latest(tenant, number))
        return next((name for name in parts if tenant.parts[name][1][last : last + 1] == (keys[last],)), None)

    def _forget(self, tenant: _Tenant, name: Key) -> None:
        """Remove a part."""
        tokens, keys = tenant.parts.pop(name)
        tenant.blocks -= len(keys)
        self._blocks -= len(keys)
        for number in set(self._block_hashes(tokens)):
            having = tenant.places[number]
            del having[name]
            if not having:
                del tenant.places[number]

    def _forget_oldest_tenant(self) -> None:
        _, tenant = self._tenants.popitem(last=False)
        self._blocks -= tenant.blocks

    def _block_hashes(self, tokens: Tokens) -> list[int]:
        hashes: list[int] = window_hashes(tokens, self.block_tokens)[:: self.block_tokens].tolist()
        return hashes

    def check(self) -> None:
        """Assert what must hold between calls: the bounds, and that each part has a place for each of its blocks."""
        assert len(self._tenants) <= self.most_tenants
        assert self._blocks == sum(tenant.blocks for tenant in self._tenants.values()) <= self._most_together
        for tenant in self._tenants.values():
            assert 0 < tenant.blocks == sum(len(keys) for _, keys in tenant.parts.values()) <= self.most_blocks
            expected: dict[int, dict[Key, int]] = {}
            for name, (tokens, _) in tenant.parts.items():
                for block, number in enumerate(self._block_hashes(tokens)):
                    expected.setdefault(number, {}).setdefault(name, block)
            assert tenant.places == expected


def _latest(tenant: _Tenant, number: int) -> list[tuple[Key, int]]:
    """Return the parts that have a block with this hash, and where, those that were added last first; not all of many."""
    having = tenant.places.get(number)
    return [] if having is None else list(islice(reversed(having.items()), MOST_TRIED))


def _equal(one: Tokens, other: Tokens, first: int) -> int:
    """Return how many tokens both begin with. Compares `first` of them, and then twice as many each time, so the time is in
    proportion to the result."""
    length, at, run = min(len(one), len(other)), 0, first
    while at < length:
        differing = np.flatnonzero(one[at : min(at + run, length)] != other[at : min(at + run, length)])
        if len(differing):
            return at + int(differing[0])
        at, run = at + run, 2 * run
    return length


def window_hashes(tokens: Tokens, size: int) -> NDArray[np.uint64]:
    """Return a hash of each run of `size` tokens, of equal runs the same: a polynomial's, from the sums up to each token."""
    count = len(tokens) - size + 1
    if count < 1:
        return np.empty(0, np.uint64)
    with np.errstate(over="ignore"):
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * _powers(_BASE, len(tokens))
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)))
        hashes: NDArray[np.uint64] = (sums[size:] - sums[:count]) * _powers(_INVERSE, count)
    return hashes


def _powers(base: np.uint64, count: int) -> NDArray[np.uint64]:
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)
