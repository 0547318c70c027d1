"""Whether another choice of the next token would be as right: two are nearly equal (I3)."""

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.messages import Sampling
from mooncake_zmq.engine.sampling import Past, _adjusted, _cutoff, _cuts, _scaled, scores

TIE_MARGIN = 0.01
"""A choice whose score leads by less may differ between batch shapes."""
CUTOFF_MARGIN = 1e-3
"""So may a choice with a top-k or top-p cutoff this near."""


def near_tie(logits: NDArray[np.float32], sampling: Sampling, position: int, past: Past | None = None) -> bool:
    """Return whether I3 lets the choice differ: two best scores within 0.01, or a cutoff within 1e-3 of a logit."""
    logits = _adjusted(logits, sampling, past)
    plain = Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )
    score = scores(logits, plain, position)
    second, best = np.partition(score, -2)[-2:]
    if best - second < TIE_MARGIN:
        return True
    if sampling.temperature == 0.0 or not _cuts(sampling):
        return False
    scaled = _scaled(logits, sampling)
    threshold = _cutoff(scaled, sampling)
    below = scaled[scaled < threshold]
    return bool(below.size and threshold - below.max() < CUTOFF_MARGIN)
