"""Records of blocks that are being computed, and of the placements that wait for them. PURE."""

import math

from mooncake_zmq.conductor.booking import Booking
from mooncake_zmq.conductor.prefills import PrefillNode
from mooncake_zmq.kv.block_hash import Key


class Waiter:
    """A placement that waits until a pool, or its prefill's slab, holds `key`, which is block number `blocks` of its prompt.
    `first` is the number of blocks that were held when it was placed."""

    __slots__ = ("blocks", "booking", "first", "key", "links", "node", "until")

    def __init__(
        self, booking: Booking, node: PrefillNode, key: Key, *, first: int, blocks: int, links: "tuple[Link, ...]"
    ) -> None:
        self.booking = booking
        self.node = node
        self.key = key
        self.first = first
        self.blocks = blocks
        self.links = links
        """The chains that compute its blocks and have not ended."""
        self.until = math.inf
        """The time at which it is released at the latest; set once its blocks are computed and only have to reach the pool."""


class Chain:
    """The blocks that one placement computes on `node`: those of `keys` from `first` on, of a prompt of `tokens`. `starts`
    holds the first key of each of its chunks."""

    __slots__ = ("booking", "first", "keys", "node", "pooled", "starts", "tokens", "waiters")

    def __init__(
        self, booking: Booking, node: PrefillNode, keys: tuple[Key, ...], first: int, tokens: int, starts: tuple[Key, ...]
    ) -> None:
        self.booking = booking
        self.node = node
        self.keys = keys
        self.first = first
        self.tokens = tokens
        self.starts = starts
        self.waiters: dict[int, Waiter] = {}
        """The placements that wait for this one, by booking number."""
        self.pooled = first
        """The number of leading blocks that a pool has announced."""


Link = tuple[Chain, int]
"""A chain, and the number of leading blocks up to which another prompt needs it."""


class Found:
    """Blocks of one prompt that other placements compute behind its first `held` blocks: up to `blocks`, ready at time `at`
    when the last of `links` has computed them."""

    __slots__ = ("at", "blocks", "held", "links")

    def __init__(self, held: int, blocks: int, at: float, links: tuple[Link, ...]) -> None:
        self.held = held
        self.blocks = blocks
        self.at = at
        self.links = links

    @property
    def chains(self) -> list[Chain]:
        """The chains without their numbers of blocks."""
        return [chain for chain, _ in self.links]


class Ended:
    """A wait that ended: the blocks are at `sources`, or will not come if that is empty."""

    __slots__ = ("booking", "prefill", "sources")

    def __init__(self, prefill: str, booking: int, sources: tuple[str, ...]) -> None:
        self.prefill = prefill
        self.booking = booking
        self.sources = sources


class Ahead:
    """Computed blocks that a waiting placement needs on another host: that host's pool, given by its bit, fetches them before
    the wait ends."""

    __slots__ = ("keys", "pool", "source")

    def __init__(self, pool: int, keys: tuple[Key, ...], source: str) -> None:
        self.pool = pool
        self.keys = keys
        self.source = source
