"""The gaps between one attempt's tokens, as far as its TBT needs them. PURE."""

from array import array
from typing import Final

from mooncake_zmq.core.gaps import longest_gaps

MAX_KEPT: Final = 4096
"""Limit on the gaps kept: 32 kB. At the limit the shorter half is dropped, which matters only past 20,000 tokens of one
attempt."""


class Gaps:
    """The seconds between tokens; adding one costs an append."""

    def __init__(self) -> None:
        self._kept = array("d")
        self._count = 0

    def add(self, gap_s: float, tokens: int = 1) -> None:
        """Add `tokens` that arrived together, `gap_s` after the token before them: their gaps count as even."""
        self._count += tokens
        if tokens == 1:
            self._kept.append(gap_s)
        else:
            self._kept.extend([gap_s / tokens] * min(tokens, MAX_KEPT))
        if len(self._kept) >= MAX_KEPT:
            self._kept = array("d", sorted(self._kept)[-MAX_KEPT // 2 :])

    def __len__(self) -> int:
        return self._count

    @property
    def tbt_s(self) -> float:
        """Mean of the longest tenth of the gaps, of at least one; 0 if there is none."""
        if not self._count:
            return 0.0
        longest = sorted(self._kept)[-longest_gaps(self._count) :]
        return sum(longest) / len(longest)
