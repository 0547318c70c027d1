"""One decision: which prefill and which decode take a request, what they promise, or why it is refused. Owns no bookings.
PURE."""

import math
from dataclasses import replace

import numpy as np

from mooncake_zmq.conductor import admission
from mooncake_zmq.conductor.arrivals import Arrivals
from mooncake_zmq.conductor.bookings import Booking, BookingKey, Bookings
from mooncake_zmq.conductor.columns import Floats
from mooncake_zmq.conductor.corrections import OutputLengths
from mooncake_zmq.conductor.decodes import DecodeChoice, Decodes
from mooncake_zmq.conductor.pipeline import Candidate, form_pipeline
from mooncake_zmq.conductor.prefills import PrefillNode, Prefills
from mooncake_zmq.conductor.prefix_index import PrefixIndex
from mooncake_zmq.conductor.routing import Plans, PrefillChoice, Router
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.conductor.transfers import Transfers
from mooncake_zmq.core import gaps
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import Placed, Rejected, RejectReason, Schedule

MAX_PREDICTION_S = 1e7
"""The most a message may say."""
TRIES = 3
"""Prefills tried for a request that would push others past their bounds."""
CHUNK_TOKENS = 512
"""A chunk is taken to be this long: what is in flight is not interrupted for a job that goes first."""

Refused = tuple[RejectReason, float]
"""The reason, and when to try again."""


class Placement:
    """Decides; what it decided is booked by `commit`."""

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
        outputs: OutputLengths,
        bookings: Bookings,
    ) -> None:
        self._settings = settings
        self._costs = costs
        self._block_tokens = block_tokens
        self._prefills = prefills
        self._decodes = decodes
        self._index = index
        self._transfers = transfers
        self._outputs = outputs
        self._bookings = bookings
        self._chunk_s = costs.compute_s(CHUNK_TOKENS, 0)
        self._arrivals = Arrivals()
        self.router = Router(settings, costs, block_tokens=block_tokens, prefills=prefills, index=index, transfers=transfers)

    def decide(self, now: float, schedule: Schedule, plans: Plans) -> tuple[PrefillChoice, DecodeChoice, float] | Refused:
        """Prefill, decode and the predicted time to the first token; or the refusal."""
        prefill = self._choose_prefill(now, schedule, plans)
        if isinstance(prefill, tuple):
            return prefill
        if self._settings.pipeline_stages > 1:
            prefill = self._in_pipeline(schedule, plans, prefill)
        ttft_s = prefill.ttft_s + self._passed_over_s(now, prefill, schedule.priority)
        late_s = admission.late_prefill(self._settings, schedule, prefill, ttft_s)
        if late_s is not None:
            return RejectReason.TTFT, late_s
        expected = self._outputs.expected(schedule.max_tokens)
        decode = self._choose_decode(now, schedule, prefill, ttft_s, expected)
        if isinstance(decode, tuple):
            return decode
        slow_s = admission.slow_decode(self._settings, schedule, decode, expected)
        if slow_s is not None:
            return RejectReason.TBT, slow_s
        return prefill, decode, ttft_s

    def commit(
        self, now: float, key: BookingKey, schedule: Schedule, prefill: PrefillChoice, decode: DecodeChoice, ttft_s: float
    ) -> Booking:
        """Book what was decided: queue, batch, link and turn know of it at once."""
        number = self._bookings.next_number()
        placed = Placed(
            request_id=schedule.request_id,
            attempt=schedule.attempt,
            prefill=prefill.node.name,
            decode=decode.node.name,
            reuse_blocks=prefill.reuse_blocks,
            sources=tuple([self._index.name_of(bit) for bit in prefill.sources]),
            ttft_s=min(ttft_s, MAX_PREDICTION_S),
            tbt_s=min(decode.tbt_s, MAX_PREDICTION_S),
            booking=number,
            tbt_slo_s=admission.promised_tbt_s(self._settings, schedule),
            stages=tuple([node.name for node in prefill.stages]),
        )
        expected = self._outputs.expected(schedule.max_tokens)
        booking = Booking(
            key=key,
            at=now,
            placed=placed,
            due=now + ttft_s,
            deadline=admission.deadline(self._settings, schedule, now),
            need_tokens=self.need_tokens(schedule, expected),
            context_tokens=schedule.tokens + expected / 2,
            expected_tokens=expected,
            max_tokens=schedule.max_tokens,
        )
        self._outputs.placed(expected)
        work_s = prefill.share_s if prefill.stages else prefill.work_s
        for node in (prefill.node, *prefill.stages):
            rank = self._prefills.rank(now, node, work_s, schedule.priority)
            self._prefills.book(now, node, (rank, work_s, number))
        self._decodes.book(decode.node, booking)
        if prefill.sources:
            self._transfers.book(now, prefill.sources[0], prefill.home, prefill.fetch_s)
        if prefill.node.overtake:
            self._arrivals.add(now, prefill.work_s)
        self.router.chosen(prefill)
        return booking

    def need_tokens(self, schedule: Schedule, expected: float) -> int:
        """KV a decode must have free: whole blocks for prompt and one token, on which it insists, and the expected output."""
        insisted = (schedule.tokens // self._block_tokens + 1) * self._block_tokens
        return max(insisted, schedule.tokens + int(expected))

    # --- leaves

    def _choose_prefill(self, now: float, schedule: Schedule, plans: Plans) -> PrefillChoice | Refused:
        barred = list(schedule.exclude)
        pushed_s = 0.0
        for _ in range(TRIES):
            choice = self.router.choose(plans, barred)
            if choice is None:
                break
            if not self._pushes_others(now, schedule, choice):
                return choice
            barred.append(choice.node.name)
            pushed_s = choice.queue_s + choice.work_s
        if pushed_s:
            return RejectReason.TTFT, admission.bounded(pushed_s)
        last_resort = self.router.choose(plans, ()) if schedule.exclude else None
        if last_resort is not None:
            return last_resort
        if any(not node.draining for node in self._prefills.nodes):
            shortest_s = min(float(self._prefills.queued_s(now).min()), admission.MAX_RETRY_S)
            return RejectReason.NO_ROOM, admission.bounded(shortest_s / 2)
        return RejectReason.NO_PREFILL, admission.NO_NODE_RETRY_S

    def _in_pipeline(self, schedule: Schedule, plans: Plans, choice: PrefillChoice) -> PrefillChoice:
        """With others that compute a long prompt together with it, if that is sooner."""

        def candidate(node: PrefillNode) -> Candidate:
            held = 0 if plans.local is None else int(plans.local[node.slot])
            reuse = choice.reuse_blocks if node is choice.node else held
            return Candidate(node.name, float(plans.queue_s[node.slot]), node.compute.factor, reuse)

        usable = [node for node in self._prefills.nodes if not node.closed and node.name not in schedule.exclude]
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
        stages = tuple([self._prefills.by_name[name] for name in pipeline.stages])
        return replace(choice, queue_s=pipeline.queue_s, work_s=pipeline.work_s, stages=stages, share_s=pipeline.share_s)

    def _pushes_others(self, now: float, schedule: Schedule, choice: PrefillChoice) -> bool:
        """Whether it would go before a job that was promised a time and would then miss it."""
        node = choice.node
        if not (node.overtake or schedule.priority) or self._settings.admission == "none" or schedule.begun:
            return False
        rank = self._prefills.rank(now, node, choice.work_s, schedule.priority)
        end = node.as_of
        for other, left_s, number in node.jobs:
            end += left_s
            if other > rank:
                booking = self._bookings.numbered(number)
                if booking is not None and end <= booking.deadline < end + choice.work_s:
                    return True
        return False

    def _passed_over_s(self, now: float, choice: PrefillChoice, priority: int) -> float:
        """What comes before the job though it is not ahead of it yet: the rest of a chunk in flight, and later arrivals that
        are shorter."""
        node = choice.node
        if not node.overtake:
            return 0.0
        rank = self._prefills.rank(now, node, choice.work_s, priority)
        behind = [left for other, left, _ in node.jobs if other > rank]
        chunk_s = min(0.5 * self._chunk_s * node.compute.factor, max(behind)) if behind else 0.0
        return chunk_s + self._arrivals.overtaking_s(
            now, work_s=choice.work_s, wait_s=choice.queue_s, overtake=node.overtake, nodes=len(self._prefills.nodes)
        )

    def _choose_decode(
        self, now: float, schedule: Schedule, prefill: PrefillChoice, ttft_s: float, expected: float
    ) -> DecodeChoice | Refused:
        """Of those with room the smallest predicted gap; among ties the prefill's own host, where the handoff is a read of
        shared memory, then the most free tokens, then the name."""
        decodes, stay_tokens = self._decodes, max(1.0, self._outputs.typical)
        if not decodes.nodes:
            return RejectReason.NO_DECODE, admission.NO_NODE_RETRY_S
        at = now if self._settings.admission in ("baseline", "early") else now + ttft_s
        tbt_s, batch = decodes.tbt_s(at, own_tokens=schedule.tokens, expected_tokens=expected, stay_tokens=stay_tokens)
        roomy = decodes.roomy(prefill.queue_s, self.need_tokens(schedule, expected), stay_tokens)
        score = np.where(roomy, tbt_s, np.inf) + decodes.closed
        slot = self._best_decode(score, prefill.node, schedule.exclude)
        if slot is None:
            return self._no_decode(stay_tokens)
        alone_s = decodes.alone_s(slot, schedule.tokens)
        grown_s = decodes.growth_s(slot, gaps.growth_tokens(float(batch[slot]) + 1, expected))
        promised_s = gaps.tbt_s(float(tbt_s[slot]) + grown_s, expected)
        return DecodeChoice(decodes.nodes[slot], promised_s, float(batch[slot]), gaps.tbt_s(alone_s, expected))

    def _best_decode(self, score: Floats, prefill: PrefillNode, exclude: tuple[str, ...]) -> int | None:
        preferred = score
        if exclude:
            preferred = score.copy()
            preferred[[node.slot for name in exclude if (node := self._decodes.by_name.get(name))]] = np.inf
        for each in (preferred, score):
            least = float(each[each.argmin()])
            if least < math.inf:
                tied = (each <= least * (1 + self._settings.tie_ratio)).nonzero()[0]
                if len(tied) == 1:
                    return int(tied[0])
                home = tied[self._decodes.host[tied] == self._decodes.host_number(prefill.host)]
                among = home if len(home) else tied
                return int(among[self._decodes.free[among].argmax()])
        return None

    def _no_decode(self, stay_tokens: float) -> Refused:
        """None has room: until the first request leaves one; without any decode, until one may be back."""
        decodes = self._decodes
        working = [node.slot for node in decodes.nodes if not node.draining]
        if not working:
            return RejectReason.NO_DECODE, admission.NO_NODE_RETRY_S
        leaves_s = stay_tokens * decodes.step_s[working] / np.maximum(1.0, decodes.there[working])
        return RejectReason.NO_ROOM, admission.bounded(float(leaves_s.min()))


def rejected(schedule: Schedule, refused: Refused) -> Rejected:
    """The answer to one that is not placed."""
    reason, retry_after_s = refused
    return Rejected(request_id=schedule.request_id, attempt=schedule.attempt, reason=reason, retry_after_s=retry_after_s)
