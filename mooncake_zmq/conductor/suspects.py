"""Nodes that accept requests and report but return no tokens are closed for a time, which doubles. PURE.

When no first token comes it is not known whether the prefill or the decode is at fault, so both are suspected. Any token from
a node clears it.
"""

from collections.abc import Iterable
from typing import Final

from mooncake_zmq.core.messages import Placed

STRIKES: Final = 2
"""The number of attempts in a row without an answer after which a node is first closed."""
FIRST_S: Final = 2.0
LONGEST_S: Final = 60.0


class _Suspect:
    __slots__ = ("strikes", "until")

    def __init__(self) -> None:
        self.strikes = 0
        self.until = 0.0


class Suspects:
    """Tracks suspected nodes among the connected ones; `forget` removes those that left."""

    def __init__(self) -> None:
        self._suspects: dict[str, _Suspect] = {}

    def __len__(self) -> int:
        return len(self._suspects)

    def stalled(self, now: float, placed: Placed, *, had_token: bool) -> None:
        """Note that an attempt ended without an answer; `had_token`: its first token had come, so its prefill is not at
        fault."""
        for node in (placed.decode,) if had_token else _nodes(placed):
            suspect = self._suspects.setdefault(node, _Suspect())
            suspect.strikes += 1
            if suspect.strikes >= STRIKES:
                suspect.until = now + min(LONGEST_S, FIRST_S * 2.0 ** min(suspect.strikes - STRIKES, 10))

    def answered(self, placed: Placed, tokens: int) -> None:
        """Clear the nodes that produced so many tokens: the first comes from the prefill, the others from the decode."""
        for node in _nodes(placed):
            if tokens > 1 or node != placed.decode:
                self._suspects.pop(node, None)

    def shuts(self, now: float, node: str) -> bool:
        """Return whether no new request is to be sent to a node."""
        suspect = self._suspects.get(node)
        return suspect is not None and now < suspect.until

    def forget(self, node: str) -> None:
        """Forget a node that left: its next incarnation starts anew."""
        self._suspects.pop(node, None)


def _nodes(placed: Placed) -> Iterable[str]:
    """Return the nodes of a placement, each once."""
    return dict.fromkeys((placed.prefill, *placed.stages, placed.decode))
