"""One request of a gateway: its state, and what it sends and answers. PURE."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

from msgspec import structs

from mooncake_zmq.core.actor_parts import Lifecycle, Named
from mooncake_zmq.core.messages import (
    MAX_WEIGHT_VERSIONS,
    CancelRequest,
    Eviction,
    FirstToken,
    Outcome,
    Placed,
    PromptScored,
    Schedule,
    Sibling,
    StartPrefill,
    TextsEmbedded,
    TokenLogprob,
    WeightsReported,
)
from mooncake_zmq.core.work import NO_FINITE_LOGITS
from mooncake_zmq.gateway.requests.answer import Answer
from mooncake_zmq.gateway.requests.client_events import ClientRequest, Failed, Finished, PromptLogprobs, Vectors, VersionSpan
from mooncake_zmq.kv.block_hash import pack_tokens
from mooncake_zmq.kv.image_keys import keys_with_images, shifted
from mooncake_zmq.kv.layout import BlockLayout

MAX_EXCLUDED = 4
"""Nodes that the next attempt avoids: the last ones that failed."""


ANY_TOKEN: Final = 1 << 31
"""More than any token's id in a message."""


class RequestState(Named):
    """State of a request."""

    WAITING = "waiting"
    """Waits for a conductor, or for the pause before the next attempt."""
    PLACING = "placing"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


class RequestEvent(Named):
    """Event that changes the state of a request."""

    SCHEDULED = "schedule"
    PLACED = "placed"
    FIRST_TOKEN = "first token"
    RETRY = "retry"
    END = "end"


NEXT_STATE: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.WAITING, RequestEvent.SCHEDULED): RequestState.PLACING,
    (RequestState.PLACING, RequestEvent.PLACED): RequestState.PREFILLING,
    (RequestState.PREFILLING, RequestEvent.FIRST_TOKEN): RequestState.DECODING,
    (RequestState.PLACING, RequestEvent.RETRY): RequestState.WAITING,
    (RequestState.PREFILLING, RequestEvent.RETRY): RequestState.WAITING,
    (RequestState.DECODING, RequestEvent.RETRY): RequestState.WAITING,
    (RequestState.WAITING, RequestEvent.END): RequestState.ENDED,
    (RequestState.PLACING, RequestEvent.END): RequestState.ENDED,
    (RequestState.PREFILLING, RequestEvent.END): RequestState.ENDED,
    (RequestState.DECODING, RequestEvent.END): RequestState.ENDED,
}


PLACED = (RequestState.PREFILLING, RequestState.DECODING)
"""States in which a request is placed."""


class Asked(NamedTuple):
    """A question to a conductor for another place, asked while an attempt is under way."""

    attempt: int
    """Number of the attempt that would begin there."""
    conductor: str
    node: str
    """The draining node that it would leave."""
    at: float


@dataclass(slots=True)
class Request:
    """A request from its arrival to its end, with its attempt under way."""

    request_id: str
    client: ClientRequest
    layout: BlockLayout
    lifecycle: Lifecycle[RequestState, RequestEvent]
    answer: Answer
    arrived_at: float
    deadline: float
    family: str = ""
    """Name of the requests of one call that have its prompt."""
    state: RequestState = RequestState.WAITING
    attempt: int = 0
    """Number of the attempt under way."""
    latest: int = 0
    """Number of the latest attempt for which a place was asked."""
    tries: int = 0
    """Number of attempts without those that began because a node drains."""
    relocations: int = 0
    """Number of those."""
    asked: Asked | None = None
    missing: str = "no_conductor"
    """Reason why a request that is not admitted waits."""
    broken: int = 0
    """Attempts that ended because something broke."""
    admitted: bool = False
    """Whether a conductor has ever placed it."""
    scheduled: bool = False
    """Whether an attempt is under way that a conductor may have booked."""
    conductor: str = ""
    prefill: str = ""
    decode: str = ""
    begun: bool = False
    """Whether its client has tokens of it or of its family: it is not refused any more."""
    answered: bool = False
    """Whether its client has tokens of another part of its call's answer."""
    led_by: str = ""
    """Request whose placement it waits for."""
    booked: bool = False
    """Whether its attempt has a booking of its own, whose end a conductor has to know."""
    scored: int = 0
    """Tokens of the prompt whose probabilities its client has."""
    exclude: tuple[str, ...] = ()
    computed_of_cached: int = 0
    """Tokens with KV elsewhere that the prefill computed while KV after them was fetched."""
    parts: int = 0
    """Tokens with KV of earlier prompts, computed behind other tokens: the answer is approximate if there are any."""
    recomputed: int = 0
    """Tokens of these that the prefill computed again."""
    selected_from: int | None = None
    """The first token for which a decode attended to few of many: the answer is approximate from there on."""
    dropped: int = 0
    """Tokens of the prompt whose KV the decode of an attempt did not get: the answer is approximate if there are any."""
    borrowed_tokens: int = 0
    """Tokens whose KV other decodes than its own held."""
    cached: tuple[int, int, int] | None = None
    prefill_times: tuple[float, float] = (0.0, 0.0)
    """Times of the attempt under way in the prefill: queued, computed."""
    received_at: float = 0.0
    """When the last message for the attempt under way arrived: the stall timer reads it when it fires."""
    versions: tuple[VersionSpan, ...] = ()
    """Versions of the weights that made the tokens, as far as engines reported them."""
    predicted: tuple[float, float] = (0.0, 0.0)
    """TTFT and TBT of the attempt under way, as its `Placed` predicted them."""
    has_scores: bool = field(init=False)
    """Whether its tokens come with their probabilities."""
    tokens_end: int = field(init=False)
    """The end of the ids that its tokens may have; 0: it has none."""

    def __post_init__(self) -> None:
        self.has_scores = self.client.sampling.logprobs is not None
        self.tokens_end = 0 if self.client.embedding is not None else self.layout.vocab_size or ANY_TOKEN

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.client.tokens) // 4

    @property
    def eviction(self) -> Eviction | None:
        """How few tokens of the prompt and the answer so far the next decode is to hold: all of the answer; None: all."""
        eviction = self.client.eviction
        return None if eviction is None else eviction.behind(len(self.answer.tokens))

    @property
    def is_scored(self) -> bool:
        """Whether the client has the prompt's probabilities, if it asked for them; vectors are the whole answer."""
        if self.client.embedding is not None:
            return False
        return self.client.prompt_logprobs is None or self.scored == self.prompt_tokens - 1

    @property
    def handing_off(self) -> str:
        """The prefill, until its decode has sent a token: a decode that never received the request cannot report its loss."""
        return "" if self.answer.arrived > 1 else self.prefill

    def move(self, event: RequestEvent) -> None:
        """Change the state."""
        self.state = self.lifecycle.after(self.state, event)

    def begin_attempt(self, now: float, conductor: str) -> None:
        """Begin the next attempt, which this conductor is to place."""
        self.latest += 1
        self.tries += 1
        self._begin(now, self.latest, conductor)

    def _begin(self, now: float, attempt: int, conductor: str) -> None:
        self.move(RequestEvent.SCHEDULED)
        self.attempt = attempt
        self.scheduled = True
        self.conductor, self.prefill, self.decode = conductor, "", ""
        self.prefill_times = self.predicted = (0.0, 0.0)
        self.received_at = now
        self.answer.begin_attempt(now)
        end = len(self.answer.tokens)
        if self.selected_from is not None and self.selected_from >= end:
            self.selected_from = None
        self.versions = tuple([(name, start, min(stop, end)) for name, start, stop in self.versions if start < end])

    def place(self, now: float, placed: Placed) -> None:
        """Take the nodes that a conductor chose."""
        self.move(RequestEvent.PLACED)
        self.led_by = ""
        self.prefill, self.decode = placed.prefill, placed.decode
        self.predicted = (placed.ttft_s, placed.tbt_s)
        self.received_at = now

    def ask(self, now: float, conductor: str, node: str) -> Schedule:
        """Return the message that asks a conductor for a place without this node, while the attempt under way goes on."""
        self.latest += 1
        self.asked = Asked(self.latest, conductor, node, now)
        self.avoid(node)
        return structs.replace(self.schedule(now, 1), attempt=self.latest)

    def continue_at(self, now: float, asked: Asked, placed: Placed) -> None:
        """Begin the attempt for which another place was asked; that under way is over."""
        self.move(RequestEvent.RETRY)
        self._begin(asked.at, asked.attempt, asked.conductor)
        self.booked = True
        self.relocations += 1
        self.place(now, placed)

    def forget_excluded(self, *, unless_new: str) -> None:
        """Exclude no node any more, if this one was excluded: as the last resort it was no place, so that those that broke an
        attempt are tried again."""
        if unless_new in self.exclude:
            self.exclude = ()

    def avoid(self, node: str) -> None:
        """Exclude a node from the attempts that follow."""
        self.exclude = (*[each for each in self.exclude if each != node], node)[-MAX_EXCLUDED:]

    def schedule(self, now: float, choices: int) -> Schedule:
        """Return the message that asks a conductor for a place."""
        client, eviction = self.client, self.eviction
        return Schedule(
            request_id=self.request_id,
            attempt=self.attempt,
            keys=tuple(self._keys()) if self.is_scored else (),
            tokens=self.prompt_tokens + len(self.answer.tokens),
            max_tokens=self.answer.left,
            exclude=self.exclude,
            ttft_slo_s=client.ttft_slo_s,
            tbt_slo_s=client.tbt_slo_s,
            priority=client.priority,
            begun=self.begun,
            waited_s=max(0.0, now - self.arrived_at),
            choices=choices,
            tenant=client.tenant,
            adapter=client.adapter,
            kept_tokens=0 if eviction is None else eviction.kept,
        )

    def start(self, now: float, placed: Placed, siblings: Sequence["Request"]) -> StartPrefill:
        """Return the message that starts the attempt, and those of its siblings, at its prefill."""
        client = self.client
        return StartPrefill(
            request_id=self.request_id,
            attempt=self.attempt,
            tokens=client.tokens + pack_tokens(self.answer.tokens),
            root=client.root,
            adapter=client.adapter,
            keys=tuple(self._keys()),
            first_index=len(self.answer.tokens),
            sampling=client.sampling,
            stop=client.stop,
            decode=placed.decode,
            reuse_blocks=placed.reuse_blocks,
            sources=placed.sources,
            coming_blocks=0 if client.prompt_logprobs is not None else placed.coming_blocks,
            coming_s=placed.coming_s,
            conductor=self.conductor,
            deadline_s=max(0.0, self.deadline - now),
            booking=placed.booking,
            priority=max(client.priority, placed.least_priority),
            tbt_slo_s=placed.tbt_slo_s,
            stages=placed.stages if self.is_scored and client.eviction is None else (),
            tenant=client.tenant,
            prompt_logprobs=None if self.is_scored else client.prompt_logprobs,
            siblings=tuple([each.as_sibling() for each in siblings]),
            embedding=client.embedding,
            images=client.images,
            exact=client.exact,
            lenders=placed.lenders if client.eviction is None else (),
            eviction=self.eviction,
        )

    def as_sibling(self) -> Sibling:
        """Return what a prefill has to know of a request that is placed with another."""
        return Sibling(request_id=self.request_id, attempt=self.attempt, seed=self.client.sampling.seed)

    def cancel(self) -> CancelRequest:
        """Return the message that cancels the attempt under way."""
        return CancelRequest(request_id=self.request_id, attempt=self.attempt)

    def fits_model(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> bool:
        """Return whether these are tokens of the model, with their probabilities if they were asked for."""
        if len(logprobs) != (len(tokens) if self.has_scores else 0):
            return False
        for token in tokens:
            if token >= self.tokens_end:
                return False
        for _, likeliest in logprobs:
            for token, _ in likeliest:
                if token >= self.tokens_end:
                    return False
        return True

    def fits_prompt(self, message: PromptScored | TextsEmbedded) -> bool:
        """Return whether these probabilities are of the prompt's tokens and leave none out, or these vectors of its texts."""
        embedding = self.client.embedding
        if isinstance(message, TextsEmbedded) or embedding is not None:
            return isinstance(message, TextsEmbedded) and embedding is not None and embedding.has(message.vectors)
        ids = [token for _, likeliest in message.logprobs for token, _ in likeliest]
        end = message.first + len(message.logprobs)
        return message.first <= self.scored + 1 and end <= self.prompt_tokens and self.layout.has_token(max(ids, default=0))

    def take_first(self, message: FirstToken) -> None:
        """Take what a prefill reports with its token: of reuse, what the first attempt did; a later one blends nothing. Each
        may drop KV."""
        self.dropped = max(self.dropped, min(message.dropped, self.prompt_tokens))
        if self.cached is None:
            self.cached = (message.own, message.local, message.remote)
            self.computed_of_cached = min(message.met, self.prompt_tokens)
            self.parts = min(message.parts, self.prompt_tokens)
            self.recomputed = min(message.recomputed, self.parts)
        self.prefill_times = (message.queue_s, message.prefill_s)

    def take_of_prompt(self, now: float, message: PromptScored | TextsEmbedded) -> PromptLogprobs | Vectors | None:
        """Take vectors, or probabilities of the prompt's tokens. Return those that the client lacks: a later attempt sends all
        of them."""
        self.received_at = now
        if isinstance(message, TextsEmbedded):
            self.prefill_times = (message.queue_s, message.prefill_s)
            self.answer.arrive(now)
            return Vectors(message.vectors)
        first, end = self.scored + 1, message.first + len(message.logprobs)
        if end <= first:
            return None
        self.scored = end - 1
        return PromptLogprobs(first, message.logprobs[first - message.first :])

    def made_by(self, node: str, report: WeightsReported) -> None:
        """Take what a node of the attempt under way reports of the weights that made its tokens. Reports of a prefill and a
        decode may come in any order."""
        starts = pairwise([*report.versions, ("", report.stop)])
        made = [(name, start, stop) for (name, start), (_, stop) in starts if start < stop <= report.stop]
        if made and len(made) == len(report.versions) and node in (self.prefill, self.decode):
            first, last = made[0][1], made[-1][2]
            earlier = [(name, start, min(stop, first)) for name, start, stop in self.versions if start < first]
            later = [(name, max(start, last), stop) for name, start, stop in self.versions if stop > last]
            self.versions = tuple([*earlier, *made, *later][-MAX_WEIGHT_VERSIONS:])

    def _without_gaps(self) -> tuple[VersionSpan, ...]:
        """Return the versions that made all tokens so far, those of the others as unknown."""
        if not self.versions:
            return ()
        spans, at, end = list[VersionSpan](), 0, len(self.answer.tokens)
        for name, start, stop in (*self.versions, (None, end, end)):
            spans += (None, at, min(start, end)), (name, start, min(stop, end))
            at = stop
        return tuple([span for span in spans if span[1] < span[2]])

    def unplaced(self) -> Failed:
        """Return the error of a request that waited in vain for what it is missing."""
        missing = f"{self.missing.replace('_', ' ')} is there to serve the request"
        return Failed(status=503, code=self.missing, message=missing, retry_after_s=2.0)

    def stuck(self, reason: str) -> Failed:
        """Return the error of a request that fails on every node."""
        if NO_FINITE_LOGITS in reason:
            return Failed(status=500, code="no_finite_logits", message=f"the answer cannot go on ({reason})")
        if self.client.embedding is not None:
            return Failed(status=400, code="invalid_value", message=f"the model does not embed so ({reason})")
        if self.client.images and not self.answer.tokens:
            return Failed(status=400, code="invalid_value", message=f"the model takes no such images ({reason})")
        why = f"the answer cannot go on as its constraint demands ({reason})"
        return Failed(status=400, code="constraint_stuck", message=why)

    def outcome(self, ended: bool) -> Outcome | None:
        """Return what became of the attempt under way, if it brought a token. `ended`: its answer is complete."""
        answer = self.answer
        if answer.ttft_s is None:
            return None
        return Outcome(
            ttft_s=max(0.0, answer.ttft_s),
            predicted_ttft_s=self.predicted[0],
            tbt_s=max(0.0, answer.gaps.tbt_s),
            predicted_tbt_s=self.predicted[1],
            max_tokens=self.client.stop.max_tokens - answer.resumed_at,
            output_tokens=len(answer.tokens) - answer.resumed_at,
            ended=ended,
        )

    def finished(self, reason: str) -> Finished:
        """Return the client's last event: the answer is complete."""
        own, local, remote = self.cached or (0, 0, 0)
        return Finished(
            reason=reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.answer.tokens),
            cached_own=own,
            cached_local=local,
            cached_remote=remote,
            prefill=self.prefill,
            decode=self.decode,
            attempts=self.tries,
            relocations=self.relocations,
            queue_s=self.prefill_times[0],
            prefill_s=self.prefill_times[1],
            versions=self._without_gaps(),
            computed_of_cached=self.computed_of_cached,
            parts=self.parts,
            recomputed=self.recomputed,
            borrowed_tokens=self.borrowed_tokens,
            selected=self.selected_from is not None,
            dropped=self.dropped,
        )

    def dump(self, now: float) -> dict[str, Any]:
        """Return the state for people and tools."""
        return {
            "request": self.request_id,
            "state": self.state.value,
            "attempt": self.attempt,
            "age_s": now - self.arrived_at,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": len(self.answer.tokens),
            "prefill": self.prefill,
            "decode": self.decode,
        }

    def _keys(self) -> list[bytes]:
        """Return the keys of the complete blocks of the prompt and the tokens so far. Of texts to embed none is reused, and
        what is evicted is computed as a whole and gets no key."""
        client, size = self.client, self.layout.block_tokens
        if client.embedding is not None or client.eviction is not None:
            return []
        full = len(client.keys) * size * 4
        parent = client.keys[-1] if client.keys else client.root
        begins = shifted([(image.begin, image.digest) for image in client.images], len(client.keys) * size)
        return [*client.keys, *keys_with_images(parent, client.tokens[full:] + pack_tokens(self.answer.tokens), size, begins)]
