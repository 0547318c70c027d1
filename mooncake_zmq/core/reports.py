"""Timing of a node's load reports to the conductors. PURE."""

from mooncake_zmq.core.actor import Effect, PeerUp, Send, SetTimer
from mooncake_zmq.core.messages import MAX_SECONDS, Message, QueuedJob

REPORT = ("report",)
SOONER = 4
"""A change is reported after 1/SOONER of the interval at the earliest."""


MAX_RANK_S = 1e9
"""Upper limit of the rank in a message."""


def queued_job(now: float, *, booking: int, rank: float, left_s: float, tenant: str = "") -> QueuedJob:
    """Return the report of one job."""
    rank_s = min(MAX_RANK_S, max(-MAX_RANK_S, rank - now))
    return QueuedJob(booking=booking, rank_s=rank_s, left_s=min(MAX_SECONDS, left_s), tenant=tenant)


class Reports:
    """Load reports every `interval_s`, and sooner if something ended, as a conductor's prediction is then off. One timer is
    brought forward once, so that there are never more than `SOONER` reports in an interval."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._sent_at = -interval_s
        self._hurried = False
        self.conductors: list[str] = []
        """Conductors that are up, the latest one last."""

    def peer_up(self, up: PeerUp) -> None:
        """Note a peer that came up."""
        self.peer_down(up.peer)
        if up.hello.role == "conductor":
            self.conductors.append(up.peer)

    def peer_down(self, peer: str) -> None:
        """Note a peer that went down."""
        if peer in self.conductors:
            self.conductors.remove(peer)

    def begin(self) -> SetTimer:
        """Arm the timer for the first time."""
        return SetTimer(REPORT, self._interval_s)

    def hurry(self, now: float) -> list[Effect]:
        """Bring the next report forward, as something ended."""
        if self._hurried:
            return []
        self._hurried = True
        return [SetTimer(REPORT, max(0.0, self._sent_at + self._interval_s / SOONER - now))]

    def send(self, now: float, *messages: Message) -> list[Effect]:
        """Send to every conductor, and arm the timer again. A report may be lost: the next one repeats everything."""
        self._sent_at, self._hurried = now, False
        sends = [Send(name, message, lossy=True) for message in messages for name in self.conductors]
        return [*sends, SetTimer(REPORT, self._interval_s)]
