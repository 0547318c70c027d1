"""Copies of prefixes that an operator requests: which chains can be named, and what is sent to which nodes. PURE."""

from collections.abc import Sequence
from typing import Final

from mooncake_zmq.conductor.inventory import Inventory
from mooncake_zmq.conductor.prefills import Prefills
from mooncake_zmq.conductor.recent import RecentChains
from mooncake_zmq.conductor.replication import Replication
from mooncake_zmq.core.actor import Answered, Effect, Send
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.kv.block_hash import Key

RECENT_BLOCKS: Final = 512
"""The most leading blocks of a prompt that an operator can have copied: 16,000 tokens in blocks of 32."""


class Copies:
    """Holds the chains that requests found held; `Replication` decides which nodes are asked for copies."""

    def __init__(self, inventory: Inventory, prefills: Prefills, counts: Tally) -> None:
        self.replication = Replication(inventory.index, counts)
        self.recent = RecentChains(RECENT_BLOCKS)
        self._inventory = inventory
        self._prefills = prefills

    def note(self, keys: Sequence[Key], held: int) -> None:
        """Remember the first `held` blocks of a request, if there are any, as a chain that an operator can name."""
        if held:
            self.recent.add(keys, held)

    def change(self, now: float, keys: tuple[Key, ...], copies: int) -> list[Effect]:
        """Return the messages that make `copies` hosts hold the chain `keys` (from its first block on, not empty): requests
        for missing copies, or the copies to evict first. At least one copy remains, and nothing is requested twice."""
        readers = {node.host for node in self._prefills.nodes if not node.draining and (node.vllm or node.home >= 0)}
        changes = self.replication.change(now, keys, copies, hosts=self._inventory.hosts, readers=readers)
        return [Send(node, message) for node, message in changes]

    def on_wanted(self, now: float, ask_id: str, key: Key, copies: int) -> list[Effect]:
        """Handle an operator's request for a number of copies of the chain that ends with `key`."""
        keys = self.recent.get(key)
        if keys is None:
            return [Answered(ask_id, {"error": "that prefix is not known: see recent in this conductor's dump"})]
        effects = self.change(now, keys, copies)
        asked = [effect.to for effect in effects if isinstance(effect, Send)]
        holders = self._inventory.index.holders(keys)
        return [*effects, Answered(ask_id, {"blocks": len(keys), "holders": holders, "asked": asked})]

    def check(self, now: float) -> None:
        """Assert the invariants."""
        self.replication.check(now)
        self.recent.check()
