"""The continuous batch of a decode: its steps, their tokens, joining requests and preemption. PURE."""

from collections.abc import Sequence

from mooncake_zmq.core.actor import Effect, Send, SetTimer, Start
from mooncake_zmq.core.actor_parts import Ids, Tally
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.gaps import growth_tokens
from mooncake_zmq.core.messages import DecodeTimes, Measured, TokenLogprob, TokensDecoded
from mooncake_zmq.core.speed import STEP_MEMORY_S, Speed
from mooncake_zmq.core.tenant_room import left_free
from mooncake_zmq.core.work import DecodeStep, SampleTokens, StepDecoded, StepEntry, TokensSampled, WorkFailed, lender_lost
from mooncake_zmq.decode.batch import Place, ahead_of, retry_after_s, step_members, victim
from mooncake_zmq.decode.budget import Budget
from mooncake_zmq.decode.ends import Ends
from mooncake_zmq.decode.flight import Flight, Step
from mooncake_zmq.decode.lateness import AGAIN_S, lenders_s
from mooncake_zmq.decode.lending import Lending
from mooncake_zmq.decode.masks import mask_s
from mooncake_zmq.decode.offers import Offers
from mooncake_zmq.decode.request import Holder, Lent, Request, RequestEvent, RequestState
from mooncake_zmq.decode.requests import Requests
from mooncake_zmq.decode.settings import DecodeSettings

JOIN = ("join",)
"""Key of the timer that begins a step which was held back, or for which all requests wait."""
LEAST_HOLD_S = 1e-4
HOLD_SHARE = 0.3
"""A step is held back for at most this share of one, for a request whose KV has nearly arrived."""
READY, STEPPING, CLOSING, SITTING_OUT = (
    RequestState.READY,
    RequestState.STEPPING,
    RequestState.CLOSING,
    RequestState.SITTING_OUT,
)
STEP_BEGAN, STEPPED = RequestEvent.STEP_BEGAN, RequestEvent.STEPPED
"""Local names, since each step needs them for each request and looking into an enum class is ten times as slow."""

Entry = tuple[tuple[str, int, int, tuple[int, ...]], tuple[TokenLogprob, ...], DecodeTimes | None, bool]
"""The tokens of one request in a `TokensDecoded`, their probabilities, its times if it ends, and whether it is approximate."""


class Steps:
    """Run the batch of one decode, and hold the requests that sit out of it until their tokens are sampled."""

    def __init__(
        self,
        *,
        settings: DecodeSettings,
        costs: Costs,
        piece_parts: int,
        requests: Requests,
        budget: Budget,
        flight: Flight,
        lending: Lending,
        offers: Offers,
        ends: Ends,
        ids: Ids,
        counts: Tally,
    ) -> None:
        self._settings = settings
        self._costs = costs
        self._piece_parts = piece_parts
        self._requests = requests
        self._budget = budget
        self._flight = flight
        self._lending = lending
        self._offers = offers
        self._ends = ends
        self._ids = ids
        self._counts = counts
        self._speed = Speed(memory_s=STEP_MEMORY_S, half_life_s=settings.measured_half_life_s)
        self._sitting_out: dict[int, Request] = {}
        """Requests that sit out, by the works that sample their tokens."""

    def measured(self, now: float) -> Measured:
        """Return how long recent steps took, compared with the cost model."""
        return self._speed.measured(now)

    def is_sampling(self, work_id: int) -> bool:
        """Return whether this work samples the token of a request that sits out."""
        return work_id in self._sitting_out

    def retry_after_s(self, now: float, request: Request) -> float | None:
        """Return when a request may join for which steps would be too long now, by its own SLO or that of the others; None
        if it may join now."""
        promised = [r for r in self._requests.live.values() if r.promised and r is not request]
        if not promised:
            return None
        others = (*promised, *request.siblings)
        batch = min(len(others) + 1, self._settings.max_batch)
        return retry_after_s(
            self._costs,
            slowness=self._speed.ratio(now),
            slo_s=self._limit_s(now, request, promised),
            max_batch=self._settings.max_batch,
            others=[Place(r.context, max(0, r.left)) for r in others],
            own_context=request.context + int(growth_tokens(batch, request.left)),
            ahead=ahead_of(others, request.tenant),
        )

    def _limit_s(self, now: float, request: Request, promised: Sequence[Request]) -> float:
        """Return how long steps may be with the request: as the SLOs of all allow, less what its tenant leaves to others."""
        slo_s = min([request.longest_step_s, *(r.longest_step_s for r in promised)])
        mine = [r for r in promised if request.tenant and r.tenant == request.tenant]
        if not mine:
            return slo_s
        costs, ratio = self._costs, self._speed.ratio(now)
        added_s = sum(costs.decode_request_s + costs.decode_context_s * r.context for r in (*mine, request))
        return slo_s - left_free(ratio * added_s, slo_s - ratio * costs.step_s(1, request.context))

    def join(self, now: float, request: Request, token: int) -> list[Effect]:
        """Add a request that has its KV and its first token to the batch, unless that token ends it."""
        request.made, request.last, request.promised = 1, token, True
        if request.request.stop.reason(token, request.count) is not None:
            return self._ends.close(now, request)
        step = self._flight.step
        if step is not None and len(step.members) < self._settings.max_batch:
            return self._flight.interrupt()
        return []

    def begin(self, now: float) -> list[Effect]:
        """Begin the next step of the batch, unless there is none or it waits for a request."""
        effects: list[Effect] = []
        while True:
            ready = [r for r in self._requests.live.values() if r.state is READY and r.again_at <= now]
            members = step_members(ready, self._settings.max_batch)
            short = [r for r in members if r.context > r.budget_tokens and not self._budget.grow(r)]
            if not short or self._requests.closing or self._lending.ending:  # these free KV soon: wait for that
                members = [r for r in members if r not in short] if short else members
                break
            effects += self._preempt(now, short[0])
        if not members:
            return effects + self._wait_for_late(now)
        hold_s = self._hold_s(now)
        if hold_s > LEAST_HOLD_S:
            return [*effects, SetTimer(JOIN, hold_s)]
        steps = self._run_length(members)
        entries, begins_choice = [], False
        for request in members:
            self._requests.move(request, STEP_BEGAN)
            request.stepped_at = request.stepped_at or now
            request.in_flight += 1
            sampling = request.request.sampling
            wait_s = mask_s(self._flight.step_s, constrained=bool(sampling.constraint), was_late=request.was_late)
            # One copy a step: those of many choices of a prompt would stop all answers for as long as all of them take.
            chose, choice = request.selected, request.select(may_begin=not begins_choice)
            begins_choice = begins_choice or request.selected and not chose
            entries.append(StepEntry(request.sequence, request.last, request.position, sampling, wait_s, choice))
        self._counts.add("steps_sat_out", len(self._sitting_out))
        work_id = self._ids.new()
        self._flight.begin(Step(work_id, members, steps, sum([request.context for request in members]), begins_choice))
        borrow = any([request.lent_tokens for request in members])
        wait_s = lenders_s(self._flight.step_s, self._settings.lender_timeout_s) if borrow else 0.0
        return [*effects, Start(work_id, DecodeStep(tuple(entries), steps, wait_s), self._settings.step_deadline_s)]

    def _wait_for_late(self, now: float) -> list[Effect]:
        """Begin a step once the first of the requests may join one whose lenders were late, if there are any."""
        again_s = [r.again_at - now for r in self._requests.live.values() if r.state is READY and r.again_at > now]
        return [SetTimer(JOIN, min(again_s))] if again_s else []

    def _hold_s(self, now: float) -> float:
        """Return how much longer the next step waits for a request whose last blocks are copied now, or will be within that
        time; otherwise the request would wait for the whole step."""
        hold_s, held_s = HOLD_SHARE * self._flight.step_s, now - self._flight.border_at
        if held_s >= hold_s:
            return 0.0
        expected_s = hold_s / 2  # the other half is for its last layers
        for request in self._requests.live.values():
            if request.is_arriving(self._piece_parts):
                return hold_s - held_s
            if request.done is None and held_s < expected_s and abs(request.due_at - self._flight.border_at) < expected_s:
                return expected_s - held_s
        return 0.0

    def _run_length(self, members: Sequence[Request]) -> int:
        """Return the number of steps in one work: until the first member ends, as far as there is KV for all members."""
        steps = min(self._settings.max_steps, *[request.left for request in members]) if self._settings.max_steps > 1 else 1
        if all([request.held_tokens + steps <= request.budget_tokens for request in members]):
            return max(1, steps)
        while steps > 1:
            if self._budget.grow_for_run(members, steps):
                return steps
            steps //= 2
        return 1

    def _preempt(self, now: float, short: Request) -> list[Effect]:
        """Preempt the youngest request or loan; where `short` is only to leave room for other tenants, that of the tenant that
        holds the most. A request's full blocks are in the pool already, so it resumes cheaply on another node."""
        may_end: list[Holder] = [r for r in self._requests.live.values() if r.state is not STEPPING]
        may_end += self._lending.loans
        if self._budget.growth(short, 1) <= self._budget.free_tokens:
            largest = self._budget.largest_tenant
            may_end = [r for r in may_end if r.tenant == largest] or may_end
        youngest = victim(may_end)
        assert youngest is not None
        if isinstance(youngest, Lent):
            return self._lending.end(youngest, "preempted")
        self._counts.add("preemptions")
        return self._ends.fail(now, youngest, "preempted", full=True)

    def on_stepped(self, now: float, result: StepDecoded | WorkFailed) -> list[Effect]:
        """Send the tokens of the work in flight, which ended."""
        step = self._flight.end(now)
        columns: Sequence[tuple[int, ...]] = [()] * len(step.members)
        scored: Sequence[tuple[TokenLogprob | None, ...]] = [()] * len(step.members)
        unable: dict[int, WorkFailed] = {}
        late: dict[int, str] = {}
        sat_out: tuple[int, ...] = ()
        if isinstance(result, StepDecoded):
            self._measure(now, step, result)
            columns = list(zip(*result.tokens, strict=True))
            scored = list(zip(*result.logprobs, strict=True)) or scored
            unable, late, sat_out = dict(result.failed), dict(result.late), result.sat_out
        effects: list[Effect] = []
        batches: dict[str, list[Entry]] = {}
        for place, (request, tokens, logprobs) in enumerate(zip(step.members, columns, scored, strict=True)):
            request.in_flight -= 1
            if request.state is CLOSING:
                effects += self._ends.try_end(request)
                continue
            self._requests.move(request, STEPPED)
            if isinstance(result, WorkFailed):
                effects += self._ends.fail(now, request, f"step failed: {result.reason}")
                continue
            if place in unable:
                effects += self._take_until_failed(now, request, tokens[:-1], logprobs[:-1], batches, unable[place])
                continue
            request.was_late = place in sat_out
            if request.was_late or place in late:
                tokens, logprobs = tokens[:-1], logprobs[:-1]
            if tokens:
                effects += self._take_tokens(now, request, tokens, logprobs, batches)
            if step.steps > 1 and request.state is READY:
                self._budget.shrink(request)
            if request.was_late and request.state is READY:
                effects.append(self._sit_out(request))
            if place in late and request.state is READY:
                effects += self._try_again(now, request, late[place])
        return self._sent(batches) + effects

    def _sent(self, batches: dict[str, list[Entry]]) -> list[Effect]:
        """Send each gateway the tokens that were sampled for it."""
        self._counts.add("generation_tokens", sum([len(entry[-1]) for each in batches.values() for entry, *_ in each]))
        return [Send(gateway, _decoded(entries)) for gateway, entries in batches.items()]

    def _sit_out(self, request: Request) -> Effect:
        """Take a request whose mask is late out of the batch, and sample its next token later."""
        self._requests.move(request, RequestEvent.SAT_OUT)
        request.in_flight += 1
        request.sampling_id = self._ids.new()
        self._sitting_out[request.sampling_id] = request
        return Start(request.sampling_id, SampleTokens(request.sequence), self._settings.step_deadline_s)

    def _try_again(self, now: float, request: Request, lender: str) -> list[Effect]:
        """Leave a request out of steps for a while whose lender is late, or end its attempt if that is so for long."""
        self._counts.add("lenders_late")
        if request.late_since is None:
            request.late_since = now
        ends_at = request.late_since + self._settings.lender_timeout_s
        if now >= ends_at:
            lost = lender_lost(lender, "no answer in time")
            return self._ends.fail(now, request, lost.reason, avoid=lost.avoid)
        request.again_at = min(now + AGAIN_S, ends_at)
        return []

    def on_sampled(self, now: float, work_id: int, result: TokensSampled | WorkFailed) -> list[Effect]:
        """Send the token of a request that sat out."""
        request = self._sitting_out.pop(work_id)
        request.in_flight -= 1
        if request.state is CLOSING:
            return self._ends.try_end(request)
        self._requests.move(request, RequestEvent.SAMPLED)
        if isinstance(result, WorkFailed):
            return self._ends.fail(now, request, result.reason, stuck=result.stuck)
        batches: dict[str, list[Entry]] = {}
        ((token, logprob),) = result.sampled
        effects = self._take_tokens(now, request, (token,), (logprob,), batches)
        return self._sent(batches) + effects

    def _measure(self, now: float, step: Step, result: StepDecoded) -> None:
        """Record the time of a work; each step of a run reads one more token of KV for each member than the one before. Of one
        that a copy or a late lender made longer nothing follows for others."""
        made, batch = len(result.tokens), len(step.members)
        self._counts.add("steps", made)
        if step.begins_choice:
            return
        self._flight.measure(result.elapsed_s, made)
        if result.late:
            return
        context = step.context + batch * (made - 1) / 2
        self._speed.add(now, result.elapsed_s, made * self._costs.step_s(batch, context))

    def _take_tokens(
        self,
        now: float,
        request: Request,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob | None, ...],
        batches: dict[str, list[Entry]],
    ) -> list[Effect]:
        """Append the tokens that one work sampled for one request, up to its end."""
        message, first = request.request, request.count
        request.late_since = None
        stop, ended = message.stop.cut(tokens, first)
        taken = tokens[:stop]
        effects: list[Effect] = []
        if self._settings.store_output and request.is_exact and not request.lent_tokens:
            effects = self._offers.output(now, request, taken)
        else:
            request.made += stop
            request.last = taken[-1]
        entry = (message.request_id, message.attempt, first, taken)
        known = tuple([each for each in logprobs[:stop] if each is not None]) if logprobs else ()
        request.steps += stop
        if request.selected:
            self._counts.add("generation_tokens_approximate", stop)
        batches.setdefault(message.gateway, []).append((entry, known, request.times(now) if ended else None, request.selected))
        return effects + self._ends.close(now, request) if ended else effects

    def _take_until_failed(
        self,
        now: float,
        request: Request,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob | None, ...],
        batches: dict[str, list[Entry]],
        failed: WorkFailed,
    ) -> list[Effect]:
        """Append the tokens sampled before the step that failed for this request alone."""
        effects = self._take_tokens(now, request, tokens, logprobs, batches) if tokens else []
        if request.state is not READY:
            return effects
        return effects + self._ends.fail(now, request, failed.reason, stuck=failed.stuck, avoid=failed.avoid)

    def check(self) -> None:
        """See `core.actor`."""
        sitting_out = {id(r) for r in self._sitting_out.values() if r.state is not CLOSING}
        assert sitting_out == {id(r) for r in self._requests if r.state is SITTING_OUT}
        stepping = sum(1 for r in self._requests if r.state is STEPPING)
        assert stepping == 0 or self._flight.step is not None


def _decoded(entries: Sequence[Entry]) -> TokensDecoded:
    tokens, logprobs, times, selected = zip(*entries, strict=True)
    over = tuple([each for each in times if each is not None])
    approximate = tuple([entry[:2] for entry, is_approximate in zip(tokens, selected, strict=True) if is_approximate])
    return TokensDecoded(entries=tokens, logprobs=logprobs if any(logprobs) else (), times=over, approximate=approximate)
