"""The KV that a decode can give to its requests, in tokens of whole blocks. PURE."""

from collections.abc import Sequence

from mooncake_zmq.decode.request import Request
from mooncake_zmq.kv.layout import BlockLayout

RUN_SHARE = 4
"""A work of several steps takes at most this share of the free KV in advance, so that new requests find some."""


class Budget:
    """Hold the capacity in whole blocks and what of it is free. Each request holds its `budget_tokens`."""

    def __init__(self, layout: BlockLayout, capacity_tokens: int) -> None:
        self._layout = layout
        self.capacity_tokens = capacity_tokens // layout.block_tokens * layout.block_tokens
        self.free_tokens = self.capacity_tokens

    def take(self, tokens: int) -> None:
        """Reserve KV; the caller has checked that enough is free."""
        self.free_tokens -= tokens

    def give_back(self, request: Request) -> None:
        """Free the KV of a request that ended."""
        self.free_tokens += request.budget_tokens

    def growth(self, request: Request, steps: int) -> int:
        """Return how much KV so many steps need beyond what is reserved."""
        needed = request.position + steps - request.budget_tokens
        return self._layout.blocks_for(needed) * self._layout.block_tokens if needed > 0 else 0

    def grow(self, request: Request) -> bool:
        """Reserve KV for the next token; return False if none is left."""
        more = self.growth(request, 1)
        if not more:
            return True
        if more > self.free_tokens:
            return False
        self.free_tokens -= more
        request.budget_tokens += more
        return True

    def grow_for_run(self, members: Sequence[Request], steps: int) -> bool:
        """Reserve KV for a run of so many steps; return False if that takes too much of what is free."""
        growth = [self.growth(request, steps) for request in members]
        if sum(growth) * RUN_SHARE > self.free_tokens:
            return False
        for request, more in zip(members, growth, strict=True):
            request.budget_tokens += more
        self.free_tokens -= sum(growth)
        return True

    def shrink(self, request: Request) -> None:
        """Free the KV that a run which ended early did not need."""
        needed, size = request.position + 1, self._layout.block_tokens
        if request.budget_tokens - needed >= size:
            kept = self._layout.blocks_for(needed) * size
            self.free_tokens += request.budget_tokens - kept
            request.budget_tokens = kept
