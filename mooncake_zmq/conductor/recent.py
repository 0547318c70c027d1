"""The chains that requests found held lately, so that an operator can ask for copies of one by its last key. PURE."""

from collections.abc import Sequence
from typing import Any, Final

from mooncake_zmq.conductor.prefix_index import PrefixIndex
from mooncake_zmq.kv.block_hash import Key

MOST_RECENT: Final = 256
"""Chains remembered; past it the one not asked for longest is forgotten."""


class RecentChains:
    """Leading runs of prompts, by their last key: that digest covers all before it."""

    def __init__(self, max_blocks: int) -> None:
        """`max_blocks`: of a longer run its beginning is remembered."""
        self._max_blocks = max_blocks
        self._chains: dict[Key, tuple[Key, ...]] = {}
        """The one not asked for longest first."""

    def __len__(self) -> int:
        return len(self._chains)

    def add(self, keys: Sequence[Key], blocks: int) -> None:
        """A request found its first `blocks` blocks held, at least one."""
        blocks = min(blocks, self._max_blocks)
        last = keys[blocks - 1]
        chain = self._chains.get(last)
        if chain is not None:
            del self._chains[last]  # to stand last again
        elif len(self._chains) == MOST_RECENT:
            del self._chains[next(iter(self._chains))]
        self._chains[last] = tuple(keys[:blocks]) if chain is None else chain

    def get(self, key: Key) -> tuple[Key, ...] | None:
        """The chain that ends with `key`."""
        return self._chains.get(key)

    def dump(self, index: PrefixIndex, limit: int) -> list[dict[str, Any]]:
        """JSON-able: the latest, with who holds them whole."""
        latest = [self._chains[key] for key in list(reversed(self._chains))[:limit]]
        return [{"key": keys[-1].hex(), "blocks": len(keys), "holders": index.holders(keys)} for keys in latest]

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._chains) <= MOST_RECENT
        assert all(0 < len(keys) <= self._max_blocks and keys[-1] == key for key, keys in self._chains.items())
