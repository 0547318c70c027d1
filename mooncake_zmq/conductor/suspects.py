"""Nodes that took requests, report, and gave nothing back: they are closed for a time, which doubles. PURE.

After a wait for the first token in vain it is not known whether prefill or decode is at fault, so both are suspected. Any token
that comes through a node clears it.
"""

from collections.abc import Iterable
from typing import Final

from mooncake_zmq.core.messages import Placed

STRIKES: Final = 2
"""Attempts in a row that ended in silence, with which a node is closed first."""
FIRST_S: Final = 2.0
LONGEST_S: Final = 60.0


class _Suspect:
    __slots__ = ("strikes", "until")

    def __init__(self) -> None:
        self.strikes = 0
        self.until = 0.0


class Suspects:
    """Those among the nodes that are known; `forget` the others."""

    def __init__(self) -> None:
        self._suspects: dict[str, _Suspect] = {}

    def __len__(self) -> int:
        return len(self._suspects)

    def stalled(self, now: float, placed: Placed, *, told: bool) -> None:
        """Note that an attempt ended in silence; `told`: its first token had come, so its prefill is not at fault."""
        for node in (placed.decode,) if told else _nodes(placed):
            suspect = self._suspects.setdefault(node, _Suspect())
            suspect.strikes += 1
            if suspect.strikes >= STRIKES:
                suspect.until = now + min(LONGEST_S, FIRST_S * 2.0 ** min(suspect.strikes - STRIKES, 10))

    def answered(self, placed: Placed, tokens: int) -> None:
        """Clear the nodes that so many tokens came through: the first is the prefill's, the others are the decode's."""
        if self._suspects:
            for node in _nodes(placed):
                if tokens > 1 or node != placed.decode:
                    self._suspects.pop(node, None)

    def shuts(self, now: float, node: str) -> bool:
        """Return whether nothing new is to be sent to a node."""
        suspect = self._suspects.get(node)
        return suspect is not None and now < suspect.until

    def forget(self, node: str) -> None:
        """Drop what is known of a node that left: its next life is another."""
        self._suspects.pop(node, None)


def _nodes(placed: Placed) -> Iterable[str]:
    """Each once."""
    return dict.fromkeys((placed.prefill, *placed.stages, placed.decode))
