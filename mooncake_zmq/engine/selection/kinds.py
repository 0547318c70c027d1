"""The kinds of selection that a decode serves."""

from collections.abc import Callable, Mapping

from mooncake_zmq.core.selection import Selection
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.selection.exact_keys import ExactKeys
from mooncake_zmq.engine.selection.few_of_many import FewOfMany, Selector
from mooncake_zmq.engine.selection.product_codes import ProductCodes
from mooncake_zmq.engine.selection.quest import Quest

SELECTORS: Mapping[str, Callable[[int, int, int, int], Selector]] = {
    "kcache": ExactKeys,
    "pqcache": ProductCodes,
    "quest": Quest,
}
"""By kind: what makes a selector for layers, KV heads, their width and a capacity in tokens."""
BY_VALUES = ("kcache", "pqcache")
"""Those that are served with values counting too: nearer to attention over all, and a little slower (`bench select`)."""


def selected(source: SequenceKV, selection: Selection) -> FewOfMany:
    """Return a copy of a sequence's KV that grows up to its capacity, and chooses so."""
    layers, kv_heads, _, dim, _ = source.keys.shape
    selector = SELECTORS[selection.kind](layers, kv_heads, dim, source.capacity)
    following = source.capacity - source.length
    return FewOfMany(source, selector, selection.tokens, following=following, values=selection.kind in BY_VALUES)
