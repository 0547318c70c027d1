"""Blocks that a decode offers to its host's pool: prompts that were handed off to it, and its output. PURE."""

from collections.abc import Sequence

from mooncake_zmq.core.actor import Effect
from mooncake_zmq.core.actor_parts import Ids
from mooncake_zmq.core.messages import HandoffDone, SlotsReserved
from mooncake_zmq.core.work import SequenceBlock
from mooncake_zmq.decode.ends import Ends
from mooncake_zmq.decode.request import Request, RequestState
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.node.client import PoolClient, PutEnded

CLOSING = RequestState.CLOSING


class Offers:
    """Carry out the puts of one decode. Each counts as a work that uses the request's sequence."""

    def __init__(
        self, *, settings: DecodeSettings, layout: BlockLayout, piece_blocks: int, pool: PoolClient, ends: Ends, ids: Ids
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._piece_blocks = piece_blocks
        self._pool = pool
        self._ends = ends
        self._ids = ids

    def prompt(self, now: float, request: Request, done: HandoffDone) -> list[Effect]:
        """Offer the prompt's blocks where the pool has them from nowhere else: those of a pipeline are complete here for the
        first time, and those of a prefill on another host are put here for the next turn of the chat."""
        keys, size, complete = done.keys, self._layout.block_tokens, request.request.tokens // self._layout.block_tokens
        if request.lent_tokens:
            return []
        if not keys:
            return self._keep_prompt(now, request) if self._settings.store_prompts else []
        if len(keys) > complete or len(done.block_tokens) != len(keys) * size * 4:
            return []
        sources = [SequenceBlock(request.sequence, block) for block in range(complete - len(keys), complete)]
        return self._put(now, request, keys, sources, done.parent, done.block_tokens)

    def _keep_prompt(self, now: float, request: Request) -> list[Effect]:
        """Offer the blocks that did not come from the pool."""
        message = request.request
        if not message.block_tokens:
            return []
        request.unkept = range(request.pooled_blocks, len(request.keys))
        return self._keep_piece(now, request)

    def _keep_piece(self, now: float, request: Request) -> list[Effect]:
        """Offer one piece after the other; pieces left when the request ends are not offered."""
        message, size = request.request, self._layout.block_tokens * 4
        piece, request.unkept = request.unkept[: self._piece_blocks], request.unkept[self._piece_blocks :]
        if not piece or request.state is CLOSING:
            return []
        keys = (*message.reuse_keys, *message.new_keys)
        parent, tokens = keys[piece.start - 1] if piece.start else None, message.block_tokens
        sources = [SequenceBlock(request.sequence, block) for block in piece]
        tokens = tokens[piece.start * size : piece.stop * size]
        more = bool(request.unkept)
        return self._put(now, request, keys[piece.start : piece.stop], sources, parent, tokens, more=more)

    def output(self, now: float, request: Request, taken: Sequence[int]) -> list[Effect]:
        """Append output tokens, and offer the blocks that they complete, so that the next turn of a chat hits them."""
        size = self._layout.block_tokens
        keys = request.take(taken, size)
        if not keys:
            return []
        first, stop = request.keyed_blocks, len(keys) * size * 4
        before = request.parent if first else None  # the root is no block
        sources = [SequenceBlock(request.sequence, first + index) for index in range(len(keys))]
        tokens = request.tail[:stop]
        request.parent, request.tail = keys[-1], request.tail[stop:]
        if len(request.keys) == request.keyed_blocks:
            request.keys += keys
        request.keyed_blocks += len(keys)
        return self._put(now, request, keys, sources, before, tokens)

    def _put(
        self,
        now: float,
        request: Request,
        keys: Sequence[Key],
        sources: Sequence[SequenceBlock],
        parent: Key | None,
        tokens: bytes,
        *,
        more: bool = False,
    ) -> list[Effect]:
        """Offer blocks of a sequence, which a copy then reads."""
        put_id, tenant = self._ids.new(), request.request.tenant
        effects = self._pool.put(now, put_id, keys, sources, request, parent=parent, tokens=tokens, tenant=tenant, more=more)
        if effects is None:
            return []
        request.in_flight += 1
        return effects

    def on_reserved(self, now: float, _sender: str, message: SlotsReserved) -> list[Effect]:
        """Copy blocks into the slots that the pool granted."""
        return self.ended(now, self._pool.on_reserved(now, message, self._ids.new()))

    def ended(self, now: float, ended: PutEnded) -> list[Effect]:
        """Continue with the requests whose puts ended."""
        effects = list(ended.effects)
        for token in ended.tokens:
            assert isinstance(token, Request)
            token.in_flight -= 1
            if token.state is CLOSING:
                effects += self._ends.try_end(token)
            elif token.unkept:
                effects += self._keep_piece(now, token)
        return effects
