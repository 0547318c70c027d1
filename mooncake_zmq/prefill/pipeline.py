"""A long prompt computed by several prefills, as its first stage plans it: which chunk is computed where and when. PURE.

Each stage computes some of the layers of every chunk, so that stages compute different chunks at the same time:

    stage 0   c0 c1 c2 c3
    stage 1      c0 c1 c2 c3
    stage 2         c0 c1 c2 c3

Only a chunk's hidden states are sent between stages, through one of two buffers of the sending stage. So a chunk begins on a
stage once the previous stage has computed it and the next stage has computed the chunk before the previous one, whose buffer it
takes. Thus no stage has more than two chunks to compute. The first stage leads: it sends the chunks to the other stages, and
they answer it.
"""

from typing import Any

from mooncake_zmq.core.actor import Effect, Send
from mooncake_zmq.core.chunking import chunk_stop, longest_chunk
from mooncake_zmq.core.messages import (
    MAX_PARTS,
    EndStage,
    HandoffBlocks,
    SlotRef,
    StageChunk,
    StageDone,
    StartPrefill,
    StartStage,
)
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.kv.layout import BlockLayout, div_ceil
from mooncake_zmq.prefill.slab import Slab

BUFFERS = 2
"""Chunks whose hidden states one stage holds."""


def hidden_slots(layout: BlockLayout, tokens: int) -> int:
    """Return the slots that the hidden states of a chunk take."""
    return div_ceil(tokens * layout.hidden_bytes, layout.block_bytes)


def chunk_refusal(layout: BlockLayout, tokens: int, layers: int) -> str | None:
    """Return why a stage of so many layers cannot report a chunk of so many tokens, or None."""
    return "chunks are too long for a pipeline" if layout.blocks_for(tokens) * layers > MAX_PARTS else None


def refusal(request: StartPrefill, first: str, layout: BlockLayout, chunk_tokens: int) -> str | None:
    """Return why a request cannot have its pipeline behind the prefill `first`, or None."""
    names = (first, *request.stages)
    if len(set(names)) != len(names) or len(names) > layout.layers:
        return "no such pipeline"
    if not layout.hidden_bytes:
        return "this model is not computed in stages"
    longest = longest_chunk(len(request.tokens) // 4, chunk_tokens)
    return chunk_refusal(layout, longest, div_ceil(layout.layers, len(names)))


class HiddenSlots:
    """Hold the buffers of one stage: slots of its slab, pinned and never committed."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self._used: set[int] = set()

    def reserve(self, slab: Slab, each: int) -> None:
        """Take the slots; the caller has checked that there is room."""
        self.slots += slab.reserve(BUFFERS * each)

    def take(self, slab: Slab, chunk: int, count: int) -> list[int]:
        """Return the slots for the hidden states of a chunk, with new generations, so that former readers cannot mistake the
        contents."""
        first = chunk % BUFFERS * (len(self.slots) // BUFFERS)
        for index in range(first, first + count):
            if index in self._used:
                slab.release([self.slots[index]])
                self.slots[index] = slab.reserve(1)[0]
            self._used.add(index)
        return self.slots[first : first + count]


class Group:
    """Plan the pipeline of one attempt. Stages are counted from the first, `names` are those of the later ones."""

    def __init__(self, request: StartPrefill, layout: BlockLayout, chunk_tokens: int) -> None:
        self.names = request.stages
        self.hidden = HiddenSlots()
        self.keys: tuple[bytes, ...] = ()
        """Keys of the blocks that may be reused."""
        self.outgoing: list[int] = []
        """Slots for the hidden states of the first stage's latest chunk."""
        self._request = request
        self._layout = layout
        self._longest = longest_chunk(len(request.tokens) // 4, chunk_tokens)
        self._chunk_tokens = chunk_tokens
        count = 1 + len(self.names)
        self._layers = [stage_layers(layout.layers, stage, count) for stage in range(count)]
        self._blocks: dict[str, int] = {}
        """Leading blocks that each later stage holds."""
        self._chunks: list[tuple[int, int]] = []
        self._begun = [0] * count
        self._done = [0] * count
        """Number of chunks begun and computed, by stage."""
        self._hidden_states: dict[tuple[int, int], tuple[SlotRef, ...]] = {}
        """Hidden states by stage and chunk, until they are announced to the next stage."""
        self._parts: dict[int, list[int]] = {}
        """Checksums of layers by block; a block's stages end in the order of its layers."""
        self._asked = False

    @property
    def share(self) -> float:
        """Fraction of the layers that the first stage computes."""
        return len(self._layers[0]) / self._layout.layers

    @property
    def own_layers(self) -> range:
        """Layers of the first stage."""
        return self._layers[0]

    @property
    def room(self) -> int:
        """Slots that the first stage needs. How many blocks all stages reuse is not known when it takes them."""
        blocks = self._layout.blocks_for(len(self._request.tokens) // 4)
        return blocks + BUFFERS * hidden_slots(self._layout, self._longest)

    # --- beginning

    def ask(self, deadline_s: float) -> list[Effect]:
        """Have the later stages make room and lease the blocks `keys`."""
        self._asked = True
        request = self._request
        return [
            Send(
                name,
                StartStage(
                    request_id=request.request_id,
                    attempt=request.attempt,
                    tokens=len(request.tokens) // 4,
                    chunk_tokens=self._longest,
                    first_layer=layers.start,
                    stop_layer=layers.stop,
                    keys=self.keys,
                    reuse_blocks=request.reuse_blocks,
                    sources=request.sources,
                    sampling=request.sampling,
                    deadline_s=deadline_s,
                    booking=request.booking,
                    priority=request.priority,
                    tenant=request.tenant,
                    past=request.sampling.past(request.tokens),
                    seeds=tuple([each.seed for each in request.siblings]),
                ),
            )
            for name, layers in zip(self.names, self._layers[1:], strict=True)
        ]

    def take_room(self, slab: Slab) -> list[int]:
        """Take the first stage's slots: return those for blocks, keep those for hidden states in `hidden`."""
        self.hidden.reserve(slab, hidden_slots(self._layout, self._longest))
        return slab.reserve(self._layout.blocks_for(len(self._request.tokens) // 4))

    def on_ready(self, name: str, blocks: int) -> bool:
        """Record that a later stage is ready. Returns whether all are."""
        self._blocks[name] = blocks
        return len(self._blocks) == len(self.names)

    def common_blocks(self, own: int) -> int:
        """Return how many leading blocks all stages can load."""
        return min(own, *self._blocks.values())

    def plan(self, start: int) -> None:
        """Plan the chunks from token `start` on, once all stages are ready."""
        length = len(self._request.tokens) // 4
        while start < length:
            stop = chunk_stop(start, length, self._chunk_tokens)
            self._chunks.append((start, stop))
            start = stop

    # --- computing

    def may_begin(self, stage: int) -> bool:
        """Return whether the stage may begin its next chunk."""
        chunk = self._begun[stage]
        here = stage == 0 or self._done[stage - 1] > chunk
        is_last = stage == len(self.names)
        return chunk < len(self._chunks) and here and (is_last or self._done[stage + 1] > chunk - BUFFERS)

    def begin_own(self, slab: Slab) -> list[int]:
        """Begin the first stage's next chunk. Returns the slots for its hidden states."""
        assert self.may_begin(0)
        chunk = self._begun[0]
        self._begun[0] += 1
        start, stop = self._chunks[chunk]
        self.outgoing = self.hidden.take(slab, chunk, hidden_slots(self._layout, stop - start))
        return self.outgoing

    def expects(self, name: str, message: StageDone) -> bool:
        """Return whether this message completes the chunk that the stage called `name` computes."""
        stage = 1 + self.names.index(name)
        chunk = self._done[stage]
        if chunk >= self._begun[stage] or self._chunks[chunk][0] != message.start:
            return False
        start, stop = self._chunks[chunk]
        blocks = self._layout.blocks_for(stop) - start // self._layout.block_tokens
        is_last = stage == len(self.names)
        return (
            len(message.sources) == blocks
            and len(message.parts) == blocks * len(self._layers[stage])
            and len(message.outgoing) == (0 if is_last else hidden_slots(self._layout, stop - start))
            and (message.token is not None) == (is_last and chunk + 1 == len(self._chunks))
            and len(message.others) == (0 if message.token is None else len(self._request.siblings))
        )

    def on_done(self, name: str, message: StageDone) -> list[Effect]:
        """Record that a later stage has computed the chunk expected from it."""
        return self._end(1 + self.names.index(name), message.sources, message.parts, message.outgoing)

    def on_own_done(self, sources: tuple[SlotRef, ...], parts: tuple[int, ...], outgoing: tuple[SlotRef, ...]) -> list[Effect]:
        """Record that the first stage has computed a chunk."""
        return self._end(0, sources, parts, outgoing)

    def _end(
        self, stage: int, sources: tuple[SlotRef, ...], parts: tuple[int, ...], outgoing: tuple[SlotRef, ...]
    ) -> list[Effect]:
        """Announce this stage's layers to the decode, and to the stages the chunks that they may begin."""
        chunk, layers = self._done[stage], self._layers[stage]
        self._done[stage] += 1
        first_block = self._chunks[chunk][0] // self._layout.block_tokens
        for index in range(len(sources)):
            of_block = parts[index * len(layers) : (index + 1) * len(layers)]
            self._parts.setdefault(first_block + index, []).extend(of_block)
        if outgoing:
            self._hidden_states[stage, chunk] = outgoing
        handoff = HandoffBlocks(
            request_id=self._request.request_id,
            attempt=self._request.attempt,
            first_block=first_block,
            sources=sources,
            ready=True,
            first_layer=layers.start,
            stop_layer=layers.stop,
        )
        return [Send(self._request.decode, handoff), *self._advance()]

    def _advance(self) -> list[Effect]:
        effects: list[Effect] = []
        for stage, name in enumerate(self.names, 1):
            while self.may_begin(stage):
                chunk = self._begun[stage]
                self._begun[stage] += 1
                start, stop = self._chunks[chunk]
                message = StageChunk(
                    request_id=self._request.request_id,
                    attempt=self._request.attempt,
                    start=start,
                    count=stop - start,
                    entering=self._hidden_states.pop((stage - 1, chunk)),
                )
                effects.append(Send(name, message))
        return effects

    # --- ending

    @property
    def finished(self) -> bool:
        """Whether all stages have computed all chunks."""
        return bool(self._chunks) and self._done[-1] == len(self._chunks)

    def checksums(self) -> list[int]:
        """Return the checksums of all computed blocks in order, over the layers of all stages."""
        assert self.finished
        return [block_checksum(self._parts[block]) for block in sorted(self._parts)]

    def offer(self, first_block: int) -> dict[str, Any]:
        """Return the fields of a `HandoffDone` by which the decode offers the blocks from this one on, which no stage has
        completely."""
        keys, size = self._request.keys, self._layout.block_tokens * 4
        return {
            "keys": keys[first_block:],
            "parent": keys[first_block - 1] if first_block else None,
            "block_tokens": self._request.tokens[first_block * size : len(keys) * size],
        }

    def dismiss(self) -> list[Effect]:
        """End the later stages, once."""
        asked, self._asked = self._asked, False
        message = EndStage(request_id=self._request.request_id, attempt=self._request.attempt)
        return [Send(name, message) for name in self.names] if asked else []


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """Return the layers that stage `stage` of `stages` computes: in order, in numbers as equal as possible."""
    return range(layers * stage // stages, layers * (stage + 1) // stages)
