"""Operations between the products of a prefill: norms, the activation, softmax. Each row by itself, in NumPy or CuPy."""

from typing import Any, Protocol

import numpy as np

from mooncake_zmq.engine.kv_cache import KEY_TILE


class Rowwise(Protocol):
    """Row operations, called by several threads at once, each with arrays of its own."""

    def normalize(self, x: Any, weight: Any, eps: float, out: Any) -> None:
        """Write the RMSNorm of `x` [n, width] into `out` [n, width]."""

    def activate(self, gate: Any, up: Any, out: Any) -> None:
        """Write silu(gate) * up into `out`, each [n, width]; `gate` is scratch afterwards."""

    def exponentiate(self, scores: Any, visible: int, *, shift: bool) -> Any:
        """Exponentiate `scores` [head, n, group, width] in place, where token i of the n sees the first `visible` + i keys; 0
        for the rest of the first `visible` + n - 1, anything beyond. Returns the sums of the rows, [head, n, group, 1].

        `shift`: subtract each row's maximum first, or another value that keeps sums finite; without, it may.
        """


class ArrayRowwise:
    """Row operations by whole arrays. `tile_tokens`: the most tokens in a call of `exponentiate`."""

    def __init__(self, xp: Any, tile_tokens: int) -> None:
        self._xp = xp
        future = np.triu(np.ones((tile_tokens, tile_tokens + KEY_TILE), dtype=bool), k=1)
        self._future: Any = xp.asarray(future)

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

    def exponentiate(self, scores: Any, visible: int, *, shift: bool) -> Any:
        # Without a shift two of five passes over the scores are saved.
        own = scores[:, :, :, visible - 1 :]
        # Assigned, not added: a key that is not written yet may be anything, also not a number.
        self._xp.copyto(own, np.float32(-np.inf), where=self._future[: scores.shape[1], None, : own.shape[3]])
        if shift:
            scores -= scores.max(axis=3, keepdims=True)
        self._xp.exp(scores, out=scores)
        return scores.sum(axis=3, keepdims=True)
