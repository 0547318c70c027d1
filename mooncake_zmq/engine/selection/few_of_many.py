"""The KV of a sequence of which each step attends to few tokens: the first and the last ones, and those of the others that a
selector chooses for its queries.

    near: | sinks | recent, a ring | chosen |  and what the selector keeps of all others
                        |  leaves       ^  copied, and counted
                        v               |
    far:  | one row for each token behind the sinks: its value, and its key where the selector has not got it |

"Far" is memory of its own that stands for a host's pool; its rows are copied before they are attended to. Where they have keys,
the rows that were chosen last stay near, for each layer and head: only those that the next step wants beside them are copied.
That is a cache of hot tokens as large as one choice, from which attention reads in place.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.selection import RECENT, SINKS
from mooncake_zmq.engine.kv_cache import SequenceKV

Floats = NDArray[np.float32]
SMALLEST_SHARE = 1e-7
"""The least share of the tokens that are not chosen: less is lost in rounding."""


class Weighed(NamedTuple):
    """How the far tokens matter to a layer's queries. Valid until the next call."""

    matter: Floats
    """Each token's weight [kv_head, n]."""
    total: Floats | None = None
    """The logarithm of the sum of exponentials of all scores [kv_head, group, 1], if it is known at least roughly."""
    share: Callable[[NDArray[np.int64]], Floats] | None = None
    """A function from tokens [kv_head, chosen] to their share of that sum [kv_head, group, 1], as roughly known."""
    scores: Floats | None = None
    """The scores of each token and query [kv_head, group, n], where they are exact."""


class Selector(Protocol):
    """The part of far tokens that is near: enough to see which of them matter to a query."""

    exact: bool
    """Whether it has the keys themselves, so that far rows need none."""

    def add(self, layer: int, first: int, keys: Floats) -> None:
        """Take the keys [n, kv_head, head_dim] of tokens that go far; `first`: the number of those that went before."""

    def weigh(self, layer: int, queries: Floats, length: int) -> Weighed:
        """Return how the first `length` far tokens matter to queries [kv_head, group, head_dim]."""

    def near_bytes(self, tokens: int) -> int:
        """Return the memory for so many tokens."""


class FewOfMany:
    """Implements `Attending` over the KV of a sequence, which may be closed afterwards. `chosen`: the tokens to attend to
    beside `sinks` and `recent` ones; without a selector there are none, and other tokens are forgotten. `values`: a
    token matters by the norm of its value too, and those that are not chosen count as one that has the mean of far values and
    their weight, where the selector knows it. That is not in the papers."""

    def __init__(
        self,
        source: SequenceKV,
        selector: Selector | None,
        chosen: int,
        *,
        following: int,
        sinks: int = SINKS,
        recent: int = RECENT,
        values: bool = False,
    ) -> None:
        """`following`: room for further tokens. Raises ValueError for a sequence of fewer tokens than a step attends to."""
        layers, kv_heads, _, dim, _ = source.keys.shape
        if source.length + 1 < sinks + recent + chosen or min(sinks, recent - 1, chosen) < 0 or (chosen and selector is None):
            raise ValueError(f"{sinks} + {recent} + {chosen} tokens of {source.length} are no choice")
        self.length, self.capacity = source.length, source.length + following
        self.selector, self.sinks, self.recent, self.chosen = selector, sinks, recent, chosen
        self.holds = selector is not None and not selector.exact
        """Whether chosen rows stay near from step to step."""
        self._kv_heads, self._dim, self._room = kv_heads, dim, self.capacity - sinks - recent
        width = 2 * dim if self.holds else dim
        self.window: Floats = np.empty((layers, 2, kv_heads, sinks + recent, dim), np.float32)
        """The first tokens and the ring of recent ones [layer, key and value, kv_head, token, head_dim]."""
        self.far: Floats = np.empty((layers, kv_heads * self._room if selector else 0, width), np.float32)
        """Rows [layer, kv_head * room + token, key and value or value]."""
        self.near: Floats = np.empty((layers if self.holds else 1, kv_heads * chosen, width), np.float32)
        self.held = np.full((layers, kv_heads * chosen if self.holds else 0), -1, np.int64)
        """The rows of `far` that are in `near`, or -1."""
        self.wanted = np.zeros(len(self.far[0]) if self.holds else 0, np.bool_)
        """The rows that are wanted; False between two calls."""
        self.sums: Floats = np.zeros((layers if values else 0, kv_heads, dim), np.float32)
        self.norms: Floats = np.empty((len(self.sums), kv_heads, self._room), np.float32)
        """The sum of far values, and the norm of each."""
        self.fetched = np.zeros(kv_heads, np.int64)
        """The rows copied from far memory so far, of which each may be counted for any head."""
        self._heads = self._room * np.arange(kv_heads)[:, None]
        self._first_length = self.length
        for layer in range(layers):
            self._take_over(layer, source)

    @property
    def position(self) -> int:
        """The position of the next token."""
        return self.length

    @property
    def far_tokens(self) -> int:
        return self.length - self.sinks - self.recent

    @property
    def fetched_bytes(self) -> int:
        """The bytes copied from far memory so far."""
        return int(self.fetched.sum()) * self._row_bytes

    @property
    def stored_bytes(self) -> int:
        """The bytes copied into far memory after the beginning."""
        return (self.length - self._first_length) * len(self.far) * self._kv_heads * self._row_bytes if self.selector else 0

    @property
    def _row_bytes(self) -> int:
        return int(self.far.itemsize * self.far.shape[2])

    def near_bytes(self) -> int:
        """Return the memory that is near: the window, the chosen rows, their names and what the selector keeps."""
        arrays = (self.window, self.near, self.held, self.wanted, self.sums)
        far = self.far_tokens
        kept = self.selector.near_bytes(far) + self.norms[:, :, :far].nbytes if self.selector else 0
        return kept + sum(int(array.nbytes) for array in arrays)

    def whole_bytes(self) -> int:
        """Return the memory of the KV of all tokens."""
        return int(2 * 4 * len(self.window) * self._kv_heads * self._dim * self.length)

    def attend(self, layer: int, queries: Any, keys: Any, values: Any) -> Any:
        slot = self.sinks + (self.length - self.sinks) % self.recent
        window = self.window[layer]
        if self.selector:
            parting = window[:, :, slot, None]
            self._send(layer, self.far_tokens, parting)
            self.selector.add(layer, self.far_tokens, parting[0].transpose(1, 0, 2))
        window[:, :, slot] = keys, values
        scores = queries @ window[0].transpose(0, 2, 1)
        highest = scores.max(axis=2, keepdims=True)
        if self.chosen:
            far, chosen, of_others = self._choose(layer, queries, self.far_tokens + 1)
            highest = np.maximum(highest, far.max(axis=2, keepdims=True))
        weights = np.exp(scores - highest)
        mixed, total = weights @ window[1], weights.sum(axis=2, keepdims=True)
        if self.chosen:
            weights = np.exp(far - highest)
            mixed += weights @ chosen
            total += weights.sum(axis=2, keepdims=True)
            if of_others is not None:
                others = np.exp(np.minimum(of_others - highest, 80))
                mixed += others * self.sums[layer, :, None] / (self.far_tokens + 1)
                total += others
        mixed /= total
        return mixed.reshape(-1)

    def select(self, layer: int, queries: Floats, far_tokens: int) -> tuple[NDArray[np.int64], Weighed]:
        """Return those of the first `far_tokens` that matter most, [kv_head, chosen], counted from the sinks on, and how all of
        them matter."""
        assert self.selector
        weighed = self.selector.weigh(layer, queries, far_tokens)
        matter = weighed.matter
        if len(self.norms):
            matter = matter * self.norms[layer, :, : matter.shape[1]]
        beside = matter.shape[1] - self.chosen
        if not beside:
            return np.tile(np.arange(self.chosen), (self._kv_heads, 1)), weighed
        return np.argpartition(matter, beside, axis=1)[:, beside:], weighed

    def _choose(self, layer: int, queries: Floats, far_tokens: int) -> tuple[Floats, Floats, Floats | None]:
        """Copy the chosen rows near; return their scores [kv_head, group, chosen] and values [kv_head, chosen, head_dim], and
        the logarithm of the other tokens' total [kv_head, group, 1], if they count and it is known."""
        found, weighed = self.select(layer, queries, far_tokens)
        rows, near = found + self._heads, self.near[layer if self.holds else 0]
        if self.holds:
            self._hold(layer, rows, near)
        else:
            np.take(self.far[layer], rows.reshape(-1), axis=0, out=near, mode="clip")
            self.fetched += self.chosen
        by_head = near.reshape(self._kv_heads, self.chosen, -1)
        if weighed.scores is None:
            scores = queries @ by_head[:, :, : self._dim].transpose(0, 2, 1)
        else:
            scores = np.take_along_axis(weighed.scores, found[:, None], axis=2)
        others = None
        if weighed.share is not None and weighed.total is not None and len(self.sums):
            others = weighed.total + np.log(np.maximum(1 - weighed.share(found), SMALLEST_SHARE))
        return scores, by_head[:, :, -self._dim :], others

    def _hold(self, layer: int, rows: NDArray[np.int64], near: Floats) -> None:
        """Replace the rows that are held and not wanted by those that are wanted and not held. Both ascend by head, and of each
        head there are as many of either."""
        held, wanted = self.held[layer], self.wanted
        wanted[rows] = True
        stays = wanted[held] & (held >= 0)
        wanted[held[stays]] = False
        new, free = np.flatnonzero(wanted), np.flatnonzero(~stays)
        wanted[new] = False
        fetched = self.far[layer].take(new, axis=0)
        near[free], held[free] = fetched, new
        self.fetched[0] += len(new)

    def _take_over(self, layer: int, source: SequenceKV) -> None:
        """Take the KV of a layer: the first and last tokens near, the others far."""
        sinks, last = self.sinks, self.length - self.recent
        both = np.empty((2, self.length, self._kv_heads, self._dim), np.float32)
        SequenceKV.read_part(source, layer, 0, self.length, both)
        by_head = both.transpose(0, 2, 1, 3)
        self.window[layer, :, :, :sinks] = by_head[:, :, :sinks]
        slots = sinks + (np.arange(last, self.length) - sinks) % self.recent
        self.window[layer][:, :, slots] = by_head[:, :, last:]
        if self.selector:
            self._send(layer, 0, by_head[:, :, sinks:last])
            self.selector.add(layer, 0, both[0, sinks:last])

    def _send(self, layer: int, first: int, kv: Floats) -> None:
        """Store keys and values [k/v, kv_head, n, head_dim] far, from a token on."""
        rows = self.far[layer].reshape(self._kv_heads, self._room, -1)[:, first : first + kv.shape[2]]
        rows[:, :, -self._dim :] = kv[1]
        if self.holds:
            rows[:, :, : self._dim] = kv[0]
        if len(self.sums):
            self.sums[layer] += kv[1].sum(axis=1)
            self.norms[layer, :, first : first + kv.shape[2]] = np.linalg.norm(kv[1], axis=2)


def weighed(scores: Floats) -> Weighed:
    """Return how tokens with these scores [kv_head, group, n] matter: softmax, summed over the queries that share keys."""
    highest = scores.max(axis=2, keepdims=True)
    weights = np.exp(scores - highest)
    sums = weights.sum(axis=2, keepdims=True)
    return Weighed(((1 / sums).transpose(0, 2, 1) @ weights)[:, 0], np.log(sums) + highest)
