"""KV events about the blocks of one pool, for routers outside the cluster. PURE; the wire format is vLLM's KV events."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mooncake_zmq.kv.block_hash import Key, unpack_tokens

MAX_EVENT_BLOCKS = 1024
MAX_EVENT_TOKENS = 16_384
"""Tokens that one event may name, at most about 100 kB; an event of more blocks is split."""
MAX_BATCH_BYTES = 128 << 10
"""Size of one encoded batch; only a single block of more tokens than MAX_EVENT_TOKENS exceeds it."""
TOKEN_BYTES = 4
_BATCH_BYTES, _EVENT_BYTES, _KEY_BYTES, _TOKEN_BYTES = 32, 160, 18, 5
"""Upper bounds of the MessagePack bytes of a batch and of an event (beside its keys and tokens), of a key, and of a token."""


class Medium(Enum):
    """The tier of a copy, by vLLM's names."""

    CPU = "CPU"
    DISK = "DISK"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """These blocks can now be read from `medium`. `keys` are a chain after `parent`, which is empty where they begin a prompt
    or the parent is not known. `tokens` (int32 bytes), the blocks' contents, is empty where this node does not know them:
    neither the put nor the source of a fetch gave them, or an earlier incarnation without KV events wrote the block."""

    keys: tuple[Key, ...]
    medium: Medium
    parent: bytes = b""
    tokens: bytes = b""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks can no longer be read from `medium`."""

    keys: tuple[Key, ...]
    medium: Medium


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing said before counts any more."""


KvEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


class EventFormat(Enum):
    """How an event is written. Subscribers understand both; those of before mid 2026 only the former."""

    ARRAY = "array"
    """Tagged arrays: vLLM up to 0.23, SGLang."""
    MAP = "map"
    """Maps with a `type`: vLLM since June 2026."""


class EventEncoder:
    """Writes batches as `[time, [event, ...], rank]`; ranks are nil, since a pool serves all of its host's engines."""

    def __init__(self, form: EventFormat, block_tokens: int) -> None:
        """`block_tokens`: tokens in a block, named in every stored event."""
        self._form = form
        self._block_tokens = block_tokens
        self.max_blocks = max(1, min(MAX_EVENT_BLOCKS, MAX_EVENT_TOKENS // block_tokens))
        self.max_batch_bytes = max(MAX_BATCH_BYTES, _BATCH_BYTES + _EVENT_BYTES + _KEY_BYTES + block_tokens * _TOKEN_BYTES)
        """No batch that `batches` returns takes more when it is written."""

    def batches(self, events: Iterable[KvEvent]) -> list[tuple[KvEvent, ...]]:
        """Return the same events in the same order, split so that an event names at most `max_blocks` blocks and a batch
        takes at most `max_batch_bytes`."""
        batches: list[tuple[KvEvent, ...]] = []
        batch: list[KvEvent] = []
        room = self.max_batch_bytes - _BATCH_BYTES
        for event in events:
            for part in self._parts(event):
                size = _event_bytes(part)
                if size > room and batch:
                    batches.append(tuple(batch))
                    batch, room = [], self.max_batch_bytes - _BATCH_BYTES
                batch.append(part)
                room -= size
        return [*batches, tuple(batch)] if batch else batches

    def encode(self, time_s: float, events: Iterable[KvEvent]) -> bytes:
        """The MessagePack payload of one batch. `time_s`: seconds since 1970."""
        import msgpack  # a node without KV events does not need it

        write = self._as_map if self._form is EventFormat.MAP else self._as_array
        packed: bytes = msgpack.packb((time_s, [write(event) for event in events], None))
        return packed

    def _parts(self, event: KvEvent) -> Iterator[KvEvent]:
        """`event` in pieces of at most `max_blocks`."""
        if isinstance(event, AllBlocksCleared) or len(event.keys) <= self.max_blocks:
            yield event
            return
        for start in range(0, len(event.keys), self.max_blocks):
            stop = start + self.max_blocks
            if isinstance(event, BlocksRemoved):
                yield BlocksRemoved(event.keys[start:stop], event.medium)
                continue
            is_chain = bool(event.parent or event.tokens)
            parent = event.keys[start - 1] if start and is_chain else event.parent
            size = self._block_tokens * TOKEN_BYTES
            yield BlocksStored(event.keys[start:stop], event.medium, parent, event.tokens[start * size : stop * size])

    def _as_array(self, event: KvEvent) -> list[Any]:
        match event:
            case BlocksStored(keys, medium, parent, tokens):
                # The two nils are LoRA's id and name: older subscribers insist on all eight elements.
                size = self._block_tokens
                return ["BlockStored", keys, parent or None, unpack_tokens(tokens), size, None, medium.value, None]
            case BlocksRemoved(keys, medium):
                return ["BlockRemoved", keys, medium.value]
        return ["AllBlocksCleared"]

    def _as_map(self, event: KvEvent) -> dict[str, Any]:
        match event:
            case BlocksStored(keys, medium, parent, tokens):
                return {
                    "type": "BlockStored",
                    "block_hashes": keys,
                    "parent_block_hash": parent or None,
                    "token_ids": unpack_tokens(tokens),
                    "block_size": self._block_tokens,
                    "lora_id": None,
                    "medium": medium.value,
                    "lora_name": None,
                }
            case BlocksRemoved(keys, medium):
                return {"type": "BlockRemoved", "block_hashes": keys, "medium": medium.value}
        return {"type": "AllBlocksCleared"}


def batch_bytes(batch: Iterable[KvEvent]) -> int:
    """The most that `EventEncoder.encode` makes of a batch."""
    return _BATCH_BYTES + sum(map(_event_bytes, batch))


def _event_bytes(event: KvEvent) -> int:
    if isinstance(event, AllBlocksCleared):
        return _EVENT_BYTES
    tokens = len(event.tokens) // TOKEN_BYTES if isinstance(event, BlocksStored) else 0
    return _EVENT_BYTES + len(event.keys) * _KEY_BYTES + tokens * _TOKEN_BYTES
