"""The model's probabilities of a prompt: of each token behind those before it, from logits that come in slices."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.messages import TokenLogprob
from mooncake_zmq.engine.sampling import logprob


class PromptScores:
    """Takes the logits at some positions of a prompt, row after row, and keeps of each the probability of the token that
    follows."""

    def __init__(self, following: Sequence[int], likeliest: int) -> None:
        """`following`: that token, by position; one less where the last has none. `likeliest`: the number of likeliest tokens
        that are returned as well."""
        self.scored: list[TokenLogprob] = []
        self.last: NDArray[np.float32] | None = None
        """The last row, [1, vocab_size]."""
        self._following: Iterator[int] = iter(following)
        self._likeliest = likeliest

    def __call__(self, logits: NDArray[np.float32]) -> None:
        self.scored += [logprob(row, token, self._likeliest) for row, token in zip(logits, self._following, strict=False)]
        self.last = logits[-1:].copy()
