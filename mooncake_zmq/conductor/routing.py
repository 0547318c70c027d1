"""Algorithm 1 of the Mooncake paper: which prefill computes, which blocks it reuses, and where they come from. PURE.

The time to the first token is predicted for a prefill: the queued work ahead, then computing what is not reused while the
other blocks are loaded. Where another host holds more of the prompt, fetching that is weighed against computing it. The
shortest time wins; of near ties the prefill chosen longest ago, so that load and blocks spread. The other policies are those
that the paper compares with.

Not every prefill is evaluated. Those that hold the most are; all others are visited in two orders, by speed and by when they
are free, until no unvisited one can be better. The choice is the same as if all were evaluated.
"""

import math
from collections.abc import Collection
from typing import Final

import xxhash

from mooncake_zmq.conductor.choices import PrefillChoice
from mooncake_zmq.conductor.plans import Plan, Planner
from mooncake_zmq.conductor.prefills import EVERYONE, PrefillNode, Prefills
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.conductor.sources import Sources
from mooncake_zmq.core.messages import Schedule

ROUNDING: Final = 1 + 1e-9
"""The tolerance in comparing a bound with a time: the two are summed in a different order."""
NO_TIME: Final = math.inf


class Router:
    """Chooses the prefill of a request."""

    def __init__(self, settings: ConductorSettings, *, planner: Planner, prefills: Prefills, sources: Sources) -> None:
        self._settings = settings
        self._planner = planner
        self._prefills = prefills
        self._sources = sources
        self._tie = 1 + settings.tie_ratio
        self._quickest = settings.policy in ("coming", "global", "local")

    def choose(self, schedule: Schedule, plan: Plan, barred: Collection[str]) -> PrefillChoice | None:
        """Return the choice by the policy, never a prefill in `barred`; None if there is none."""
        node = self._least_ttft(plan, barred) if self._quickest else self._least_score(schedule, plan, barred)
        if node is None:
            return None
        weighed = plan if plan.weighed is node else self._planner.weigh(plan, node)
        fetches = weighed.fetches and not node.vllm
        return PrefillChoice(
            node=node,
            reuse_blocks=weighed.reused,
            sources=self._sources.order(plan.source, plan.runs, node.homes, weighed.local) if fetches else (),
            stores=self._sources.stores(plan.runs, node.host, weighed.local) if weighed.fetches and node.vllm else (),
            queue_s=weighed.queue_s,
            work_s=weighed.work_s,
            fetch_s=weighed.fetch_s,
        )

    # --- leaves

    def _least_ttft(self, plan: Plan, barred: Collection[str]) -> PrefillNode | None:
        """Return the prefill of the best time, of ties the one whose turn is first. The candidates for a tie are visited in
        two ways alternately, the most promising first and by turn; the way that ends first has found the answer."""
        times = plan.times
        least, place, bound_s = self._search(plan, barred)
        if least == NO_TIME:
            return None
        limit = least * self._tie
        if bound_s <= limit:
            candidates = self._candidates(plan, limit)
            too_late = plan.now + limit - self._planner.least_work_s(plan) if plan.priority >= 0 else NO_TIME
            for node in self._prefills.turns:
                if (node.floor_at > too_late or not node.marks & candidates) and node not in times:
                    continue
                if node.closed or node.name in barred:
                    continue
                time_s = times.get(node)
                if time_s is None:
                    time_s = times[node] = self._planner.ttft_s(plan, node)
                if time_s <= limit:
                    return node
                self._look_at(plan, place, candidates, barred)
                place += 1
                if self._planner.bound_s(plan, place) > limit:
                    break
        tied = [node for node, time_s in times.items() if time_s <= limit and node.name not in barred]
        return tied[0] if len(tied) == 1 else min(tied, key=_turn)

    def _search(self, plan: Plan, barred: Collection[str]) -> tuple[float, int, float]:
        """Return the smallest time, how many places of the orders were visited to find it, and the bound for those that
        follow."""
        least, place, bound_s = self._least(plan, barred), 0, self._planner.bound_s(plan, 0)
        if bound_s * ROUNDING < least:
            least = min(least, self._first_free(plan, EVERYONE, barred))
        if plan.candidates and bound_s * ROUNDING < least:
            least = min(least, self._first_free(plan, plan.candidates, barred))
        if bound_s * ROUNDING < least:
            candidates = self._candidates(plan, least * self._tie)
            while bound_s * ROUNDING < least:
                least = min(least, self._look_at(plan, place, candidates, barred))
                place += 1
                bound_s = self._planner.bound_s(plan, place)
        return least, place, bound_s

    def _least(self, plan: Plan, barred: Collection[str]) -> float:
        least = NO_TIME
        for node, time_s in plan.times.items():
            if time_s < least and node.name not in barred:
                least = time_s
        return least

    def _look_at(self, plan: Plan, place: int, candidates: int, barred: Collection[str]) -> float:
        """Evaluate the two prefills at this place of the orders, if they are candidates; return the smaller time."""
        times, least = plan.times, NO_TIME
        for order in self._planner.orders:
            node = order[place].node
            if node.marks & candidates and node not in times:
                times[node] = time_s = self._planner.ttft_s(plan, node)
                if time_s < least and node.name not in barred:
                    least = time_s
        return least

    def _first_free(self, plan: Plan, marks: int, barred: Collection[str]) -> float:
        """Return the time on the free prefill whose turn is first, which is mostly as good as any."""
        for node in self._prefills.turns:
            if node.floor_at <= plan.now and node.marks & marks and not node.closed and node.name not in barred:
                time_s = plan.times.get(node)
                if time_s is None:
                    time_s = plan.times[node] = self._planner.ttft_s(plan, node)
                return time_s
        return NO_TIME

    def _candidates(self, plan: Plan, limit: float) -> int:
        """Return the marks of the candidates that may be within the limit: all prefills, or only those that hold a part of the
        prompt."""
        return EVERYONE if self._planner.least_cold_s(plan) <= limit else plan.candidates

    def _least_score(self, schedule: Schedule, plan: Plan, barred: Collection[str]) -> PrefillNode | None:
        """Return the prefill with the best score by a policy that does not use predicted times; all are evaluated."""
        scores: list[tuple[float, PrefillNode]] = []
        shift = xxhash.xxh3_64_intdigest(schedule.request_id.encode()) if self._settings.policy == "random" else 0
        for place, node in enumerate(self._prefills.nodes):
            if not node.closed and node.name not in barred:
                scores.append((self._score(plan, node, place + shift), node))
        if not scores:
            return None
        limit = min([score for score, _ in scores]) * (self._tie if self._settings.policy == "load" else 1.0)
        return min([node for score, node in scores if score <= limit], key=_turn)

    def _score(self, plan: Plan, node: PrefillNode, shifted: int) -> float:
        """Return the score of a prefill; the smallest is chosen."""
        match self._settings.policy:
            case "match":
                return -self._planner.weigh(plan, node).local
            case "load":
                return self._planner.weigh(plan, node).queue_s
            case "random":
                return shifted % len(self._prefills.nodes)
            case _:
                return node.last


def _turn(node: PrefillNode) -> tuple[int, str]:
    return node.last, node.name
