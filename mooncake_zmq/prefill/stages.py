"""A prefill as a later stage of pipelines that other prefills lead: room, reuse, chunks, and the end. PURE.

It talks only to the first stage, which sends every chunk and is notified of a failure. Any failure ends the stage, and the
first stage with it, so that the request is placed again. A stage never waits for room: two pipelines could do so in a circle.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from mooncake_zmq.core.actor import CancelTimer, CancelWork, CloseSequence, Effect, OpenSequence, Send, SetTimer, Start
from mooncake_zmq.core.actor_parts import Ids, Lifecycle, Named, Tally
from mooncake_zmq.core.drain import Drain
from mooncake_zmq.core.messages import (
    EndStage,
    QueuedJob,
    SlotRef,
    StageChunk,
    StageDone,
    StageFailed,
    StageReady,
    StartStage,
    clip,
)
from mooncake_zmq.core.work import (
    BlockLoad,
    ComputeChunk,
    ComputeStage,
    SampleTokens,
    StageComputed,
    TokensSampled,
    WorkFailed,
)
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.node.client import PoolClient
from mooncake_zmq.prefill.pipeline import BUFFERS, HiddenSlots, chunk_refusal, hidden_slots
from mooncake_zmq.prefill.reuse import LEASE_ENDED, Reuse
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.prefill.slab import Slab
from mooncake_zmq.prefill.workload import Workload

DEADLINE = "stage deadline"


class StageState(Named):
    """States of a stage."""

    LEASING = "leasing"
    """Waiting for the own pool's answer on which leading blocks it holds."""
    READY = "ready"
    """Waiting for a chunk, or for its turn to compute one."""
    COMPUTING = "computing"
    SAMPLING = "sampling"
    """Computed, but the mask of the first token is not ready."""
    ABANDONED = "abandoned"
    """The stage ended, but a chunk in flight still writes its slots."""
    ENDED = "ended"


class StageEvent(Named):
    """Events that change the state of a stage."""

    LEASED = "leased"
    CHUNK_BEGAN = "chunk"
    CHUNK_DONE = "chunk done"
    SET_ASIDE = "set aside"
    SAMPLED = "sampled"
    END = "end"


NEXT_STATE: dict[tuple[StageState, StageEvent], StageState] = {
    (StageState.LEASING, StageEvent.LEASED): StageState.READY,
    (StageState.READY, StageEvent.CHUNK_BEGAN): StageState.COMPUTING,
    (StageState.COMPUTING, StageEvent.CHUNK_DONE): StageState.READY,
    (StageState.READY, StageEvent.SET_ASIDE): StageState.SAMPLING,
    (StageState.SAMPLING, StageEvent.SAMPLED): StageState.READY,
    (StageState.SAMPLING, StageEvent.END): StageState.ENDED,
    (StageState.LEASING, StageEvent.END): StageState.ENDED,
    (StageState.READY, StageEvent.END): StageState.ENDED,
    (StageState.COMPUTING, StageEvent.END): StageState.ABANDONED,
    (StageState.ABANDONED, StageEvent.END): StageState.ENDED,
}


@dataclass(slots=True)
class Stage:
    """The layers of one attempt that are computed here."""

    request: StartStage
    leader: str
    order: int
    rank: float
    arrived_at: float
    state: StageState = StageState.LEASING
    sequence: int | None = None
    computed: int = 0
    """Tokens before the next chunk."""
    begun: int = 0
    """Number of chunks begun."""
    chunks: deque[StageChunk] = field(default_factory=deque)
    """The chunk in flight first, then those that wait."""
    prefix: list[SlotRef] = field(default_factory=list)
    """Reused blocks; from the first chunk on, only those before it."""
    own_slots: list[int] = field(default_factory=list)
    new_slots: list[int] = field(default_factory=list)
    """Slots for all blocks of the prompt, in order."""
    hidden: HiddenSlots = field(default_factory=HiddenSlots)
    outgoing: list[int] = field(default_factory=list)
    """Slots for the hidden states of the chunk in flight."""
    lease_id: int | None = None
    unsampled: StageDone | None = None
    """Message to the first stage, kept for the first tokens while the stage is set aside."""
    sampling_id: int = 0
    """The work that samples the first tokens."""

    @property
    def layers(self) -> range:
        """Layers computed here."""
        return range(self.request.first_layer, self.request.stop_layer)

    @property
    def held_slots(self) -> list[int]:
        """Slab slots pinned for it, each as often as it is pinned."""
        return self.own_slots + self.new_slots + self.hidden.slots


class Stages:
    """Run all pipelines in which a prefill is a later stage. They share the prefill's slab, pool and engine; this class
    names the stage whose turn it would be, and the prefill decides."""

    def __init__(
        self,
        *,
        settings: PrefillSettings,
        layout: BlockLayout,
        slab: Slab,
        pool: PoolClient,
        workload: Workload,
        reuse: Reuse,
        drain: Drain,
        ids: Ids,
        counts: Tally,
        transitions: Tally,
    ) -> None:
        self.computing: tuple[int, Stage] | None = None
        """The work in flight, and its stage."""
        self._stages: OrderedDict[str, Stage] = OrderedDict()
        """Live stages by request."""
        self._sampling: dict[int, Stage] = {}
        """Stages set aside, by the works that sample their first tokens."""
        self._abandoned: list[Stage] = []
        self._settings = settings
        self._layout = layout
        self._slab = slab
        self._pool = pool
        self._workload = workload
        self._reuse = reuse
        self._drain = drain
        self._ids = ids
        self._counts = counts
        self._lifecycle = Lifecycle("prefill stage", NEXT_STATE, transitions)

    def __len__(self) -> int:
        return len(self._stages) + len(self._abandoned)

    @property
    def held_slots(self) -> list[int]:
        """Slab slots pinned here, each as often as it is pinned."""
        return [slot for stage in self._all() for slot in stage.held_slots]

    def check(self) -> None:
        for stage in self._all():
            assert stage.state is not StageState.ENDED
            assert (stage.state is StageState.ABANDONED) == (stage in self._abandoned)
            assert len(stage.chunks) <= BUFFERS
        sampling = {id(s) for s in self._all() if s.state is StageState.SAMPLING}
        assert sampling == {id(s) for s in self._sampling.values()}
        computing = [s for s in self._all() if s.state in (StageState.COMPUTING, StageState.ABANDONED)]
        assert len(computing) == (self.computing is not None)

    def dump(self, now: float) -> list[dict[str, Any]]:
        """Return the state of each stage as JSON-able values."""
        return [
            {
                "request": stage.request.request_id,
                "attempt": stage.request.attempt,
                "state": stage.state.value,
                "age_s": now - stage.arrived_at,
                "leader": stage.leader,
                "layers": [stage.request.first_layer, stage.request.stop_layer],
                "tokens": stage.request.tokens,
                "computed": stage.computed,
            }
            for stage in self._all()
        ]

    def report(self, now: float) -> list[QueuedJob]:
        """Return the remaining work, for the load report."""
        live = [stage for stage in self._stages.values() if stage.computed < stage.request.tokens]
        return [
            self._workload.stage(now, stage.request, stage.rank, computed=stage.computed, share=self._share(stage.request))
            for stage in live
        ]

    # --- beginning

    def on_start(self, now: float, sender: str, message: StartStage) -> list[Effect]:
        """Accept a stage, or answer why not."""
        current = self._stages.get(message.request_id)
        if current is not None and current.request.attempt >= message.attempt:
            same = current.request.attempt == message.attempt and current.leader == sender
            return [] if same else [_failed(sender, message, "a newer attempt is here")]
        effects = [] if current is None else self._fail(current, "a newer attempt is here")
        refusal = self._refusal(message)
        slots = self._slab.slots
        own = self._reuse.own_hits(message.keys)
        if self._room(message) + len(own) > slots.capacity:  # they would keep the room from it for good
            own = []
        slots.pin(own)
        lack = refusal or self._lack(message)
        if lack is not None:
            slots.unpin(own)
            self._counts.add("stages_refused")
            return [*effects, _failed(sender, message, lack, full=refusal is None)]
        share = self._share(message)
        stage = Stage(
            request=message,
            leader=sender,
            order=self._ids.new(),
            rank=self._workload.rank(now, message, message.tokens, share),
            arrived_at=now,
            own_slots=own,
        )
        self._stages[message.request_id] = stage
        stage.prefix += self._slab.refs(own)
        stage.new_slots = self._slab.reserve(self._layout.blocks_for(message.tokens))
        stage.hidden.reserve(self._slab, self._hidden_slots(message))
        key = (DEADLINE, message.request_id, message.attempt)
        effects.append(SetTimer(key, message.deadline_s))
        return effects + self._lease(now, stage)

    def _refusal(self, message: StartStage) -> str | None:
        """Return why this prefill can never take the request, or None."""
        layers = self._layout.layers
        if not 0 < message.first_layer < message.stop_layer <= layers or not self._layout.hidden_bytes:
            return "no such stage of this model"
        if not 0 < message.chunk_tokens <= message.tokens or len(message.keys) * self._layout.block_tokens >= message.tokens:
            return "chunks or keys do not match tokens"
        sampling = message.sampling
        known = self._layout.has_tokens(message.past) and self._layout.has_token(sampling.largest_token)
        if not known or not sampling.fits(message.past, message.tokens):
            return "sampling does not match tokens"
        if self._room(message) > self._slab.slots.capacity:
            return "prompt is longer than the slab"
        return chunk_refusal(self._layout, message.chunk_tokens, message.stop_layer - message.first_layer)

    def _lack(self, message: StartStage) -> str | None:
        """Return what is missing for now, or None."""
        if self._drain.draining:
            return "prefill is draining"
        if len(self) >= self._settings.max_active:
            return "too many stages"
        return "no room in the slab" if self._room(message) > self._slab.slots.available else None

    def _room(self, message: StartStage) -> int:
        return self._layout.blocks_for(message.tokens) + BUFFERS * self._hidden_slots(message)

    def _hidden_slots(self, message: StartStage) -> int:
        is_last = message.stop_layer == self._layout.layers
        return 0 if is_last else hidden_slots(self._layout, message.chunk_tokens)

    def _lease(self, now: float, stage: Stage) -> list[Effect]:
        """Lease the blocks that the own slab does not hold."""
        wanted = stage.request.keys[len(stage.prefix) :]
        promised = bool(wanted) and len(stage.prefix) < stage.request.reuse_blocks
        if not wanted or not (promised or self._pool.node is not None):
            return self._begin(stage)
        stage.lease_id = self._ids.new()
        share = self._share(stage.request)
        return self._pool.lease(
            now,
            stage.lease_id,
            wanted,
            stage.request.sources,
            fetch=promised,
            compute_s=share * self._workload.block_s(now),
            wait_s=share * self._workload.spared_s(now, stage.request, stage.request.tokens, len(stage.prefix)),
        )

    def on_leased(self, lease_id: int, sources: tuple[SlotRef, ...]) -> list[Effect] | None:
        """Handle the pool's answer to a lease; return None if it is not the lease of a stage."""
        stage = next((s for s in self._stages.values() if s.lease_id == lease_id), None)
        if stage is None or stage.state is not StageState.LEASING:
            return None
        stage.prefix += sources[: len(stage.request.keys) - len(stage.prefix)]  # no more than requested
        return self._begin(stage)

    def _begin(self, stage: Stage) -> list[Effect]:
        self._move(stage, StageEvent.LEASED)
        stage.sequence = self._ids.new()
        request = stage.request
        ready = StageReady(request_id=request.request_id, attempt=request.attempt, blocks=len(stage.prefix))
        tokens = request.tokens
        opened = OpenSequence(stage.sequence, tokens, request.sampling, request.past, tokens, request.tenant)
        return [opened, Send(stage.leader, ready)]

    # --- chunks

    def on_chunk(self, _now: float, sender: str, message: StageChunk) -> list[Effect]:
        """Queue a chunk for computation."""
        stage = self._live(sender, message.request_id, message.attempt)
        if stage is None or stage.state is StageState.LEASING:
            return []
        if not self._follows(stage, message):
            return self._fail(stage, "a chunk out of order")
        if not stage.begun and not stage.chunks:
            stage.computed = message.start
            del stage.prefix[message.start // self._layout.block_tokens :]
        stage.chunks.append(message)
        return []

    def _follows(self, stage: Stage, message: StageChunk) -> bool:
        if len(stage.chunks) >= BUFFERS or not 0 < message.count <= stage.request.chunk_tokens:
            return False
        if len(message.entering) != hidden_slots(self._layout, message.count):
            return False
        if stage.chunks:
            begins = message.start == stage.chunks[-1].start + stage.chunks[-1].count
        elif stage.begun:
            begins = message.start == stage.computed
        else:
            blocks, rest = divmod(message.start, self._layout.block_tokens)
            begins = rest == 0 and blocks <= len(stage.prefix)
        return begins and message.start + message.count <= stage.request.tokens

    def first(self) -> Stage | None:
        """Return the stage whose turn it is among those here."""
        if not self._stages:
            return None
        waiting = [stage for stage in self._stages.values() if stage.state is StageState.READY and stage.chunks]
        return min(waiting, key=lambda stage: (stage.rank, stage.order), default=None)

    def compute(self, now: float, stage: Stage) -> list[Effect]:
        """Compute the next chunk of a stage, or fail the stage."""
        assert stage.sequence is not None
        chunk, layers = stage.chunks[0], stage.layers
        deadline_s = prefix_s = self._settings.work_deadline_s
        prefix: tuple[BlockLoad, ...] = ()
        if not stage.begun and stage.prefix:
            prefix_s = self._reuse.time_s(now, stage)
            if prefix_s <= 0:
                return self._fail(stage, LEASE_ENDED)
            prefix = self._reuse.loads(stage, layers)
        self._move(stage, StageEvent.CHUNK_BEGAN)
        is_last = layers.stop == self._layout.layers
        if not is_last:
            stage.outgoing = stage.hidden.take(self._slab, stage.begun, hidden_slots(self._layout, chunk.count))
        ends = chunk.start + chunk.count == stage.request.tokens
        stage.begun += 1
        work = ComputeStage(
            chunk=ComputeChunk(
                sequence=stage.sequence,
                start=chunk.start,
                tokens=b"",
                prefix=prefix,
                outputs=self._slab.grants(self._blocks_of(stage, chunk)),
                sampling=stage.request.sampling if is_last and ends else None,
                prefix_s=prefix_s,
                seeds=stage.request.seeds if is_last and ends else (),
            ),
            count=chunk.count,
            first_layer=layers.start,
            stop_layer=layers.stop,
            entering=chunk.entering,
            outgoing=self._slab.grants(stage.outgoing),
        )
        work_id = self._ids.new()
        self.computing = (work_id, stage)
        return [Start(work_id, work, deadline_s)]

    def is_computing(self, work_id: int) -> bool:
        """Return whether this work is the chunk in flight."""
        return self.computing is not None and self.computing[0] == work_id

    def on_computed(self, now: float, result: StageComputed | WorkFailed) -> list[Effect]:
        """Handle the end of the chunk in flight."""
        assert self.computing is not None
        stage = self.computing[1]
        self.computing = None
        if stage.state is StageState.ABANDONED:
            return self._end(stage)
        self._move(stage, StageEvent.CHUNK_DONE)
        if isinstance(result, WorkFailed):
            self._counts.add("chunks_failed")
            return self._fail(stage, f"chunk failed: {result.reason}", stuck=result.stuck)
        if result.failed:
            reason, unreached, reports = self._reuse.not_loaded(dict(enumerate(stage.prefix)), result)
            return reports + self._fail(stage, reason, unreached=unreached)
        chunk = stage.chunks.popleft()
        stop = chunk.start + chunk.count
        loaded = chunk.start if stage.begun == 1 and stage.prefix else 0
        share = self._share(stage.request)
        self._workload.measure(now, result, start=chunk.start, stop=stop, loaded=loaded, share=share)
        self._counts.add("stage_tokens_computed", chunk.count)
        stage.computed = stop
        done = StageDone(
            request_id=stage.request.request_id,
            attempt=stage.request.attempt,
            start=chunk.start,
            sources=self._slab.written(self._blocks_of(stage, chunk)),
            parts=result.parts,
            outgoing=self._slab.written(stage.outgoing),
            token=result.token,
            logprob=result.logprob,
            others=result.others,
        )
        samples = stage.layers.stop == self._layout.layers and stop == stage.request.tokens
        return [self._set_aside(stage, done)] if samples and result.token is None else [Send(stage.leader, done)]

    def _set_aside(self, stage: Stage, done: StageDone) -> Effect:
        """Sample the first token later, since its grammar mask is not ready; other stages take turns until then."""
        assert stage.sequence is not None
        self._move(stage, StageEvent.SET_ASIDE)
        self._counts.add("jobs_set_aside")
        stage.unsampled, stage.sampling_id = done, self._ids.new()
        self._sampling[stage.sampling_id] = stage
        return Start(stage.sampling_id, SampleTokens(stage.sequence), self._settings.work_deadline_s)

    def is_sampling(self, work_id: int) -> bool:
        """Return whether this work samples first tokens here."""
        return work_id in self._sampling

    def on_sampled(self, work_id: int, result: TokensSampled | WorkFailed) -> list[Effect]:
        """Handle the end of a work that samples a stage's first tokens."""
        stage = self._sampling.pop(work_id)
        self._move(stage, StageEvent.SAMPLED)
        if isinstance(result, WorkFailed):
            return self._fail(stage, f"no first token: {result.reason}", stuck=result.stuck)
        assert stage.unsampled is not None
        (token, logprob), *others = result.sampled
        return [Send(stage.leader, structs.replace(stage.unsampled, token=token, logprob=logprob, others=tuple(others)))]

    # --- ends

    def on_end(self, _now: float, sender: str, message: EndStage) -> list[Effect]:
        """End a stage that the first stage needs no more."""
        stage = self._live(sender, message.request_id, message.attempt)
        return [] if stage is None else self._end(stage)

    def on_deadline(self, request_id: str, attempt: int) -> list[Effect]:
        """End a stage whose request has reached its deadline."""
        stage = self._stages.get(request_id)
        if stage is None or stage.request.attempt != attempt:
            return []
        return self._fail(stage, "deadline passed in a stage")

    def peer_down(self, peer: str) -> list[Effect]:
        """End the stages whose leader is down, and continue those that wait for a pool that is down without it. To be called
        after the pool's client was notified."""
        effects: list[Effect] = []
        for stage in list(self._stages.values()):
            if stage.leader == peer:
                effects += self._end(stage)
            elif stage.lease_id is not None and stage.state is StageState.LEASING and not self._pool.wants(stage.lease_id):
                stage.lease_id = None
                effects += self._begin(stage)
        return effects

    def hand_over(self, reason: str) -> list[Effect]:
        """End all remaining stages; they count as ones for which there is no room."""
        return [e for stage in list(self._stages.values()) for e in self._fail(stage, reason, full=True)]

    def _fail(
        self, stage: Stage, reason: str, *, full: bool = False, unreached: bool = False, stuck: bool = False
    ) -> list[Effect]:
        self._counts.add("stages_failed")
        failed = _failed(stage.leader, stage.request, reason, full=full, unreached=unreached, stuck=stuck)
        return [failed, *self._end(stage)]

    def _end(self, stage: Stage) -> list[Effect]:
        """Free everything that a stage holds; slots that a chunk in flight still writes, once that has ended."""
        effects: list[Effect] = []
        if self._sampling.pop(stage.sampling_id, None) is not None:
            effects.append(CancelWork(stage.sampling_id))
        self._move(stage, StageEvent.END)
        request = stage.request
        if self._stages.get(request.request_id) is stage:
            del self._stages[request.request_id]
            effects.append(CancelTimer((DEADLINE, request.request_id, request.attempt)))
        if stage.state is StageState.ABANDONED:
            assert self.computing is not None
            self._abandoned.append(stage)
            return [*effects, CancelWork(self.computing[0])]
        if stage in self._abandoned:
            self._abandoned.remove(stage)
        if stage.lease_id is not None:
            effects += self._pool.release(stage.lease_id)
        if stage.sequence is not None:
            effects.append(CloseSequence(stage.sequence))
        self._slab.slots.unpin(stage.own_slots)
        self._slab.release(stage.new_slots + stage.hidden.slots)
        return effects

    # --- helpers

    def _all(self) -> list[Stage]:
        return [*self._stages.values(), *self._abandoned]

    def _live(self, leader: str, request_id: str, attempt: int) -> Stage | None:
        stage = self._stages.get(request_id)
        current = stage is not None and stage.leader == leader and stage.request.attempt == attempt
        return stage if current else None

    def _share(self, request: StartStage) -> float:
        return (request.stop_layer - request.first_layer) / self._layout.layers

    def _blocks_of(self, stage: Stage, chunk: StageChunk) -> list[int]:
        first = chunk.start // self._layout.block_tokens
        return stage.new_slots[first : self._layout.blocks_for(chunk.start + chunk.count)]

    def _move(self, stage: Stage, event: StageEvent) -> None:
        stage.state = self._lifecycle.after(stage.state, event)


def _failed(
    leader: str,
    request: StartStage,
    reason: str,
    *,
    full: bool = False,
    unreached: bool = False,
    stuck: bool = False,
) -> Send:
    failed = StageFailed(
        request_id=request.request_id,
        attempt=request.attempt,
        reason=clip(reason),
        full=full,
        unreached=unreached,
        stuck=stuck,
    )
    return Send(leader, failed)
