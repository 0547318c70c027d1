"""Remembers the chains that recent requests found held, so that an operator can request copies of one by its last key.
PURE."""

from collections.abc import Sequence
from typing import Any, Final

from mooncake_zmq.conductor.prefix_index import PrefixIndex
from mooncake_zmq.kv.block_hash import Key

MOST_RECENT: Final = 256
"""The most chains remembered; beyond it the one not asked for longest is forgotten."""


class RecentChains:
    """Holds leading runs of prompts by their last key, which covers all keys before it."""

    def __init__(self, max_blocks: int) -> None:
        """Create it; of runs longer than `max_blocks` only the beginning is remembered."""
        self._max_blocks = max_blocks
        self._chains: dict[Key, tuple[Key, ...]] = {}
        """The chains, the one not asked for longest first."""

    def __len__(self) -> int:
        return len(self._chains)

    def add(self, keys: Sequence[Key], blocks: int) -> None:
        """Remember that a request found its first `blocks` blocks held, at least one."""
        blocks = min(blocks, self._max_blocks)
        last = keys[blocks - 1]
        chain = self._chains.get(last)
        if chain is not None:
            del self._chains[last]  # to move to the end
        elif len(self._chains) == MOST_RECENT:
            del self._chains[next(iter(self._chains))]
        self._chains[last] = tuple(keys[:blocks]) if chain is None else chain

    def get(self, key: Key) -> tuple[Key, ...] | None:
        """Return the chain that ends with `key`."""
        return self._chains.get(key)

    def dump(self, index: PrefixIndex, limit: int) -> list[dict[str, Any]]:
        """Return the latest chains with the nodes that hold them whole, ready for JSON."""
        latest = [self._chains[key] for key in list(reversed(self._chains))[:limit]]
        return [{"key": keys[-1].hex(), "blocks": len(keys), "holders": index.holders(keys)} for keys in latest]

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._chains) <= MOST_RECENT
        assert all(0 < len(keys) <= self._max_blocks and keys[-1] == key for key, keys in self._chains.items())
