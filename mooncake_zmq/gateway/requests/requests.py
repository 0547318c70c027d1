"""The gateway's actor, which owns all requests: placement, attempts, tokens, resume, cancel. PURE.

A request is here from its arrival to its end. A failure elsewhere ends an *attempt*; the next one resumes from the prompt and
the tokens so far, so that the client sees a pause, never an error or a repeated token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mooncake_zmq.core.actor import (
    CancelTimer,
    CordonWanted,
    DrainTimedOut,
    DrainWanted,
    Effect,
    Event,
    FromClient,
    PeerDown,
    PeerUp,
    Received,
    Send,
    SetTimer,
    Started,
    TimerFired,
    ToClient,
    WorkDone,
    WorkProgress,
)
from mooncake_zmq.core.actor_parts import Lifecycle, Tally
from mooncake_zmq.core.drain import Drain
from mooncake_zmq.core.messages import (
    AttemptFailed,
    CancelRequest,
    ChatRendered,
    ChatUnrendered,
    FirstToken,
    Hello,
    NodesReported,
    Placed,
    PlaceElsewhere,
    PromptScored,
    Rejected,
    RejectReason,
    RequestEnded,
    TextsEmbedded,
    TokenLogprob,
    TokensDecoded,
    WeightsReported,
)
from mooncake_zmq.gateway.requests.answer import Answer
from mooncake_zmq.gateway.requests.client_events import (
    ChatToRender,
    ClientGone,
    ClientRequest,
    Failed,
    StopFound,
)
from mooncake_zmq.gateway.requests.cluster_snapshot import count_prediction, prediction
from mooncake_zmq.gateway.requests.families import Families
from mooncake_zmq.gateway.requests.readiness import WAIT, ClusterView, Readiness, missing_roles
from mooncake_zmq.gateway.requests.readings import Readings
from mooncake_zmq.gateway.requests.relocations import Relocations, absent
from mooncake_zmq.gateway.requests.renderings import Renderings
from mooncake_zmq.gateway.requests.request import NEXT_STATE, Request, RequestEvent, RequestState
from mooncake_zmq.gateway.settings import RequestsSettings
from mooncake_zmq.kv.layout import BlockLayout

EPSILON_S = 1e-9
"""Tolerance for timers that fire early by rounding: such a timer must not be set again and again."""


class Requests:
    """All requests of one gateway."""

    def __init__(
        self,
        *,
        name: str,
        host: str,
        incarnation: int,
        settings: RequestsSettings,
        layout: BlockLayout,
        models: Mapping[str, BlockLayout] | None = None,
    ) -> None:
        """Create the actor. `models`: the layouts of several models by identity; None: there is one, with `layout`."""
        self.name = name
        self.host = host
        self.incarnation = incarnation
        self.counts = Tally()
        self.transitions = Tally()
        self._lifecycle = Lifecycle("gateway request", NEXT_STATE, self.transitions)
        self._settings = settings
        self._layouts = models or {"": layout}
        self._peers: dict[str, Hello] = {}
        self._requests: dict[str, Request] = {}
        self._families = Families()
        self._readiness = Readiness(settings.conductors, settings.ready_wait_s, tuple(self._layouts))
        self._drain = Drain("", self.counts)
        table, peers, readiness = self._requests, self._peers, self._readiness
        self._relocations = Relocations(table, peers, readiness, settings.stall_s, counts=self.counts, let_go=self._let_go)
        self.readings = Readings(self._peers, self.counts)
        self._renderings = Renderings(self._peers, self._layouts, settings, self.counts, lambda: self.cluster.closed)

    @property
    def cluster(self) -> ClusterView:
        """The conductor's report of the cluster, for /health."""
        return self._readiness.view(self._peers)

    def handle(self, now: float, event: Event) -> list[Effect]:
        """See `core.actor`."""
        effects = self.readings.around(now, event, self._dispatch) + self._renderings.handle(event)
        idle = not (self._requests or self.readings or self._renderings)
        return effects + self._drain.drained(idle=idle) if self._drain.leaves else effects

    def _dispatch(self, now: float, event: Event) -> list[Effect]:
        match event:
            case FromClient(request_id, ClientRequest() as client):
                return self._on_client(now, request_id, client)
            case FromClient(request_id, ClientGone()):
                return self._on_gone(request_id)
            case FromClient(request_id, StopFound()):
                return self._on_stop_found(request_id)
            case Received(sender, Placed() as message):
                return self._on_placed(now, sender, message)
            case Received(sender, Rejected() as message):
                return self._on_rejected(now, sender, message)
            case Received(sender, FirstToken() as message):
                return self._on_first_token(now, sender, message)
            case Received(sender, TokensDecoded() as message):
                return self._on_tokens(now, sender, message)
            case Received(sender, PromptScored() | TextsEmbedded() as message):
                return self._on_scored(now, sender, message)
            case Received(sender, WeightsReported(request_id, attempt) as message):
                if (request := self._current(request_id, attempt)) is not None:
                    request.made_by(sender, message)
                return []
            case Received(sender, AttemptFailed() as message):
                return self._on_failed(now, sender, message)
            case Received(sender, PlaceElsewhere() as message):
                return self._relocations.on_wanted(now, sender, message)
            case Received(sender, NodesReported() as message):
                return self._readiness.on_report(sender, message, self._peers)
            case PeerUp() as up:
                return self._on_peer_up(now, up)
            case PeerDown(peer, _):
                return self._on_peer_down(now, peer)
            case TimerFired(key) if key == WAIT:
                self.counts.add("ready_waits_over", self._readiness.waited())
                return []
            case TimerFired(("attempt", str(request_id))):
                return self._begin_attempt(now, self._requests.get(request_id))
            case TimerFired(("placement", str(request_id))):
                return self._on_placement_late(request_id)
            case TimerFired(("stall", str(request_id))):
                return self._on_stalled(now, request_id)
            case TimerFired(("deadline", str(request_id))):
                late = self._requests.get(request_id)
                return [] if late is None else self._fail(late, _too_late(self._settings.deadline_s))
            case DrainWanted() | CordonWanted() as order:
                self._drain.wanted(order)
                return []
            case DrainTimedOut():
                self._drain.drain()
                return self._hand_over()
            case Started() | TimerFired() | WorkProgress() | WorkDone():
                return []
            case FromClient(_, ChatToRender()) | Received(_, ChatRendered() | ChatUnrendered()):
                return []  # see `renderings`
            case Received(_, message):
                self.counts.add(f"unexpected_messages[type={type(message).__name__}]")
                return []
            case _:
                raise TypeError(event)

    def check(self, now: float) -> None:
        """See `core.actor`."""
        for request in self._requests.values():
            assert request.state is not RequestState.ENDED
            request.answer.check()
            assert request.scheduled == (request.state is not RequestState.WAITING)
            if request.led_by:
                assert request.state is self._requests[request.led_by].state is RequestState.PLACING
        assert len(self._requests) <= self._settings.max_open
        self.readings.check()
        self._renderings.check()

    def gauges(self, now: float) -> dict[str, float]:
        """See `core.actor`."""
        states = [request.state for request in self._requests.values()]
        levels = {f"requests_{state.value}": states.count(state) for state in RequestState if state is not RequestState.ENDED}
        return {**levels, "answers_being_read": len(self.readings), "chats_being_written": len(self._renderings)}

    def dump(self, now: float) -> dict[str, Any]:
        """See `core.actor`."""
        return {
            "gauges": self.gauges(now),
            "draining": self._drain.draining,
            "cluster": asdict(self.cluster),
            "predictions": {of: prediction(self.counts, of) for of in ("ttft", "tbt")},
            "peers": {name: hello.role for name, hello in self._peers.items()},
            "requests": [request.dump(now) for request in self._requests.values()],
        }

    # --- the client

    def _on_client(self, now: float, request_id: str, client: ClientRequest) -> list[Effect]:
        choices = ((request_id, client.sampling.seed), *client.siblings)
        if any(each in self._requests for each, _ in choices):
            return []
        refused: Failed | None = None
        if self._drain.draining or len(self._requests) + len(choices) > self._settings.max_open:
            why = "the gateway is draining: try another one" if self._drain.draining else "too many open requests"
            refused = Failed(status=503, code="overloaded", message=why, retry_after_s=1.0)
        elif len(self._layouts) > 1 and missing_roles(self._peers.values(), client.model):
            # Half of what each model would have: the others are served meanwhile.
            share = max(1, self._settings.max_open // (2 * len(self._layouts)))
            if len(choices) + sum([each.client.model == client.model for each in self._requests.values()]) > share:
                why = "no node serves this model, and enough requests wait for one"
                refused = Failed(status=503, code="no_conductor", message=why, retry_after_s=2.0)
        if refused is not None:
            self.counts.add("requests_refused", len(choices))
            return [ToClient(each, refused) for each, _ in choices]
        timers: list[Effect] = []
        family = request_id if client.siblings else ""
        for each, seed in choices:
            self._open(now, each, client.choice(seed) if family else client, family)
            timers.append(SetTimer(("deadline", each), self._settings.deadline_s))
            timers.append(SetTimer(("placement", each), self._settings.placement_wait_s))
        return timers + self._begin_attempt(now, self._requests[request_id])

    def _open(self, now: float, request_id: str, client: ClientRequest, family: str) -> None:
        answer, deadline = Answer(client.stop, self.counts), now + self._settings.deadline_s
        request = Request(request_id, client, self._layouts[client.model], self._lifecycle, answer, now, deadline, family)
        self._requests[request_id] = request
        self._families.add(request)
        self.counts.add("requests")

    def _on_gone(self, request_id: str) -> list[Effect]:
        request = self._requests.get(request_id)
        if request is None:
            return []
        self.counts.add("requests_cancelled")
        return self._let_go(request) + self._end(request)

    def _on_stop_found(self, request_id: str) -> list[Effect]:
        request = self._requests.get(request_id)
        return [] if request is None else [*self._let_go(request, ended=True), *self._finish(request, "stop")]

    # --- placement

    def _begin_attempt(self, now: float, request: Request | None) -> list[Effect]:
        """Ask the conductor for a place, or wait for a conductor if none is up. Requests of a family that wait and have no
        token are placed together."""
        if request is None or request.state is not RequestState.WAITING:
            return []
        conductor = self._readiness.conductor(self._peers, request.client.model)
        if not conductor:
            return []
        siblings = self._families.waiting_with(request)
        for each in (request, *siblings):
            each.begin_attempt(now, conductor)
            each.booked = each is request
        timers: list[Effect] = [SetTimer(("stall", each.request_id), self._settings.stall_s) for each in (request, *siblings)]
        for each in siblings:
            each.led_by = request.request_id
            timers.append(CancelTimer(("attempt", each.request_id)))
        return [Send(conductor, request.schedule(now, 1 + len(siblings))), *timers]

    def _on_placed(self, now: float, sender: str, message: Placed) -> list[Effect]:
        if (relocated := self._relocations.on_placed(now, sender, message)) is not None:
            return relocated
        request = self._placing(sender, message.request_id, message.attempt)
        if request is None:
            return []
        together = [request, *self._families.led_by(request)]
        for each in together:
            each.place(now, message)
        # A node may be unknown here, down, or of another role by now. That does not count as a broken attempt, but as if there
        # were no such node: a new request then waits for at most `placement_wait_s`, an admitted one until its deadline.
        gone = absent(self._peers, message, request.client)
        if gone is not None:
            request.forget_excluded(unless_new=gone[0])
            return self._retry_all(together, gone[1].value, exclude=gone[0])
        effects: list[Effect] = [CancelTimer(("placement", each.request_id)) for each in together]
        for each in together:
            each.admitted = True
        return [*effects, Send(message.prefill, request.start(now, message, together[1:]))]

    def _placing(self, sender: str, request_id: str, attempt: int) -> Request | None:
        """Return the request, if this conductor was asked to place it."""
        request = self._current(request_id, attempt)
        asked = request is not None and request.state is RequestState.PLACING and not request.led_by
        return request if request is not None and asked and request.conductor == sender else None

    def _on_rejected(self, now: float, sender: str, message: Rejected) -> list[Effect]:
        if self._relocations.on_rejected(sender, message):
            return []
        request = self._placing(sender, message.request_id, message.attempt)
        if request is None:
            return []
        together = [*self._families.led_by(request), request]
        request.exclude = ()
        overloaded = message.reason in (RejectReason.TTFT, RejectReason.TBT)
        no_node = message.reason in (RejectReason.NO_PREFILL, RejectReason.NO_DECODE)
        under_way = self._families.is_under_way(request)
        # Nodes may be restarting, or a new conductor does not know them yet.
        if under_way or (not overloaded and (request.admitted or no_node)):
            placements: list[Effect] = [CancelTimer(("placement", each.request_id)) for each in together if under_way]
            return placements + self._retry_all(together, message.reason.value)
        return [effect for each in together for effect in self._refuse(each, message.reason, message.retry_after_s)]

    def _retry_all(self, together: Sequence[Request], missing: str, *, exclude: str = "") -> list[Effect]:
        """Retry all of them. `missing`: the reason why they wait, if they are not admitted yet."""
        effects: list[Effect] = []
        for request in together:
            request.missing = missing
            effects += self._retry(request, exclude=exclude)
        return effects

    def _refuse(self, request: Request, reason: RejectReason, retry_after_s: float) -> list[Effect]:
        """Refuse a request that has no token yet."""
        self.counts.add(f"requests_rejected[reason={reason.value}]")
        return self._fail(request, _rejection(reason, retry_after_s))

    def _on_placement_late(self, request_id: str) -> list[Effect]:
        request = self._requests.get(request_id)
        return [] if request is None or request.admitted else self._fail(request, request.unplaced())

    def _on_peer_up(self, now: float, up: PeerUp) -> list[Effect]:
        """Take a new peer. If it is a conductor, requests begin an attempt that wait for one or pause between attempts."""
        self._peers[up.peer] = up.hello
        effects = self._readiness.changed(self._peers)
        if up.hello.role != "conductor":
            return effects
        for request in list(self._requests.values()):
            effects += self._begin_attempt(now, request)
        return effects

    # --- tokens

    def _on_first_token(self, now: float, sender: str, message: FirstToken) -> list[Effect]:
        request = self._current(message.request_id, message.attempt)
        if request is None or request.prefill != sender or request.state is not RequestState.PREFILLING:
            return []
        logprobs = () if message.logprob is None else (message.logprob,)
        if not request.is_scored or not request.fits_model((message.token,), logprobs):
            return self._on_nonsense(request, sender)
        request.move(RequestEvent.FIRST_TOKEN)
        request.take_first(message)
        return self._take_run(now, request, message.index, (message.token,), logprobs)

    def _on_tokens(self, now: float, sender: str, message: TokensDecoded) -> list[Effect]:
        effects: list[Effect] = []
        for request_id, attempt, reused in message.reused:
            request = self._current(request_id, attempt)
            if request is not None and request.decode == sender and not request.answer.resumed_at:
                request.cached = (min(reused, request.prompt_tokens), 0, 0)
        for times in message.times:
            if (request := self._current(times.request_id, times.attempt)) is not None and request.decode == sender:
                request.borrowed_tokens = min(times.borrowed_tokens, request.prompt_tokens + len(request.answer.tokens))
        for place, (request_id, attempt, first, tokens) in enumerate(message.entries):
            request = self._current(request_id, attempt)
            if request is None:  # our cancel came before the prefill's reservation: else the attempt would run to its end
                effects.append(Send(sender, CancelRequest(request_id=request_id, attempt=attempt)))
            elif request.decode == sender:
                logprobs = message.logprobs[place] if place < len(message.logprobs) else ()
                if not request.fits_model(tokens, logprobs):
                    effects += self._on_nonsense(request, sender)
                    continue
                if request.selected_from is None and (request_id, attempt) in message.approximate:
                    request.selected_from = first
                effects += self._take_run(now, request, first, tokens, logprobs)
        return effects

    def _on_scored(self, now: float, sender: str, message: PromptScored | TextsEmbedded) -> list[Effect]:
        """Pass on probabilities of the prompt, or vectors, with which the request ends. A later attempt repeats probabilities
        from the beginning: those that were sent are skipped."""
        request = self._current(message.request_id, message.attempt)
        if request is None or request.prefill != sender or request.state is not RequestState.PREFILLING or request.is_scored:
            return []
        if not request.fits_prompt(message):
            return self._on_nonsense(request, sender)
        found = request.take_of_prompt(now, message)
        effects: list[Effect] = [] if found is None else [ToClient(request.request_id, found)]
        if isinstance(message, TextsEmbedded):
            effects += [*self._forget_booking(request, ended=True), *self._finish(request, "stop")]
        return effects

    def _take_run(
        self, now: float, request: Request, first: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> list[Effect]:
        request.received_at = now
        answer = request.answer
        effects: list[Effect] = [ToClient(request.request_id, out) for out in answer.take(now, first, tokens, logprobs)]
        if effects and not request.begun:
            self._families.begin(request)
        if answer.reason is not None:
            effects += self._forget_booking(request, ended=True)
            effects += self._finish(request, answer.reason)
        return effects

    def _finish(self, request: Request, reason: str) -> list[Effect]:
        self.counts.add(f"requests_finished[reason={reason}]")
        return [ToClient(request.request_id, request.finished(reason)), *self._end(request)]

    # --- attempts that end early

    def _on_nonsense(self, request: Request, sender: str) -> list[Effect]:
        """Retry without a node that sent tokens that the model does not have, as if the node had failed."""
        self.counts.add("tokens_out_of_range")
        request.broken += 1
        return self._retry(request, exclude=sender)

    def _on_failed(self, now: float, sender: str, message: AttemptFailed) -> list[Effect]:
        request = self._current(message.request_id, message.attempt)
        if request is None or sender not in (request.prefill, request.decode):
            return []
        self.counts.add(f"attempts_failed[by={self._peers[sender].role}]")
        if message.refused and not self._families.is_under_way(request):
            return self._refuse(request, RejectReason.TBT, message.retry_after_s)
        if message.stuck:
            return self._fail(request, request.stuck(message.reason))
        request.broken += not message.full
        return self._retry(request, exclude=message.avoid or sender)

    def _on_stalled(self, now: float, request_id: str) -> list[Effect]:
        request = self._requests.get(request_id)
        if request is None or request.state is RequestState.WAITING:
            return []
        quiet_s = now - request.received_at
        if quiet_s < self._settings.stall_s - EPSILON_S:
            return [SetTimer(("stall", request_id), self._settings.stall_s - quiet_s)]
        self.counts.add("attempts_stalled")
        request.broken += 1
        return self._retry(request, stalled=True)

    def _on_peer_down(self, now: float, peer: str) -> list[Effect]:
        self._peers.pop(peer, None)
        self._readiness.forget(peer)
        self._relocations.peer_down(peer)
        effects: list[Effect] = []
        for request in list(self._requests.values()):
            placing = request.state is RequestState.PLACING and request.conductor == peer
            prefilling = request.state is RequestState.PREFILLING and peer in (request.prefill, request.decode)
            decoding = request.state is RequestState.DECODING and peer in (request.decode, request.handing_off)
            if placing or prefilling or decoding:
                self.counts.add(f"attempts_lost[state={request.state.value}]")
                request.broken += not placing
                effects += self._retry(request, exclude="" if placing else peer)
        return effects

    def _retry(self, request: Request, *, exclude: str = "", stalled: bool = False) -> list[Effect]:
        """Cancel this attempt at every hop and begin the next one after a pause that grows."""
        effects = self._let_go(request, stalled=stalled)
        if request.broken >= self._settings.max_attempts:
            return effects + self._fail(request, _exhausted(request.broken))
        request.move(RequestEvent.RETRY)
        self.counts.add("attempts_retried")
        if exclude:
            request.avoid(exclude)
        pause = min(self._settings.backoff_max_s, self._settings.backoff_s * 2.0 ** min(request.tries - 1, 16))
        return [*effects, CancelTimer(("stall", request.request_id)), SetTimer(("attempt", request.request_id), pause)]

    def _let_go(self, request: Request, *, ended: bool = False, stalled: bool = False) -> list[Effect]:
        """Cancel the current attempt at every hop."""
        if not request.scheduled:
            return []
        left = [effect for each in self._families.led_by(request) for effect in self._retry(each)]
        request.led_by = ""
        nodes = [node for node in dict.fromkeys((request.prefill, request.decode)) if node in self._peers]
        return [
            *left,
            *[Send(node, request.cancel()) for node in nodes],
            *self._forget_booking(request, ended=ended, stalled=stalled),
        ]

    def _forget_booking(self, request: Request, *, ended: bool, stalled: bool = False) -> list[Effect]:
        """Report the end of an attempt to its conductor, once. `ended`: its answer is complete; `stalled`: no message came in
        time."""
        request.scheduled = False
        unasked = self._relocations.give_up(request)
        if not request.booked:
            return unasked
        outcome = request.outcome(ended)
        if outcome is not None:
            count_prediction(self.counts, "ttft", outcome.ttft_s, outcome.predicted_ttft_s)
            if len(request.answer.gaps):
                count_prediction(self.counts, "tbt", outcome.tbt_s, outcome.predicted_tbt_s)
        if request.conductor not in self._peers:
            return unasked
        end = RequestEnded(request_id=request.request_id, attempt=request.attempt, outcome=outcome, stalled=stalled)
        return [Send(request.conductor, end), *unasked]

    def _fail(self, request: Request, failed: Failed) -> list[Effect]:
        self.counts.add(f"requests_failed[code={failed.code}]")
        return [ToClient(request.request_id, failed), *self._let_go(request), *self._end(request)]

    def _hand_over(self) -> list[Effect]:
        """Fail all open requests: no other gateway has these clients' connections, so the clients have to call another one."""
        left = list(self._requests.values())
        why = Failed(status=503, code="gateway_stopped", message="the gateway stops before the answer ends", retry_after_s=1.0)
        self.counts.add("requests_handed_over", len(left))
        return [effect for request in left for effect in self._fail(request, why)]

    def _end(self, request: Request) -> list[Effect]:
        request.move(RequestEvent.END)
        del self._requests[request.request_id]
        self._families.remove(request)
        return [CancelTimer((timer, request.request_id)) for timer in ("deadline", "placement", "attempt", "stall")]

    # --- leaves

    def _current(self, request_id: str, attempt: int) -> Request | None:
        """Return the request, if this is its attempt under way. Messages of older attempts are counted and dropped."""
        request = self._requests.get(request_id)
        if request is None or request.attempt != attempt or not request.scheduled:
            self.counts.add("stale_attempt_messages")
            return None
        return request


def _exhausted(broken: int) -> Failed:
    limit = f"gave up after {broken} attempts that broke"
    return Failed(status=503, code="attempts_exhausted", message=limit, retry_after_s=5.0)


def _too_late(deadline_s: float) -> Failed:
    return Failed(status=504, code="deadline_exceeded", message=f"no answer within {deadline_s:g} s")


def _rejection(reason: RejectReason, retry_after_s: float) -> Failed:
    """Return the error of a request for which a conductor has no place, or a decode."""
    overloaded = reason in (RejectReason.TTFT, RejectReason.TBT)
    return Failed(
        status=429 if overloaded else 503,
        code=reason.value,
        message="the request would miss its SLO" if overloaded else "no decode has room for the request now",
        retry_after_s=retry_after_s,
    )
