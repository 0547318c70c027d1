"""A very small exact engine: KV of a token follows from the KV before it, and a token hashes every KV byte of its sequence.

Any wrong KV byte therefore changes the next token, and equality with the undisturbed run is exact. A hidden state is a token,
in a chunk's last row also the hash of all KV of the layers before.
"""

from functools import cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from mooncake_zmq.core.messages import Eviction, Sampled, Sampling, TokenLogprob
from mooncake_zmq.core.work import LentPart
from mooncake_zmq.engine.eviction import kept_tokens
from mooncake_zmq.kv.block_hash import pack_tokens
from mooncake_zmq.kv.layout import BlockLayout

LAYERS, KV_HEADS, HEAD_DIM = 3, 1, 2
HIDDEN_WORDS = 4
VOCABULARY = 512
EOS_IDS = (7, 100, 256, 300, 411)
PLACES, FEW = 97, 5
POISON = np.uint32(0x5EED)
_MULTIPLIER = (np.arange(LAYERS * 2 * HEAD_DIM, dtype=np.uint32).reshape(LAYERS, 2, 1, HEAD_DIM) * 40503 + 10007) | np.uint32(1)


def sim_layout(block_tokens: int) -> BlockLayout:
    """Return the layout of this engine's KV."""
    return BlockLayout(
        layers=LAYERS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_tokens=block_tokens,
        hidden_bytes=4 * HIDDEN_WORDS,
        vocab_size=VOCABULARY,
    )


class SimSequence:
    """One sequence's KV as `[layer, k/v, token, head_dim]`."""

    __slots__ = ("_adds", "_place", "approximate_from", "borrowed", "capacity", "dropped", "kv", "past", "unsampled")

    def __init__(self, capacity: int, past: bytes = b"", adapter: str = "", dropped: int = 0) -> None:
        self.capacity = capacity
        self.dropped = dropped
        """The tokens whose KV nothing holds any more: the others are at their positions less these."""
        self._adds = np.uint32(xxhash.xxh32_intdigest(adapter.encode()) if adapter else 0)
        """The adapter's part of each token's KV."""
        self.past = past
        """The tokens before the next one that choices depend on, as `Sampling.past` says."""
        self.unsampled: tuple[Sampled, ...] = ()
        """The samples of its last work that were missing because the mask of allowed tokens was not ready in time."""
        self._place: int | None = None
        self.borrowed: tuple[LentPart, ...] = ()
        """Its leading tokens that other machines hold."""
        self.approximate_from = capacity
        """The first token whose KV is known to be poisoned, as blended KV and all that is computed behind it is."""
        self.kv = np.zeros((LAYERS, 2, capacity, HEAD_DIM), dtype=np.uint32)

    def write_part(self, layer: int, start: int, tokens: int, part: bytes) -> None:
        """Store the first `tokens` tokens of a layer's part at token `start`."""
        block = np.frombuffer(part, dtype=np.uint32).reshape(2, -1, HEAD_DIM)
        self.kv[layer, :, start : start + tokens] = block[:, :tokens]

    def read_part(self, layer: int, start: int, stop: int, block_tokens: int) -> bytes:
        """Return a layer's part of the block at `start`, with zeros from `stop` on."""
        if stop - start == block_tokens:
            return self.kv[layer, :, start:stop].tobytes()
        out = np.zeros((2, block_tokens, HEAD_DIM), dtype=np.uint32)
        out[:, : stop - start] = self.kv[layer, :, start:stop]
        return out.tobytes()

    def run_layer(self, layer: slice, start: int, tokens: NDArray[np.uint32]) -> None:
        """Append `tokens`' KV of some layers at position `start`."""
        cells, row = self._cells(layer, start, tokens), start - self.dropped
        if row:
            cells[:, :, 0] += self.kv[layer, :, row - 1]
        if len(tokens) > 1:
            np.cumsum(cells, axis=2, out=cells)
        self.kv[layer, :, row : row + len(tokens)] = cells

    def _cells(self, layer: slice, start: int, tokens: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return what each token adds to the KV before it."""
        positions = np.arange(start + 1, start + 1 + len(tokens), dtype=np.uint32)
        steps = (tokens + np.uint32(1)) * np.uint32(7919) + positions * np.uint32(104729)
        steps ^= steps >> np.uint32(7)
        steps += self._adds
        cells: NDArray[np.uint32] = steps[:, None] * _MULTIPLIER[layer]
        return cells

    def has_computed(self, layer: slice, first: int, computed_at: int, tokens: NDArray[np.uint32]) -> bool:
        """Return whether the KV from token `first` on is that of these tokens, as they are computed at a position."""
        kv = self.kv[layer, :, first : first + len(tokens)]
        return bool((np.diff(kv, axis=2) == self._cells(layer, computed_at, tokens)[:, :, 1:]).all())

    def poison(self, layer: slice, start: int, stop: int) -> None:
        """Make the KV of some layers of these tokens differ from exact KV; what is computed behind them differs likewise."""
        self.kv[layer, :, start:stop] += POISON
        self.approximate_from = min(start, self.approximate_from)

    def run(self, start: int, tokens: NDArray[np.uint32]) -> None:
        """Append `tokens`' KV of all layers at position `start`."""
        self.run_layer(slice(None), start, tokens)

    def evict(self, eviction: Eviction, length: int) -> None:
        """Keep the KV of few of the first `length` tokens. What is attended to most follows from the position alone, so that it
        is the same with further tokens behind them."""
        matter = np.arange(length, dtype=np.int64) * 40503 % 65521
        rows = kept_tokens(eviction, length, matter if eviction.kind == "elastic" else None)
        self.kv[:, :, : len(rows)] = self.kv[:, :, rows]
        self.dropped = length - len(rows)

    def next_token(self, length: int, sampling: Sampling) -> int:
        """Return the token at position `length`: greedy depends on the KV alone, sampled on (seed, position) as well."""
        return self.token_of(self.hash_kv(range(LAYERS), length), length, sampling)

    def feed(self, token: int, position: int, sampling: Sampling) -> None:
        """Append a token that was chosen at `position`."""
        if sampling.reads_past and len(self.past) == 4 * (position - sampling.past_from):
            self._place = follow(self.place(sampling), token)
            self.past += pack_tokens((token,))

    def place(self, sampling: Sampling) -> int:
        """Return the place in the answer's grammar, if it has one: each token leads on from where it was opened."""
        if self._place is None:
            self._place = place_of(sampling, self.past)
        return self._place

    def hash_kv(self, layers: range, length: int, before: int = 0) -> int:
        """Return the hash of all KV of these layers up to a position, after those that hash to `before`: of poisoned KV as if
        it were exact, so that answers stay comparable."""
        length -= self.dropped
        for layer in layers:
            kv = self.kv[layer, :, :length]
            if self.approximate_from < length:
                kv = kv.copy()
                kv[:, self.approximate_from :] -= POISON
            before = xxhash.xxh3_64_intdigest(kv.tobytes(), seed=before)
        return before

    def token_of(self, kv_hash: int, length: int, sampling: Sampling) -> int:
        """Return the token at position `length` behind KV that hashes to this."""
        if sampling.penalizes:
            kv_hash = xxhash.xxh3_64_intdigest(self.past, seed=kv_hash)
        if sampling.temperature > 0:
            kv_hash = xxhash.xxh3_64_intdigest(b"%d %d" % (sampling.seed, length), seed=kv_hash)
        if not sampling.constraint:
            return kv_hash % VOCABULARY
        allowed = allowed_at(self.place(sampling))
        return allowed[kv_hash % len(allowed)]


# --- a grammar is an automaton: a constraint says where it begins, and each token leads on


def place_of(sampling: Sampling, past: bytes) -> int:
    """Return the place in the grammar to which the answer so far has led."""
    place = int(sampling.constraint or b"0")
    for token in as_tokens(past)[sampling.prompt_tokens - sampling.past_from :].tolist():
        place = follow(place, token)
    return place


def follow(place: int, token: int) -> int:
    """Return the place to which a token leads."""
    return (31 * place + token + 1) % PLACES


@cache
def allowed_at(place: int) -> tuple[int, ...]:
    """Return the few tokens allowed at a place: in every other place only those that end an answer."""
    return tuple(
        token for token in range(VOCABULARY) if (token + place) % FEW == 0 and (place % 2 == 0 or token not in EOS_IDS)
    )


def logprob_of(token: int, length: int, sampling: Sampling) -> TokenLogprob | None:
    """Return the reported log probability of a token."""
    return None if sampling.logprobs is None else (-float(token + length), ((token, -float(length)),) * sampling.logprobs)


def hidden_states(tokens: NDArray[np.uint32], kv_hash: int) -> bytes:
    """Return the hidden states that leave a stage."""
    states = np.zeros((len(tokens), HIDDEN_WORDS), dtype=np.uint32)
    states[:, 0] = tokens
    states[-1, 1:3] = kv_hash & 0xFFFFFFFF, kv_hash >> 32
    return states.tobytes()


def entering_states(raw: bytes) -> tuple[NDArray[np.uint32], int]:
    """Return the tokens and hash that left the stage before."""
    states = np.frombuffer(raw, dtype=np.uint32).reshape(-1, HIDDEN_WORDS)
    return states[:, 0].copy(), int(states[-1, 1]) | int(states[-1, 2]) << 32


def as_tokens(raw: bytes) -> NDArray[np.uint32]:
    """Return token ids out of int32 bytes."""
    return np.frombuffer(raw, dtype="<i4").astype(np.uint32)
