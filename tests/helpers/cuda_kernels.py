"""What the kernels of device.cu and parts.cu do, in NumPy: the stand-in's `RawModule`. `tests/gpu` runs the real ones."""

import ctypes

import numpy as np

PART_FIELDS, CACHE_FIELDS = 5, 5


def floats(address, *shape):
    size = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer((ctypes.c_float * size).from_address(int(address)), np.float32).reshape(shape)


def integers(address, *shape):
    size = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer((ctypes.c_int64 * size).from_address(int(address)), np.int64).reshape(shape)


class Module:
    """`cupy.RawModule`: sizes come as compiler options."""

    def __init__(self, xp, code, options):
        self.xp = xp
        self.sizes = {name.removeprefix("-D"): int(size) for name, size in (option.split("=") for option in options)}
        for name in ("extern", "__global__"):
            assert name in code

    def get_function(self, name):
        return getattr(self, name)

    # --- parts.cu, on the stream of the thread: when that is synchronized

    def scatter(self, grid, _block, arguments):
        table, keys, values, tiles, capacity = arguments
        self._later(grid, table, keys, values, lambda row: self._scatter(row, keys._array, values._array))
        assert (keys.shape[2], values.shape[2]) == (tiles, capacity)

    def gather(self, grid, _block, arguments):
        table, keys, values, tiles, capacity, room = arguments
        self._later(grid, table, keys, values, lambda row: self._gather(row, keys._array, values._array, room))
        assert (keys.shape[2], values.shape[2]) == (tiles, capacity)

    def _later(self, grid, table, keys, values, one):
        runtime = self.xp.runtime
        rows = integers(table, grid[1], PART_FIELDS)
        size = 4 * self.sizes["HEADS"] * self.sizes["DIM"]
        for from_keys, from_values, _, _, tokens in rows.tolist():
            for address in (from_keys, from_values):
                runtime.require_reach(address, tokens * size)
        owners = runtime.held(keys.data.ptr, keys.nbytes), runtime.held(values.data.ptr, values.nbytes)

        def run():
            for owner in owners:
                owner()
            for row in rows.tolist():
                one(row)

        runtime.queue(self.xp.stream().ptr, run)

    def _cells(self, layer, start, tokens, keys, values):
        positions, tile = start + np.arange(tokens), self.sizes["KEY_TILE"]
        return (layer, slice(None), positions // tile, slice(None), positions % tile), (layer, slice(None), positions)

    def _scatter(self, row, keys, values):
        from_keys, from_values, layer, start, tokens = row
        shape = tokens, self.sizes["HEADS"], self.sizes["DIM"]
        key_cells, value_cells = self._cells(layer, start, tokens, keys, values)
        target = keys[layer]
        target[key_cells[1:]] = floats(from_keys, *shape)
        values[layer][value_cells[1:]] = floats(from_values, *shape).transpose(1, 0, 2)

    def _gather(self, row, keys, values, room):
        to_keys, to_values, layer, start, tokens = row
        shape = room, self.sizes["HEADS"], self.sizes["DIM"]
        key_cells, value_cells = self._cells(layer, start, tokens, keys, values)
        for address, found in (
            (to_keys, keys[layer][key_cells[1:]]),
            (to_values, values[layer][value_cells[1:]].transpose(1, 0, 2)),
        ):
            out = floats(address, *shape)
            out[:tokens] = found
            out[tokens:] = 0

    # --- device.cu, on the default stream: at once

    def normalize(self, grid, _block, arguments):
        x, _, weight, eps, out, _, width = arguments
        self.xp._launched()
        rows = x._array[: grid[0], :width]
        scale = 1 / np.sqrt((rows * rows).sum(axis=1, keepdims=True) / np.float32(width) + eps)
        out._array[: grid[0], :width] = rows * scale * weight._array

    def activate(self, grid, _block, arguments):
        gate, up, _, out, _, width = arguments
        self.xp._launched()
        x = gate._array[: grid[0], :width]
        out._array[: grid[0], :width] = x / (1 + np.exp(-x)) * up._array[: grid[0], :width]

    def exponentiate(self, _grid, _block, arguments):
        scores, _, tokens, group, visible, totals = arguments
        self.xp._launched()
        for token in range(tokens):
            rows, seen = scores._array[:, token], visible + token
            rows[..., :seen] = np.exp(rows[..., :seen] - rows[..., :seen].max(axis=-1, keepdims=True))
            rows[..., seen:] = 0
        totals._array[...] = scores._array.sum(axis=3, keepdims=True)
        assert totals.shape[2] == group

    def rotate(self, grid, _block, arguments):
        qkv, _, frequencies, caches, layer, kv_heads, scale, queries = arguments
        self.xp._launched()
        dim, group = self.sizes["DIM"], self.sizes["GROUP"]
        width = kv_heads * group * dim
        for row in range(grid[0]):
            keys, values, position = self._cache(caches, row, kv_heads)
            turn = np.exp(1j * (np.float32(position) * frequencies._array)).astype(np.complex64)
            pairs = qkv._array[row, : width + kv_heads * dim].reshape(-1, dim).view(np.complex64) * turn
            turned = pairs.view(np.float32)
            queries._array[row, :width] = turned[: kv_heads * group].reshape(-1) * scale
            tile, column = divmod(position, self.sizes["KEY_TILE"])
            keys[layer, :, tile, :, column] = turned[kv_heads * group :]
            start = width + kv_heads * dim
            values[layer, :, position] = qkv._array[row, start : start + kv_heads * dim].reshape(kv_heads, dim)

    def attend(self, grid, _block, arguments):
        queries, caches, layer, kv_heads, span, partial = arguments
        self.xp._launched()
        splits, _, rows = grid
        dim, group, tile = self.sizes["DIM"], self.sizes["GROUP"], self.sizes["KEY_TILE"]
        left = partial._array[: rows * kv_heads * splits * group * (dim + 2)].reshape(rows, kv_heads, splits, group, dim + 2)
        left[..., :dim], left[..., dim], left[..., dim + 1] = 0, -np.inf, 0
        for row in range(rows):
            keys, values, position = self._cache(caches, row, kv_heads)
            asked = queries._array[row, : kv_heads * group * dim].reshape(kv_heads, group, dim)
            for split in range(splits):
                seen = np.arange(split * span * tile, min((split + 1) * span * tile, position + 1))
                if not len(seen):
                    continue
                for head in range(kv_heads):
                    scores = asked[head] @ keys[layer, head][seen // tile, :, seen % tile].T
                    highest = scores.max(axis=1)
                    weights = np.exp(scores - highest[:, None])
                    left[row, head, split, :, :dim] = weights @ values[layer, head][seen]
                    left[row, head, split, :, dim], left[row, head, split, :, dim + 1] = highest, weights.sum(axis=1)

    def combine(self, grid, _block, arguments):
        partial, kv_heads, splits, out = arguments
        self.xp._launched()
        dim, group, rows = self.sizes["DIM"], self.sizes["GROUP"], grid[1]
        left = partial._array[: rows * kv_heads * splits * group * (dim + 2)].reshape(rows, kv_heads, splits, group, dim + 2)
        scale = np.exp(left[..., dim] - left[..., dim].max(axis=2, keepdims=True))[..., None]
        mixed = (left[..., :dim] * scale).sum(axis=2) / (left[..., dim + 1 :] * scale).sum(axis=2)
        out._array[:rows, : kv_heads * group * dim] = mixed.reshape(rows, -1)

    def _cache(self, caches, row, kv_heads):
        """(keys, values, position) of one sequence."""
        keys, values, tiles, capacity, position = caches._array[row].tolist()
        dim, tile = self.sizes["DIM"], self.sizes["KEY_TILE"]
        layers = self.xp.runtime.owner(keys, 4).nbytes // (4 * kv_heads * tiles * dim * tile)
        return floats(keys, layers, kv_heads, tiles, dim, tile), floats(values, layers, kv_heads, capacity, dim), position


class Cublas:
    """`cupy.cuda.cublas`."""

    CUBLAS_OP_N = 0

    def __init__(self, xp):
        self.xp = xp

    def sgemm(self, _handle, a_way, b_way, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
        """Columns of what it calls matrices are rows of ours."""
        assert a_way == b_way == self.CUBLAS_OP_N
        self.xp._launched()
        for address, rows, stride, width in ((a, k, lda, m), (b, n, ldb, k), (c, n, ldc, m)):
            assert self.xp.runtime.owner(address, 4 * ((rows - 1) * stride + width)) is not None
        out = floats(c, (n - 1) * ldc + m)
        strided = np.lib.stride_tricks.as_strided
        target = strided(out, (n, m), (4 * ldc, 4))
        weights = strided(floats(a, (k - 1) * lda + m), (k, m), (4 * lda, 4))
        inputs = strided(floats(b, (n - 1) * ldb + k), (n, k), (4 * ldb, 4))
        kept = floats(beta, 1)[0] * target if floats(beta, 1)[0] else 0
        target[...] = floats(alpha, 1)[0] * (inputs @ weights) + kept
