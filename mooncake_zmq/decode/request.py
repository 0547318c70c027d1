"""One request at a decode, and the table of its states. PURE."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mooncake_zmq.core.actor import OpenSequence
from mooncake_zmq.core.actor_parts import Named
from mooncake_zmq.core.gaps import longest_step_s
from mooncake_zmq.core.messages import DecodeTimes, HandoffDone, LoanPlace, ReserveDecode, SlotRef
from mooncake_zmq.core.selection import RECENT, SINKS, Selection
from mooncake_zmq.core.work import BlockLoad
from mooncake_zmq.kv.block_hash import Key, extend_keys, pack_tokens

MISSING, KEPT = -1, 0
"""In place of the checksum of a part: of one that has not arrived, and of one that was copied within the decode."""


class RequestState(Named):
    """States of a request at a decode."""

    LOADING = "loading"
    """KV is reserved, and being filled by the handoff and from the host's pool."""
    READY = "ready"
    """The handoff is verified; the request may join the batch."""
    STEPPING = "stepping"
    SITTING_OUT = "sitting out"
    """Its token is sampled once its grammar mask arrives; the batch goes on without it."""
    CLOSING = "closing"
    """The request ended, but a copy or step in flight still uses its sequence."""
    ENDED = "ended"


class RequestEvent(Named):
    """Events that change the state of a request."""

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
    """Blocks up to `stop_block` of one chunk; layers below `wanted_layers` have been copied or are being copied."""

    stop_block: int
    announced_at: float
    wanted_layers: int = 0


@dataclass(slots=True)
class Segment:
    """Some of the blocks that a request loads from its host's pool, under one lease."""

    lease_id: int
    first: int
    blocks: int


@dataclass(slots=True)
class Loan:
    """Leading blocks of a request that another decode holds, or is asked to hold. `place`: known once it does. `asked`: which
    of them it is reading, by their numbers in the loan."""

    lender: str
    number: int
    blocks: range
    place: LoanPlace | None = None
    asked: frozenset[int] = frozenset()


@dataclass(slots=True)
class Request:
    """One attempt of one request: its KV, its handoff, its output."""

    request: ReserveDecode
    prefill: str
    order: int
    sequence: int
    budget_tokens: int
    """KV reserved, in whole blocks, with what other decodes hold."""
    capacity_tokens: int
    """KV that its sequence can grow to."""
    keys: list[Key]
    """The keys of its leading complete blocks, as far as they are known."""
    state: RequestState = RequestState.LOADING
    in_flight: int = 0
    """Number of works that use the sequence."""
    held_blocks: int = 0
    """Leading blocks to load from the host's pool."""
    leased_blocks: int = 0
    """Number of these blocks for which a lease was requested, or that are copied from a kept sequence."""
    pooled_blocks: int = 0
    """Number of these blocks that the pool has or will have, as far as is known."""
    kept_lease: int = 0
    """The lease of those of the pool's blocks that are copied from a kept sequence; 0 if there is none."""
    segment: Segment | None = None
    """The last requested segment, while the pool has not answered."""
    reading: list[int] = field(default_factory=list)
    """Leases of the blocks that are waiting to be copied from the pool, or being copied."""
    passed_over: list[BlockLoad] = field(default_factory=list)
    """Announced blocks that are to be loaded from the pool instead."""
    sources: dict[int, SlotRef] = field(default_factory=dict)
    """Handed-off blocks announced so far."""
    held_sources: dict[int, SlotRef] = field(default_factory=dict)
    """Blocks read from the host's pool."""
    groups: dict[int, Group] = field(default_factory=dict)
    """Blocks announced before their layers were ready, by the first block."""
    wanted: list[BlockLoad] = field(default_factory=list)
    """Blocks and layers that can be copied now."""
    wanted_parts: int = 0
    """Layers of blocks that were ever queued for copying."""
    pulling: bool = False
    """Whether blocks are being copied, or the lenders that are to hold some have yet to be connected."""
    parts: list[int] = field(default_factory=list)
    """Checksums of all layers of blocks that arrived and verified, block by block; `MISSING` where one has not arrived."""
    done: HandoffDone | None = None
    is_exact: bool = True
    """Whether all its KV is exact; otherwise that of the blocks with `keys` alone."""
    due_at: float = 0.0
    """When the last of its layers is expected."""
    unkept: range = range(0)
    """Blocks of the prompt still to be offered to the pool, after those being offered."""
    promised: bool = False
    """Its last chunk is announced: it is about to join the batch, and passed the check of its SLO."""
    made: int = 0
    """Output tokens of this attempt."""
    last: int = 0
    """The latest output token, whose KV is not computed yet."""
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
    """The mask of its previous token did not arrive in time."""
    sampling_id: int = 0
    """The work that samples its next token, while it sits out."""
    forked: bool = False
    """It has no handoff of its own: it begins with a copy of its leader's KV."""
    leader: "Request | None" = None
    """The request whose handoff it waits for, until that ends."""
    siblings: "list[Request]" = field(default_factory=list)
    """Requests that wait for its handoff."""
    lent_tokens: int = 0
    """Leading tokens whose KV other decodes are to hold."""
    lenders: list[str] = field(default_factory=list)
    """Decodes that it has still to ask."""
    loans: list[Loan] = field(default_factory=list)
    late_since: float | None = None
    """Since when a lender of it has been late for its next token; None: none is."""
    again_at: float = 0.0
    """When it may join a step again."""
    selection: Selection | None = None
    """How its steps choose what they attend to in a long context; None: they attend to all."""
    selected: bool = False
    """Whether a step has chosen: its tokens from then on are approximate."""
    unwanted: bool = False
    """Its gateway has cancelled it: the handoff goes on only for its siblings."""

    @property
    def tenant(self) -> str:
        """Return the tenant of the request; empty without tenants."""
        return self.request.tenant

    @property
    def own_tokens(self) -> int:
        """Return the KV of this decode that it holds."""
        return self.budget_tokens - self.lent_tokens

    @property
    def opened(self) -> OpenSequence:
        """Return the effect that opens its sequence."""
        message, tokens = self.request, self.prompt_tokens - self.lent_tokens
        return OpenSequence(
            self.sequence,
            self.capacity_tokens,
            message.sampling,
            message.past,
            filled_tokens=tokens,
            tenant=message.tenant,
            dropped_tokens=message.tokens - self.prompt_tokens,
        )

    @property
    def lent_blocks(self) -> int:
        """Return the leading blocks for which lenders were found."""
        return self.loans[-1].blocks.stop if self.loans else 0

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of the prompt whose KV is handed off: all, unless others are dropped."""
        return self.request.handed_tokens

    @property
    def position(self) -> int:
        """Return the position of the latest token."""
        return self.request.tokens + self.made - 1

    @property
    def held_tokens(self) -> int:
        """Return the tokens whose KV its next step finds."""
        return self.prompt_tokens + self.made - 1

    @property
    def context(self) -> int:
        """Return the tokens of KV that its next step reads, or its first step will."""
        return self.prompt_tokens + max(1, self.made)

    @property
    def count(self) -> int:
        """Return the output tokens of the whole request so far."""
        return self.request.first_index + self.made

    @property
    def left(self) -> int:
        """Return how many output tokens may still come."""
        message = self.request
        return message.stop.max_tokens - message.first_index - self.made

    @property
    def longest_step_s(self) -> float:
        """Return the longest step that keeps its SLO; inf without one."""
        bound_s, message = self.request.tbt_slo_s, self.request
        return longest_step_s(bound_s, message.stop.max_tokens - message.first_index) if bound_s > 0 else math.inf

    def times(self, now: float) -> DecodeTimes:
        """Return where its time went, once it has ended."""
        return DecodeTimes(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            handoff_s=max(0.0, self.verified_at - self.reserved_at),
            wait_s=max(0.0, self.stepped_at - self.verified_at),
            decode_s=max(0.0, now - self.stepped_at),
            steps=self.steps,
            borrowed_tokens=self.lent_tokens,
        )

    @property
    def wants_twice(self) -> bool:
        """Return whether something was handed off twice. Otherwise each layer of each block is queued once, and passed over
        at most once."""
        return max(self.wanted_parts, sum([load.stop_layer - load.first_layer for load in self.passed_over])) > len(self.parts)

    def want(self, blocks: range, first_layer: int, stop_layer: int, block_tokens: int) -> None:
        """Queue layers of handed-off blocks for copying, except of blocks that come from the pool."""
        loads = self._loads(blocks, self.sources, first_layer, stop_layer, block_tokens)
        passed_over = max(0, min(blocks.stop, self.held_blocks) - blocks.start)
        self.passed_over += loads[:passed_over]
        self._want(loads[passed_over:])

    def want_held(self, segment: Segment, sources: Sequence[SlotRef], layers: int, block_tokens: int) -> None:
        """Queue what the pool has of a segment for copying."""
        blocks = range(segment.first, segment.first + len(sources))
        self.held_sources.update(zip(blocks, sources, strict=True))
        if sources:
            self.reading.append(segment.lease_id)
        self._want(self._loads(blocks, self.held_sources, 0, layers, block_tokens))

    def hold_fewer(self, blocks: int) -> None:
        """Load nothing from the pool from block `blocks` on: announced blocks passed over before are queued."""
        self.held_blocks, self.pooled_blocks = blocks, min(self.pooled_blocks, blocks)
        self._want([load for load in self.passed_over if load.block >= blocks])
        self.passed_over = [load for load in self.passed_over if load.block < blocks]

    def is_arriving(self, most_parts: int) -> bool:
        """Return whether everything missing is being copied, except for at most one more piece."""
        last = self.done is not None and self.pulling and self.segment is None
        return last and self.piece(most_parts) == len(self.wanted)

    def piece(self, most_parts: int) -> int:
        """Return how many queued loads go into one copy: at most so many layers of blocks, to one place, but at least one
        load."""
        parts = 0
        loan = self.loan_of(self.wanted[0].block) if self.wanted else None
        for count, load in enumerate(self.wanted):
            parts += load.stop_layer - load.first_layer
            if count and (parts > most_parts or self.loans and self.loan_of(load.block) is not loan):
                return count
        return len(self.wanted)

    def loan_of(self, block: int) -> Loan | None:
        """Return the loan that a block is in; None if it is here."""
        return next((loan for loan in self.loans if block in loan.blocks), None)

    def read_from(self, block: int) -> SlotRef:
        """Return where a block was copied from."""
        return self.held_sources[block] if block < self.held_blocks else self.sources[block]

    def keep_exact(self, blocks: int) -> None:
        """Take note that only so many leading blocks have exact KV: nothing behind them gets a key."""
        self.is_exact = False
        del self.keys[blocks:]

    def select(self, *, may_begin: bool) -> Selection | None:
        """Return how its next step chooses what it attends to; None: it attends to all, as they are few, or as it would choose
        for the first time, which `may_begin` allows."""
        if self.selection is None or self.context <= SINKS + RECENT + self.selection.tokens:
            return None
        if not self.selected:
            if not may_begin:
                return None
            self.selected = True
            self.keep_exact(len(self.keys))
        return self.selection

    def _loads(
        self, blocks: range, sources: Mapping[int, SlotRef], first_layer: int, stop_layer: int, block_tokens: int
    ) -> list[BlockLoad]:
        tokens = self.prompt_tokens
        return [
            BlockLoad(block, sources[block], first_layer, stop_layer, min(block_tokens, tokens - block * block_tokens))
            for block in blocks
        ]

    def _want(self, loads: Sequence[BlockLoad]) -> None:
        self.wanted += loads
        self.wanted_parts += sum([load.stop_layer - load.first_layer for load in loads])

    def take(self, tokens: Sequence[int], block_tokens: int) -> list[Key]:
        """Append sampled tokens to the output. The KV of the previous last token and of all new ones but the last is
        computed. Returns the keys of the blocks that this completes."""
        fed = self.last.to_bytes(4, "little")  # one token per step is the common case, which must be quick
        self.tail += fed if len(tokens) == 1 else fed + pack_tokens(tokens[:-1])
        self.made += len(tokens)
        self.last = tokens[-1]
        return extend_keys(self.parent, self.tail, block_tokens) if len(self.tail) >= 4 * block_tokens else []


class LentState(Named):
    """States of KV that is lent."""

    HELD = "held"
    USED = "used"
    """A work uses it, whose result the borrower waits for."""
    OVER = "over"
    """The borrower waits no more for the result of that work."""
    TAKEN_BACK = "taken back"
    """Nothing uses it once the last query is answered."""


@dataclass(slots=True, eq=False)
class Lent:
    """KV that this decode holds for a request of another one."""

    borrower: str
    number: int
    sequence: int
    tenant: str
    capacity_tokens: int
    state: LentState = LentState.HELD

    @property
    def order(self) -> int:
        """Return the order among all loans and requests here."""
        return self.sequence

    @property
    def own_tokens(self) -> int:
        """Return the KV of this decode that it holds."""
        return self.capacity_tokens


Holder = Request | Lent
"""A holder of KV of a decode."""
