"""One request at a decode and the table of its life. PURE."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake_zmq.core.gaps import longest_step_s
from mooncake_zmq.core.messages import DecodeAccount, HandoffDone, ReserveDecode, SlotRef
from mooncake_zmq.core.shell import Named
from mooncake_zmq.core.work import BlockLoad
from mooncake_zmq.kv.block_hash import Key, extend_keys, pack_tokens

MISSING = -1


class RequestState(Named):
    """Life of a request here."""

    RESERVING = "reserving"
    """KV is reserved; the own pool is being asked which leading blocks it holds."""
    LOADING = "loading"
    READY = "ready"
    """Handoff verified; may join the batch."""
    STEPPING = "stepping"
    CLOSING = "closing"
    """Over, but a copy or step in flight still uses the sequence."""
    ENDED = "ended"


class RequestEvent(Named):
    """What moves it on."""

    RESERVED = "reserved"
    VERIFIED = "verified"
    STEP_BEGAN = "step"
    STEPPED = "stepped"
    CLOSE = "close"
    END = "end"


NEXT_STATE: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.RESERVING, RequestEvent.RESERVED): RequestState.LOADING,
    (RequestState.LOADING, RequestEvent.VERIFIED): RequestState.READY,
    (RequestState.READY, RequestEvent.STEP_BEGAN): RequestState.STEPPING,
    (RequestState.STEPPING, RequestEvent.STEPPED): RequestState.READY,
    (RequestState.RESERVING, RequestEvent.CLOSE): RequestState.CLOSING,
    (RequestState.LOADING, RequestEvent.CLOSE): RequestState.CLOSING,
    (RequestState.READY, RequestEvent.CLOSE): RequestState.CLOSING,
    (RequestState.STEPPING, RequestEvent.CLOSE): RequestState.CLOSING,
    (RequestState.CLOSING, RequestEvent.END): RequestState.ENDED,
}


@dataclass(slots=True)
class Group:
    """Blocks up to `stop_block` of one chunk; layers below `wanted_layers` are being copied or were."""

    stop_block: int
    wanted_layers: int = 0


@dataclass(slots=True)
class Request:
    """One attempt of one request: its KV, its handoff, its output."""

    request: ReserveDecode
    prefill: str
    order: int
    sequence: int
    budget_tokens: int
    """KV reserved: whole blocks."""
    state: RequestState = RequestState.RESERVING
    in_flight: int = 0
    """Works that use the sequence."""
    lease_id: int | None = None
    held_blocks: int = 0
    sources: dict[int, SlotRef] = field(default_factory=dict)
    """Handed-off blocks announced so far."""
    groups: dict[int, Group] = field(default_factory=dict)
    """By first block: blocks announced before their layers were ready."""
    wanted: list[BlockLoad] = field(default_factory=list)
    """What can be copied now."""
    wanted_parts: int = 0
    """Layers of blocks that were ever wanted."""
    pulling: bool = False
    held_pull: bool = False
    parts: list[int] = field(default_factory=list)
    """Part checksums of all that arrived and verified, one block's layers after the other; `MISSING` where it has not."""
    done: HandoffDone | None = None
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
    forked: bool = False
    """It has no handoff of its own: it begins with a copy of another one's KV."""
    leader: "Request | None" = None
    """That one, as long as its handoff goes on."""
    siblings: "list[Request]" = field(default_factory=list)
    """Those that wait for its handoff."""
    unwanted: bool = False
    """Its gateway has cancelled it: its handoff goes on for its siblings alone."""

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

    def account(self, now: float) -> DecodeAccount:
        """Where its time went, now that it is over."""
        return DecodeAccount(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            handoff_s=max(0.0, self.verified_at - self.reserved_at),
            wait_s=max(0.0, self.stepped_at - self.verified_at),
            decode_s=max(0.0, now - self.stepped_at),
            steps=self.steps,
        )

    @property
    def wants_twice(self) -> bool:
        """Was something handed off again? Else each layer of each block is wanted once."""
        return self.wanted_parts > len(self.parts)

    def want(self, blocks: range, first_layer: int, stop_layer: int, block_tokens: int) -> None:
        """Some layers of blocks whose sources are known can be copied."""
        sources, tokens = self.sources, self.request.tokens
        self.wanted += [
            BlockLoad(block, sources[block], first_layer, stop_layer, min(block_tokens, tokens - block * block_tokens))
            for block in blocks
        ]
        self.wanted_parts += len(blocks) * (stop_layer - first_layer)

    def take(self, tokens: Sequence[int], block_tokens: int) -> list[Key]:
        """More output: `tokens` were sampled, so the KV of the last one before them and of all but the last of them is there.
        Returns the keys of the blocks that this completes."""
        fed = self.last.to_bytes(4, "little")  # one token a step: the way that must be quick
        self.tail += fed if len(tokens) == 1 else fed + pack_tokens(tokens[:-1])
        self.made += len(tokens)
        self.last = tokens[-1]
        return extend_keys(self.parent, self.tail, block_tokens) if len(self.tail) >= 4 * block_tokens else []
