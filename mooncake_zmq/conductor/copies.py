"""When copies of hot prefixes are asked for: in rounds while requests come, and when an operator wants them. PURE."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from mooncake_zmq.conductor.inventory import Inventory
from mooncake_zmq.conductor.prefills import Prefills
from mooncake_zmq.conductor.recent import RecentChains
from mooncake_zmq.conductor.replication import Replication
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.actor import Answered, Effect, Send, SetTimer
from mooncake_zmq.core.shell import Tally
from mooncake_zmq.kv.block_hash import Key

REPLICAS = ("replicas",)
PAUSE_S: Final = 0.005
"""Between two pieces of a round."""


class Copies:
    """Owns the round that is under way and the chains that requests found held; `Replication` says how many copies of which."""

    def __init__(self, settings: ConductorSettings, inventory: Inventory, prefills: Prefills, counts: Tally) -> None:
        self.replication = Replication(settings, inventory.index, counts)
        self.recent = RecentChains(settings.replica_max_blocks)
        self._interval_s = settings.replica_interval_s
        self._half_life_s = settings.replica_half_life_s
        self._inventory = inventory
        self._prefills = prefills
        self._counts = counts
        self._armed = False
        self._round: Iterator[tuple[tuple[Key, ...], int] | None] | None = None
        self._asked_at = -math.inf
        """When the last request came: gateways ask one conductor at a time, and that one acts."""

    def count(self, now: float, keys: Sequence[Key], held: int) -> list[Effect]:
        """Count a request that found the first `held` of its blocks held."""
        if held:
            self.recent.add(keys, held)
        if not self._interval_s:
            return []
        demand = self.replication.demand
        if now - self._asked_at > self._half_life_s:
            # Another conductor may have been asked all the while: what was counted before would make hot chains look cold.
            demand.clear()
        self._asked_at = now
        self._counts.add("chains_forgotten", demand.count(now, keys[:held]))
        if self._armed or not demand:
            return []
        self._armed = True
        return [SetTimer(REPLICAS, self._interval_s)]

    def change(self, now: float, keys: tuple[Key, ...], copies: int) -> list[Effect]:
        """Have `copies` hosts hold the chain `keys` (from its first block on, not empty): ask for the missing copies, or name
        those that go first. At least one copy stays; what was asked already is not asked again."""
        readers = {node.host for node in self._prefills.nodes if not node.draining and (node.vllm or node.home >= 0)}
        changes = self.replication.change(now, keys, copies, hosts=self._inventory.hosts, readers=readers)
        return [Send(node, message) for node, message in changes]

    def on_wanted(self, now: float, ask_id: str, key: Key, copies: int) -> list[Effect]:
        """Have as many copies as an operator wants of the chain that ends with `key`."""
        chain = self.replication.demand.chain(key)
        keys = self.recent.get(key) if chain is None else chain.keys
        if keys is None:
            return [Answered(ask_id, {"error": "that prefix is not known: see chains and recent in this conductor's dump"})]
        effects = self.change(now, keys, copies)
        asked = [effect.to for effect in effects if isinstance(effect, Send)]
        holders = self._inventory.index.holders(keys)
        return [*effects, Answered(ask_id, {"blocks": len(keys), "holders": holders, "asked": asked})]

    def on_timer(self, now: float) -> list[Effect]:
        """Do one piece of a round, and the next soon; the next round only while requests come."""
        if self._round is None:
            if not self._is_acting(now):
                self._armed = False
                return []
            self._round = self.replication.round(now, self._inventory.hosts)
        effects: list[Effect] = []
        for target in self._round:
            if target is None:
                return [*effects, SetTimer(REPLICAS, PAUSE_S)]
            effects += self.change(now, *target)
        self._round = None
        self._armed = bool(self.replication.demand)
        return [*effects, SetTimer(REPLICAS, self._interval_s)] if self._armed else effects

    def members_changed(self) -> None:
        """End the round: it may name a node that is gone, or leave out one that came."""
        self._round = None

    def check(self, now: float) -> None:
        """Assert the invariants."""
        self.replication.check(now)
        self.recent.check()
        assert self._armed or not self._interval_s or not self._is_acting(now)

    def _is_acting(self, now: float) -> bool:
        """Whether this is the conductor that gateways ask, as far as it knows, and it has demand to act on."""
        return bool(self.replication.demand) and now - self._asked_at < 2 * self._interval_s
