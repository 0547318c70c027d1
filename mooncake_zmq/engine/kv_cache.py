"""The KV of one running sequence, contiguous. Blocks exist only at its interface: `write_part` and `read_part`.

Layout, by measurement (OpenBLAS, one thread, 3 KV heads of 64, 4,096 tokens, per layer of a decode step): scores against
keys kept as blocks keep them, [token, kv_head, dim], take 0.87 ms; against transposed tiles of 64 tokens, 0.11 ms. Each
product is then small and contiguous, which is where BLAS uses kernels that read the keys in place. Values are kept per
head, [token, dim]: 0.11 ms instead of 0.32. Re-laying out a part on the way in or out costs a small part of that, once.

Threads. A copy thread may call `write_part` and `read_part` while the compute thread runs a layer: the sequence is
append-only, every (layer, token) cell is written once (but by a loan that grows, whose borrower may try a token again, see
`transfer.partials`), and each thread touches cells that the other has finished with
(the engine's `before_layer` and `after_layer` are where they agree). Nothing is moved or resized.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.backend import KVMemory

KEY_TILE = 64  # tokens in one transposed tile of keys

Part = tuple[int, int, int, Any]
"""One layer of a block, as (layer, start, tokens, array of the layout's `part_shape`, of which `tokens` count)."""


def check_whole(*sequences: "SequenceKV") -> None:
    """Raise ValueError for a sequence of whose KV a part lies elsewhere."""
    if any(sequence.before for sequence in sequences):
        raise ValueError("a sequence of whose KV a part lies elsewhere")


class SequenceKV:
    """`length` tokens of valid KV out of `capacity`; memory is committed as it is written and returned by `close`. Cells
    that are not written yet mean nothing.

    `keys` is [layer, kv_head, tile, head_dim, KEY_TILE], `values` [layer, kv_head, token, head_dim]; engines read them.
    Parts are arrays of the same namespace; `transfer.cuda` has sequences on a GPU that also take and give them in host memory.
    """

    __slots__ = ("_memory", "before", "capacity", "dropped", "keys", "length", "values")

    parts_at_once = 1
    """The most layers of blocks in one call of `write_parts` or `read_parts`. The caller then still has each in the CPU's cache
    when it hashes it."""

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, capacity_tokens: int, xp: ModuleType = np) -> None:
        if capacity_tokens < 1:
            raise ValueError("a sequence needs room for at least one token")
        tiles = -(-capacity_tokens // KEY_TILE)
        keys = KVMemory(xp, (layers, kv_heads, tiles, head_dim, KEY_TILE))
        values = KVMemory(xp, (layers, kv_heads, capacity_tokens, head_dim))
        self.keys: Any = keys.array
        self.values: Any = values.array
        self._memory: tuple[KVMemory, ...] = (keys, values)
        self.capacity = capacity_tokens
        self.length = 0
        self.before = 0
        """The tokens ahead of the first one here, whose KV lies elsewhere: `Llama.decode_elsewhere` goes on behind them."""
        self.dropped = 0
        """The tokens whose KV nothing holds any more, see `engine.eviction`: those behind them keep their positions."""

    @property
    def position(self) -> int:
        """The position of the next token."""
        return self.before + self.dropped + self.length

    def set_position(self, position: int) -> None:
        """Set the length such that the next token is at this position."""
        self.set_length(position - self.before - self.dropped)

    def expect(self, tokens: int) -> None:
        """Prepare for so many tokens at once, before any is written. If they fill most of the capacity, it is allocated in
        large pages: a decode step then reads it a tenth to a quarter faster (measured). Else large pages would commit memory
        that stays empty. What is not written yet is then undefined, as it may be of a sequence that ended."""
        if self._memory and 2 * tokens >= self.capacity:
            for memory in self._memory:
                memory.enlarge()
            self.keys, self.values = (memory.array for memory in self._memory)

    def write_part(self, layer: int, start: int, part: Any) -> None:
        """Store one layer's part of a block, [k/v, n, kv_head, head_dim] or coded, at tokens start..start+n.

        On a device it may be under way until `settle`, and `part` is to stay as it is until then.
        """
        self.store(layer, start, part[0], part[1])

    def write_parts(self, parts: Sequence[Part]) -> None:
        """Call `write_part` for the first `tokens` of each."""
        for layer, start, tokens, part in parts:
            self.write_part(layer, start, self.first_tokens(part, tokens))

    def read_parts(self, parts: Sequence[Part]) -> None:
        """Copy tokens start..start + tokens of a layer into the beginning of each; the content behind them is undefined. Those
        in host memory are there on return."""
        for layer, start, tokens, part in parts:
            self.read_part(layer, start, start + tokens, self.first_tokens(part, tokens))

    def first_tokens(self, part: Any, tokens: int) -> Any:
        """Return a view of the first tokens of a part."""
        return part[:, :tokens]

    def settle(self) -> None:
        """Return once every `write_part` of this thread has ended."""

    def read_part(self, layer: int, start: int, stop: int, out: Any) -> None:
        """Copy one layer's tokens start..stop into `out`, [k/v, stop - start, kv_head, head_dim] or coded.

        `stop` may lie beyond `length`: after `after_layer(l)` a layer can be read while later layers still compute.
        """
        self._check_range(start, stop)
        out[1] = self.values[layer, :, start:stop].transpose(1, 0, 2)
        for tiles, columns, tokens in _tile_runs(start, stop):
            source = self.keys[layer, :, tiles, :, columns]
            target = out[0, tokens].reshape(source.shape[1], source.shape[3], source.shape[0], source.shape[2])
            target[...] = source.transpose(1, 3, 0, 2)

    def store(self, layer: int, start: int, keys: Any, values: Any) -> None:
        """Store keys and values, each [n, kv_head, head_dim], at tokens start..start+n of one layer."""
        stop = start + len(keys)
        self._check_range(start, stop)
        self.values[layer, :, start:stop] = values.transpose(1, 0, 2)
        for tiles, columns, tokens in _tile_runs(start, stop):
            target = self.keys[layer, :, tiles, :, columns]
            source = keys[tokens].reshape(target.shape[1], target.shape[3], target.shape[0], target.shape[2])
            target[...] = source.transpose(2, 0, 3, 1)

    def store_rows(self, layer: int, positions: NDArray[np.int64], keys: Any, values: Any) -> None:
        """Store keys and values, each [n, kv_head, head_dim], of the tokens at ascending positions of one layer."""
        start = start_of_run(positions)
        if start is None:
            self.scatter(layer, positions, keys, values)
        else:
            self.store(layer, start, keys, values)

    def scatter(self, layer: int, positions: NDArray[np.int64], keys: Any, values: Any) -> None:
        """Store keys and values, each [n, kv_head, head_dim], of tokens of one layer that do not follow one another."""
        self._check_range(int(positions[0]), int(positions[-1]) + 1)
        self.values[layer][:, positions] = values.transpose(1, 0, 2)
        self.keys[layer][:, positions // KEY_TILE, :, positions % KEY_TILE] = keys

    def keep_rows(self, layer: int, rows: NDArray[np.int64]) -> None:
        """Move the KV of these tokens of a layer, ascending, to its beginning, bit for bit."""
        keys = self.keys[layer][:, rows // KEY_TILE, :, rows % KEY_TILE]
        self.values[layer, :, : len(rows)] = self.values[layer][:, rows]
        to = np.arange(len(rows))
        self.keys[layer][:, to // KEY_TILE, :, to % KEY_TILE] = keys

    def append(self, layer: int, position: int, keys: Any, values: Any) -> None:
        """Store one token's keys and values, each [kv_head, head_dim]. The caller has checked that there is room."""
        tile, column = divmod(position, KEY_TILE)
        self.keys[layer, :, tile, :, column] = keys
        self.values[layer, :, position] = values

    def copy_from(self, source: "SequenceKV", tokens: int) -> None:
        """Take the KV of the first tokens of another sequence of the model, which may be fed behind them meanwhile: what is
        copied beyond `tokens` means nothing."""
        self._check_range(0, tokens)
        source._check_range(0, tokens)
        tiles = -(-tokens // KEY_TILE)
        self.keys[:, :, :tiles] = source.keys[:, :, :tiles]
        self.values[:, :, :tokens] = source.values[:, :, :tokens]

    def set_length(self, length: int) -> None:
        if not 0 <= length <= self.capacity:
            raise ValueError(f"length {length} is outside 0..{self.capacity}")
        self.length = length

    def close(self) -> None:
        """Give the memory back, once no copy is in flight. May be called twice; then the sequence is dead."""
        self.length = self.capacity = 0
        self.keys = self.values = None
        for memory in self._memory:
            memory.release()
        self._memory = ()

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.capacity:
            raise ValueError(f"tokens {start}..{stop} are outside the sequence's capacity of {self.capacity}")


def start_of_run(positions: NDArray[np.int64]) -> int | None:
    """Return the first of ascending positions if they follow one another, or there are none; else None."""
    if not len(positions):
        return 0
    first, last = int(positions[0]), int(positions[-1])
    return first if last - first == len(positions) - 1 else None


class NewSequence(Protocol):
    """A function that makes sequences of a model's shape."""

    def __call__(self, *, layers: int, kv_heads: int, head_dim: int, capacity_tokens: int) -> SequenceKV: ...


def _tile_runs(start: int, stop: int) -> list[tuple[slice, slice, slice]]:
    """Cut tokens start..stop into at most three runs of (tiles, columns in each, tokens counted from start).

    start                                       stop
      |..tail of a tile..|== whole tiles ==|..head of a tile..|
    """
    runs = []
    at = start
    while at < stop:
        tile, column = divmod(at, KEY_TILE)
        whole = (stop - at) // KEY_TILE if column == 0 else 0
        if whole:
            tiles, columns, end = slice(tile, tile + whole), slice(0, KEY_TILE), at + whole * KEY_TILE
        else:
            end = min(stop, (tile + 1) * KEY_TILE)
            tiles, columns = slice(tile, tile + 1), slice(column, column + end - at)
        runs.append((tiles, columns, slice(at - start, end - start)))
        at = end
    return runs
