"""Links to peers that requests need, and that are not up. PURE."""

from typing import Final

LINK_S: Final = 5.0
"""Seconds within which the links of a process that was killed and started again come up: some do a second after others, as
ZeroMQ pauses before it connects again, and as a peer takes a new incarnation only once the known one is silent."""
MOST_MISSING: Final = 1024


class MissingLinks:
    """The peers that requests named while no link to them was up, each with the time of the first such request.

    An attempt that fails because a link has yet to come up counts as one that found no room: it is repeated, and not for
    ever, as a link that stays down counts as a failure of each attempt that needs it.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def is_passing(self, now: float, peer: str) -> bool:
        """Return whether a link that a request needs has been missed for less than `LINK_S`; False beyond `MOST_MISSING`."""
        if peer not in self._since and len(self._since) >= MOST_MISSING:
            return False
        return now - self._since.setdefault(peer, now) < LINK_S

    def peer_up(self, peer: str) -> None:
        """Forget since when a link was missed."""
        self._since.pop(peer, None)
