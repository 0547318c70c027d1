"""The check of what answers say of KV that was computed behind other tokens, of steps that attended to few of many, and of KV
that was dropped."""

from collections.abc import Sequence
from typing import Any

from mooncake_zmq.core.actor import Effect, Start
from mooncake_zmq.core.messages import FirstToken
from mooncake_zmq.core.work import ComputeChunk, DecodeStep
from mooncake_zmq.gateway.requests.client_events import ClientRequest, Finished
from mooncake_zmq.prefill.job import attempts_of
from mooncake_zmq.simulation.violation import Violation


class Approximations:
    """Notes which attempts a prefill computes over parts, and from which token on a decode chooses what it attends to, and
    compares that with the ends of answers and what clients asked."""

    def __init__(self) -> None:
        self._exact: set[str] = set()
        """The requests whose answers must not be approximate."""
        self._blended: set[tuple[str, int]] = set()
        self._evicted: set[tuple[str, int]] = set()
        self._dropped: set[str] = set()
        """The requests that have not ended with a first token of which a gateway sent on, after which KV is dropped."""
        self._begun: dict[str, bool] = {}
        """Request that has not ended -> whether the first token that its gateway sent on is over parts."""
        self._selected: dict[tuple[str, int], int] = {}
        """Attempt -> the first token for which its decode chose what it attends to."""
        self._sent: set[str] = set()
        """The requests that have not ended whose clients have such a token."""

    def asked(self, request_id: str, client: ClientRequest) -> None:
        """Note that a client accepts no approximate answer."""
        if client.exact:
            self._exact |= {request_id, *(sibling for sibling, _ in client.siblings)}

    def computes(self, actor: Any, effects: Sequence[Effect]) -> None:
        """Check I3: no prefill poisons the KV of a request that must be exact."""
        for effect in effects:
            if isinstance(effect, Start) and isinstance(effect.work, ComputeChunk) and effect.work.eviction is not None:
                (job,) = (job for job in actor.jobs if job.chunk_work == effect.work_id)
                self._evicted.update(attempts_of(job.request).items())
            if isinstance(effect, Start) and isinstance(effect.work, ComputeChunk) and effect.work.parts:
                (job,) = (job for job in actor.jobs if job.chunk_work == effect.work_id)
                attempts = attempts_of(job.request)
                self._blended.update(attempts.items())
                if wrong := self._exact & attempts.keys():
                    raise Violation("I3", f"{wrong} must be exact and are computed over KV of other prompts")

    def decodes(self, actor: Any, effects: Sequence[Effect]) -> None:
        """Check I3: no decode chooses what it attends to for a request that must be exact."""
        for effect in effects:
            if not (isinstance(effect, Start) and isinstance(effect.work, DecodeStep)):
                continue
            chosen = {entry.sequence for entry in effect.work.entries if entry.selection is not None}
            for request in [each for each in actor.requests if each.sequence in chosen]:
                said = request.request
                self._selected.setdefault((said.request_id, said.attempt), request.count)
                if said.request_id in self._exact:
                    raise Violation("I3", f"{said.request_id} must be exact and attends to few of many tokens")

    def sent(self, request_id: str, attempt: int, index: int) -> None:
        """Note a token of an attempt that a gateway sent on."""
        if index >= self._selected.get((request_id, attempt), index + 1):
            self._sent.add(request_id)

    def received(self, message: FirstToken) -> None:
        """Note the first token that a gateway received and sent on: that of an attempt given up meanwhile goes nowhere."""
        if (message.request_id, message.attempt) in self._evicted:
            self._dropped.add(message.request_id)
        self._begun.setdefault(message.request_id, (message.request_id, message.attempt) in self._blended)

    def finished(self, request_id: str, end: Finished) -> None:
        """Check I3: an answer says that it is approximate if and only if it is."""
        is_approximate = self._begun.pop(request_id, False)
        if (end.parts > 0) != is_approximate:
            raise Violation("I3", f"{request_id} says that {end.parts} tokens have KV of other prompts: {is_approximate=}")
        if (end.dropped > 0) != (request_id in self._dropped):
            raise Violation("I3", f"{request_id} says that KV of {end.dropped} tokens was dropped")
        self._dropped.discard(request_id)
        if end.selected != (request_id in self._sent):
            raise Violation("I3", f"{request_id} says {end.selected} of whether few of many tokens were attended to")
        self._sent.discard(request_id)
