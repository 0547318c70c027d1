"""One request at a decode and the table of its life. PURE."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mooncake_zmq.core.gaps import longest_step_s
from mooncake_zmq.core.messages import DecodeTimes, HandoffDone, ReserveDecode, SlotRef
from mooncake_zmq.core.shell import Named
from mooncake_zmq.core.work import BlockLoad
from mooncake_zmq.kv.block_hash import Key, extend_keys, pack_tokens

MISSING = -1


class RequestState(Named):
    """Life of a request here."""

    LOADING = "loading"
    """KV is reserved, and being filled by the handoff and from the host's pool."""
    READY = "ready"
    """Handoff verified; may join the batch."""
    STEPPING = "stepping"
    SITTING_OUT = "sitting out"
    """Its token is sampled once it is known what may come next there; others step meanwhile."""
    CLOSING = "closing"
    """Over, but a copy or step in flight still uses the sequence."""
    ENDED = "ended"


class RequestEvent(Named):
    """What moves it on."""

    VERIFIED = "verified"
    STEP_BEGAN = "step"
    STEPPED = "stepped"
    SAT_OUT = "sat out"
    SAMPLED = "sampled"
    CLOSE = "close"
    END = "end"


NEXT_STATE: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.LOADING, RequestEvent.VERIFIED): RequestState.READY,
    (RequestState.READY, RequestEvent.STEP_BEGAN): RequestState.STEPPING,
    (RequestState.STEPPING, RequestEvent.STEPPED): RequestState.READY,
    (RequestState.READY, RequestEvent.SAT_OUT): RequestState.SITTING_OUT,
    (RequestState.SITTING_OUT, RequestEvent.SAMPLED): RequestState.READY,
    (RequestState.SITTING_OUT, RequestEvent.CLOSE): RequestState.CLOSING,
    (RequestState.LOADING, RequestEvent.CLOSE): RequestState.CLOSING,
    (RequestState.READY, RequestEvent.CLOSE): RequestState.CLOSING,
    (RequestState.STEPPING, RequestEvent.CLOSE): RequestState.CLOSING,
    (RequestState.CLOSING, RequestEvent.END): RequestState.ENDED,
}


@dataclass(slots=True)
class Group:
    """Blocks up to `stop_block` of one chunk; layers below `wanted_layers` are being copied or were."""

    stop_block: int
    announced_at: float
    wanted_layers: int = 0


@dataclass(slots=True)
class Segment:
    """Some of the blocks that a request loads from the pool of its host, under a lease that was asked for."""

    lease_id: int
    first: int
    blocks: int


@dataclass(slots=True)
class Request:
    """One attempt of one request: its KV, its handoff, its output."""

    request: ReserveDecode
    prefill: str
    order: int
    sequence: int
    budget_tokens: int
    """KV reserved: whole blocks."""
    state: RequestState = RequestState.LOADING
    in_flight: int = 0
    """Works that use the sequence."""
    held_blocks: int = 0
    """Leading blocks that it is to load from the pool of its host."""
    leased_blocks: int = 0
    """Of these, those that were asked for."""
    segment: Segment | None = None
    """The last of those, while the pool has not said how many it has."""
    reading: list[int] = field(default_factory=list)
    """Leases of the blocks that are wanted from the pool, or being copied from there."""
    passed_over: list[BlockLoad] = field(default_factory=list)
    """What was handed off though it is to be loaded from the pool."""
    sources: dict[int, SlotRef] = field(default_factory=dict)
    """Handed-off blocks announced so far."""
    held_sources: dict[int, SlotRef] = field(default_factory=dict)
    """Blocks read from the pool of its host."""
    groups: dict[int, Group] = field(default_factory=dict)
    """By first block: blocks announced before their layers were ready."""
    wanted: list[BlockLoad] = field(default_factory=list)
    """What can be copied now."""
    wanted_parts: int = 0
    """Layers of blocks that were ever wanted."""
    pulling: bool = False
    parts: list[int] = field(default_factory=list)
    """Part checksums of all that arrived and verified, one block's layers after the other; `MISSING` where it has not."""
    done: HandoffDone | None = None
    due_at: float = 0.0
    """When the last of its layers is expected."""
    unkept: range = range(0)
    """Blocks of the prompt that are to be offered to the pool, after those that are being."""
    promised: bool = False
    """Its last chunk is announced: it is about to join the batch, and was held against its SLO if it has one."""
    made: int = 0
    """Output tokens of this attempt."""
    last: int = 0
    """The last of them, whose KV is not computed yet."""
    tail: bytes = b""
    """Tokens after the last keyed block whose KV is computed."""
    parent: Key = b""
    keyed_blocks: int = 0
    reserved_at: float = 0.0
    verified_at: float = 0.0
    stepped_at: float = 0.0
    """When its first step began."""
    steps: int = 0
    was_late: bool = False
    """What its last token may be was not known in time."""
    sampling_id: int = 0
    """The work that samples its next token, while it sits out."""
    forked: bool = False
    """It has no handoff of its own: it begins with a copy of another one's KV."""
    leader: "Request | None" = None
    """That one, as long as its handoff goes on."""
    siblings: "list[Request]" = field(default_factory=list)
    """Those that wait for its handoff."""
    unwanted: bool = False
    """Its gateway has cancelled it: its handoff goes on for its siblings alone."""

    @property
    def tenant(self) -> str:
        """Who asked; empty where nobody is known."""
        return self.request.tenant

    @property
    def position(self) -> int:
        """Where the last token stands."""
        return self.request.tokens + self.made - 1

    @property
    def context(self) -> int:
        """Tokens of KV that its next step reads, or will when it begins."""
        return self.request.tokens + max(1, self.made)

    @property
    def count(self) -> int:
        """Output tokens of the whole request so far."""
        return self.request.first_index + self.made

    @property
    def left(self) -> int:
        """Output tokens that may still come."""
        message = self.request
        return message.stop.max_tokens - message.first_index - self.made

    @property
    def longest_step_s(self) -> float:
        """The longest step at which it keeps what it was promised; inf: it was promised nothing."""
        bound_s, message = self.request.tbt_slo_s, self.request
        return longest_step_s(bound_s, message.stop.max_tokens - message.first_index) if bound_s > 0 else math.inf

    def account(self, now: float) -> DecodeTimes:
        """Where its time went, now that it is over."""
        return DecodeTimes(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            handoff_s=max(0.0, self.verified_at - self.reserved_at),
            wait_s=max(0.0, self.stepped_at - self.verified_at),
            decode_s=max(0.0, now - self.stepped_at),
            steps=self.steps,
        )

    @property
    def wants_twice(self) -> bool:
        """Was something handed off again? Else each layer of each block is wanted once, and passed over once at most."""
        return max(self.wanted_parts, sum([load.stop_layer - load.first_layer for load in self.passed_over])) > len(self.parts)

    def want(self, blocks: range, first_layer: int, stop_layer: int, block_tokens: int) -> None:
        """Some layers of blocks that were handed off can be copied, unless they are to come from the pool."""
        loads = self._loads(blocks, self.sources, first_layer, stop_layer, block_tokens)
        passed_over = max(0, min(blocks.stop, self.held_blocks) - blocks.start)
        self.passed_over += loads[:passed_over]
        self._want(loads[passed_over:])

    def want_held(self, segment: Segment, sources: Sequence[SlotRef], layers: int, block_tokens: int) -> None:
        """What the pool has of a segment can be copied."""
        blocks = range(segment.first, segment.first + len(sources))
        self.held_sources.update(zip(blocks, sources, strict=True))
        if sources:
            self.reading.append(segment.lease_id)
        self._want(self._loads(blocks, self.held_sources, 0, layers, block_tokens))

    def hold_fewer(self, blocks: int) -> None:
        """From block `blocks` on nothing comes from the pool: what was passed over of it is wanted."""
        self.held_blocks = blocks
        self._want([load for load in self.passed_over if load.block >= blocks])
        self.passed_over = [load for load in self.passed_over if load.block < blocks]

    def is_arriving(self, most_parts: int) -> bool:
        """Is all that it lacks being copied, but for one more piece at most?"""
        last = self.done is not None and self.pulling and self.segment is None
        return last and self.piece(most_parts) == len(self.wanted)

    def piece(self, most_parts: int) -> int:
        """How much of what is wanted goes into one copy: so many layers of blocks, one load at least."""
        parts = 0
        for count, load in enumerate(self.wanted):
            parts += load.stop_layer - load.first_layer
            if parts > most_parts and count:
                return count
        return len(self.wanted)

    def read_from(self, block: int) -> SlotRef:
        """Where a block was copied from."""
        return self.held_sources[block] if block < self.held_blocks else self.sources[block]

    def _loads(
        self, blocks: range, sources: Mapping[int, SlotRef], first_layer: int, stop_layer: int, block_tokens: int
    ) -> list[BlockLoad]:
        tokens = self.request.tokens
        return [
            BlockLoad(block, sources[block], first_layer, stop_layer, min(block_tokens, tokens - block * block_tokens))
            for block in blocks
        ]

    def _want(self, loads: Sequence[BlockLoad]) -> None:
        self.wanted += loads
        self.wanted_parts += sum([load.stop_layer - load.first_layer for load in loads])

    def take(self, tokens: Sequence[int], block_tokens: int) -> list[Key]:
        """More output: `tokens` were sampled, so the KV of the last one before them and of all but the last of them is there.
        Returns the keys of the blocks that this completes."""
        fed = self.last.to_bytes(4, "little")  # one token a step: the way that must be quick
        self.tail += fed if len(tokens) == 1 else fed + pack_tokens(tokens[:-1])
        self.made += len(tokens)
        self.last = tokens[-1]
        return extend_keys(self.parent, self.tail, block_tokens) if len(self.tail) >= 4 * block_tokens else []
