"""The actor beside a vLLM server: queue, first token and later ones, and load reports for both kinds of work. PURE.

To gateway and conductor it is a prefill and a decode in one, for requests that are placed on it as both. With a part it is one
of the two: it passes on what it prefilled, or continues what another node prefilled, and the KV is transferred from vLLM to
vLLM through the stores. With either part it serves whole requests too: the conductor places them so while no other vLLM is open
for the other part. vLLM holds all KV. A request that cannot go on here ends with `AttemptFailed`; the gateway places it again,
from the prompt and the tokens so far.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import structs
from msgspec.structs import asdict

from mooncake_zmq.core.actor import (
    CancelTimer,
    CancelWork,
    CordonWanted,
    DrainTimedOut,
    DrainWanted,
    Effect,
    Event,
    PeerDown,
    PeerUp,
    Received,
    Send,
    SetTimer,
    Start,
    Started,
    TimerFired,
    WorkDone,
    WorkProgress,
)
from mooncake_zmq.core.actor_parts import Ids, Lifecycle, Tally
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.drain import MOVE, Attempt, Drain
from mooncake_zmq.core.messages import (
    AttemptFailed,
    CancelRequest,
    FirstToken,
    Hello,
    Message,
    PromptScored,
    ReadAnswer,
    RenderChat,
    StartPrefill,
    StopRule,
    TextsEmbedded,
    TokenLogprob,
    TokensDecoded,
    WeightsReported,
    clip,
    for_sibling,
)
from mooncake_zmq.core.reports import REPORT, Reports
from mooncake_zmq.core.work import (
    Embedded,
    EngineProbed,
    EngineReported,
    Generated,
    ProbeEngine,
    PromptScoresGenerated,
    TokensGenerated,
    WorkFailed,
)
from mooncake_zmq.kv.block_hash import pack_tokens
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.vllm_node import early
from mooncake_zmq.vllm_node.adapters import ListedAdapters
from mooncake_zmq.vllm_node.admission import Admission, unable
from mooncake_zmq.vllm_node.engine_cache import EngineCache
from mooncake_zmq.vllm_node.job import NEXT_STATE, Job, JobEvent, JobState
from mooncake_zmq.vllm_node.load import Load
from mooncake_zmq.vllm_node.reads import Reads
from mooncake_zmq.vllm_node.renders import Renders
from mooncake_zmq.vllm_node.settings import VllmSettings
from mooncake_zmq.vllm_node.silence import Silence

PROBE = ("probe",)
IN_VAIN: Final = 0.9
"""A health check that failed after more than this share of its timeout got no answer, rather than a bad one."""
UNKNOWN = "vLLM was not asked yet"
NO_DECODE = "the vLLM that is to go on is not there"
"""A failure for this reason counts as a broken attempt: without another vLLM the conductor would name the same one again and
again."""


def _each_choice(message: StartPrefill) -> list[StartPrefill]:
    """Split a request into its choices, since vLLM's own cache lets the second one reuse the first one's prompt."""
    return [structs.replace(message, siblings=()), *(for_sibling(message, each) for each in message.siblings)]


def _conductors(peers: Mapping[str, Hello]) -> list[str]:
    return [name for name, hello in peers.items() if hello.role == "conductor"]


class VllmNode:
    """Serve requests by one vLLM server."""

    def __init__(
        self, *, name: str, host: str, incarnation: int, settings: VllmSettings, layout: BlockLayout, costs: Costs
    ) -> None:
        self.name = name
        self.host = host
        self.incarnation = incarnation
        self.counts = Tally()
        self.transitions = Tally()
        self._lifecycle = Lifecycle("vllm job", NEXT_STATE, self.transitions)
        self._settings = settings
        self._layout = layout
        self._load = Load(settings, costs, layout.block_tokens)
        self._reports = Reports(settings.report_s)
        self._peers: dict[str, Hello] = {}
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        """The live attempt of each request, in order of arrival."""
        self._closing: list[Job] = []
        self._works: dict[int, Job] = {}
        """Jobs that vLLM has, by work."""
        self._probe: int | None = None
        """The health check under way."""
        self._trouble = UNKNOWN
        """Why vLLM gets nothing new; empty if it does."""
        self._lost = False
        """Whether vLLM did not answer: no request waits for it here."""
        self._silence = Silence(settings.hung_s, settings.quiet_s)
        self._probe_at = 0.0
        self._hung = False
        """Whether vLLM was found hung: it counts as healthy again after it made a token."""
        self._ids = Ids()
        self._cache = EngineCache(settings, layout, self._ids, self.counts)
        self._admission = Admission(name, settings, layout, self._peers, self.counts)
        self._drain = Drain("", self.counts)
        self._early = early.EarlyRequests(settings.max_queued)
        self._adapters = ListedAdapters()
        self._reads = Reads(settings.max_running + settings.max_queued, self._peers, self._ids, self.counts)
        self._renders = Renders(settings.max_queued, self._peers, self._ids, self.counts)

    def handle(self, now: float, event: Event) -> list[Effect]:
        trouble = self._trouble if self._lost else "the node is draining" if self._drain.draining else ""
        effects = self._reads.handle(now, event) + self._renders.handle(now, event, trouble) + self._dispatch(now, event)
        return effects + self._begin(now) + self._drained()

    def _dispatch(self, now: float, event: Event) -> list[Effect]:
        match event:
            case WorkProgress(work_id, TokensGenerated() as made) if work_id in self._works:
                self._silence.received(now)
                return self._on_tokens(now, self._works[work_id], made)
            case WorkProgress(work_id, PromptScoresGenerated() as scores) if work_id in self._works:
                self._silence.received(now)
                return _scored(self._works[work_id], scores)
            case Received(sender, message):
                return self._on_message(now, sender, message)
            case WorkDone(work_id, Generated() | Embedded() | WorkFailed() as result) if work_id in self._works:
                self._silence.received(now)
                return self._on_generated(now, self._works.pop(work_id), result)
            case WorkDone(work_id, EngineProbed() | WorkFailed() as result) if work_id == self._probe:
                return self._on_probed(now, result)
            case WorkProgress(work_id, EngineReported(events)) if self._cache.is_watched_by(work_id):
                return self._cache.on_events(events, _conductors(self._peers))
            case PeerUp() as up:
                return self._on_peer_up(now, up)
            case PeerDown(peer, _):
                return self._on_peer_down(now, peer)
            case TimerFired(key) if key == REPORT:
                return self._report(now)
            case TimerFired(key) if key == PROBE:
                return self._ask(now)
            case TimerFired(("deadline", str(request_id), int(attempt))):
                return self._on_deadline(now, request_id, attempt)
            case TimerFired((early.EARLY, str(request_id), int(attempt))):
                self.counts.add("unasked_requests", int(self._early.expire(request_id, attempt)))
                return []
            case Started():
                return [self._reports.begin(), *self._ask(now), *self._cache.begin()]
            case TimerFired(key) if key == MOVE:
                return self._drain.move(_movable(self._jobs.values()))
            case DrainWanted() | CordonWanted() as order:
                self._drain.wanted(order)
                return [*self._report(now), self._drain.move_timer(self._settings.drain_grace_s)]
            case DrainTimedOut():
                self._drain.drain()
                return self._hand_over(now)
            case TimerFired() | WorkProgress() | WorkDone():
                return []
            case _:
                raise TypeError(event)

    def _on_message(self, now: float, sender: str, message: Message) -> list[Effect]:
        match message:
            case StartPrefill() if self._admission.is_early(sender, message) and (held := self._early.hold(sender, message)):
                return held
            case StartPrefill():
                gateway = self._admission.asker(sender, message)
                choices = _each_choice(message) if gateway is not None else []
                return [e for each in choices for e in self._on_start(now, gateway or "", each)]
            case CancelRequest():
                return self._on_cancel(now, sender, message)
            case ReadAnswer() | RenderChat():
                return []
            case _:
                self.counts.add(f"unexpected_messages[type={type(message).__name__}]")
                return []

    def check(self, now: float) -> None:
        live = [*self._jobs.values(), *self._closing]
        for job in live:
            assert job.state is not JobState.ENDED
            assert (job.state is JobState.CLOSING) == (job in self._closing)
            assert (job.work_id is None) == (job.state is JobState.QUEUED)
            assert (job.made > 0) == (job.state is JobState.DECODING) or job.state is JobState.CLOSING
        assert {id(job) for job in self._works.values()} == {id(job) for job in live if job.work_id is not None}
        assert len(self._works) <= self._settings.max_running
        assert len(self._in(JobState.QUEUED)) <= self._settings.max_queued
        self._cache.check()
        self._reads.check()
        self._renders.check()

    def gauges(self, now: float) -> dict[str, float]:
        waiting = len(self._in(JobState.QUEUED))
        return {
            "capacity_tokens": self._settings.capacity_tokens,
            "capacity_engines": 0 if self._trouble else 1,
            "cached_engine_blocks": len(self._cache),
            "requests_waiting": waiting,
            "requests_running": len(self._jobs) - waiting,
            "requests_closing": len(self._closing),
            "reads_open": len(self._reads),
            "renders_open": len(self._renders),
        }

    def dump(self, now: float) -> dict[str, Any]:
        return {
            "gauges": self.gauges(now),
            "draining": self._drain.draining,
            "trouble": self._trouble,
            "reads": self._reads.dump(),
            "renders": self._renders.dump(),
            "compute": asdict(self._load.compute.measured(now)),
            "step": asdict(self._load.step.measured(now)),
            "jobs": [
                {
                    "request": job.request.request_id,
                    "attempt": job.request.attempt,
                    "state": job.state.value,
                    "age_s": now - job.arrived_at,
                    "tokens": job.length,
                    "output": job.count,
                }
                for job in [*self._jobs.values(), *self._closing]
            ],
        }

    # --- messages of the gateway

    def _on_start(self, now: float, gateway: str, message: StartPrefill) -> list[Effect]:
        current = self._jobs.get(message.request_id)
        if current is not None and current.request.attempt >= message.attempt:
            return []
        effects = self._drop(now, current) if current is not None else []
        lack = self._lack()
        reason = lack or self._admission.refusal(message)
        if reason is not None:
            self.counts.add("jobs_refused")
            return [*effects, _failed(gateway, message, reason, full=lack is not None)]
        if not self._admission.may_pass_on(message):
            return [*effects, _failed(gateway, message, NO_DECODE, full=False, avoid=message.decode)]
        job = Job(message, gateway, self._ids.new(), self._load.rank(now, message), now)
        self._jobs[message.request_id] = job
        return [*effects, SetTimer(("deadline", message.request_id, message.attempt), message.deadline_s)]

    def _lack(self) -> str | None:
        """Return what is missing for now, or None. An attempt denied for this counts as one that found no room."""
        if self._drain.draining:
            return "the node is draining"
        if self._lost:
            return self._trouble
        return "queue is full" if len(self._in(JobState.QUEUED)) >= self._settings.max_queued else None

    def _on_cancel(self, now: float, sender: str, message: CancelRequest) -> list[Effect]:
        job = self._jobs.get(message.request_id)
        if job is None or job.gateway != sender or job.request.attempt > message.attempt:
            return []
        self.counts.add("requests_cancelled")
        return self._drop(now, job)

    def _on_deadline(self, now: float, request_id: str, attempt: int) -> list[Effect]:
        job = self._jobs.get(request_id)
        if job is None or job.request.attempt != attempt:
            return []
        return self._fail(now, job, "deadline passed")

    def _on_peer_up(self, now: float, up: PeerUp) -> list[Effect]:
        self._peers[up.peer] = up.hello
        self._reports.peer_up(up)
        effects: list[Effect] = []
        if up.hello.role == "conductor":
            effects += self._cache.announce_to(up.peer) + self._adapters.announce_to(up.peer)
        passed_on, ends = self._early.take(up.peer)
        return effects + ends + [e for sender, message in passed_on for e in self._on_message(now, sender, message)]

    def _on_peer_down(self, now: float, peer: str) -> list[Effect]:
        self._peers.pop(peer, None)
        self._reports.peer_down(peer)
        orphans = [job for job in self._jobs.values() if job.gateway == peer]
        return [effect for job in orphans for effect in self._drop(now, job)]

    # --- vLLM

    def _begin(self, now: float) -> list[Effect]:
        """Send vLLM the requests of the smallest ranks, as many as it may have."""
        effects: list[Effect] = []
        while not self._trouble and len(self._works) < self._settings.max_running and (waiting := self._in(JobState.QUEUED)):
            job = min(waiting, key=lambda each: (each.rank, each.order))
            self._move(job, JobEvent.BEGIN)
            if not self._works:
                self._silence.owed(now)
            job.work_id, job.began_at = self._ids.new(), now
            self._works[job.work_id] = job
            work = job.work(self._stop(job.request), self._settings.quiet_s)
            left_s = job.request.deadline_s - (now - job.arrived_at)
            effects.append(Start(job.work_id, work, max(left_s, self._settings.report_s)))
        return effects

    def _on_tokens(self, now: float, job: Job, made: TokensGenerated) -> list[Effect]:
        """Handle the next tokens; those beyond the request's end are dropped, and vLLM's work is cancelled."""
        if job.state is JobState.CLOSING:
            return []
        effects, ended = self._take(now, job, made)
        return effects + self._drop(now, job) if ended else effects

    def _on_generated(self, now: float, job: Job, result: Generated | Embedded | WorkFailed) -> list[Effect]:
        job_over = job.state is JobState.CLOSING
        job.work_id = None
        if job_over:
            return self._end(now, job)
        if isinstance(result, WorkFailed):
            if result.stuck:
                return self._fail(now, job, result.reason, stuck=True)
            return self._fail(now, job, result.reason) + self._doubt(now, result.reason)
        if isinstance(result, Embedded):
            self._load.first(now, job)
            return [_embedded(now, job, result), *self._end(now, job)]
        if job.taken_over:
            self.counts.add("taken_over_tokens", job.length)
            self.counts.add("taken_over_tokens_reused", result.reused)
        # A prompt with logprobs was computed as a whole; what its answer reused is that.
        reused = result.reused if job.request.prompt_logprobs is None else 0
        effects, ended = self._take(now, job, result, reused)
        effects = _reported(job, result.versions) + effects
        if self._jobs.get(job.request.request_id) is not job:  # the tokens were invalid
            return effects
        if ended:
            return effects + self._end(now, job)
        return effects + self._fail(now, job, f"vLLM ended the answer after {job.count} tokens")

    def _take(self, now: float, job: Job, given: TokensGenerated | Generated, reused: int = 0) -> tuple[list[Effect], bool]:
        """Send tokens to the gateway. Returns the effects, and whether the last token was among them."""
        tokens, logprobs = given.tokens, given.logprobs
        if not tokens:
            return [], False
        if not self._layout.has_token(max(tokens)) or min(tokens) < 0:
            self.counts.add("tokens_out_of_range")
            return self._fail(now, job, "vLLM gave tokens that the model does not have"), False
        request, effects = job.request, list[Effect]()
        taken, ended = self._stop(request).cut(tokens, job.count)
        tokens, logprobs = tokens[:taken], logprobs[:taken]
        if job.state is JobState.PREFILLING and not job.taken_over:
            effects += self._first(now, job, tokens[0], logprobs[0] if logprobs else None, reused)
            tokens, logprobs, reused = tokens[1:], logprobs[1:], 0
        if tokens:
            effects.append(self._later(now, job, tokens, logprobs, reused))
        return effects, ended

    def _first(self, now: float, job: Job, token: int, logprob: TokenLogprob | None, reused: int) -> list[Effect]:
        self._move(job, JobEvent.TOKEN)
        request = job.request
        self._load.first(now, job)
        queue_s, prefill_s = job.times_s(now)
        first = FirstToken(
            request_id=request.request_id,
            attempt=request.attempt,
            index=job.count,
            token=token,
            own=reused,
            local=0,
            remote=0,
            queue_s=queue_s,
            prefill_s=prefill_s,
            logprob=logprob,
        )
        job.made, job.token_at = 1, now
        return [Send(job.gateway, first), *self._pass_on(now, job, token), *self._reports.hurry(now)]

    def _pass_on(self, now: float, job: Job, token: int) -> list[Effect]:
        """Pass a request that only begins here on to the node where it was placed, if that was not its last token."""
        request = job.request
        if request.decode == self.name or request.stop.reason(token, job.count) is not None:
            return []
        if not self._admission.may_pass_on(request):
            return [_failed(job.gateway, request, NO_DECODE, full=False, avoid=request.decode)]
        self.counts.add("jobs_passed_on")
        rest = structs.replace(
            request,
            gateway=job.gateway,
            prompt_logprobs=None,
            tokens=request.tokens + pack_tokens((token,)),
            keys=(),
            first_index=job.count,
            reuse_blocks=job.length // self._layout.block_tokens,
            deadline_s=max(0.0, request.deadline_s - (now - job.arrived_at)),
        )
        return [Send(request.decode, rest)]

    def _later(self, now: float, job: Job, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...], reused: int) -> Effect:
        request = job.request
        if job.state is JobState.PREFILLING:
            self._move(job, JobEvent.TOKEN)
            self._load.first(now, job)
        self._load.stepped(now, job, len(tokens), self._in(JobState.DECODING))
        # For a request that was taken over, the previous node has reported what was reused before.
        report = ((request.request_id, request.attempt, reused),) if reused and not job.taken_over else ()
        entry = request.request_id, request.attempt, job.count, tokens
        decoded = TokensDecoded(entries=(entry,), logprobs=(logprobs,) if logprobs else (), reused=report)
        job.made += len(tokens)
        job.token_at = now
        return Send(job.gateway, decoded)

    def _doubt(self, now: float, reason: str) -> list[Effect]:
        """Send nothing new after a failure until a health check has answered."""
        self._trouble = self._trouble or reason
        return self._ask(now)

    def _ask(self, now: float) -> list[Effect]:
        if self._probe is not None:
            return []
        self._probe, self._probe_at = self._ids.new(), now
        return [
            Start(
                self._probe,
                ProbeEngine(self._hung, bool(self._trouble) or not self._reads.knows_parsers),
                self._settings.probe_timeout_s,
            )
        ]

    def _on_probed(self, now: float, result: EngineProbed | WorkFailed) -> list[Effect]:
        self._probe = None
        effects: list[Effect] = [SetTimer(PROBE, self._settings.probe_s)]
        if isinstance(result, EngineProbed) and result.ready:
            effects += self._adapters.listed(result.adapters, _conductors(self._peers)) + self._reads.learn(result.parsers)
            due = [job for job in self._jobs.values() if job.work_id is not None]
            if due and self._silence.is_over_long(now, self._load.under_way_s(now, due)):
                return effects + self._on_hung(now)
            well_before, self._trouble, self._lost, self._hung = not self._trouble, "", False, False
            return effects if well_before else effects + self._reports.hurry(now)
        in_vain = now - self._probe_at > IN_VAIN * self._settings.probe_timeout_s
        return effects + self._lose(now, result.reason, running=in_vain and self._silence.nothing_since(self._probe_at))

    def _on_hung(self, now: float) -> list[Effect]:
        """Handle a vLLM whose server answers while its engine does not."""
        self.counts.add("engine_hangs")
        self._silence.judge(now)
        self._hung = True
        return self._lose(now, "its answers got no token for too long", running=True)

    def _lose(self, now: float, reason: str, *, running: bool) -> list[Effect]:
        """Send nothing there for now. Waiting requests continue on other nodes, and with `running` those that vLLM has, too."""
        effects: list[Effect] = []
        if not self._lost:
            self.counts.add("engine_losses")
            effects += self._reports.hurry(now)
        self._trouble, self._lost = f"vLLM is not well: {reason}", True
        for job in self._in(JobState.QUEUED):
            effects += self._fail(now, job, self._trouble, full=True)
        for job in list(self._jobs.values()) if running else ():
            effects += self._fail(now, job, self._trouble)
        return effects

    # --- ends

    def _fail(self, now: float, job: Job, reason: str, *, full: bool = False, stuck: bool = False) -> list[Effect]:
        self.counts.add("jobs_failed")
        return [_failed(job.gateway, job.request, reason, full=full, stuck=stuck), *self._drop(now, job)]

    def _hand_over(self, now: float) -> list[Effect]:
        """End all requests at once so that they continue on other nodes; they count as ones for which there is no room."""
        left = list(self._jobs.values())
        self.counts.add("jobs_handed_over", len(left))
        return [effect for job in left for effect in self._fail(now, job, "the node is leaving", full=True)]

    def _drop(self, now: float, job: Job) -> list[Effect]:
        """End a request that its gateway cancelled, and hang up on vLLM."""
        if job.work_id is None:
            return self._end(now, job)
        self._move(job, JobEvent.CLOSE)
        self._closing.append(job)
        return [*self._leave(now, job), CancelWork(job.work_id)]

    def _end(self, now: float, job: Job) -> list[Effect]:
        was_closing = job.state is JobState.CLOSING
        self._move(job, JobEvent.END)
        if was_closing:
            self._closing.remove(job)
            return []
        return self._leave(now, job)

    def _leave(self, now: float, job: Job) -> list[Effect]:
        request = job.request
        del self._jobs[request.request_id]
        return [CancelTimer(("deadline", request.request_id, request.attempt)), *self._reports.hurry(now)]

    def _report(self, now: float) -> list[Effect]:
        """Report the load as a prefill and as a decode. While vLLM does not answer, the report is that of a draining node."""
        closed = self._drain.draining or self._lost
        jobs = list(self._jobs.values())
        prompts, answers = self._load.of_prompts(now, jobs, closed=closed), self._load.of_answers(now, jobs, closed=closed)
        return self._reports.send(now, prompts, answers)

    def _drained(self) -> list[Effect]:
        return self._drain.drained(idle=not (self._jobs or self._closing or self._early or self._reads or self._renders))

    # --- helpers

    def _in(self, state: JobState) -> list[Job]:
        return [job for job in self._jobs.values() if job.state is state]

    def _stop(self, request: StartPrefill) -> StopRule:
        """Return the rule by which the request ends on this node."""
        if request.decode == self.name:
            return request.stop
        return structs.replace(request.stop, max_tokens=request.first_index + 1)

    def _move(self, job: Job, event: JobEvent) -> None:
        job.state = self._lifecycle.after(job.state, event)


def _movable(jobs: Iterable[Job]) -> list[Attempt]:
    """Return the attempts that go on elsewhere when the node drains: not those that vLLM cannot take over once they have a
    token, which end here."""
    able = [job for job in jobs if unable(job.request.sampling, job.count + 1) is None]
    return [(job.gateway, job.request.request_id, job.request.attempt) for job in able]


def _scored(job: Job, scores: PromptScoresGenerated) -> list[Effect]:
    """Return the message with which logprobs of the prompt go to the gateway, unless the request has ended."""
    if job.state is not JobState.PREFILLING:
        return []
    request = job.request
    scored = PromptScored(request.request_id, request.attempt, scores.first, scores.logprobs)
    return [Send(job.gateway, scored)]


def _reported(job: Job, versions: tuple[tuple[str, int], ...]) -> list[Effect]:
    """Return the message with which the versions of the weights that made a job's tokens go to the gateway, where vLLM names
    any."""
    if not versions:
        return []
    request = job.request
    placed = tuple((version, request.first_index + start) for version, start in versions)
    return [Send(job.gateway, WeightsReported(request.request_id, request.attempt, job.count, placed))]


def _embedded(now: float, job: Job, result: Embedded) -> Send:
    """Return the message with which the vectors of a job go to the gateway."""
    queue_s, prefill_s = job.times_s(now)
    embedded = TextsEmbedded(
        request_id=job.request.request_id,
        attempt=job.request.attempt,
        vectors=result.vectors,
        queue_s=queue_s,
        prefill_s=prefill_s,
    )
    return Send(job.gateway, embedded)


def _failed(gateway: str, request: StartPrefill, reason: str, *, full: bool, stuck: bool = False, avoid: str = "") -> Send:
    failed = AttemptFailed(request.request_id, request.attempt, clip(reason), full=full, avoid=avoid, stuck=stuck)
    return Send(gateway, failed)
