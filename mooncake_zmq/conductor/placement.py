"""Decides which prefill and which decode take a request and what they promise, or why it is refused; it owns no bookings.
PURE."""

from bisect import bisect_right
from typing import Final

from mooncake_zmq.conductor.admission import MAX_RETRY_S, NO_NODE_RETRY_S, Admission, bounded
from mooncake_zmq.conductor.arrivals import Arrivals
from mooncake_zmq.conductor.batches import Batches, Joining
from mooncake_zmq.conductor.booking import Booking, BookingKey
from mooncake_zmq.conductor.bookings import Bookings
from mooncake_zmq.conductor.choices import Decision, DecodeChoice, Limits, PrefillChoice
from mooncake_zmq.conductor.coming import Coming
from mooncake_zmq.conductor.corrections import Hindsight, OutputLengths
from mooncake_zmq.conductor.decodes import Candidates, Decodes
from mooncake_zmq.conductor.handovers import Handover
from mooncake_zmq.conductor.pipeline import Candidate, form_pipeline
from mooncake_zmq.conductor.plans import Plan, Planner
from mooncake_zmq.conductor.prefills import PrefillNode, Prefills
from mooncake_zmq.conductor.prefix_index import PrefixIndex, lowest_bit
from mooncake_zmq.conductor.routing import Router
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.conductor.sources import Sources
from mooncake_zmq.conductor.transfers import Transfers
from mooncake_zmq.conductor.waits import Waits
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import GROWTH_TOKENS, MAX_SECONDS, Placed, Rejected, RejectReason, Schedule
from mooncake_zmq.core.order import Order

NO_DECODE: Final = (RejectReason.NO_DECODE, RejectReason.NO_ROOM)
ALONE_BELOW: Final = 0.5
"""The expected batch size below which a request that joins is probably alone."""
TRIES: Final = 3
"""The number of prefills tried for a request that would make others miss their bounds."""


Refused = tuple[RejectReason, float, float]
"""A refusal: the reason, the seconds until a retry, and the predicted TTFT or TBT (0 for other reasons)."""


class Placement:
    """Decides where requests go, and books decisions by `commit`."""

    def __init__(
        self,
        settings: ConductorSettings,
        costs: Costs,
        *,
        block_tokens: int,
        prefills: Prefills,
        decodes: Decodes,
        index: PrefixIndex,
        transfers: Transfers,
        sources: Sources,
        outputs: OutputLengths,
        bookings: Bookings,
        coming: Coming,
    ) -> None:
        self._settings = settings
        self._pipelines = settings.pipeline_stages > 1
        self._at_once = settings.admission in ("baseline", "early")
        """Whether a decode is judged by its present state, not by its predicted one."""
        self._admission = Admission(settings)
        self._costs = costs
        self._block_tokens = block_tokens
        self._prefills = prefills
        self._decodes = decodes
        self._index = index
        self._transfers = transfers
        self._outputs = outputs
        self._bookings = bookings
        self._request_s, self._context_s = costs.decode_request_s, costs.decode_context_s
        self._arrivals = Arrivals()
        self._sources = sources
        self.planner = Planner(
            settings,
            costs,
            block_tokens=block_tokens,
            prefills=prefills,
            index=index,
            transfers=transfers,
            sources=sources,
        )
        self._coming = coming if settings.policy == "coming" else None
        self._waits = Waits(settings, costs, block_tokens=block_tokens, prefills=prefills, transfers=transfers, coming=coming)
        self._router = Router(settings, planner=self.planner, prefills=prefills, sources=sources)
        self.batches = Batches(settings, costs, decodes)
        self.hindsight = Hindsight()

    def decide(self, now: float, schedule: Schedule, plan: Plan) -> Decision | Refused:
        """Return the decision for a request, or its refusal."""
        limits = self._admission.limits(schedule)
        prefill = self._choose_prefill(now, schedule, plan, limits, plan.without)
        if isinstance(prefill, tuple):
            return prefill
        decided = self._go_on(now, schedule, plan, limits, prefill)
        if not prefill.node.vllm or prefill.whole or _has_decode(decided, schedule):
            return decided
        # No vLLM can decode what this one would prefill. A vLLM that does both may take it; otherwise this one does, unless it
        # only has to wait for room.
        separate = [node.name for node in self._prefills.nodes if node.vllm and not node.stays]
        other = self._choose_prefill(now, schedule, plan, limits, plan.without.union(separate))
        if not isinstance(other, tuple):
            instead = self._go_on(now, schedule, plan, limits, other)
            if isinstance(instead, Decision):
                return instead
        if isinstance(decided, tuple) and decided[0] is RejectReason.NO_ROOM:
            return decided
        prefill.whole = True
        whole = self._go_on(now, schedule, plan, limits, prefill)
        return whole if isinstance(whole, Decision) else decided

    def _go_on(self, now: float, schedule: Schedule, plan: Plan, limits: Limits, prefill: PrefillChoice) -> Decision | Refused:
        """Return the decision for a chosen prefill, or the refusal."""
        if self._pipelines and not (prefill.node.vllm or prefill.coming or schedule.kept_tokens):
            prefill = self._in_pipeline(schedule, plan, prefill)
        ttft_s = prefill.ttft_s + self._passed_over_s(now, prefill)
        spare = self.hindsight.lateness.factor if prefill.queue_s > 0 else 1.0  # an idle node gets no quicker by waiting
        late_s = self._admission.late_prefill_s(limits, prefill, ttft_s * spare)
        if late_s:
            return RejectReason.TTFT, late_s, limits.waited_s + ttft_s * spare
        expected = self._outputs.expected(schedule.max_tokens)
        at = now if self._at_once else now + ttft_s
        joining = self._joining(now, at, prefill, plan, schedule, expected, schedule.choices)
        decode = self._choose_decode(now, joining, prefill, schedule, plan)
        if decode is None and schedule.choices > 1:  # the others are placed when this decode has no room for them
            joining = self._joining(now, at, prefill, plan, schedule, expected, 1)
            decode = self._choose_decode(now, joining, prefill, schedule, plan)
        if decode is None:
            return self._no_decode(self._candidates(prefill.node), joining.stay_tokens, plan.without)
        slow_s = self._admission.slow_decode_s(limits, decode, expected)
        if slow_s:
            return RejectReason.TBT, slow_s, decode.tbt_s
        return Decision(
            prefill,
            decode,
            limits,
            ttft_s=ttft_s,
            expected=expected,
            need_tokens=joining.need_tokens,
            choices=joining.choices,
        )

    def commit(self, now: float, key: BookingKey, schedule: Schedule, plan: Plan, decision: Decision) -> Booking:
        """Book a decision: prefill queue, decode batch, links and turns include it at once."""
        prefill, decode, ttft_s, expected = decision.prefill, decision.decode, decision.ttft_s, decision.expected
        alone = decode.batch < ALONE_BELOW
        number = self._bookings.next_number()
        placed = Placed(
            request_id=key[1],
            attempt=schedule.attempt,
            prefill=prefill.node.name,
            decode=decode.node.name,
            reuse_blocks=prefill.reuse_blocks,
            sources=self._named(prefill),
            ttft_s=min(self.hindsight.ttft_s(ttft_s), MAX_SECONDS),
            tbt_s=min(self.hindsight.tbt_s(decode.tbt_s, alone=alone), MAX_SECONDS),
            booking=number,
            tbt_slo_s=decision.limits.promised_tbt_s,
            stages=tuple([node.name for node in prefill.stages]) if prefill.stages else (),
            coming_blocks=prefill.coming_blocks,
            coming_s=min(prefill.coming_s, MAX_SECONDS),
            least_priority=prefill.least_priority,
            lenders=tuple(decode.lent),
        )
        booking = Booking(
            key,
            placed,
            number=number,
            at=now,
            ttft_s=ttft_s,
            tbt_s=decode.tbt_s,
            deadline=decision.limits.deadline(now),
            need_tokens=decision.need_tokens - sum(decode.lent.values()),
            lent=decode.lent,
            load_s=decision.choices * (self._request_s + self._context_s * (plan.kv_tokens + expected / 2)),
            choices=decision.choices,
            expected_tokens=expected,
            idle=prefill.queue_s <= 0 and prefill.coming is None,
            alone=alone,
            waits=prefill.coming is not None,
            work_s=ttft_s - prefill.queue_s,
            tenant=schedule.tenant,
        )
        if self._coming is not None and not prefill.stages:
            self._coming.add(booking, prefill.node, plan.keys, prefill.reuse_blocks, plan.tokens)
            if prefill.coming is not None:
                self._coming.wait(booking, prefill.node, plan.keys[prefill.coming.blocks - 1], prefill.coming)
        self._outputs.placed(expected)
        work_s = prefill.share_s if prefill.stages else prefill.work_s
        for node in (prefill.node, *prefill.stages):
            self._prefills.book(now, node, work_s, prefill.priority, number, schedule.tenant)
        self._decodes.book(decode.node, booking)
        if prefill.sources:
            self._transfers.book(now, prefill.sources[0], prefill.node.home, prefill.fetch_s)
            self._sources.chosen(prefill.sources[0])
        if decode.moving_s:
            self._book_handover(now, decision)
        if prefill.node.overtake:
            self._arrivals.add(now, prefill.work_s)
        self._prefills.chosen(prefill.node)
        return booking

    def _book_handover(self, now: float, decision: Decision) -> None:
        """Book the transfer from the prefill's host to the decode's host on the links of both."""
        pool = lowest_bit(self._sources.pools(decision.decode.node.host))
        if pool >= 0 and decision.prefill.node.home >= 0:
            self._transfers.book(now, decision.prefill.node.home, pool, decision.decode.moving_s)

    # --- leaves

    def _named(self, prefill: PrefillChoice) -> tuple[str, ...]:
        """Return the cache-nodes to name in the answer; if one vLLM prefills and another decodes, the first is the one to
        whose store the prefilling vLLM writes."""
        if not prefill.node.vllm:
            return tuple([self._index.name_of(bit) for bit in prefill.sources]) if prefill.sources else ()
        first = () if prefill.whole else self._sources.store_of(prefill.node.host)
        return (*first, *prefill.stores)

    def _candidates(self, prefill: PrefillNode) -> Candidates:
        """Return the decodes that can continue what this prefill begins."""
        return self._decodes.vllms if prefill.vllm else self._decodes.own

    def _joining(
        self, now: float, at: float, prefill: PrefillChoice, plan: Plan, schedule: Schedule, expected: float, choices: int
    ) -> Joining:
        handed = bool(prefill.reuse_blocks) and not prefill.node.vllm
        return Joining(
            at,
            handover=self._handover(plan, prefill) if handed else None,
            wait_s=prefill.queue_s,
            own_tokens=choices * plan.kv_tokens,
            need_tokens=choices * self._need_tokens(plan.kv_tokens, expected),
            expected_tokens=expected,
            stay_tokens=max(1.0, self._outputs.typical),
            choices=choices,
            borrower_tokens=self._borrower_tokens(plan, schedule),
            handover_s=0.0 if prefill.whole or not prefill.node.vllm else self._costs.load_s(plan.tokens),
            tenant=plan.tenant,
            begins=now + prefill.queue_s,
        )

    def _handover(self, plan: Plan, prefill: PrefillChoice) -> Handover:
        return Handover(plan, prefill, self._sources, self._transfers, self._costs, self._block_tokens)

    def _choose_decode(
        self, now: float, joining: Joining, prefill: PrefillChoice, schedule: Schedule, plan: Plan
    ) -> DecodeChoice | None:
        if prefill.whole:
            return self.batches.stay(joining, self._decodes.by_name[prefill.node.name])
        candidates = self._candidates(prefill.node)
        return self.batches.choose(now, joining, candidates, prefill.node.host, schedule.exclude, plan.without)

    def _need_tokens(self, tokens: int, expected: float) -> int:
        """Return the KV tokens that a decode must have free: whole blocks for the prompt and one token, which it requires, or
        the prompt and its expected output."""
        return max((tokens // self._block_tokens + 1) * self._block_tokens, tokens + int(expected))

    def _borrower_tokens(self, plan: Plan, schedule: Schedule) -> int:
        """Return the KV tokens that a request needs of which decodes lend each other a part; 0: nothing of it is lent."""
        if schedule.kept_tokens:
            return 0
        return self._need_tokens(plan.tokens, min(schedule.max_tokens, GROWTH_TOKENS))

    def _choose_prefill(
        self, now: float, schedule: Schedule, plan: Plan, limits: Limits, without: frozenset[str]
    ) -> PrefillChoice | Refused:
        """Choose a prefill, never one of `without`; one that the request excludes is chosen only if there is no other."""
        barred = without.union(schedule.exclude) if schedule.exclude else without
        pushed_s = 0.0
        for _ in range(TRIES):
            choice = self._router.choose(schedule, plan, barred)
            if choice is None:
                break
            if self._coming is not None:
                waiting = self._waits.better(plan, choice, barred)
                if waiting is not choice and not self._is_late(limits, waiting):  # rather use more engine time than refuse
                    choice = waiting
            self._give_way(now, plan, choice)
            if not self._pushes_others(now, plan, limits, choice):
                return choice
            barred = barred | {choice.node.name}
            pushed_s = choice.queue_s + choice.work_s
        if pushed_s:
            return RejectReason.TTFT, bounded(pushed_s), 0.0
        last_resort = self._router.choose(schedule, plan, without) if schedule.exclude else None
        if last_resort is not None:
            self._give_way(now, plan, last_resort)
            return last_resort
        if any(not node.draining and node.name not in without for node in self._prefills.nodes):
            shortest_s = min(self._prefills.shortest_queue_s(now), MAX_RETRY_S)
            return RejectReason.NO_ROOM, bounded(shortest_s / 2), 0.0
        return RejectReason.NO_PREFILL, NO_NODE_RETRY_S, 0.0

    def _is_late(self, limits: Limits, waiting: PrefillChoice) -> bool:
        """Return whether a prompt that waits for blocks would be refused for its first token."""
        return self._admission.late_prefill_s(limits, waiting, waiting.ttft_s * self.hindsight.lateness.factor) > 0

    def _in_pipeline(self, schedule: Schedule, plan: Plan, choice: PrefillChoice) -> PrefillChoice:
        """Turn the choice into a pipeline with other prefills, if that is sooner."""

        def candidate(node: PrefillNode) -> Candidate:
            weighed = self.planner.weigh(plan, node)
            reuse = choice.reuse_blocks if node is choice.node else weighed.local
            return Candidate(node.name, weighed.queue_s, node.factor, reuse)

        usable = (node for node in self._prefills.nodes if not (node.closed or node.vllm) and node.name not in schedule.exclude)
        pipeline = form_pipeline(
            candidate(choice.node),
            map(candidate, usable),
            ttft_s=choice.ttft_s,
            tokens=schedule.tokens,
            block_tokens=self._block_tokens,
            settings=self._settings,
            costs=self._costs,
        )
        if pipeline is None:
            return choice
        choice.queue_s, choice.work_s, choice.share_s = pipeline.queue_s, pipeline.work_s, pipeline.share_s
        choice.stages = tuple([self._prefills.by_name[name] for name in pipeline.stages])
        return choice

    def _give_way(self, now: float, plan: Plan, choice: PrefillChoice) -> None:
        """Set the priority of a choice: the request's own, or a lower one if its own would take it before a job that is
        already later than was promised."""
        node = choice.node
        choice.priority = plan.priority
        if plan.priority >= 0:
            return
        first = bisect_right(node.ranks, node.rank(now, choice.work_s, plan.priority))
        stop = bisect_right(node.ranks, node.rank(now, choice.work_s, 0))
        for place in range(stop - 1, first - 1, -1):
            booking = self._bookings.numbered(node.numbers[place])
            if booking is not None and booking.deadline < node.ends[place]:
                order = Order(node.overtake, node.priority_s)
                least = min(0, order.priority_behind(node.ranks[place], now, choice.work_s))
                choice.priority = choice.least_priority = least  # lower than its own, as it ranked before that job
                rank = node.rank(now, choice.work_s, least)
                choice.queue_s = max(choice.queue_s, node.wait_s(now, rank, plan.tenant, choice.work_s))
                return

    def _pushes_others(self, now: float, plan: Plan, limits: Limits, choice: PrefillChoice) -> bool:
        """Return whether it would go before a job of its tenant that would then miss the time it was promised. Jobs of other
        tenants have turns of their own."""
        node = choice.node
        if not (node.overtake or plan.priority) or not limits.may_refuse:
            return False
        after = bisect_right(node.ranks, node.rank(now, choice.work_s, choice.priority))
        if after == len(node.ends):
            return False
        for end, number, tenant in zip(node.ends[after:], node.numbers[after:], node.tenants[after:], strict=True):
            if tenant != plan.tenant:
                continue
            booking = self._bookings.numbered(number)
            if booking is not None and end <= booking.deadline < end + choice.work_s:
                return True
        return False

    def _passed_over_s(self, now: float, choice: PrefillChoice) -> float:
        """Return the seconds of work that runs before the job without being ahead of it in the queue: the rest of a chunk in
        flight, and later arrivals that are shorter."""
        node = choice.node
        if not node.overtake:
            return 0.0
        behind_s = node.behind_s(now, node.rank(now, choice.work_s, choice.priority))
        chunk_s = min(0.5 * self._costs.compute_s(node.chunk_tokens, 0) * node.factor, behind_s)
        return chunk_s + self._arrivals.overtaking_s(
            now, work_s=choice.work_s, wait_s=choice.queue_s, overtake=node.overtake, nodes=len(self._prefills.nodes)
        )

    def _no_decode(self, candidates: Candidates, stay_tokens: float, without: frozenset[str]) -> Refused:
        """Return the refusal when no decode has room: the retry is after the first request should have left one, or, without
        any decode that takes requests, after one may be back."""
        entries = (*candidates.idle.entries, *candidates.busy.entries)
        nodes = [entry.node for entry in entries if entry.name not in without]
        leave_s = [stay_tokens * node.step_s / max(1.0, node.there) for node in nodes]
        if not leave_s:
            return RejectReason.NO_DECODE, NO_NODE_RETRY_S, 0.0
        return RejectReason.NO_ROOM, bounded(min(leave_s)), 0.0


def _has_decode(decided: Decision | Refused, schedule: Schedule) -> bool:
    """Return whether a decode was found that the request does not exclude, or none was searched for."""
    if isinstance(decided, Decision):
        return decided.decode.node.name not in schedule.exclude
    return decided[0] not in NO_DECODE


def rejected(schedule: Schedule, refused: Refused) -> Rejected:
    """Return the message for a refused request."""
    reason, retry_after_s, predicted_s = refused
    return Rejected(
        request_id=schedule.request_id,
        attempt=schedule.attempt,
        reason=reason,
        retry_after_s=retry_after_s,
        predicted_s=min(MAX_SECONDS, max(0.0, predicted_s)),
    )
