"""The KV memory of a coupled instance: the blocks that its requests hold and, with a prefix cache, evictable blocks, which no
request holds. PURE.

Counted in tokens; a block that several requests share counts once. Evictable blocks are evicted least recently used first,
and of one prompt the last block first, as vLLM's evictor does.
"""

from collections import OrderedDict
from collections.abc import Sequence

WATERMARK = 0.01
"""Share of the memory that an admission leaves free, so that running requests can grow: vLLM's default."""


class KvMemory:
    """The KV memory of `capacity` tokens in blocks of `block_tokens`. `caching`: keep computed blocks for prompts that begin
    alike."""

    def __init__(self, capacity: int, block_tokens: int, *, caching: bool) -> None:
        self.capacity = capacity
        self.used = 0
        self._block_tokens = block_tokens
        self._caching = caching
        self._holders: dict[int, int] = {}
        self._computed: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def room(self) -> int:
        """Tokens by which the running requests can still grow."""
        return self.capacity - self.used

    def shared(self, ids: Sequence[int], tokens: int) -> Sequence[int]:
        """Return the blocks of a prompt of `tokens` that the cache identifies: the full ones."""
        return ids[: tokens // self._block_tokens] if self._caching else ()

    def hit(self, ids: Sequence[int], tokens: int) -> int:
        """Return the leading tokens of a prompt whose KV is there. Its last token is always computed: the answer starts from
        it."""
        if not self._caching:
            return 0
        most = (tokens - 1) // self._block_tokens
        found = next((at for at, each in enumerate(ids[:most]) if each not in self._computed), min(most, len(ids)))
        return found * self._block_tokens

    def fits(self, ids: Sequence[int], tokens: int) -> bool:
        """Return whether a request of `tokens` with the full blocks `ids` may be taken."""
        held = sum(1 for each in ids if each in self._holders)
        return self.used + tokens - held * self._block_tokens <= self.capacity * (1 - WATERMARK)

    def take(self, ids: Sequence[int], tokens: int) -> None:
        """Hold `tokens`, the leading ones in the full blocks `ids`."""
        for each in ids:
            holders = self._holders.get(each, 0)
            if not holders:
                self._idle.pop(each, None)
                self.used += self._block_tokens
            self._holders[each] = holders + 1
        self.grow(tokens - len(ids) * self._block_tokens)

    def grow(self, tokens: int) -> None:
        """Hold `tokens` more, outside of the shared blocks; evictable blocks make room."""
        self.used += tokens
        while self._idle and self.used + len(self._idle) * self._block_tokens > self.capacity:
            self._computed.discard(self._idle.popitem(last=False)[0])

    def mark_computed(self, ids: Sequence[int]) -> None:
        """Record that the KV of these blocks, all held, is there from now on."""
        self._computed.update(ids)

    def release(self, ids: Sequence[int], tokens: int) -> None:
        """Release the tokens that `take` and `grow` hold."""
        self.used -= tokens - len(ids) * self._block_tokens
        for each in reversed(ids):
            self._holders[each] -= 1
            if not self._holders[each]:
                del self._holders[each]
                self.used -= self._block_tokens
                if each in self._computed:
                    self._idle[each] = None

    def check(self) -> None:
        """Assert its invariants."""
        assert 0 <= self.used <= self.capacity
        assert self.used + len(self._idle) * self._block_tokens <= self.capacity
        assert self._holders.keys().isdisjoint(self._idle)
        assert self._computed == {each for each in self._computed if each in self._holders or each in self._idle}
