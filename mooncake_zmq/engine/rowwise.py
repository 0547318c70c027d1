"""Operations between the products of a prefill: norms, the activation, softmax. Each row by itself, in NumPy or CuPy."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Rowwise(Protocol):
    """Row operations, called by several threads at once, each with arrays of its own."""

    def normalize(self, x: Any, weight: Any, eps: float, out: Any) -> None:
        """Write the RMSNorm of `x` [n, width] into `out` [n, width]."""

    def activate(self, gate: Any, up: Any, out: Any) -> None:
        """Write silu(gate) * up into `out`, each [n, width]; `gate` is scratch afterwards."""

    def exponentiate(self, scores: Any, positions: NDArray[np.int64], *, shift: bool) -> Any:
        """Exponentiate `scores` [head, n, group, width] in place, where each of the n tokens sees the keys up to its position,
        and these ascend; 0 for other keys up to the last position, anything beyond. Returns the sums of the rows,
        [head, n, group, 1].

        `shift`: subtract each row's maximum first, or another value that keeps sums finite; without, it may.
        """


class ArrayRowwise:
    """Row operations by whole arrays."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp

    def normalize(self, x: Any, weight: Any, eps: float, out: Any) -> None:
        mean_square = self._xp.einsum("ij,ij->i", x, x) * np.float32(1.0 / x.shape[1])
        scale = np.float32(1.0) / self._xp.sqrt(mean_square + np.float32(eps))
        self._xp.multiply(x, scale[:, None], out=out)
        out *= weight

    def activate(self, gate: Any, up: Any, out: Any) -> None:
        gate *= np.float32(0.5)
        self._xp.tanh(gate, out=out)  # silu(x) as x / 2 * (1 + tanh(x / 2)), which cannot overflow
        out += np.float32(1.0)
        out *= gate
        out *= up

    def exponentiate(self, scores: Any, positions: NDArray[np.int64], *, shift: bool) -> Any:
        # Without a shift two of five passes over the scores are saved.
        first = int(positions[0]) + 1
        future = self._xp.asarray(np.arange(first, scores.shape[3]) > positions[:, None])[:, None]
        # Assigned, not added: a key that is not written yet may be anything, also not a number.
        self._xp.copyto(scores[:, :, :, first:], np.float32(-np.inf), where=future)
        if shift:
            scores -= scores.max(axis=3, keepdims=True)
        self._xp.exp(scores, out=scores)
        return scores.sum(axis=3, keepdims=True)
