"""The blocks that cache-nodes, prefills and vLLMs hold, as they announce them, and which prefills can read them. PURE."""

from typing import Final

from mooncake_zmq.conductor.prefills import PrefillNode, Prefills
from mooncake_zmq.conductor.prefix_index import PrefixIndex
from mooncake_zmq.conductor.sources import STORE, Sources
from mooncake_zmq.core.actor import Effect, SetTimer
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import BlocksAnnounced

SWEEP = ("sweep",)
SWEEP_S: Final = 0.01
SWEPT_KEYS: Final = 2048
"""The keys swept at a time: about half a millisecond of work, every hundredth of a second while any are left."""


class Inventory:
    """Keeps the index and the sources consistent: a node joins or leaves both."""

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
        """Remove a cache-node with its store; return its bit, which a later node may get."""
        self.leave_reader(name + STORE)
        bit = self.index.join(name)
        self.index.drop(name)
        self.sources.leave(bit)
        del self.hosts[name]
        return bit

    def join_reader(self, node: PrefillNode) -> None:
        """Add a prefill or vLLM; only that node can read the blocks that it holds itself."""
        self.sources.join_own(self.index.join(node.name, pool=False), node)

    def leave_reader(self, holder: str) -> None:
        """Remove a holder whose blocks only one prefill or vLLM, or the vLLMs of one host, could read."""
        if holder in self.index.counts:
            self.sources.leave_own_or_store(self.index.join(holder))
            self.index.drop(holder)

    def announced_by_pool(self, name: str, blocks: BlocksAnnounced) -> None:
        """Enter the blocks that a cache-node has in its pool, or in its store for vLLMs."""
        if not blocks.engine_blocks:
            self.announced(name, blocks)
            return
        store = name + STORE
        self.sources.join_store(self.index.join(store, pool=False), name, self.hosts[name])
        self.announced(store, blocks)

    def announced(self, holder: str, blocks: BlocksAnnounced) -> None:
        """Enter in the index the keys that a holder stored, removed, or keeps on SSD alone."""
        before = self.index.evicted
        if blocks.removed:
            self.index.removed(holder, blocks.removed)
        if blocks.stored:
            self.index.stored(holder, blocks.stored)
        if blocks.on_disk:
            self.index.on_disk(holder, blocks.on_disk)
        self._counts.add("keys_evicted", self.index.evicted - before)

    def on_timer(self) -> list[Effect]:
        """Sweep one piece of the index of nodes that left."""
        self._sweep_armed = False
        self.index.sweep(SWEPT_KEYS)
        return self.arm_sweep()

    def arm_sweep(self) -> list[Effect]:
        """Set the timer for the next sweep, if nodes that left have any keys in the index."""
        if self._sweep_armed or not self.index.is_sweeping:
            return []
        self._sweep_armed = True
        return [SetTimer(SWEEP, SWEEP_S)]

    def check(self) -> None:
        """Assert the invariants."""
        self.index.check()
        self.sources.check()
        assert self._sweep_armed or not self.index.is_sweeping
