"""Splits the quantised blocks of a GGUF file into integers, scales and minima, and verifies them: computed again in float32
they give what the gguf package gives, bit for bit."""

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.matrices.quantized import Quantized, concatenate

ROWS_AT_ONCE = 4096  # of a matrix while it is split: bounds the copies


@dataclass(frozen=True, slots=True)
class _Layout:
    """Places within a block: byte ranges to set so that every q is 0, or 1, and the one that holds its minimum's factor."""

    group: int
    one: tuple[tuple[int, int, int], ...]  # (start, stop, byte) of q's bits
    minimum: tuple[int, int] | None = None


_LAYOUTS = {
    "Q4_0": _Layout(32, ((2, 18, 0x99),)),
    "Q4_1": _Layout(32, ((4, 20, 0x11),), (2, 4)),
    "Q5_0": _Layout(32, ((2, 6, 0xFF), (6, 22, 0x11))),
    "Q5_1": _Layout(32, ((4, 8, 0x00), (8, 24, 0x11)), (2, 4)),
    "Q8_0": _Layout(32, ((2, 34, 0x01),)),
    "Q2_K": _Layout(16, ((16, 80, 0x55),), (82, 84)),
    "Q3_K": _Layout(16, ((0, 32, 0xFF), (32, 96, 0x55))),
    "Q4_K": _Layout(32, ((16, 144, 0x11),), (2, 4)),
    "Q5_K": _Layout(32, ((16, 48, 0x00), (48, 176, 0x11)), (2, 4)),
    "Q6_K": _Layout(16, ((0, 128, 0x11), (128, 192, 0xAA))),
}


def split(raw: NDArray[np.uint8], kind: Any) -> Quantized | None:
    """Split a quantised tensor's bytes [out, bytes of a row]; return None where its kind or its numbers do not allow it.

    The gguf package does the decoding: a scale is its result for a block whose every q is 1 and minimum 0.
    """
    layout = _LAYOUTS.get(kind.name)
    if layout is None:
        return None
    parts = []
    for first in range(0, len(raw), ROWS_AT_ONCE):
        part = _split_rows(np.asarray(raw[first : first + ROWS_AT_ONCE]), kind, layout)
        if part is None:
            return None
        parts.append(part)
    return concatenate(parts)


def _split_rows(raw: NDArray[np.uint8], kind: Any, layout: _Layout) -> Quantized | None:
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = raw.reshape(-1, block_bytes)

    def decoded(q: int, *, minimum: bool) -> NDArray[np.float32]:
        changed = blocks.copy()
        for start, stop, byte in layout.one:
            changed[:, start:stop] = byte * q
        if layout.minimum and not minimum:
            changed[:, slice(*layout.minimum)] = 0
        weights = gguf.quants.dequantize(changed.reshape(raw.shape), kind)
        return np.ascontiguousarray(weights[:, :: layout.group], dtype=np.float32)

    with np.errstate(all="ignore"):
        weights = np.asarray(gguf.quants.dequantize(raw, kind), dtype=np.float32)
        scales = decoded(1, minimum=False)
        minima = decoded(0, minimum=True) if layout.minimum else None
        offsets = np.float32(0) if minima is None else np.repeat(minima, layout.group, axis=1)
        divisors = np.repeat(np.where(scales == 0, np.float32(1), scales), layout.group, axis=1)
        values = np.clip(np.nan_to_num(np.rint((weights - offsets) / divisors)), -128, 127).astype(np.int8)
        result = Quantized(values, scales, minima)
        return result if np.array_equal(result.dequantize(), weights) else None
