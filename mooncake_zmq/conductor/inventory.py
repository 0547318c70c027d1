"""The blocks that cache-nodes, prefills and vLLMs hold, as they announce them, and which prefills can read them. PURE."""

from typing import Final

from mooncake_zmq.conductor.prefills import PrefillNode, Prefills
from mooncake_zmq.conductor.prefix_index import PrefixIndex
from mooncake_zmq.conductor.sources import SHELF, Sources
from mooncake_zmq.core.actor import Effect, SetTimer
from mooncake_zmq.core.messages import BlocksAnnounced
from mooncake_zmq.core.shell import Tally

SWEEP = ("sweep",)
SWEEP_S: Final = 0.01
SWEPT_KEYS: Final = 2048
"""Keys swept at once: about half a millisecond, every hundredth of a second while there is something to sweep."""


class Inventory:
    """Keeps the index and the sources in step: a node that joins or leaves does so in both."""

    def __init__(self, max_keys: int, prefills: Prefills, counts: Tally) -> None:
        self.index = PrefixIndex(max_keys=max_keys)
        self.sources = Sources(prefills)
        self.hosts: dict[str, str] = {}
        """The host of each cache-node."""
        self._counts = counts
        self._sweep_armed = False

    def join_pool(self, name: str, host: str) -> None:
        """Add a cache-node."""
        self.hosts[name] = host
        self.sources.join(self.index.join(name), name, host)

    def leave_pool(self, name: str) -> int:
        """Remove a cache-node with its store; return its bit, which may come to mean another node."""
        self.leave_reader(name + SHELF)
        bit = self.index.join(name)
        self.index.drop(name)
        self.sources.leave(bit)
        del self.hosts[name]
        return bit

    def join_reader(self, node: PrefillNode) -> None:
        """Add a prefill or vLLM, which alone can read what it holds itself."""
        self.sources.join_own(self.index.join(node.name, pool=False), node)

    def leave_reader(self, holder: str) -> None:
        """Remove what one prefill or vLLM alone could read, or the vLLMs of one host."""
        if holder in self.index.counts:
            self.sources.leave_apart(self.index.join(holder))
            self.index.drop(holder)

    def announced_by_pool(self, name: str, blocks: BlocksAnnounced) -> None:
        """Enter what a cache-node has in its pool, or in its store for vLLMs."""
        if not blocks.shelf:
            self.announced(name, blocks)
            return
        store = name + SHELF
        self.sources.join_shelf(self.index.join(store, pool=False), name, self.hosts[name])
        self.announced(store, blocks)

    def announced(self, holder: str, blocks: BlocksAnnounced) -> None:
        """Enter in the index what was stored, removed, or kept on SSD alone."""
        before = self.index.evicted
        if blocks.removed:
            self.index.removed(holder, blocks.removed)
        if blocks.stored:
            self.index.stored(holder, blocks.stored)
        if blocks.on_disk:
            self.index.on_disk(holder, blocks.on_disk)
        self._counts.add("keys_evicted", self.index.evicted - before)

    def on_timer(self) -> list[Effect]:
        """Sweep one piece of what is left of nodes that are gone."""
        self._sweep_armed = False
        self.index.sweep(SWEPT_KEYS)
        return self.arm_sweep()

    def arm_sweep(self) -> list[Effect]:
        """Sweep soon, if a node that is gone left anything."""
        if self._sweep_armed or not self.index.is_sweeping:
            return []
        self._sweep_armed = True
        return [SetTimer(SWEEP, SWEEP_S)]

    def check(self) -> None:
        """Assert the invariants."""
        self.index.check()
        self.sources.check()
        assert self._sweep_armed or not self.index.is_sweeping
