"""A prefill that reuses KV which was computed behind other tokens, as CacheBlend does.

Such KV differs from the exact one in two ways. Its keys were rotated for other positions: they are turned by the difference,
without loss, since rotations compose. And it has not seen what stands before it now: the first layers are computed for all
tokens, and those whose values in the next one deviate most from the exact ones are computed again in all later layers, over the
reused KV of the others. The result is approximate: it must never be stored under the key of exact KV.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.coded_kv import CodedSequenceKV
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.engine.spec import check_room, check_tokens
from mooncake_zmq.kv.parts import Part

ON_CPU = "KV can be blended on a CPU alone"
CHUNK_ROWS = 512
"""The most tokens computed at a time, which bounds the memory of their activations."""
Positions = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Again:
    """The reused tokens to compute again: the `share` of them whose values in layer `probed` deviate most. All earlier layers
    are computed for all tokens; layer 1 is the first whose values depend on the tokens before. Unless given, as in
    CacheBlend."""

    share: float = 0.15
    probed: int = 1


CACHEBLEND, NOTHING = Again(), Again(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused:
    """KV of some tokens, [layer, k/v, n, kv_head, head_dim], as it was computed elsewhere. `at`: their positions here,
    ascending; `computed_at`: those for which their keys are rotated."""

    at: Positions
    computed_at: Positions
    kv: Floats

    def only(self, kept: NDArray[np.bool_]) -> "Reused":
        """Return the KV of some of the tokens."""
        return Reused(at=self.at[kept], computed_at=self.computed_at[kept], kv=self.kv[:, :, kept])


@dataclass(frozen=True, slots=True)
class Blended:
    """The outcome of a blended prefill. `logits` [vocab_size] after the last token; `computed`: the positions of the tokens
    that were computed in all layers, ascending."""

    logits: Floats
    computed: Positions


def read_kv(engine: Llama, sequence: SequenceKV, first: int, stop: int, computed_at: int | None = None) -> Floats:
    """Return the KV of some tokens as it is stored, [layer, k/v, token, kv_head, head_dim]. `computed_at`: where the first was
    computed, if blocks of it were loaded elsewhere: a codec then added the offsets of other positions."""
    spec = engine.spec
    kv: Floats = np.empty((spec.layers, 2, stop - first, spec.kv_heads, spec.head_dim), np.float32)
    for layer in range(spec.layers):
        SequenceKV.read_part(sequence, layer, first, stop, kv[layer])
    if computed_at not in (None, first) and isinstance(sequence, CodedSequenceKV) and sequence.offsets is not None:
        here, there = (np.arange(at, at + stop - first) for at in (first, computed_at))
        for layer in range(spec.layers):
            kv[layer, 0] -= sequence.offsets.at(layer, here)[0]
            kv[layer, 0] += sequence.offsets.at(layer, there)[0]
    return kv


def why_not(engine: object) -> str:
    """Return why prefills of an engine cannot be blended; empty: they can."""
    if not isinstance(engine, Llama) or engine.spec.layers <= CACHEBLEND.probed:
        return f"{type(engine).__name__} cannot compute some tokens again over reused KV of others"
    sequence = engine.new_sequence(1)
    on_cpu = isinstance(sequence.keys, np.ndarray)
    sequence.close()
    return "" if on_cpu else ON_CPU


def moved_run(kv: Floats, start: int, computed_at: int = 0) -> Reused:
    """Return the KV of tokens that follow one another, computed from one position on and used from another."""
    tokens = np.arange(kv.shape[2])
    return Reused(at=start + tokens, computed_at=computed_at + tokens, kv=kv)


def found_run(part: Part, kv: Floats, start: int, computed_at: int = 0) -> Reused:
    """Return what a prompt has of a part. `kv`: that of the whole part, whose first token was computed at `computed_at`;
    `start`: the position of the prompt's first token."""
    first = part.skipped
    return moved_run(kv[:, :, first : first + part.stop - part.start], start + part.start, computed_at + first)


def prefill_blended(
    engine: Llama,
    sequence: SequenceKV,
    tokens: NDArray[np.int32],
    reused: Sequence[Reused],
    again: Again = CACHEBLEND,
    check: Callable[[], None] = lambda: None,
) -> Blended:
    """Append `tokens` at `sequence.length`, behind exact KV. Those that nothing reused covers, and the last one, are computed
    over whatever KV stands before them, and some of the others `again`: with a share of 1 the result is that of `prefill`.
    `check` is called before each `CHUNK_ROWS` tokens, and may raise.

    Raises ValueError for KV that overlaps, leaves the tokens or is of another shape; then nothing has been written.
    """
    tokens = np.asarray(tokens, dtype=np.int32)
    check_room(sequence, len(tokens))
    check_tokens(tokens, engine.spec.vocab_size)
    first = sequence.length
    covered = _covered(engine, sequence, len(tokens), reused, again)
    positions = np.arange(first, first + len(tokens))
    try:
        probing = again.share > 0 and covered.any()
        for each in reused:
            _place(engine, sequence, each, range(again.probed + 1 if probing else 0, engine.spec.layers))
        if not probing:
            return _finished(engine, sequence, tokens, positions[~covered], first, 0, check)
        hidden = _in_chunks(engine, sequence, tokens, positions, again.probed, check)
        chosen = ~covered
        chosen[_deviating(sequence, reused, again) - first] = True
        return _finished(engine, sequence, hidden, positions[chosen], first, again.probed, check)
    except BaseException:
        sequence.length = first
        raise


def rotation(frequencies: Floats, computed_at: Positions, at: Positions) -> NDArray[np.complex64]:
    """Return the rotation between positions, [n, 1, head_dim / 2]: the difference of the engine's own angles, which it rounds
    to float32, so that the error of these large numbers is in both and cancels."""
    angles = [each.astype(np.float32)[:, None] * frequencies for each in (at, computed_at)]
    between: NDArray[np.complex64] = np.exp(1j * (angles[0].astype(np.float64) - angles[1])).astype(np.complex64)[:, None]
    return between


def turned(keys: Floats, turn: NDArray[np.complex64]) -> Floats:
    """Return keys [n, kv_head, head_dim] that are rotated for some positions as they are for others, by the rotation between
    these. The same positions give the same bits."""
    result: Floats = (np.ascontiguousarray(keys).view(np.complex64) * turn).view(np.float32)
    return result


def _place(engine: Llama, sequence: SequenceKV, each: Reused, layers: range) -> None:
    """Store reused KV in its new place."""
    turn = rotation(engine.frequencies, each.computed_at, each.at)
    for layer in layers:
        keys, values = each.kv[layer]
        sequence.store_rows(layer, each.at, turned(keys, turn), values)


def _in_chunks(
    engine: Llama,
    sequence: SequenceKV,
    tokens: NDArray[np.int32],
    positions: Positions,
    probed: int,
    check: Callable[[], None],
) -> Floats:
    """Compute the layers before `probed` for all tokens, and the KV of that one; return the hidden states that enter it."""
    hidden = np.empty((len(tokens), engine.spec.hidden), np.float32)
    for begin in range(0, len(tokens), CHUNK_ROWS):
        check()
        some = slice(begin, begin + CHUNK_ROWS)
        hidden[some] = engine.prefill_rows(sequence, tokens[some], positions[some], range(probed))
        engine.store_rows(sequence, hidden[some], positions[some], probed)
    return hidden


def _finished(
    engine: Llama,
    sequence: SequenceKV,
    entering: NDArray[np.generic],
    rows: Positions,
    first: int,
    layer: int,
    check: Callable[[], None],
) -> Blended:
    """Compute the layers from `layer` on for the tokens at `rows`. `entering`: what enters it, of all from `first` on."""
    logits = None
    for begin in range(0, len(rows), CHUNK_ROWS):
        check()
        some = rows[begin : begin + CHUNK_ROWS]
        asked = (-1,) if begin + CHUNK_ROWS >= len(rows) else None
        logits = engine.prefill_rows(sequence, entering[some - first], some, range(layer, engine.spec.layers), asked)
    assert logits is not None, "the last token is always computed"
    return Blended(logits[0], rows)


def _deviating(sequence: SequenceKV, reused: Sequence[Reused], again: Again) -> Positions:
    """Return the positions of the share of reused tokens whose values in the probed layer differ most from those computed
    here."""
    exact = sequence.values[again.probed]
    deviations = [((exact[:, each.at] - each.kv[again.probed, 1].transpose(1, 0, 2)) ** 2).sum(axis=(0, 2)) for each in reused]
    deviation, at = np.concatenate(deviations), np.concatenate([each.at for each in reused])
    chosen: Positions = at[np.argsort(-deviation, kind="stable")[: round(again.share * len(at))]]
    return chosen


def _covered(engine: Llama, sequence: SequenceKV, count: int, reused: Sequence[Reused], again: Again) -> NDArray[np.bool_]:
    """Return which of the `count` next tokens but the last have reused KV. Raises ValueError for a plan that makes no sense."""
    spec, first = engine.spec, sequence.length
    if not isinstance(sequence.keys, np.ndarray):
        raise ValueError(ON_CPU)
    if not (0 <= again.share <= 1 and 1 <= again.probed < spec.layers):
        raise ValueError(f"{again}: a share lies between 0 and 1, a probed layer between 1 and {spec.layers - 1}")
    covered = np.zeros(count, dtype=bool)
    for each in reused:
        shape = (spec.layers, 2, len(each.at), spec.kv_heads, spec.head_dim)
        if each.kv.shape != shape or each.kv.dtype != np.float32 or len(each.computed_at) != len(each.at):
            raise ValueError(f"reused KV is {each.kv.dtype} {each.kv.shape}, and {len(each.at)} tokens have float32 {shape}")
        if not len(each.at):
            raise ValueError("reused KV of no tokens")
        if each.at[0] < first or each.at[-1] >= first + count or (np.diff(each.at) <= 0).any():
            raise ValueError(
                f"reused KV of tokens {each.at[0]}..{each.at[-1]} is not of {first}..{first + count - 1}, ascending"
            )
        if covered[each.at - first].any():
            raise ValueError("two pieces of reused KV are for the same token")
        if int(each.computed_at.min()) < 0:
            raise ValueError("no token was computed at a position below 0")
        covered[each.at - first] = True
    covered[-1] = False
    return covered
