"""Matrices as panels of 64 columns, and the product with them.

Products are kept small on purpose: below SMALL_PRODUCT multiply-adds OpenBLAS (on AVX-512) reads both operands in place
instead of packing copies of them. Rows are taken in chunks to fit. On other CPUs and libraries the same code is merely an
ordinary blocked product. By measurement (one thread of an EPYC, SmolLM2-135M's shapes) a decode step of 8 moves its weights at
20 GB/s instead of 7, and prefill runs at 110 GFLOP/s where whole-matrix products reach 105. A Xeon that makes 146 of those
makes 120 here: there `compiled` multiplies panels by itself, at 160. One layout serves all.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.team import Team

PANEL_COLUMNS = 64  # measured at batch 4 and 8, and at 512 rows on a Xeon, against 32 to 192: fastest or equal
SMALL_PRODUCT = 1_000_000  # rows * columns * depth; measured just above it: half the speed
SHARED_BYTES = 3_000_000  # a product that reads so much weights takes 0.15 ms and more, and waking a thread some 0.05 ms
WOKEN_SHARE = 0.72  # of what the calling thread computes, as the others begin later; measured 0.54 to 0.92

Product = Callable[[Any, Any, Any, Any, int], None]
"""`linear`, or a function with the same result."""


def panel_count(outputs: int) -> int:
    """Return the number of panels that hold so many outputs."""
    return -(-outputs // PANEL_COLUMNS)


def to_panels(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cut [out, in] into [out / 64, in, 64], the last panel padded with zeros."""
    rows, columns = weights.shape
    count = panel_count(rows)
    padded = np.zeros((count * PANEL_COLUMNS, columns), dtype=np.float32)
    padded[:rows] = weights
    return np.ascontiguousarray(padded.reshape(count, PANEL_COLUMNS, columns).transpose(0, 2, 1))


def column(panels: Any, index: Any) -> Any:
    """Return rows of the matrix as it was before `to_panels`: [n, in]."""
    return panels[index // PANEL_COLUMNS, :, index % PANEL_COLUMNS]


def linear(xp: Any, x: Any, panels: Any, out: Any, count: int) -> None:
    """Compute out = x @ weights for the first `count` rows; the rows that round them up to whole chunks are scratch.

    x: [rows, in]. panels: [panels, in, 64]. out: [rows, 64 * panels].
    """
    inputs, by_panel = _views(xp, x, out, count, len(panels))
    _multiply(xp, inputs, panels, by_panel)


def shared_linear(team: Team, xp: Any, x: Any, panels: Any, out: Any, count: int) -> None:
    """Compute `linear` with the panels distributed over a team's threads, if they are so many that waking one pays."""
    if team.size == 1 or panels.nbytes < SHARED_BYTES:
        linear(xp, x, panels, out, count)
        return
    inputs, by_panel = _views(xp, x, out, count, len(panels))
    each = int(len(panels) * WOKEN_SHARE / (1 + WOKEN_SHARE * (team.size - 1)))
    bounds = [*(each * rank for rank in range(team.size)), len(panels)]

    def share(rank: int) -> None:
        part = slice(bounds[rank], bounds[rank + 1])
        _multiply(xp, inputs, panels[part], by_panel[part])

    team.run(share)


def _multiply(xp: Any, inputs: Any, panels: Any, out: Any) -> None:
    """Multiply panel after panel, so that each is read from memory once and by all further chunks from the cache. By default
    NumPy follows the memory of `out`, where a chunk's panels lie side by side, and reads all panels again for every chunk:
    measured at 512 rows, 0.55 to 0.7 of the speed."""
    if xp is np:
        np.matmul(inputs, panels[:, None], out=out, order="C")
    else:
        xp.matmul(inputs, panels[:, None], out=out)


def _views(xp: Any, x: Any, out: Any, count: int, panels: int) -> tuple[Any, Any]:
    """Return inputs [1, chunk, row, in] and outputs [panel, chunk, row, 64] of one product over many pairs of small
    matrices."""
    chunks, height = row_chunks(xp, count, x.shape[1])
    rows = chunks * height
    by_panel = out[:rows].reshape(chunks, height, panels, PANEL_COLUMNS).transpose(2, 0, 1, 3)
    return x[:rows].reshape(1, chunks, height, x.shape[1]), by_panel


def rows_needed(xp: Any, count: int, depth: int) -> int:
    """Return the rows that `linear` reads and writes for `count` rows of `depth` inputs."""
    chunks, height = row_chunks(xp, count, depth)
    return chunks * height


def row_chunks(xp: Any, count: int, depth: int) -> tuple[int, int]:
    """Return (chunks, height): cut `count` rows into equal chunks, small enough for the kernels and with few rows of padding.
    All are one chunk on a GPU, where small products are slow.

    Heights are even: measured at one row, two rows with one of them unused read the weights at 30 GB/s instead of 22.
    Those that 4 divides measured 3 % faster than others, the lower of them as fast or faster.
    """
    if xp is not np:
        return 1, count
    if not count:
        return 0, 2
    limit = SMALL_PRODUCT // (PANEL_COLUMNS * depth) // 2 * 2
    if limit < 2:
        return 1, count
    heights = range(max(2, limit // 2 // 2 * 2), limit + 1, 2) if count > limit else (count + count % 2,)
    height = min(heights, key=lambda rows: -(-count // rows) * rows * (1.0 if rows % 4 == 0 else 1.03))
    return -(-count // height), height
