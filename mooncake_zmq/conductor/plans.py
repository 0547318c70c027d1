"""Predicts what one prefill, or any that was not evaluated, would take for one prompt. PURE.

Computing and loading overlap, so the longer of the two counts. Where another host holds more of the prompt, fetching the
missing blocks is weighed against computing them, and, on a prefill without a queue, against both: it computes the first ones
while the last ones are fetched, until they meet.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from mooncake_zmq.conductor.booking import Booking
from mooncake_zmq.conductor.prefills import PrefillNode, Prefills
from mooncake_zmq.conductor.prefix_index import PrefixIndex, Run, bits_of
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.conductor.sources import Sources
from mooncake_zmq.conductor.transfers import Rates, Transfers
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import Schedule
from mooncake_zmq.kv.block_hash import Key

LOOKED_AT: Final = 8
"""The number of prefills up to which those that hold a run of the prompt are evaluated first; more of them are visited in
order."""
RARE: Final = 16
MOST_RARE: Final = 32
"""That number is higher in a large cluster: one `RARE`th of the prefills, up to `MOST_RARE`, because rare holders come late in
the orders."""
NO_TIME: Final = math.inf


class Group:
    """The nodes of `mask`, which hold the first `blocks` blocks of a prompt, with `tokens` tokens; computing the other blocks
    takes `missing_s` seconds, not corrected."""

    __slots__ = ("blocks", "mask", "missing_s", "tokens")

    def __init__(self, mask: int, blocks: int, tokens: int, missing_s: float) -> None:
        self.mask = mask
        self.blocks = blocks
        self.tokens = tokens
        self.missing_s = missing_s


class Plan:
    """One prompt and what is known about it; `times` holds the time to its first token by prefill. The fields from `local` on
    describe the prefill weighed last."""

    reusable: int = 0
    """The most blocks that may be reused."""
    longest: int = 0
    """The blocks of the longest run that any node holds."""
    best: int = 0
    """The blocks of the longest run that a pool holds, which any prefill can therefore have."""
    coming: int = 0
    """The number of leading blocks that a node holds or another prompt's prefill computes; 0 if none is being computed."""
    best_s: float = 0.0
    """The seconds to compute all other blocks."""
    best_prefix: int = 0
    candidates: int = 0
    """The marks of prefills not evaluated yet that hold any of the prompt."""
    source: int = -1
    """The bit of the cache-node that all prefills would fetch from; -1 if none fetches."""
    stored: Group | None = None
    """The longest run that a store holds for vLLMs."""
    out_at: float = 0.0
    moved_s: float = 0.0
    """The least wait for a fetch by prefills that were not evaluated."""
    unseen_prefix: int = 0
    """The most tokens that a prefill holds which was not evaluated."""
    unseen_load_s: float = 0.0
    """The least time in which those prefills load their own blocks."""
    best_load_s: float = 0.0
    """The least time in which they load own and fetched blocks."""
    local: int = 0
    reused: int = 0
    """The blocks reused, fetched ones included."""
    fetches: bool = False
    queue_s: float = 0.0
    work_s: float = 0.0
    fetch_s: float = 0.0
    without: frozenset[str] = frozenset()
    """The nodes that cannot answer, as they do not serve the adapter that is asked for."""
    replaces: Booking | None = None
    """The booking of the attempt that this one replaces, if it is placed: it will not compute anything then."""

    def __init__(
        self, now: float, keys: tuple[Key, ...], tokens: int, tenant: str, priority: int, runs: list[Run], whole_s: float
    ) -> None:
        self.now = now
        self.keys = keys
        self.tokens = self.kv_tokens = tokens
        """Those of the prompt, and those of it whose KV its decode is to hold."""
        self.tenant = tenant
        self.priority = priority
        self.runs = runs
        """The runs held, the shortest first."""
        self.whole_s = self.unseen_s = whole_s
        """Uncorrected compute seconds of the whole prompt, and of what prefills not evaluated must compute at least."""
        self.groups: list[Group] = []
        """The runs as groups, the longest first."""
        self.rates: Rates | None = None
        self.disk: Sequence[int] = ()
        """By block, the mask of nodes that hold it on SSD alone."""
        self.times: dict[PrefillNode, float] = {}
        self.weighed: PrefillNode | None = None


class Planner:
    """Predicts times for plans."""

    def __init__(
        self,
        settings: ConductorSettings,
        costs: Costs,
        *,
        block_tokens: int,
        prefills: Prefills,
        index: PrefixIndex,
        transfers: Transfers,
        sources: Sources,
    ) -> None:
        self._a, self._b = costs.prefill_token_s, costs.prefill_square_s
        self._block_tokens = block_tokens
        self._prefills = prefills
        self._index = index
        self._transfers = transfers
        self._sources = sources
        self._fetches = settings.policy in ("coming", "global")
        threshold = settings.kvcache_balancing_threshold
        self._threshold = 0.0 if threshold == "auto" else threshold
        self.orders = prefills.quickest.entries, prefills.freest.entries
        """The open prefills in two orders, by speed and by when they are free; in each the most promising come first."""

    def plan(self, now: float, schedule: Schedule) -> Plan:
        """Return a plan with what holds for all prefills."""
        tokens = schedule.tokens
        keys = whole = schedule.keys
        limit = reusable_blocks(tokens=tokens, keys=len(keys), block_tokens=self._block_tokens)
        if limit < len(keys):
            keys = keys[:limit]
        runs = self._index.runs(keys)
        whole_s = (self._a + self._b * tokens) * tokens
        plan = Plan(now, whole, tokens, schedule.tenant, schedule.priority, runs, whole_s)
        plan.reusable = limit
        plan.kv_tokens = schedule.kept_tokens or tokens
        if runs:
            plan.longest = runs[-1][0]
            if plan.longest < len(keys):
                keys = keys[: plan.longest]
            self._index.touch(keys)
            plan.disk = self._index.on_disk_alone(keys)
            self._group(plan)
        return plan

    def weigh(self, plan: Plan, node: PrefillNode) -> Plan:
        """Return the plan with its fields set for this prefill."""
        self.ttft_s(plan, node)
        return plan

    def ttft_s(self, plan: Plan, node: PrefillNode) -> float:
        """Return the time to the first token on this prefill."""
        homes, local, unit_s, prefix = node.homes, 0, plan.whole_s, 0
        for group in plan.groups:
            if homes & group.mask:
                local, unit_s, prefix = group.blocks, group.missing_s, group.tokens
                break
        work_s = node.factor * unit_s
        if local:
            work_s = max(work_s, node.load_token_s * prefix)
            if plan.disk:
                work_s += self._promote_s(plan, homes)
        plan.local = plan.reused = local
        plan.fetches, plan.fetch_s = False, 0.0
        if plan.source >= 0 and local < plan.best and node.home >= 0:
            work_s = self._fetched_s(plan, node, local, work_s)
        elif node.vllm and plan.stored is not None and local < plan.stored.blocks:
            work_s = self._from_store_s(plan, plan.stored, node, work_s)
        now, ends, wait_s = plan.now, node.ends, 0.0
        if ends and ends[-1] > now:
            rank = now + node.overtake * work_s + node.priority_s * plan.priority
            if node.tenant != plan.tenant:
                wait_s = node.wait_s(now, rank, plan.tenant, work_s)
            elif ahead := bisect_right(node.ranks, rank):
                wait_s = max(0.0, ends[ahead - 1] - now)
        if node.meets and not wait_s:
            work_s = self._met_s(plan, node, local, work_s)
        plan.weighed, plan.work_s, plan.queue_s = node, work_s, wait_s
        return wait_s + work_s

    def bound_s(self, plan: Plan, place: int) -> float:
        """Return a lower bound of the time to the first token for prefills at `place` or later in both orders that were not
        evaluated."""
        if place >= len(self.orders[0]):
            return NO_TIME
        lead_s = self.orders[1][place].figure - plan.now if plan.priority >= 0 else 0.0
        if plan.source < 0 or not self._prefills.meeting:
            return self.least_work_s(plan, place) + max(0.0, lead_s)
        factor = self.orders[0][place].figure
        meets_at_s = self._head(factor, plan.unseen_prefix, plan.best_prefix, plan.moved_s)[1]
        met_s = max(meets_at_s, lead_s) + max(factor * plan.best_s, plan.best_load_s)
        return min(met_s, max(factor * plan.unseen_s, plan.unseen_load_s) + max(0.0, lead_s))

    def least_work_s(self, plan: Plan, place: int = 0) -> float:
        """Return a lower bound of the work of such prefills. Those where both ends meet fetch while others are ahead of it."""
        factor = self.orders[0][place].figure
        work_s = max(factor * plan.unseen_s, plan.unseen_load_s)
        moved_s = 0.0 if self._prefills.meeting else plan.moved_s
        return min(work_s, max(factor * plan.best_s, plan.best_load_s) + moved_s) if plan.source >= 0 else work_s

    def least_cold_s(self, plan: Plan) -> float:
        """Return a lower bound of the work of prefills that hold nothing of the prompt."""
        if not self.orders[0]:
            return NO_TIME
        factor = self.orders[0][0].figure
        work_s = factor * plan.whole_s
        if plan.rates is None:
            return work_s
        moved_s = plan.best * plan.rates.least_s + max(0.0, plan.out_at - plan.now)
        if self._prefills.meeting:
            moved_s = self._head(factor, 0, plan.best_prefix, moved_s)[1]
        return min(work_s, max(factor * plan.best_s, plan.best_load_s) + moved_s)

    # --- leaves

    def _group(self, plan: Plan) -> None:
        """Group the runs, and evaluate the prefills that hold the most if they are few."""
        pooled: Group | None = None
        for blocks, mask in reversed(plan.runs):
            tokens = blocks * self._block_tokens
            group = Group(mask, blocks, tokens, plan.whole_s - (self._a + self._b * tokens) * tokens)
            plan.groups.append(group)
            if pooled is None and self._sources.pooled(mask):
                pooled = group
            if plan.stored is None and self._fetches and self._sources.in_stores(mask):
                plan.stored = group
        if pooled is not None:
            plan.best, plan.best_s, plan.best_prefix = pooled.blocks, pooled.missing_s, pooled.tokens
            if self._fetches:
                self._name_source(plan, pooled.mask)
        if plan.stored is not None:
            self._weigh_vllms(plan)
        left = max(LOOKED_AT, min(len(self.orders[0]) // RARE, MOST_RARE))
        rest, plan.unseen_s = 0, plan.whole_s
        for group in plan.groups:
            mask = group.mask
            left -= mask.bit_count()
            if left >= 0:
                for node in self._sources.readers(mask):
                    if not node.closed:
                        plan.times[node] = self.ttft_s(plan, node)
                continue
            if not plan.candidates:
                rest, plan.unseen_s = group.blocks, group.missing_s
            plan.candidates |= mask << 1
        plan.unseen_prefix = rest * self._block_tokens
        plan.unseen_load_s = self._prefills.least_load_s * rest * self._block_tokens
        if plan.rates is not None:
            plan.best_load_s = self._prefills.least_load_s * plan.best_prefix
            plan.moved_s = (plan.best - rest) * plan.rates.least_s + max(0.0, plan.out_at - plan.now)

    def _name_source(self, plan: Plan, mask: int) -> None:
        plan.source = source = self._sources.first(mask)
        plan.rates, plan.out_at = self._transfers.rates(source), self._transfers.out_at(source)

    def _fetched_s(self, plan: Plan, node: PrefillNode, local: int, work_s: float) -> float:
        """Return the work with fetching, where that is quicker. Unlike in Algorithm 1, nothing is fetched where even the
        estimate says that computing is quicker."""
        if self._below_threshold(local, plan.best):
            return work_s
        assert plan.rates is not None
        home = node.home
        fetch_s = (plan.best - local) * plan.rates.block_s(plan.now, home)
        behind_s = max(0.0, max(self._transfers.in_at(home), plan.out_at) - plan.now)
        fetched_s = max(node.factor * plan.best_s, node.load_token_s * plan.best_prefix) + fetch_s + behind_s
        if fetched_s >= work_s:
            return work_s
        plan.fetches, plan.fetch_s, plan.reused = True, fetch_s, plan.best
        return fetched_s

    def _met_s(self, plan: Plan, node: PrefillNode, local: int, work_s: float) -> float:
        """Return the work where a prefill computes the head of what it lacks while the tail is fetched, if that is quicker. One
        with a queue does not: computing what can be fetched would cost the others."""
        stop, first = plan.best, local
        fetches = plan.source >= 0 and local < stop and node.home >= 0 and not self._below_threshold(local, stop)
        if fetches:
            assert plan.rates is not None
            fetch_s = (stop - local) * plan.rates.block_s(plan.now, node.home)
            behind_s = max(0.0, max(self._transfers.in_at(node.home), plan.out_at) - plan.now)
            others_s = max(node.factor * plan.best_s, node.load_token_s * plan.best_prefix)
        elif local and plan.disk:
            stop, first = local, local - self._on_disk(plan, node.homes)
            fetch_s, behind_s = self._promote_s(plan, node.homes), 0.0
            prefix = local * self._block_tokens
            whole_s = plan.whole_s - (self._a + self._b * prefix) * prefix
            others_s = max(node.factor * whole_s, node.load_token_s * prefix)
        else:
            return work_s
        if stop <= first or fetch_s <= 0:
            return work_s
        size = self._block_tokens
        head, head_s = self._head(node.factor, first * size, stop * size, fetch_s + behind_s, fetch_s)
        met_s = head_s + others_s
        if met_s >= work_s:
            return work_s
        plan.reused = stop
        if fetches:
            plan.fetches, plan.fetch_s = True, fetch_s * (1 - head / ((stop - first) * size))
        return met_s

    def _head(self, factor: float, start: int, stop: int, lasts_s: float, fetch_s: float | None = None) -> tuple[float, float]:
        """Return how many tokens from `start` on are computed, and in how many seconds, until the others before `stop` are
        fetched. Fetching all of them takes `fetch_s` (by default `lasts_s`) and ends `lasts_s` after the engine begins."""
        missing = stop - start
        if lasts_s <= 0 or missing <= 0:
            return 0.0, 0.0
        linear, square = factor * (self._a + 2 * self._b * start), factor * self._b
        both = linear + (lasts_s if fetch_s is None else fetch_s) / missing
        head = min(missing, 2 * lasts_s / (both + math.sqrt(both * both + 4 * square * lasts_s)))
        return head, (linear + square * head) * head

    def _on_disk(self, plan: Plan, homes: int) -> int:
        """Return how many blocks a host has on SSD alone."""
        return max([sum([mask >> bit & 1 for mask in plan.disk]) for bit in bits_of(homes)], default=0)

    def _below_threshold(self, local: int, best: int) -> bool:
        return bool(self._threshold) and (local > 0 if self._threshold == NO_TIME else local * self._threshold > best)

    def _weigh_vllms(self, plan: Plan) -> None:
        """Evaluate all vLLMs where a store for them holds a run, since no bound covers loads from another host's store."""
        for node in self._sources.vllms:
            if not node.closed:
                plan.times[node] = self.ttft_s(plan, node)

    def _from_store_s(self, plan: Plan, stored: Group, node: PrefillNode, work_s: float) -> float:
        """Return the work of a vLLM that loads missing blocks from the store of another host, where that is quicker. Such a
        load is not measured by itself; the node's own factor covers it together with its computing."""
        local, blocks = plan.local, stored.blocks
        if self._below_threshold(local, blocks):
            return work_s
        fetch_s = (blocks - local) * self._transfers.model_s
        fetched_s = max(node.factor * stored.missing_s, node.load_token_s * stored.tokens) + fetch_s
        if fetched_s >= work_s:
            return work_s
        plan.fetches, plan.fetch_s, plan.reused = True, fetch_s, blocks
        return fetched_s

    def _promote_s(self, plan: Plan, homes: int) -> float:
        """Return the seconds to read the blocks that the host has on SSD alone."""
        seconds = 0.0
        for bit in bits_of(homes):
            blocks = sum([mask >> bit & 1 for mask in plan.disk])
            if blocks:
                seconds = max(seconds, blocks * self._transfers.disk.block_s(plan.now, bit))
        return seconds


def reusable_blocks(*, tokens: int, keys: int, block_tokens: int) -> int:
    """Return how many blocks may be reused at most: complete ones, leaving at least one token to compute."""
    return max(0, min(keys, (tokens - 1) // block_tokens))
