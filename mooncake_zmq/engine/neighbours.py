"""Tokens whose embeddings are alike, by locality-sensitive hashing: SemShareKV's way to pair the tokens of two prompts."""

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.llama import Llama

BITS = 64
"""Random hyperplanes: two tokens are as far apart as the number of these that lie between their embeddings."""
NEAREST_BITS = 20
"""A neighbour is nearer than that; tokens that have nothing in common are 32 apart, give or take 4."""
WITHIN = 8
"""How many places before and behind its own a token's neighbour is searched."""
AT_ONCE = 4096
"""Embeddings that are hashed at a time."""


class Neighbours:
    """The hashes of all tokens of a model, made once."""

    def __init__(self, engine: Llama, seed: int = 0) -> None:
        spec = engine.spec
        planes = np.random.default_rng(seed).standard_normal((spec.hidden, BITS), dtype=np.float32)
        self._hashes = np.empty(spec.vocab_size, np.uint64)
        for begin in range(0, spec.vocab_size, AT_ONCE):
            ids = np.arange(begin, min(begin + AT_ONCE, spec.vocab_size), dtype=np.int32)
            sides = np.asarray(engine.embed(ids)) @ planes > 0
            self._hashes[ids] = np.packbits(sides, axis=1).view(np.uint64)[:, 0]

    def paired(self, reference: NDArray[np.int32], tokens: NDArray[np.int32], source: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return `source`, the places of equal tokens in the reference or -1, with the place of the nearest neighbour about
        where a token that has none would stand, if one is near."""
        paired, equal = source.copy(), np.flatnonzero(source >= 0)
        if not len(equal):
            return paired
        lacking = np.flatnonzero(source < 0)
        for at, expected in zip(lacking.tolist(), np.interp(lacking, equal, source[equal]).tolist(), strict=True):
            middle = round(expected)
            first = max(0, middle - WITHIN)
            near = self._hashes[reference[first : middle + WITHIN + 1]]
            differing = _bits(near ^ self._hashes[tokens[at]])
            best = int((differing * (2 * WITHIN + 2) + np.abs(first + np.arange(len(near)) - middle)).argmin())
            if differing[best] < NEAREST_BITS:
                paired[at] = first + best
        return paired


def _bits(numbers: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return how many bits of each are set."""
    bits: NDArray[np.int64] = np.unpackbits(numbers.view(np.uint8).reshape(-1, 8), axis=1).sum(axis=1, dtype=np.int64)
    return bits
