"""The gaps between one attempt's tokens, as far as its TBT needs them. PURE."""

from array import array

from mooncake_zmq.core.gaps import longest_gaps

MAX_KEPT = 4096
"""Gaps kept: 32 kB. When they are as many the shorter half goes, which matters only past 20,000 tokens of one attempt."""


class Gaps:
    """Seconds between tokens; adding one costs an append."""

    def __init__(self) -> None:
        self._kept = array("d")
        self._count = 0

    def add(self, gap_s: float, tokens: int = 1) -> None:
        """`tokens` came together, `gap_s` after the one before: as evenly spread as the engine made them."""
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
        """Mean of the longest tenth, of one gap at least; 0 without any."""
        if not self._count:
            return 0.0
        longest = sorted(self._kept)[-longest_gaps(self._count) :]
        return sum(longest) / len(longest)
