"""Records of blocks that are being computed, and of the placements that wait for them. PURE."""

import math

from mooncake_zmq.conductor.booking import Booking
from mooncake_zmq.conductor.prefills import PrefillNode
from mooncake_zmq.kv.block_hash import Key


class Waiter:
    """A placement that waits until a pool, or its prefill's slab, holds `key`, its block number `blocks`. `first`: blocks that
    were held when it was placed."""

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
        """What makes its blocks and is not over."""
        self.until = math.inf
        """When it is released at the latest: set once its blocks stand in a slab and are only on their way into the pool."""


class Chain:
    """What one placement computes: the blocks of `keys` from `first` on, of a prompt of `tokens`, on `node`. `starts`: the key
    that each of its chunks begins with."""

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
        """By the number of their booking."""
        self.pooled = first
        """Leading blocks that are announced by a pool."""


Link = tuple[Chain, int]
"""A chain, and the number of leading blocks up to which another prompt needs it."""


class Found:
    """What is coming of one prompt behind its first `held` blocks: up to `blocks`, at time `at` by the last of `links`."""

    __slots__ = ("at", "blocks", "held", "links")

    def __init__(self, held: int, blocks: int, at: float, links: tuple[Link, ...]) -> None:
        self.held = held
        self.blocks = blocks
        self.at = at
        self.links = links

    @property
    def chains(self) -> list[Chain]:
        """The chains alone."""
        return [chain for chain, _ in self.links]


class Ended:
    """A wait that is over: the blocks are at `sources`, or will not come."""

    __slots__ = ("booking", "prefill", "sources")

    def __init__(self, prefill: str, booking: int, sources: tuple[str, ...]) -> None:
        self.prefill = prefill
        self.booking = booking
        self.sources = sources


class Ahead:
    """Blocks that came and are wanted at another host: its pool, by its bit, is to fetch them before the wait ends."""

    __slots__ = ("keys", "pool", "source")

    def __init__(self, pool: int, keys: tuple[Key, ...], source: str) -> None:
        self.pool = pool
        self.keys = keys
        self.source = source
