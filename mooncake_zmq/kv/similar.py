"""Prompts that are like an earlier one, and where they are the same: SemShareKV's reference, found by MinHash. PURE."""

import hashlib
from bisect import bisect_left
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.kv.parts import Tokens, window_hashes

SHINGLE = 8
"""Tokens whose runs two prompts are compared by. Of prompts with a tenth of their tokens edited .9^8, 43 %, of these are the
same; of runs of 32, 3 %."""
SKETCH = 128
"""The hashes kept of a prompt, its smallest: two prompts are alike as far as these are the same."""
LEAST_ALIKE = 0.1
"""Share of the same shingles below which a prompt is no reference."""
MOST_TOKENS, MOST_PROMPTS, MOST_TENANTS = 1_048_576, 64, 256
"""The bounds of references unless they are given others: tokens of all tenants' prompts together, prompts of one tenant, and
tenants. Beyond its prompts a tenant's least recently used one is forgotten, and beyond the others whole tenants', likewise."""
ANCHOR = 4
"""Tokens of a run that stands once in each of two prompts, which are aligned by these."""
Places = NDArray[np.int64]
_Prompts = OrderedDict[bytes, tuple[Tokens, NDArray[np.uint64]]]
"""Prompts and their sketches by the digest of their tokens, the least recently used first."""


class References:
    """The prompts of each tenant that were used last; a tenant finds its own only."""

    def __init__(
        self, *, most_tokens: int = MOST_TOKENS, most_prompts: int = MOST_PROMPTS, most_tenants: int = MOST_TENANTS
    ) -> None:
        if min(most_tokens, most_prompts, most_tenants) < 1:
            raise ValueError("references have room for one prompt of one tenant at least")
        self.most_tokens, self.most_prompts, self.most_tenants = most_tokens, most_prompts, most_tenants
        self._tenants: OrderedDict[bytes, _Prompts] = OrderedDict()
        self._tokens = 0

    def add(self, root: bytes, tokens: Tokens) -> None:
        """Remember a prompt, unless it is longer than all together may be or too short to be like another."""
        if not SHINGLE <= len(tokens) <= self.most_tokens:
            return
        own = np.array(tokens, dtype=np.int32)
        name = hashlib.sha256(own.tobytes()).digest()
        prompts = self._tenants.setdefault(root, OrderedDict())
        self._tenants.move_to_end(root)
        if name not in prompts:
            prompts[name] = own, sketch(own)
            self._tokens += len(own)
        prompts.move_to_end(name)
        if len(prompts) > self.most_prompts:
            self._forget(prompts)
        while len(self._tenants) > self.most_tenants or (self._tokens > self.most_tokens and len(self._tenants) > 1):
            _, oldest = self._tenants.popitem(last=False)
            self._tokens -= sum(len(prompt) for prompt, _ in oldest.values())
        while self._tokens > self.most_tokens:
            self._forget(prompts)

    def best(self, root: bytes, tokens: Tokens) -> Tokens | None:
        """Return the tenant's prompt that is most like these tokens, the last used of equal ones, if it is like them at all. It
        is used by that, and so is the tenant."""
        prompts = self._tenants.get(root)
        if prompts is None:
            return None
        self._tenants.move_to_end(root)
        own = sketch(np.asarray(tokens, dtype=np.int32))
        found, best = None, LEAST_ALIKE
        for name, (_, other) in prompts.items():
            alike = likeness(own, other)
            if alike >= best:
                found, best = name, alike
        if found is None:
            return None
        prompts.move_to_end(found)
        return prompts[found][0]

    def check(self) -> None:
        """Assert what must hold between calls."""
        held = [len(prompt) for prompts in self._tenants.values() for prompt, _ in prompts.values()]
        assert self._tokens == sum(held) <= self.most_tokens
        assert len(self._tenants) <= self.most_tenants
        assert all(0 < len(prompts) <= self.most_prompts for prompts in self._tenants.values())

    def _forget(self, prompts: _Prompts) -> None:
        """Remove a tenant's prompt that was not used for longest."""
        _, (prompt, _) = prompts.popitem(last=False)
        self._tokens -= len(prompt)


def sketch(tokens: Tokens) -> NDArray[np.uint64]:
    """Return the smallest hashes of a prompt's shingles, ascending."""
    with np.errstate(over="ignore"):
        mixed = window_hashes(tokens, SHINGLE)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.unique(mixed ^ (mixed >> np.uint64(31)))[:SKETCH]


def likeness(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> float:
    """Return the estimated share of the two prompts' shingles that both have."""
    together = np.union1d(one, other)[:SKETCH]
    return float((np.isin(together, one) & np.isin(together, other)).mean()) if len(together) else 0.0


def aligned(reference: Tokens, tokens: Tokens) -> Places:
    """Return, for each token, where the same one stands in the reference, or -1: ascending, so no token is there twice."""
    source = np.full(len(tokens), -1, np.int64)
    free_here = free_there = 0
    for here, there in _anchors(reference, tokens):
        if here >= free_here and there >= free_there:
            _fill_gap(reference, tokens, source, (free_there, there), (free_here, here))
            source[here] = there
            free_here, free_there = here + 1, there + 1
    _fill_gap(reference, tokens, source, (free_there, len(reference)), (free_here, len(tokens)))
    return source


def _anchors(reference: Tokens, tokens: Tokens) -> list[tuple[int, int]]:
    """Return the places (in the tokens, in the reference) of runs that stand once in each, ascending in both, as many as
    possible."""
    here, there = window_hashes(tokens, ANCHOR), window_hashes(reference, ANCHOR)
    once = [np.unique(hashes, return_index=True, return_counts=True) for hashes in (here, there)]
    (own, own_at, own_counts), (other, other_at, other_counts) = once
    own_once, other_once = own_counts == 1, other_counts == 1
    _, own_index, other_index = np.intersect1d(own[own_once], other[other_once], assume_unique=True, return_indices=True)
    pairs = sorted(zip(own_at[own_once][own_index].tolist(), other_at[other_once][other_index].tolist(), strict=True))
    pairs = [pair for pair in pairs if tokens[pair[0]] == reference[pair[1]]]  # a hash is no proof
    return _longest_ascending(pairs)


def _longest_ascending(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest selection of pairs, which ascend by the first number, that also ascends by the second."""
    lasts: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for index, (_, there) in enumerate(pairs):
        at = bisect_left(lasts, there)
        before.append(ends[at - 1] if at else -1)
        lasts[at : at + 1], ends[at : at + 1] = [there], [index]
    chosen, index = [], ends[-1] if ends else -1
    while index >= 0:
        chosen.append(pairs[index])
        index = before[index]
    return chosen[::-1]


def _fill_gap(reference: Tokens, tokens: Tokens, source: Places, there: tuple[int, int], here: tuple[int, int]) -> None:
    """Align what is equal at both ends of a gap, and in one of as many tokens in both, all that are equal in their places."""
    (there_first, there_end), (here_first, here_end) = there, here
    left, right = reference[there_first:there_end], tokens[here_first:here_end]
    length = min(len(left), len(right))
    same = left[:length] == right[:length]
    if len(left) != len(right):
        same[_leading(same) :] = False
        behind = _leading((left[::-1][:length] == right[::-1][:length])[: length - int(same.sum())])
        source[here_end - behind : here_end] = np.arange(there_end - behind, there_end)
    places = np.flatnonzero(same)
    source[here_first + places] = there_first + places


def _leading(equal: NDArray[np.bool_]) -> int:
    """Return how many are true before the first that is not."""
    return len(equal) if equal.all() else int(equal.argmin())
