"""The TBT of a request, as the paper counts it. PURE."""

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.kv.layout import div_ceil

TENTH = 10


def longest_tenth_s(gaps: NDArray[np.float64]) -> float:
    """Mean of the longest tenth, rounded up, of the gaps between a request's tokens; 0 without any."""
    if not len(gaps):
        return 0.0
    count = div_ceil(len(gaps), TENTH)
    if count == 1:
        return float(gaps.max())
    return float(np.partition(gaps, len(gaps) - count)[-count:].mean())
