"""The fourth way for a prompt beside computing, loading and fetching: waiting for blocks that another prompt computes, on the
same prefill or on another. PURE.

Each way costs its time to the first token and engine time, which delays all requests behind it, at a stated price
(`ConductorSettings.engine_price`). The prefill that computes the blocks has them when their chunk ends. Any other prefill has
them once they are also in the pool of the first one's host and their last chunk has been fetched from there; earlier chunks
are fetched meanwhile.
"""

from collections.abc import Collection, Iterator
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

TIMEOUT: Final = 4.0
TIMEOUT_S: Final = 2.0
"""A wait times out after this multiple of its expected time, and this many seconds more; the conductor ends it sooner whenever
it can."""
LOOKED_AT: Final = 16
"""The number of prefills visited in turn to find one that is free when the blocks come."""


class Waits:
    """Compares waiting with the way that was chosen without it."""

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

    def better(self, plan: Plan, choice: PrefillChoice, barred: Collection[str]) -> PrefillChoice:
        """Return the cheapest way that waits, if it costs less than `choice`; else `choice`."""
        found = self._coming.find(plan.now, plan.keys, plan.best, plan.reusable, but=plan.replaces)
        if found is None and plan.longest > plan.best:
            found = self._coming.find(plan.now, plan.keys, plan.longest, plan.reusable, but=plan.replaces)
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
        """Yield the prefill that computes the last blocks, the one chosen without waiting, and the first in turn that is free
        by then."""
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
        """Return the choice with waiting on one prefill; None if it cannot get the blocks."""
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
            queue_s=max(node.wait_s(plan.now, node.rank(plan.now, work_s, plan.priority), plan.tenant, work_s), at - plan.now),
            work_s=work_s,
            fetch_s=0.0,
        )
        if not node.vllm:  # a vLLM itself shares computed blocks among its requests
            choice.coming = found
            choice.coming_s = TIMEOUT * (at - plan.now) + TIMEOUT_S
        return choice

    def _homes(self, found: Found, node: PrefillNode) -> tuple[int, ...]:
        """Return the pools of other hosts that receive the blocks, those of the last blocks first."""
        homes = dict.fromkeys(chain.node.home for chain in reversed(found.chains) if chain.node.home != node.home)
        return tuple(homes)[:MAX_SOURCES]

    def _arrives_s(self, plan: Plan, found: Found, node: PrefillNode) -> float | None:
        """Return the seconds from the end of the last chunk until its blocks are in this prefill's pool; None if they never
        will be."""
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
