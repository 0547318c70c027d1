"""Choices of one prompt at a decode: its KV is handed off once and copied for the other choices. PURE."""

from mooncake_zmq.core.actor import Effect, Start
from mooncake_zmq.core.actor_parts import Ids
from mooncake_zmq.core.messages import HandoffDone
from mooncake_zmq.core.work import ForkSequence, SequenceForked, WorkFailed
from mooncake_zmq.decode.ends import Ends
from mooncake_zmq.decode.request import Request, RequestEvent, RequestState
from mooncake_zmq.decode.requests import Requests
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.decode.steps import Steps
from mooncake_zmq.kv.layout import BlockLayout

CLOSING = RequestState.CLOSING


class Forks:
    """Hold the copies in flight from requests' KV to their siblings."""

    def __init__(
        self, *, settings: DecodeSettings, layout: BlockLayout, requests: Requests, steps: Steps, ends: Ends, ids: Ids
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._requests = requests
        self._steps = steps
        self._ends = ends
        self._ids = ids
        self._forks: dict[int, tuple[Request, list[Request]]] = {}

    def is_copying(self, work_id: int) -> bool:
        """Return whether this work is such a copy."""
        return work_id in self._forks

    def begin(self, now: float, leader: Request, done: HandoffDone) -> list[Effect]:
        """Start a request's siblings with the same KV, and cancel those that the prefill does not name."""
        tokens, targets = dict(done.siblings), list[Request]()
        siblings, leader.siblings = leader.siblings, []
        effects: list[Effect] = []
        for sibling in siblings:
            sibling.leader = None
            token = tokens.get(sibling.request.request_id)
            if token is None or sibling.request.stop.reason(token, sibling.count + 1) is not None:
                effects += self._ends.close(now, sibling)
            elif not self._layout.has_token(token):
                effects += self._ends.fail(now, sibling, "a token that the model does not have")
            else:
                sibling.last = token
                targets.append(sibling)
        if not targets:
            return effects
        for user in (leader, *targets):
            user.in_flight += 1
        work_id = self._ids.new()
        self._forks[work_id] = leader, targets
        fork = ForkSequence(leader.sequence, tuple([each.sequence for each in targets]), leader.prompt_tokens)
        return [*effects, Start(work_id, fork, self._settings.pull_deadline_s)]

    def on_forked(self, now: float, work_id: int, result: SequenceForked | WorkFailed) -> list[Effect]:
        """Handle the end of the copies of a request's KV."""
        leader, targets = self._forks.pop(work_id)
        effects: list[Effect] = []
        for request in (leader, *targets):
            request.in_flight -= 1
            if request.state is CLOSING:
                effects += self._ends.try_end(request)
            elif request is leader:
                continue
            elif isinstance(result, WorkFailed):
                effects += self._ends.fail(now, request, f"copy of a prompt's KV failed: {result.reason}")
            elif request.sequence in result.without_memory:
                effects += self._ends.fail(now, request, "no memory for the sequence", full=True)
            else:
                self._requests.move(request, RequestEvent.VERIFIED)
                request.parts.clear()
                effects += self._steps.join(now, request, request.last)
        return effects
