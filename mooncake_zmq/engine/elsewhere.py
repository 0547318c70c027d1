"""Attention over KV that lies in several places: each place gives a partial result, and any two of them merge exactly.

A partial result of some tokens is the sum of their values weighted by exponentials of their scores, the highest of these
scores, and the sum of the weights. Nothing is divided before all are merged: order and number of the parts do not matter.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.kv_cache import SequenceKV

Floats = NDArray[np.float32]


class Partial(NamedTuple):
    """The attention of some rows over some of their tokens. A row without tokens has a highest score of -inf, a total of 0."""

    mixed: Floats
    """The sums of weighted values, undivided [n, kv_head, group, head_dim]."""
    states: Floats
    """[n, kv_head, group, (highest, total)]."""

    def merge(self, other: "Partial", rows: Sequence[int] | slice = slice(None)) -> None:
        """Add the result over further tokens of these rows."""
        highest = np.maximum(self.states[rows][..., 0], other.states[..., 0])
        with np.errstate(invalid="ignore"):  # no tokens in either: NaN
            own, its = (np.exp(each[..., 0] - highest) for each in (self.states[rows], other.states))
        self.mixed[rows] = own[..., None] * self.mixed[rows] + its[..., None] * other.mixed
        self.states[rows] = np.stack([highest, own * self.states[rows][..., 1] + its * other.states[..., 1]], axis=-1)


def no_tokens(rows: int, kv_heads: int, group: int, head_dim: int) -> Partial:
    """Return the result over no tokens."""
    states = np.zeros((rows, kv_heads, group, 2), np.float32)
    states[..., 0] = -np.inf
    return Partial(np.zeros((rows, kv_heads, group, head_dim), np.float32), states)


class Elsewhere(Protocol):
    """The KV of a step's rows that other processes hold."""

    def begin(self, sequences: "Sequence[SequenceKV | FarKV]") -> None:
        """Begin a step of these rows. Raise ValueError unless it is over just the tokens that they have not got."""

    def ask(self, layer: int, queries: Floats, keys: Floats, values: Floats) -> None:
        """Send queries [n, kv_head, group, head_dim], rotated and scaled, to who holds KV of their rows; with them the new keys
        and values [n, kv_head, head_dim] of rows that keep none here."""

    def answers(self, layer: int) -> Partial:
        """Wait for the answers to `ask`, and return them merged, for all rows."""


class FarKV:
    """A running sequence all of whose KV lies elsewhere, that of its new tokens too."""

    def __init__(self, length: int, capacity: int) -> None:
        self.length, self.capacity = length, capacity

    @property
    def position(self) -> int:
        """The position of the next token."""
        return self.length
