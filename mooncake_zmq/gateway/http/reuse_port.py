"""A gateway that is to rest leaves the address that it shares first, as long as others serve there: the kernel deals newcomers
to all that listen. Where none does it stays, and says itself that it takes no calls: whoever has it serve again must reach one.
"""

import socket
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import structlog

from mooncake_zmq.core.messages import Report
from mooncake_zmq.core.watch import EVERY_S, STALE_S
from mooncake_zmq.gateway.requests.cluster_snapshot import Seen

if TYPE_CHECKING:  # all roles read this module, and only a gateway has what a door needs
    from mooncake_zmq.gateway.http.acceptor import Door

LEAVE_S = 1.0
"""Between leaving a shared address and turning calls away: whoever was let in last has said what he wants."""
FRESH_S = 2.5 * EVERY_S
"""No older may be the report of one to whom the address is left."""
DECIDE_S = 2 * EVERY_S
"""For how long the others are given to report; calls are served meanwhile."""
LISTENING = "edge_listening"
"""The gauge of a gateway that lets in who comes."""

log = structlog.get_logger("gateway")


class SharedAddress:
    """`others`: gateways that may listen there too. `listen`: a new listener; raises OSError, and is tried again. `deserted`:
    does nobody at all listen there, as the kernel knows at once?"""

    def __init__(
        self,
        door: "Door",
        others: Collection[str],
        listen: Callable[[], socket.socket],
        deserted: Callable[[], bool],
    ) -> None:
        self._door, self._others, self._listen, self._deserted = door, others, listen, deserted
        self._asked_at: float | None = None
        self._left_at: float | None = None
        self._alone_at = float("-inf")
        """Nobody listened there then: what was heard before says nothing."""
        self._failed = False

    def mind(self, resting: bool, look: Callable[[], Seen]) -> bool:
        """Now and then: leave, come back, or neither. Whether whoever comes all the same is to be turned away."""
        if not resting:
            self._asked_at = None
            self._come_back()
            return False
        seen = look()
        self._asked_at = seen.now if self._asked_at is None else self._asked_at
        self._choose(seen)
        if self._left_at is not None:
            return seen.now - self._left_at >= LEAVE_S
        return seen.now - self._asked_at >= DECIDE_S or self._have_told(seen)

    def _choose(self, seen: Seen) -> None:
        if self._left_at is None:
            if any(map(_serves, self._reports(seen, FRESH_S))):
                self._left_at = seen.now
                self._door.leave()
            return
        if self._deserted():
            self._alone_at = seen.now
        if not any(map(_serves, self._reports(seen, STALE_S))):
            self._come_back()

    def _come_back(self) -> None:
        if self._left_at is None:
            return
        try:
            listener = self._listen()
        except OSError as error:
            if not self._failed:
                log.warning("address_not_shared", reason=str(error))
            self._failed = True
            return
        self._left_at, self._failed = None, False
        self._door.enter(listener)

    def _have_told(self, seen: Seen) -> bool:
        return len(self._reports(seen, FRESH_S)) == sum(name in seen.peers for name in self._others)

    def _reports(self, seen: Seen, within_s: float) -> list[Report]:
        """What the others say of themselves, as far as it still counts."""
        since = max(self._alone_at, seen.now - within_s)
        reports = [seen.report(name) for name in self._others if name in seen.heard and seen.heard[name].at > since]
        return [report for report in reports if report is not None]


def _serves(report: Report) -> bool:
    return not report.draining and dict(report.gauges).get(LISTENING) == 1
