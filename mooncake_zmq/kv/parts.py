"""Parts of prompts whose KV is reused behind other tokens: their keys, and a table that finds them anywhere in a prompt.

Such KV is exact for the part alone and approximate in a prompt, so a part's keys are a chain of their own: it begins at the
part, from a root that no exact chain can have. A tenant finds its own parts only, by hash and then by their tokens. PURE.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.kv.block_hash import KEY_BYTES, Key, extend_keys

MOST_BLOCKS, MOST_TENANTS = 65_536, 256
"""The bounds of a table unless it is given others: blocks of one tenant's parts, and tenants. Beyond them the least recently
used parts and tenants are forgotten."""
_ROOT = b"mooncake-zmq: parts of prompts\0"
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse modulo 2**64
_INVERSE = np.uint64(pow(int(_BASE), -1, 2**64))
_SPREAD = np.uint64(0xD6E8FEB86659FD93)
Tokens = NDArray[np.int32]


def part_root(root: bytes) -> bytes:
    """Return the root of parts' chains for the root of exact ones. No exact chain can have it: it is a digest of bytes that
    neither a namespace nor a block's key is made of, whatever a client sends as its salt."""
    return hashlib.sha256(_ROOT + root).digest()[:KEY_BYTES]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a prompt, or the end of one: tokens `start` to `stop` of the prompt are those from `skipped` on of a part whose
    complete blocks have `keys`, all of them from its first block on. `skipped` and `stop - start` are whole blocks."""

    start: int
    stop: int
    skipped: int
    keys: tuple[Key, ...]

    def behind(self, exact: int) -> "Part | None":
        """Return what lies behind the first `exact` tokens of the prompt; None where nothing does. It may begin within a
        block."""
        if self.stop <= exact:
            return None
        cut = max(0, exact - self.start)
        return Part(self.start + cut, self.stop, self.skipped + cut, self.keys)


def marked_parts(root: bytes, tokens: Tokens, marks: Sequence[tuple[int, int]], block_tokens: int) -> list[Part]:
    """Return the complete blocks of the parts that a client marked as (start, stop) of its prompt. Raises ValueError for marks
    that overlap, are out of order or leave the prompt."""
    parts, last = [], 0
    for start, stop in marks:
        if not last <= start < stop <= len(tokens):
            raise ValueError(
                f"parts must follow one another within the prompt of {len(tokens)} tokens: {start} to {stop} does not"
            )
        last = stop
        whole = (stop - start) // block_tokens * block_tokens
        if whole:
            keys = extend_keys(part_root(root), _packed(tokens[start : start + whole]), block_tokens)
            parts.append(Part(start, start + whole, 0, tuple(keys)))
    return parts


@dataclass(slots=True)
class _Tenant:
    """The parts of one root, the least recently used first, by their last key; and where each block is, by hash."""

    parts: "OrderedDict[Key, tuple[Tokens, tuple[Key, ...]]]" = field(default_factory=OrderedDict)
    places: dict[int, tuple[Key, int]] = field(default_factory=dict)
    blocks: int = 0


class PartTable:
    """Parts that were seen, by tenant. `find` takes time in proportion to the prompt, whatever the table has."""

    def __init__(self, block_tokens: int, *, most_blocks: int = MOST_BLOCKS, most_tenants: int = MOST_TENANTS) -> None:
        if min(block_tokens, most_blocks, most_tenants) < 1:
            raise ValueError("a table of parts has room for one block of one tenant at least")
        self.block_tokens, self.most_blocks, self.most_tenants = block_tokens, most_blocks, most_tenants
        self._tenants: OrderedDict[bytes, _Tenant] = OrderedDict()

    def add(self, root: bytes, tokens: Tokens) -> tuple[Key, ...]:
        """Remember a part's complete blocks, `most_blocks` of them at most; return their keys."""
        tenant = self._tenants.setdefault(root, _Tenant())
        self._tenants.move_to_end(root)
        while len(self._tenants) > self.most_tenants:
            self._tenants.popitem(last=False)
        count = min(len(tokens) // self.block_tokens, self.most_blocks)
        if not count:
            return ()
        own = np.array(tokens[: count * self.block_tokens], dtype=np.int32)
        keys = tuple(extend_keys(part_root(root), _packed(own), self.block_tokens))
        if keys[-1] in tenant.parts:
            tenant.parts.move_to_end(keys[-1])
            return keys
        while tenant.blocks + count > self.most_blocks:
            self._forget(tenant)
        tenant.parts[keys[-1]] = own, keys
        tenant.blocks += count
        for block, number in enumerate(window_hashes(own, self.block_tokens)[:: self.block_tokens].tolist()):
            tenant.places[number] = keys[-1], block  # the newest part that has the block
        return keys

    def find(self, root: bytes, tokens: Tokens, start: int = 0) -> list[Part]:
        """Return the known parts, or runs of their blocks, from token `start` on: they do not overlap, and each is as long as
        it can be from where it begins."""
        tenant = self._tenants.get(root)
        if tenant is None:
            return []
        self._tenants.move_to_end(root)
        tokens = np.asarray(tokens, dtype=np.int32)
        return list(self._found(tenant, tokens, start))

    def _found(self, tenant: _Tenant, tokens: Tokens, start: int) -> Iterator[Part]:
        size, free = self.block_tokens, start
        for offset, number in enumerate(window_hashes(tokens[start:], size).tolist(), start):
            place = tenant.places.get(number) if offset >= free else None
            if place is None:
                continue
            name, block = place
            known, keys = tenant.parts[name]
            rest, here = known[block * size :], tokens[offset : offset + len(known) - block * size]
            differing = np.flatnonzero(rest[: len(here)] != here)
            equal = (int(differing[0]) if len(differing) else len(here)) // size * size
            if equal:  # else two blocks have one hash
                tenant.parts.move_to_end(name)
                free = offset + equal
                yield Part(offset, free, block * size, keys)

    def _forget(self, tenant: _Tenant) -> None:
        """Remove the part that was not used for longest."""
        name, (tokens, keys) = tenant.parts.popitem(last=False)
        tenant.blocks -= len(keys)
        for number in window_hashes(tokens, self.block_tokens)[:: self.block_tokens].tolist():
            if tenant.places.get(number, (b"",))[0] == name:
                del tenant.places[number]

    def check(self) -> None:
        """Assert what must hold between calls."""
        assert len(self._tenants) <= self.most_tenants
        for tenant in self._tenants.values():
            assert tenant.blocks == sum(len(keys) for _, keys in tenant.parts.values()) <= self.most_blocks
            assert all(block < len(tenant.parts[name][1]) for name, block in tenant.places.values())


def window_hashes(tokens: Tokens, size: int) -> NDArray[np.uint64]:
    """Return a hash of each run of `size` tokens, of equal runs the same: a polynomial's, from the sums up to each token."""
    count = len(tokens) - size + 1
    if count < 1:
        return np.empty(0, np.uint64)
    with np.errstate(over="ignore"):
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * _powers(_BASE, len(tokens)) * _SPREAD
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)))
        hashes: NDArray[np.uint64] = (sums[size:] - sums[:count]) * _powers(_INVERSE, count)
    return hashes


def _powers(base: np.uint64, count: int) -> NDArray[np.uint64]:
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _packed(tokens: Tokens) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()
