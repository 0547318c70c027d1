"""Tables by which machine code reaches a sequence that attends to few of its tokens: addresses of its arrays, and scratch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.kv_cache import KEY_TILE
from mooncake_zmq.engine.machine_code.step_layout import ARRAY_FIELDS, BUCKETS, Few
from mooncake_zmq.engine.selection.exact_keys import ExactKeys
from mooncake_zmq.engine.selection.few_of_many import FewOfMany, Selector
from mooncake_zmq.engine.selection.product_codes import ProductCodes
from mooncake_zmq.engine.selection.quest import Quest
from mooncake_zmq.engine.selection.sizes import CENTROIDS, SUBSPACES


class FewTable:
    """The table of `Few` of one sequence, valid from step to step: the arrays stay where they are."""

    def __init__(self, few: FewOfMany, group: int) -> None:
        """`group`: queries per key head."""
        self._length = np.empty(1, np.int64)
        self._arrays = _arrays_of(few) | _scratch(few, group) | {Few.LENGTH: self._length}
        self._table = table_of(self._arrays, len(Few))

    def address(self, length: int) -> int:
        """Return the table's address, for a step after `length` tokens."""
        self._length[0] = length
        return int(self._table.ctypes.data)


def has_machine_code(few: FewOfMany) -> bool:
    """Return whether machine code knows the way in which a sequence chooses."""
    return few.selector is None or _selector_arrays(few.selector) is not None


def table_of(arrays: Mapping[Any, NDArray[Any]], rows: int) -> NDArray[np.int64]:
    """Return a table of as many rows: of each array its address and shape."""
    table = np.zeros((rows, ARRAY_FIELDS), dtype=np.int64)
    for row, array in arrays.items():
        assert array.flags.c_contiguous, row.name
        table[row, : 1 + array.ndim] = array.ctypes.data, *array.shape
    return table


def _arrays_of(few: FewOfMany) -> dict[Few, NDArray[Any]]:
    """Return what is there from step to step."""
    layers, _, kv_heads, window, dim = few.window.shape
    by_head = len(few.near), kv_heads, few.chosen, few.near.shape[2]
    arrays: dict[Few, NDArray[Any]] = {
        Few.FETCHED: few.fetched,
        Few.WINDOW: few.window.reshape(layers, 2 * kv_heads, window, dim),
        Few.RECENT: np.array([few.recent]),
        Few.NEAR: few.near.reshape(by_head),
    }
    if few.selector is not None:
        arrays[Few.FAR] = few.far.reshape(layers, kv_heads, -1, few.far.shape[2])
        arrays |= _selector_arrays(few.selector) or {}
    if few.holds:
        arrays |= {Few.HELD: few.held.reshape(by_head[:3]), Few.WANTED: few.wanted.view(np.uint8).reshape(kv_heads, -1)}
    if len(few.sums):
        arrays |= {Few.SUMS: few.sums, Few.NORMS: few.norms}
    return arrays


def _selector_arrays(selector: Selector) -> dict[Few, NDArray[Any]] | None:
    """Return what a selector keeps; None for one without machine code."""
    match selector:
        case ExactKeys():
            return {Few.KEYS: selector.keys}
        case ProductCodes():
            return {Few.CENTROIDS: selector.centroids, Few.CODES: selector.codes}
        case Quest():
            return {Few.LOWEST: selector.lowest, Few.HIGHEST: selector.highest}
    return None


def _scratch(few: FewOfMany, group: int) -> dict[Few, NDArray[Any]]:
    """Return what a step computes in."""
    kv_heads, window = few.window.shape[2:4]
    room = few.capacity - window
    pairs = CENTROIDS**SUBSPACES if isinstance(few.selector, ProductCodes) else 0
    span = max(-(-room // KEY_TILE) * KEY_TILE, window + few.chosen, pairs)
    return {
        Few.MATTER: np.empty((kv_heads, room), np.float32),
        Few.SCORES: np.empty((kv_heads, group, span), np.float32),
        Few.WEIGHTS: np.empty((kv_heads, group, span), np.float32),
        Few.FOUND: np.empty((kv_heads, room + few.chosen + 1), np.int64),
        Few.BUCKETS: np.empty((kv_heads, max(BUCKETS, pairs)), np.int64),
    }
