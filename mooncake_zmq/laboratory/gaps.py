"""The TBT of a request, as the paper counts it. PURE."""

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.gaps import longest_gaps


def longest_tenth_s(gaps: NDArray[np.float64]) -> float:
    """Return the mean of the longest tenth, of one at least, of the gaps between a request's tokens; 0 without any. The gateway
    computes the same."""
    if not len(gaps):
        return 0.0
    count = longest_gaps(len(gaps))
    if count == 1:
        return float(gaps.max())
    ordered = gaps.copy()
    ordered.partition(len(gaps) - count)
    return float(ordered[-count:].sum()) / count
