"""The KV that a decode may give to its requests, in tokens, whole blocks at a time. PURE."""

from collections.abc import Sequence

from mooncake_zmq.decode.request import Request
from mooncake_zmq.kv.layout import BlockLayout

RUN_SHARE = 4
"""A work of several steps takes at most this part of the free KV ahead, so that there is some left for new requests."""


class Budget:
    """The capacity in whole blocks and what is free of it. Each request holds `budget_tokens`."""

    def __init__(self, layout: BlockLayout, capacity_tokens: int) -> None:
        self._layout = layout
        self.capacity_tokens = capacity_tokens // layout.block_tokens * layout.block_tokens
        self.free_tokens = self.capacity_tokens

    def take(self, tokens: int) -> None:
        """Reserve KV of which there is enough."""
        self.free_tokens -= tokens

    def give_back(self, request: Request) -> None:
        """Free the KV of a request that ended."""
        self.free_tokens += request.budget_tokens

    def growth(self, request: Request, steps: int) -> int:
        """Return the KV that the tokens fed in so many steps need beside what is reserved."""
        needed = request.position + steps - request.budget_tokens
        return self._layout.blocks_for(needed) * self._layout.block_tokens if needed > 0 else 0

    def grow(self, request: Request) -> bool:
        """Make sure there is KV for the token to be fed; False if none is left."""
        more = self.growth(request, 1)
        if not more:
            return True
        if more > self.free_tokens:
            return False
        self.free_tokens -= more
        request.budget_tokens += more
        return True

    def grow_for_run(self, members: Sequence[Request], steps: int) -> bool:
        """Reserve KV for a run of so many steps, unless that takes too much of what is free."""
        growth = [self.growth(request, steps) for request in members]
        if sum(growth) * RUN_SHARE > self.free_tokens:
            return False
        for request, more in zip(members, growth, strict=True):
            request.budget_tokens += more
        self.free_tokens -= sum(growth)
        return True

    def shrink(self, request: Request) -> None:
        """Free what a run that ended early did not need."""
        needed, size = request.position + 1, self._layout.block_tokens
        if request.budget_tokens - needed >= size:
            kept = self._layout.blocks_for(needed) * size
            self.free_tokens += request.budget_tokens - kept
            request.budget_tokens = kept
