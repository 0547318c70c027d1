"""When a node tells its load to the conductors. PURE."""

from collections.abc import Iterable, Mapping

from mooncake_zmq.core.actor import Effect, Send, SetTimer
from mooncake_zmq.core.messages import Hello, Message

REPORT = ("report",)
SOONER = 4
"""A change is told after this part of the interval at the earliest."""


class Reports:
    """Every `interval_s`, and sooner if something ended: what a conductor predicted is then off, and it cannot know. One timer,
    brought forward once, so that there are never more than `SOONER` reports in an interval."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._sent_at = -interval_s
        self._hurried = False

    def begin(self) -> SetTimer:
        """Arm the timer for the first time."""
        return SetTimer(REPORT, self._interval_s)

    def hurry(self, now: float) -> list[Effect]:
        """Something ended."""
        if self._hurried:
            return []
        self._hurried = True
        return [SetTimer(REPORT, max(0.0, self._sent_at + self._interval_s / SOONER - now))]

    def send(self, now: float, message: Message, peers: Mapping[str, Hello]) -> list[Effect]:
        """Tell every conductor, and arm the timer again."""
        self._sent_at, self._hurried = now, False
        return [*to_conductors(message, peers), SetTimer(REPORT, self._interval_s)]


def to_conductors(message: Message, peers: Mapping[str, Hello]) -> Iterable[Effect]:
    """A report may be lost: the next one says it all again."""
    return [Send(name, message, lossy=True) for name, hello in peers.items() if hello.role == "conductor"]
