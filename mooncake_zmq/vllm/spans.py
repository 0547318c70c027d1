"""Locations of a KV block's bytes in a process's memory, from the shapes and strides of its layers' arrays. PURE.

A block's value is its bytes of each layer, one layer after another, each in the order of its memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

Span = tuple[int, int]
"""(address or offset, bytes)."""


@dataclass(frozen=True, slots=True)
class LayerSpans:
    """One layer: block b's bytes are `runs`, (offset, bytes), starting at `address + b * step`."""

    address: int
    step: int
    runs: tuple[Span, ...]


def runs_of(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> tuple[Span, ...]:
    """Return the contiguous pieces of an array, (offset, bytes), in the order of memory. `strides` in bytes, none negative."""
    axes = sorted(((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1), reverse=True)
    run = item_bytes
    while axes and axes[-1][0] == run:
        run *= axes.pop()[1]
    offsets = [sum(place) for place in product(*(range(0, stride * size, stride) for stride, size in axes))]
    return tuple((offset, run) for offset in sorted(offsets))


def layer_spans(address: int, shape: Sequence[int], strides: Sequence[int], item_bytes: int, num_blocks: int) -> LayerSpans:
    """Return the spans of a layer. `shape`, `strides` (bytes): of its array, blocks first; a kernel may cut a block into
    several of its own. Raises ValueError where the first axis is not that of the blocks, or places of the array share
    memory."""
    pieces, left = divmod(shape[0], num_blocks)
    if left or not pieces:
        raise ValueError(f"a KV cache of shape {list(shape)} does not begin with {num_blocks} blocks")
    step = strides[0] * pieces
    runs = runs_of((pieces, *shape[1:]), strides, item_bytes)
    ends = [offset + length for offset, length in runs]
    if any(stop > start for stop, (start, _) in zip(ends, runs[1:], strict=False)) or min(strides) < 0:
        raise ValueError(f"a KV cache of shape {list(shape)} and strides {list(strides)} has places that share memory")
    return LayerSpans(address, step, runs)


class BlockSpans:
    """Spans of all layers of one rank."""

    def __init__(self, layers: Sequence[LayerSpans]) -> None:
        self.layers = tuple(layers)
        self.value_bytes = sum(length for layer in layers for _, length in layer.runs)

    def of(self, block: int) -> list[Span]:
        """Return (address, bytes) of block `block`, in order."""
        return [(layer.address + block * layer.step + offset, length) for layer in self.layers for offset, length in layer.runs]
