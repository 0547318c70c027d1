"""Matrices in the few bits their file holds them in: exactly the same weights, a fifth of the memory to read.

A quantised block is w = scale * q + minimum, q a small integer, over 16 or 32 inputs of one output (`sources/gguf_blocks.py`
reads them from a file). A float32 matrix that was bfloat16 keeps its upper halves. Anything else stays float32.

Panels are [out / 32, in, 32], as in weights.bin but narrower; packed q are [out / 32, in / 8, 32] of eight 4-bit values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

PANEL_WIDTH = 32  # outputs in a panel: two registers of AVX-512; eight rows of them leave registers for the weights


class Form(IntEnum):
    """The form of a matrix in memory. FLOAT32 is weights.bin's own panel of 64."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT8_MINIMUM = 3
    INT4_MINIMUM = 4


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix w = scales * values + minima. `values` int8 [out, in]; the others float32 [out, in / group], minima None:
    zero."""

    values: NDArray[np.int8]
    scales: NDArray[np.float32]
    minima: NDArray[np.float32] | None

    @property
    def group(self) -> int:
        return int(self.values.shape[1] // self.scales.shape[1])

    def map_rows(self, permute: Callable[[NDArray[Any]], NDArray[Any]]) -> "Quantized":
        """Return the matrix with the rows of all its arrays in another order."""
        minima = None if self.minima is None else permute(self.minima)
        return Quantized(permute(self.values), permute(self.scales), minima)

    def dequantize(self) -> NDArray[np.float32]:
        weights = self.values.astype(np.float32) * np.repeat(self.scales, self.group, axis=1)
        return weights if self.minima is None else weights + np.repeat(self.minima, self.group, axis=1)


@dataclass(frozen=True, slots=True)
class Panels:
    """A matrix in the form that the compiled engine reads. `scales` and `minima` are float32 [out / 32, in / group, 32]."""

    form: Form
    values: NDArray[Any]
    scales: NDArray[np.float32] | None = None
    minima: NDArray[np.float32] | None = None

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0: there are no scales."""
        if self.scales is None:
            return 0
        steps = 8 if self.form is Form.INT4_MINIMUM else 1
        return int(self.values.shape[1] * steps // self.scales.shape[1])

    def arrays(self) -> dict[str, NDArray[Any]]:
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "form"}
        return {name: array for name, array in found.items() if array is not None}


def concatenate(parts: Sequence[Quantized]) -> Quantized:
    """Return one matrix of several that share their input: the finest groups of any, minima where one has them."""
    group = min(part.group for part in parts)

    def refined(part: Quantized, array: NDArray[np.float32] | None) -> NDArray[np.float32]:
        return np.repeat(np.zeros_like(part.scales) if array is None else array, part.group // group, axis=1)

    plain = all(part.minima is None for part in parts)
    return Quantized(
        np.concatenate([part.values for part in parts]),
        np.concatenate([refined(part, part.scales) for part in parts]),
        None if plain else np.concatenate([refined(part, part.minima) for part in parts]),
    )


def quantized_panels(matrix: Quantized) -> Panels:
    """Return 4 packed bits where the values fit, else 8."""
    low, high = int(matrix.values.min()), int(matrix.values.max())
    scales = _cut(matrix.scales)
    if low >= 0 and high <= 15 or (matrix.minima is None and low >= -8 and high <= 7):
        shift = 0 if low >= 0 else 8  # q + 8 with a minimum of -8 scales is the same weight: both are exact
        minima = np.float32(-shift) * matrix.scales if matrix.minima is None else matrix.minima
        return Panels(Form.INT4_MINIMUM, _packed(_cut(matrix.values + np.int8(shift))), scales, _cut(minima))
    form = Form.INT8 if matrix.minima is None else Form.INT8_MINIMUM
    return Panels(form, _cut(matrix.values), scales, None if matrix.minima is None else _cut(matrix.minima))


def bfloat16_panels(weights: NDArray[np.float32]) -> Panels | None:
    """Return the upper halves of float32 weights [out, in] whose lower halves are zero; None where they are not."""
    bits = np.ascontiguousarray(weights).view(np.uint32)
    if np.any(bits & np.uint32(0xFFFF)):
        return None
    return Panels(Form.BFLOAT16, _cut((bits >> np.uint32(16)).astype(np.uint16)))


def panel_arrays(form: Form, rows: int, columns: int, group: int) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return dtype and shape of the arrays of a matrix [rows, columns] in this form."""
    count = -(-rows // PANEL_WIDTH)
    steps = columns // 8 if form is Form.INT4_MINIMUM else columns
    item = {Form.BFLOAT16: np.uint16, Form.INT4_MINIMUM: np.uint32}.get(form, np.int8)
    arrays: dict[str, tuple[Any, tuple[int, ...]]] = {"values": (item, (count, steps, PANEL_WIDTH))}
    if form is not Form.BFLOAT16:
        arrays["scales"] = (np.float32, (count, columns // group, PANEL_WIDTH))
    if form in (Form.INT8_MINIMUM, Form.INT4_MINIMUM):
        arrays["minima"] = arrays["scales"]
    return arrays


def _cut(matrix: NDArray[Any]) -> NDArray[Any]:
    """Cut [out, in] into [out / 32, in, 32], the last panel padded with zeros."""
    rows, columns = matrix.shape
    count = -(-rows // PANEL_WIDTH)
    padded = np.zeros((count * PANEL_WIDTH, columns), dtype=matrix.dtype)
    padded[:rows] = matrix
    return np.ascontiguousarray(padded.reshape(count, PANEL_WIDTH, columns).transpose(0, 2, 1))


def _packed(panels: NDArray[np.int8]) -> NDArray[np.uint32]:
    """Pack [panel, in, 32] of 0..15 into [panel, in / 8, 32]: the first of eight inputs in the lowest bits."""
    count, columns, width = panels.shape
    eights = panels.view(np.uint8).reshape(count, columns // 8, 8, width)
    packed = np.zeros((count, columns // 8, width), dtype=np.uint32)
    for index in range(8):
        packed |= eights[:, :, index].astype(np.uint32) << np.uint32(4 * index)
    return packed
