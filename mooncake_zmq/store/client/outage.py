"""Whether a store is left alone for now because it did not answer, and when it is pinged meanwhile. PURE.

No call waits for a store that is left alone: pings beside the calls find out when it answers again. A store that answers pings
and then leaves calls without an answer is pinged later each time, until a call was answered.
"""

from typing import Final

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 5.0
"""The first ping of an outage comes at once; the pauses before the others double, from the first to the longest. A store that
answers again is asked again so much later at most."""


class Outage:
    """`is_on`: the store is left alone. `pause_s`: how long to wait before the next ping."""

    def __init__(self) -> None:
        self.is_on = False
        self.pause_s = 0.0
        self.reason = ""

    def begin(self, reason: str) -> bool:
        """Note that a call got no answer; return whether pings are to begin, as none are under way."""
        begins, self.is_on, self.reason = not self.is_on, True, reason
        return begins

    def missed(self) -> None:
        """Note that a pause is over, and that the ping after it got no answer or the next call may get none either."""
        self.pause_s = min(LONGEST_PAUSE_S, 2 * self.pause_s or FIRST_PAUSE_S)

    def met(self) -> None:
        """Note that a ping was answered: calls may ask again."""
        self.missed()
        self.is_on = False

    def answered(self) -> None:
        """Note that a call was answered."""
        self.pause_s = 0.0
