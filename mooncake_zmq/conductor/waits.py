"""The fourth way of a prompt beside computing, loading and fetching: to wait for blocks that another prompt makes, on the same
prefill or on another. PURE.

Each way costs its time to the first token, and the engine time that it takes from everybody behind it, at a stated price
(`ConductorSettings.engine_price`). A prefill that makes the blocks has them when their chunk ends; any other when they are put
into the pool of that host as well, and the last chunk of them is fetched from there: those before it are fetched meanwhile.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from mooncake_zmq.conductor.chain import Found
from mooncake_zmq.conductor.choices import PrefillChoice
from mooncake_zmq.conductor.coming import Coming
from mooncake_zmq.conductor.plans import Plan
from mooncake_zmq.conductor.prefills import PrefillNode, Prefills
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.conductor.sources import MAX_SOURCES
from mooncake_zmq.conductor.transfers import Transfers
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.kv.block_hash import Key

PATIENCE: Final = 4.0
PATIENCE_S: Final = 2.0
"""A wait ends by itself after so many times what it should take, and this: the conductor ends it sooner whenever it can."""
LOOKED_AT: Final = 16
"""Prefills looked at, in turn, for one that is free when the blocks come."""


class Waits:
    """Weighs waiting against the way that was chosen without it."""

    def __init__(
        self,
        settings: ConductorSettings,
        costs: Costs,
        *,
        block_tokens: int,
        prefills: Prefills,
        transfers: Transfers,
        coming: Coming,
    ) -> None:
        self._price = settings.engine_price
        self._costs = costs
        self._block_tokens = block_tokens
        self._prefills = prefills
        self._transfers = transfers
        self._coming = coming

    def better(self, plan: Plan, keys: Sequence[Key], choice: PrefillChoice, barred: Collection[str]) -> PrefillChoice:
        """Return the cheapest way that waits, if it costs less than `choice`; else `choice`."""
        found = self._coming.find(plan.now, keys, plan.best, plan.reusable)
        if found is None and plan.longest > plan.best:
            found = self._coming.find(plan.now, keys, plan.longest, plan.reusable)
        if found is None:
            return choice
        plan.coming = found.blocks
        if found.blocks <= choice.reuse_blocks:
            return choice
        best, least = choice, self._cost_s(plan, choice)
        for node in self._candidates(found, choice.node, barred):
            way = self._waiting(plan, found, node)
            if way is not None and (cost_s := self._cost_s(plan, way)) < least:
                best, least = way, cost_s
        return best

    # --- leaves

    def _cost_s(self, plan: Plan, choice: PrefillChoice) -> float:
        prefix = choice.reuse_blocks * self._block_tokens
        return choice.ttft_s + self._price * choice.node.factor * self._costs.compute_s(plan.tokens, prefix)

    def _candidates(self, found: Found, chosen: PrefillNode, barred: Collection[str]) -> Iterator[PrefillNode]:
        """The prefill that makes the last blocks, the one chosen without them, and the first in turn that is free then."""
        maker = found.chains[-1].node
        free = self._free_at(found.at, maker, barred)
        for node in dict.fromkeys((maker, chosen) if free is None else (maker, chosen, free)):
            if not node.closed and node.name not in barred:
                yield node

    def _free_at(self, at: float, maker: PrefillNode, barred: Collection[str]) -> PrefillNode | None:
        for place, node in enumerate(self._prefills.turns):
            if place == LOOKED_AT:
                break
            if node.floor_at <= at and node is not maker and not (node.closed or node.vllm) and node.name not in barred:
                return node
        return None

    def _waiting(self, plan: Plan, found: Found, node: PrefillNode) -> PrefillChoice | None:
        """Return the way on one prefill; None if it cannot have the blocks."""
        at = found.at
        joins = all(chain.node is node for chain in found.chains)
        if not joins:
            arrives_s = self._arrives_s(plan, found, node)
            if arrives_s is None:
                return None
            at += arrives_s
        prefix = found.blocks * self._block_tokens
        work_s = max(node.factor * self._costs.compute_s(plan.tokens, prefix), node.load_token_s * prefix)
        choice = PrefillChoice(
            node=node,
            reuse_blocks=found.blocks,
            sources=() if joins else self._homes(found, node),
            queue_s=max(node.wait_s(plan.now, node.rank(plan.now, work_s, plan.priority)), at - plan.now),
            work_s=work_s,
            fetch_s=0.0,
        )
        if not node.vllm:  # a vLLM shares what it computes among its requests itself
            choice.coming = found
            choice.coming_s = PATIENCE * (at - plan.now) + PATIENCE_S
        return choice

    def _homes(self, found: Found, node: PrefillNode) -> tuple[int, ...]:
        """Return the pools of other hosts into which the blocks are put, the last ones' first."""
        homes = dict.fromkeys(chain.node.home for chain in reversed(found.chains) if chain.node.home != node.home)
        return tuple(homes)[:MAX_SOURCES]

    def _arrives_s(self, plan: Plan, found: Found, node: PrefillNode) -> float | None:
        """Return the seconds from the end of the last chunk until its blocks are in this prefill's pool; None: never."""
        maker = found.chains[-1].node
        if node.vllm or node.home < 0 or any(chain.node.home < 0 for chain in found.chains):
            return None
        chunk = min(maker.chunk_tokens, found.blocks * self._block_tokens)
        put_s = maker.load_token_s * chunk
        if node.home == maker.home:
            return put_s
        others = sum([len(chain.waiters) for chain in found.chains])
        block_s = self._transfers.rates(maker.home).block_s(plan.now, node.home)
        return put_s + (1 + others) * block_s * chunk / self._block_tokens
