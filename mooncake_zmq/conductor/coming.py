"""Tracks the blocks that placed prompts will have computed, with their times, and the placements that wait for them. PURE.

A placement's chain is found by the key of each chunk's first block, since what another prompt finds held mostly ends where a
chunk begins: a prefill announces chunk by chunk. A key covers all blocks before it, so a binary search finds how far two
prompts agree from there on. A chain is removed once it is overdue and not waited for, or with its booking, and then its waiters
are released at once.
"""

import math
from collections.abc import Sequence
from typing import Final

from mooncake_zmq.conductor.booking import Booking
from mooncake_zmq.conductor.bookings import Bookings
from mooncake_zmq.conductor.chain import Ahead, Chain, Ended, Found, Link, Waiter
from mooncake_zmq.conductor.prefills import PrefillNode
from mooncake_zmq.conductor.prefix_index import PrefixIndex
from mooncake_zmq.core.chunking import chunk_stop
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.kv.block_hash import Key

TOO_SLOW: Final = 2.0
TOO_SLOW_S: Final = 0.5
"""A wait is ended when it will take this many times as long as computing the blocks would, and this many seconds more."""
MAX_LINKS: Final = 16
"""The most chains that one prompt waits for."""
PUT_GRACE_S: Final = 2.0
"""The time after which computed blocks that no pool holds are no longer expected."""


class Coming:
    """Holds all chains and waiters of one conductor; each booking has at most one of each."""

    def __init__(self, costs: Costs, block_tokens: int, index: PrefixIndex) -> None:
        self._costs = costs
        self._block_tokens = block_tokens
        self._index = index
        self._starts: dict[Key, Chain] = {}
        """Chains by the first key of each chunk; of several chains that compute a chunk, the one placed first."""
        self._chains: dict[int, Chain] = {}
        self._waiters: dict[int, Waiter] = {}
        self._wanted: dict[Key, list[Waiter]] = {}
        self._by_node: dict[PrefillNode, dict[int, Chain]] = {}
        """The same chains by the prefill that computes them."""
        self._settling: dict[int, Waiter] = {}
        """Waiters whose blocks only have to reach the pool, in the order of `until`."""
        self._watched: dict[Key, Chain] = {}
        """The chains that have waiters, by the first key of each chunk."""
        self.ended: list[Ended] = []
        """The waits that ended and the pools' fetches (`ahead`) since the owner last read these lists; the owner clears
        both."""
        self.ahead: list[Ahead] = []

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def waiting(self) -> int:
        """The number of placements that wait."""
        return len(self._waiters)

    # --- placements

    def add(self, booking: Booking, node: PrefillNode, keys: tuple[Key, ...], first: int, tokens: int) -> None:
        """Note that a placement computes the blocks of `keys` from `first` on."""
        if first >= len(keys):
            return
        starts = self._starts_of(node, keys, first, len(keys))
        chain = self._chains[booking.number] = Chain(booking, node, keys, first, tokens, starts)
        self._by_node.setdefault(node, {})[booking.number] = chain
        self._enter(chain, booking.at)

    def wait(self, booking: Booking, node: PrefillNode, key: Key, found: Found) -> None:
        """Note that a placement waits for `key`, the last of what was found to be coming of its prompt."""
        number = booking.number
        waiter = Waiter(booking, node, key, first=found.held, blocks=found.blocks, links=found.links)
        self._waiters[number] = waiter
        self._wanted.setdefault(key, []).append(waiter)
        for chain, _ in found.links:
            chain.waiters[number] = waiter
            self._watched |= dict.fromkeys(chain.starts, chain)

    def remove(self, now: float, number: int, *, lost: bool = False) -> None:
        """Forget a placement that ended. Its waiters are released, unless the blocks are in the slab and so will reach the
        pool soon; `lost` means that the prefill is down and its slab with it."""
        if (waiter := self._waiters.get(number)) is not None:
            self._drop(waiter)
        chain = self._chains.get(number)
        if chain is None:
            return
        self._forget(chain)
        if not chain.waiters:  # and so it is not watched
            return
        for waiter in list(chain.waiters.values()):
            stop = next(stop for each, stop in waiter.links if each is chain)
            if lost or not self._stands(chain, stop):
                self._release(waiter, ())
                continue
            waiter.links = tuple([link for link in waiter.links if link[0] is not chain])
            if not waiter.links:
                waiter.until = now + PUT_GRACE_S
                self._settling[waiter.booking.number] = waiter
        chain.waiters.clear()
        self._unwatch(chain)

    def pool_left(self) -> None:
        """Release placements that can no longer get their blocks because their own host, or that of a prefill that computes
        for them, has no pool."""
        for waiter in list(self._waiters.values()):
            elsewhere = [chain for chain, _ in waiter.links if chain.node is not waiter.node]
            if elsewhere and (waiter.node.home < 0 or any(chain.node.home < 0 for chain in elsewhere)):
                self._release(waiter, ())

    # --- what is found

    def find(self, now: float, keys: Sequence[Key], held: int, limit: int, *, but: Booking | None = None) -> Found | None:
        """Return which of the first `limit` of `keys` behind the first `held`, which are held already, are being computed, but
        not by the placement `but`; None if none is."""
        if not self._starts:
            return None
        links: list[Link] = []
        blocks, at = held, now
        while blocks < limit and len(links) < MAX_LINKS and (chain := self._starts.get(keys[blocks])) is not None:
            if chain.booking is but or chain.booking.due + PUT_GRACE_S < now or any(chain is each for each, _ in links):
                break
            blocks = min(limit, _common(chain.keys, keys, blocks))
            at = max(at, self.ready_at(chain, blocks))
            links.append((chain, blocks))
        return Found(held, blocks, at, tuple(links)) if links else None

    def ready_at(self, chain: Chain, blocks: int) -> float:
        """Return when the chunk with the last of `blocks` blocks ends, if its prompt is computed when it is due."""
        chunk = chain.node.chunk_tokens
        if not chunk:
            return chain.booking.due
        start = chain.first * self._block_tokens
        last = start + (blocks * self._block_tokens - start - 1) // chunk * chunk  # where the chunk with that block begins
        stop = chunk_stop(last, chain.tokens, chunk)
        return chain.booking.due - chain.node.factor * self._costs.compute_s(chain.tokens, stop)

    # --- what comes

    def stored(self, holder: str, keys: Sequence[Key]) -> None:
        """Take in that a pool holds these keys: release those that wait for the last of them, and let the pools of those that
        wait for more fetch them."""
        if not self._waiters:
            return
        if not self._wanted.keys().isdisjoint(keys):
            for waiter in [waiter for key in dict.fromkeys(keys) for waiter in self._wanted.get(key, ())]:
                self._release(waiter, (holder,))
        if not self._watched.keys().isdisjoint(keys):
            chains = [self._watched[key] for key in keys if key in self._watched]
            for chain in {chain.booking.number: chain for chain in chains}.values():
                self._advance(chain, holder)

    def review(self, now: float, node: PrefillNode) -> None:
        """Release placements that wait for a prefill that reported, where computing the blocks themselves is much sooner or
        the blocks are overdue, and those whose blocks did not reach the pool in time. Forget what is overdue and not waited
        for: its answer may take far longer."""
        while self._settling and (first := next(iter(self._settling.values()))).until <= now:
            self._release(first, ())
        for chain in list(self._by_node.get(node, {}).values()):
            overdue = chain.booking.due + PUT_GRACE_S < now
            if overdue and not chain.waiters and chain.booking.number not in self._waiters:
                self._forget(chain)
            for waiter in list(chain.waiters.values()):
                alone_s = waiter.node.factor * self._costs.compute_s(waiter.blocks * self._block_tokens, 0)
                left_s = self.ready_at(chain, min(waiter.blocks, len(chain.keys))) - now
                if left_s > TOO_SLOW * alone_s + TOO_SLOW_S or (overdue and waiter.node is not node):
                    self._release(waiter, ())

    def check(self, bookings: Bookings) -> None:
        """Assert the invariants; every chain and every waiter has a booking."""
        for number, chain in self._chains.items():
            assert bookings.numbered(number) is chain.booking, f"{number} is not booked, and its blocks are coming"
            assert all(self._waiters.get(each) is waiter for each, waiter in chain.waiters.items())
        assert all(self._chains[chain.booking.number] is chain for chain in self._starts.values())
        assert all(chain.waiters for chain in self._watched.values())
        assert all(self._by_node[chain.node][number] is chain for number, chain in self._chains.items())
        assert sum(map(len, self._by_node.values())) == len(self._chains), "a chain that is forgotten is forgotten everywhere"
        for number, waiter in self._waiters.items():
            assert bookings.numbered(number) is waiter.booking, f"{number} is not booked, and waits"
            assert waiter in self._wanted[waiter.key]
            assert waiter.links or waiter.until < math.inf, "a waiter that nothing would release"
            assert (number in self._settling) == (waiter.until < math.inf)
            assert all(chain.waiters[number] is waiter for chain, _ in waiter.links)
            assert all(self._chains.get(chain.booking.number) is chain for chain, _ in waiter.links)
        assert sum(map(len, self._wanted.values())) == len(self._waiters)

    # --- leaves

    def _advance(self, chain: Chain, holder: str) -> None:
        """Request that the pools of waiters fetch what this pool now holds of the chain."""
        begin = stop = chain.pooled
        while stop < len(chain.keys) and self._index.holds(holder, chain.keys[stop]):
            stop += 1
        if stop == begin:
            return
        chain.pooled = stop
        keys, source = chain.keys[begin:stop], self._index.join(holder)
        pools = dict.fromkeys(waiter.node.home for waiter in chain.waiters.values())
        self.ahead += [Ahead(pool, keys, holder) for pool in pools if pool not in (-1, source)]

    def _starts_of(self, node: PrefillNode, keys: tuple[Key, ...], first: int, stop: int) -> tuple[Key, ...]:
        """Return the first key of each chunk of blocks `first` to `stop`, of which there is at least one; for a vLLM only that
        of the first block."""
        return keys[first : stop : node.chunk_tokens // self._block_tokens or len(keys)]

    def _enter(self, chain: Chain, at: float) -> None:
        """Register a chain by its chunks, except for chunks that an earlier chain computes and that are not overdue."""
        for key in chain.starts:
            known = self._starts.setdefault(key, chain)
            if known is not chain and known.booking.due + PUT_GRACE_S < at:
                self._starts[key] = chain

    def _forget(self, chain: Chain) -> None:
        """Forget a chain, but not its waiters."""
        number, of_node = chain.booking.number, self._by_node[chain.node]
        del self._chains[number], of_node[number]
        if not of_node:
            del self._by_node[chain.node]
        for key in chain.starts:
            if self._starts.get(key) is chain:
                del self._starts[key]

    def _stands(self, chain: Chain, stop: int) -> bool:
        """Return whether the chain's blocks up to `stop` are in its prefill's slab or in a pool."""
        key = chain.keys[stop - 1]
        return self._index.holds(chain.node.name, key) or self._index.copies(key) > 0

    def _release(self, waiter: Waiter, sources: tuple[str, ...]) -> None:
        """End a wait. Without `sources` its prompt computes the blocks itself, and others may wait for these."""
        self._drop(waiter)
        booking = waiter.booking
        booking.earliest = 0.0
        chain = self._chains.get(booking.number)
        if chain is not None and not sources and waiter.first < chain.first and not chain.waiters:
            more = self._starts_of(chain.node, chain.keys, waiter.first, chain.first)
            chain.first, chain.pooled, chain.starts = waiter.first, waiter.first, (*more, *chain.starts)
            self._enter(chain, booking.at)
        self.ended.append(Ended(waiter.node.name, waiter.booking.number, sources))

    def _drop(self, waiter: Waiter) -> None:
        number = waiter.booking.number
        del self._waiters[number]
        same = self._wanted[waiter.key]
        same.remove(waiter)
        if not same:
            del self._wanted[waiter.key]
        self._settling.pop(number, None)
        for chain, _ in waiter.links:
            chain.waiters.pop(number, None)
            self._unwatch(chain)

    def _unwatch(self, chain: Chain) -> None:
        """Stop watching a chain that has no waiters left."""
        if chain.waiters:
            return
        for key in chain.starts:
            if self._watched.get(key) is chain:
                del self._watched[key]


def _common(one: Sequence[Key], other: Sequence[Key], held: int) -> int:
    """Return how many leading keys two chains share that agree at index `held`: a key covers all keys before it."""
    low, high = held + 1, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) >> 1
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
