"""When a node tells its load to the conductors. PURE."""

from mooncake_zmq.core.actor import Effect, PeerUp, Send, SetTimer
from mooncake_zmq.core.messages import Message, QueuedJob

REPORT = ("report",)
SOONER = 4
"""A change is told after this part of the interval at the earliest."""


MAX_LEFT_S = 1e7
MAX_RANK_S = 1e9
"""The most a message may say."""


def queued_job(now: float, *, booking: int, rank: float, left_s: float) -> QueuedJob:
    """What is told of a job that ranks so and has so much to do."""
    return QueuedJob(booking=booking, rank_s=min(MAX_RANK_S, max(-MAX_RANK_S, rank - now)), left_s=min(MAX_LEFT_S, left_s))


class Reports:
    """Every `interval_s`, and sooner if something ended: what a conductor predicted is then off, and it cannot know. One timer,
    brought forward once, so that there are never more than `SOONER` reports in an interval."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._sent_at = -interval_s
        self._hurried = False
        self.conductors: list[str] = []
        """Those that are up, the one met last at the end."""

    def peer_up(self, up: PeerUp) -> None:
        """Somebody appeared."""
        self.peer_down(up.peer)
        if up.hello.role == "conductor":
            self.conductors.append(up.peer)

    def peer_down(self, peer: str) -> None:
        """Somebody is gone."""
        if peer in self.conductors:
            self.conductors.remove(peer)

    def begin(self) -> SetTimer:
        """Arm the timer for the first time."""
        return SetTimer(REPORT, self._interval_s)

    def hurry(self, now: float) -> list[Effect]:
        """Something ended."""
        if self._hurried:
            return []
        self._hurried = True
        return [SetTimer(REPORT, max(0.0, self._sent_at + self._interval_s / SOONER - now))]

    def send(self, now: float, *messages: Message) -> list[Effect]:
        """Tell every conductor, and arm the timer again. A report may be lost: the next one says it all again."""
        self._sent_at, self._hurried = now, False
        told = [Send(name, message, lossy=True) for message in messages for name in self.conductors]
        return [*told, SetTimer(REPORT, self._interval_s)]
