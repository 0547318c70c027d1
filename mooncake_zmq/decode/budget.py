"""The KV that a decode can give to its requests, in tokens of whole blocks. PURE.

A tenant leaves room for the others, see `core.tenant_room`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from mooncake_zmq.core.tenant_room import GROWN_OF_FREE, NEW_OF_FREE, leaves_room
from mooncake_zmq.decode.request import Holder, Request
from mooncake_zmq.kv.layout import BlockLayout

RUN_SHARE = 4
"""A work of several steps takes at most this share of the free KV in advance, so that new requests find some."""


class Budget:
    """Hold the capacity in whole blocks and what of it is free. Each request holds its `own_tokens`."""

    def __init__(self, layout: BlockLayout, capacity_tokens: int) -> None:
        self._layout = layout
        self.capacity_tokens = capacity_tokens // layout.block_tokens * layout.block_tokens
        self.free_tokens = self.capacity_tokens
        self._held: Counter[str] = Counter()
        """The KV that the requests of each tenant hold."""

    def lacks(self, tenant: str, more: int, own: int = 0) -> bool:
        """Return whether a request that holds `own` must not get more KV, for want of it or to leave room for other tenants. A
        tenant's only request may have all."""
        held, free = self._held[tenant], self.free_tokens
        if more > free:
            return True
        multiple = GROWN_OF_FREE if own else NEW_OF_FREE
        limited = bool(tenant) and held > own
        return limited and not leaves_room(held, more, free=free, whole=self.capacity_tokens, multiple=multiple)

    @property
    def largest_tenant(self) -> str:
        """The tenant whose requests hold the most KV."""
        return max(self._held, key=self._held.__getitem__)

    def take(self, tenant: str, tokens: int) -> None:
        """Reserve KV; the caller has checked that it may."""
        self.free_tokens -= tokens
        self._held[tenant] += tokens

    def give_back(self, holder: Holder) -> None:
        """Free the KV of a request or loan that ended."""
        self.take(holder.tenant, -holder.own_tokens)
        if not self._held[holder.tenant]:
            del self._held[holder.tenant]

    def growth(self, request: Request, steps: int) -> int:
        """Return how much KV so many steps need beyond what is reserved."""
        needed = request.held_tokens + steps - request.budget_tokens
        return self._layout.blocks_for(needed) * self._layout.block_tokens if needed > 0 else 0

    def grow(self, request: Request) -> bool:
        """Reserve KV for the next token; return False if it may not have that."""
        more = self.growth(request, 1)
        if not more:
            return True
        if self.lacks(request.tenant, more, request.own_tokens):
            return False
        self.take(request.tenant, more)
        request.budget_tokens += more
        return True

    def grow_for_run(self, members: Sequence[Request], steps: int) -> bool:
        """Reserve KV for a run of so many steps; return False if that takes too much of what is free."""
        growth = [self.growth(request, steps) for request in members]
        if sum(growth) * RUN_SHARE > self.free_tokens:
            return False
        for request, more in zip(members, growth, strict=True):
            self.take(request.tenant, more)
            request.budget_tokens += more
        return True

    def shrink(self, request: Request) -> None:
        """Free the KV that a run which ended early did not need."""
        needed, size = request.held_tokens + 1, self._layout.block_tokens
        if request.budget_tokens - needed >= size:
            kept = self._layout.blocks_for(needed) * size
            self.take(request.tenant, kept - request.budget_tokens)
            request.budget_tokens = kept

    def check(self, holders: Iterable[Holder]) -> None:
        """Assert that the sums are those of these requests and loans, which are all."""
        held: Counter[str] = Counter()
        for holder in holders:
            held[holder.tenant] += holder.own_tokens
        assert held == self._held
        assert self.free_tokens + held.total() == self.capacity_tokens
        assert self.free_tokens >= 0
