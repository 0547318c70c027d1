"""Bugs planted in prefills and decodes, see `planted`. Simulation only."""

from typing import Any

from msgspec import structs

from mooncake_zmq.core.actor import Effect, Start
from mooncake_zmq.core.messages import FirstToken, SlotRef, StartPrefill
from mooncake_zmq.core.work import StepDecoded
from mooncake_zmq.decode import ends as decode_ends
from mooncake_zmq.decode import handoff as decode_handoff
from mooncake_zmq.decode import request as decode_request
from mooncake_zmq.decode import steps as decode_steps
from mooncake_zmq.decode.borrowing import Borrowing
from mooncake_zmq.decode.kept import Kept
from mooncake_zmq.decode.lending import Lending
from mooncake_zmq.gateway.requests import request as gateway_request
from mooncake_zmq.kv.block_hash import extend_keys
from mooncake_zmq.prefill.computing import Computing
from mooncake_zmq.prefill.handoff import Handoff
from mooncake_zmq.prefill.job import Blend, JobState
from mooncake_zmq.prefill.meeting import Meeting
from mooncake_zmq.prefill.offers import Offers
from mooncake_zmq.prefill.pipeline import BUFFERS, Group, HiddenSlots
from mooncake_zmq.prefill.prefill import Prefill
from mooncake_zmq.prefill.stages import Stages
from mooncake_zmq.simulation.planted_stores import Replacements, silent


def closed_under_copy() -> Replacements:
    """A request that ends frees its KV although a work still uses it."""
    try_end = decode_ends.Ends.try_end

    def end_now(self: decode_ends.Ends, request: Any) -> list[Effect]:
        request.in_flight = 0
        return try_end(self, request)

    return [(decode_ends.Ends, "try_end", end_now)]


def kept_unverified() -> Replacements:
    """A decode keeps the KV of a request that ended before all of it had come."""
    end = Kept.end

    def end_any(self: Kept, request: Any) -> list[Effect]:
        request.verified_at = 1.0
        return end(self, request)

    return [(Kept, "end", end_any)]


def kept_closed() -> Replacements:
    """A decode frees KV that it kept although a request copies it."""
    read = Kept.read

    def unnoticed(self: Kept, kept: Any) -> None:
        read(self, kept)
        kept.readers = 0

    return [(Kept, "read", unnoticed)]


def stale_hidden() -> Replacements:
    """A stage writes a chunk's hidden states over those that the next stage has still to read, under the same generation."""

    def hurried(self: Any, stage: int) -> bool:
        chunk = self._begun[stage]
        return chunk < len(self._chunks) and (stage == 0 or self._done[stage - 1] > chunk)

    def taken(self: Any, slab: Any, chunk: int, count: int) -> list[int]:
        first = chunk % BUFFERS * (len(self.slots) // BUFFERS)
        return list(self.slots[first : first + count])

    def always(*_: object) -> bool:
        return True

    return [
        (Group, "may_begin", hurried),
        (HiddenSlots, "take", taken),
        (Stages, "_follows", always),
        (Stages, "check", silent),
    ]


def one_seed() -> Replacements:
    """All choices are given the first one's token."""
    finish = Handoff.finish

    def alike(self: Handoff, now: float, job: Any, sampled: Any, layers: Any = ()) -> list[Effect]:
        return finish(self, now, job, sampled[:1] * len(sampled), layers)

    return [(Handoff, "finish", alike)]


def coming_believed() -> Replacements:
    """A chunk's blocks count as computed when it begins."""
    begin = Computing.begin

    def early(self: Computing, now: float, job: Any) -> list[Effect]:
        effects = begin(self, now, job)
        if job.state is JobState.COMPUTING and job.group is None:
            blocks = job.chunk_stop // self._layout.block_tokens - job.chunk_first_block
            written = job.checksums
            job.checksums = [*written, *[1] * blocks]
            effects += self._offers.keep_chunk(now, job)
            job.checksums = written
        return effects

    keep = _once(Offers.keep_chunk)
    return [(Computing, "begin", early), (Offers, "keep_chunk", keep), (Prefill, "check", silent)]


def _once(keep: Any) -> Any:
    """Return a function that keeps a chunk's blocks, unless they are kept."""

    def unless_kept(self: Offers, now: float, job: Any) -> list[Effect]:
        first, base = job.chunk_first_block, len(job.prefix)
        slots = job.new_slots[first - base : job.chunk_stop // self._layout.block_tokens - base]
        writing = self._slab.slots.being_written(slots) == slots
        effects: list[Effect] = keep(self, now, job) if writing else []
        return effects

    return unless_kept


def tail_misplaced() -> Replacements:
    """Blocks that came from the tail are loaded in the order in which they came."""
    take_run = Meeting.take_run

    def as_they_came(self: Meeting, block: int) -> list[SlotRef]:
        came = list(self.arrived.values())
        return came[: len(take_run(self, block))]

    return [(Meeting, "take_run", as_they_came)]


def blend_committed() -> Replacements:
    """A prefill gives blended blocks the keys that exact ones would have."""
    keep = Offers.keep_chunk

    def keep_all(self: Offers, now: float, job: Any) -> list[Effect]:
        blend, job.blend = job.blend, None
        effects = keep(self, now, job)
        job.blend = blend
        return effects

    return [(Offers, "keep_chunk", keep_all), (Prefill, "check", silent)]


def blend_decoded() -> Replacements:
    """A decode keeps and offers what it decodes behind blended KV as if that were exact."""

    def keep(self: decode_request.Request, blocks: int) -> None:
        del self.keys[blocks:]

    return [(decode_request.Request, "keep_exact", keep)]


def selected_kv_put() -> Replacements:
    """A decode keeps and offers what it decodes over few of many tokens as if that were exact."""
    select = decode_request.Request.select

    def as_if_exact(self: decode_request.Request, *, may_begin: bool) -> Any:
        before = self.is_exact, list(self.keys)
        choice = select(self, may_begin=may_begin)
        self.is_exact, self.keys[:] = before
        return choice

    return [(decode_request.Request, "select", as_if_exact)]


def selected_unreported() -> Replacements:
    """A decode does not say that it attended to few of many tokens."""
    decoded = decode_steps._decoded

    def silently(entries: Any) -> Any:
        return structs.replace(decoded(entries), approximate=())

    return [(decode_steps, "_decoded", silently)]


def blend_kept() -> Replacements:
    """A decode keeps blended blocks under the keys that exact ones would have."""

    def keep(self: decode_request.Request, _blocks: int) -> None:
        self.is_exact = False

    return [(decode_request.Request, "keep_exact", keep)]


def blend_unreported() -> Replacements:
    """A prefill does not say of a first token that it is over blended KV."""
    return [(Blend, "tokens", property(lambda _: 0))]


def evicted_kv_put() -> Replacements:
    """A prefill gives blocks of the tokens that it kept the keys that exact ones would have."""
    keep = Offers.keep_chunk

    def keep_evicted(self: Offers, now: float, job: Any) -> list[Effect]:
        request, size = job.request, self._layout.block_tokens
        if request.eviction is not None and job.computed == job.length:
            keys = extend_keys(request.root, request.tokens, size)[: request.eviction.kept // size]
            job.request = structs.replace(request, keys=tuple(keys))
        effects = keep(self, now, job)
        job.request = request
        return effects

    return [(Offers, "keep_chunk", keep_evicted), (Prefill, "check", silent)]


def evicted_unreported() -> Replacements:
    """A prefill does not say of a first token that KV is dropped behind it."""
    first_tokens = Handoff._first_tokens

    def silently(self: Handoff, *arguments: Any) -> list[FirstToken]:
        return [structs.replace(each, dropped=0) for each in first_tokens(self, *arguments)]

    return [(Handoff, "_first_tokens", silently)]


def exact_ignored() -> Replacements:
    """A gateway does not say that an answer must be exact."""
    start = gateway_request.Request.start

    def lax(self: gateway_request.Request, *arguments: Any) -> StartPrefill:
        return structs.replace(start(self, *arguments), exact=False)

    return [(gateway_request.Request, "start", lax)]


def loan_twice() -> Replacements:
    """A decode has what a lender holds merged twice."""
    connect = Borrowing._connect

    def twice(self: Borrowing, request: Any) -> Effect:
        start: Any = connect(self, request)
        parts = (*start.work.parts, start.work.parts[-1])
        return Start(start.work_id, structs.replace(start.work, parts=parts), start.deadline_s)

    return [(Borrowing, "_connect", twice)]


def lent_freed() -> Replacements:
    """A decode frees what it lent while it is asked for it."""
    return [(Lending, "_take_back", Lending._free), (Lending, "check", silent)]


def late_taken() -> Replacements:
    """A decode takes a token of a request whose lender was late."""
    stepped = decode_steps.Steps.on_stepped

    def careless(self: decode_steps.Steps, now: float, result: Any) -> list[Effect]:
        return stepped(self, now, structs.replace(result, late=()) if isinstance(result, StepDecoded) else result)

    return [(decode_steps.Steps, "on_stepped", careless)]


def held_unread() -> Replacements:
    """A decode whose pool got fewer blocks than it was to have takes the others as read: they are never handed off."""

    def trusting(self: decode_handoff.Handoff, now: float, request: Any, segment: Any, sources: Any) -> list[Effect]:
        request.segment = None
        layers = self._layout.layers
        request.want_held(segment, sources, layers, self._layout.block_tokens)
        for block in range(segment.first + len(sources), segment.first + segment.blocks):
            request.parts[block * layers : (block + 1) * layers] = [0] * layers
        return self._lease_held(now, request) + self._pull(now, request) + self._verify(now, request)

    return [(decode_handoff.Handoff, "_take_segment", trusting)]
