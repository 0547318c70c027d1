"""Listening on an address that several gateways share, between which the kernel distributes new connections.

A cordoned gateway first stops listening there, if other gateways serve the address. If none does, it keeps listening and
refuses calls itself, because an operator needs a gateway to uncordon it.
"""

import asyncio
import socket
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import structlog

from mooncake_zmq.core.messages import Report
from mooncake_zmq.core.watch import EVERY_S
from mooncake_zmq.gateway.requests.cluster_snapshot import Seen

if TYPE_CHECKING:  # all roles import this module, and only a gateway has the dependencies of an acceptor
    from mooncake_zmq.gateway.http.acceptor import Acceptor

LEAVE_S = 1.0
"""Least time between leaving a shared address and refusing calls."""
MOST_LEAVE_S = 10.0
"""Greatest time between them, while connections that were accepted last have sent no call: on a machine that is busy their
clients may need seconds, and a call that is refused is an error of a request."""
LOOK_S = 0.1
"""Interval at which a gateway that ends looks whether it may refuse calls."""
FRESH_S = 2.5 * EVERY_S
"""Greatest age of a report of another gateway that shows that it serves the address."""
DECIDE_S = 2 * EVERY_S
"""Time that other gateways have to connect; calls are served meanwhile."""
MOST_SILENT_S = 10 * EVERY_S
"""Time that connected gateways have to report, the first time and again. On a busy machine a report may be seconds late, and
a gateway that took that for an absence would refuse calls at an address that another one serves."""
LISTENING = "edge_listening"
"""Gauge that shows whether a gateway accepts connections."""

log = structlog.get_logger("gateway")


class SharedAddress:
    """An address that this gateway may share. `others`: gateways that may listen there too. `listen` opens a new listener;
    after an OSError it is tried again. `deserted` returns whether no process listens there, which the kernel knows at once."""

    def __init__(
        self,
        acceptor: "Acceptor",
        others: Collection[str],
        listen: Callable[[], socket.socket],
        deserted: Callable[[], bool],
    ) -> None:
        self._acceptor, self._others, self._listen, self._deserted = acceptor, frozenset(others), listen, deserted
        self._asked_at: float | None = None
        self._left_at: float | None = None
        self._alone_at = float("-inf")
        """When no process listened there: older reports do not count."""
        self._failed = False

    def mind(self, cordoned: bool, look: Callable[[], Seen]) -> bool:
        """Leave the address, return to it, or neither; called at intervals. Return whether new calls are refused."""
        if not cordoned:
            self._asked_at = None
            self._come_back()
            return False
        seen = look()
        self._asked_at = seen.now if self._asked_at is None else self._asked_at
        self._choose(seen)
        if self._left_at is not None:
            return _may_refuse(self._acceptor, seen.now - self._left_at)
        return seen.now - self._asked_at >= self._decides_after(seen, self._asked_at)

    def _choose(self, seen: Seen) -> None:
        if self._left_at is None:
            if serving := [name for name, report in self._reports(seen, FRESH_S).items() if _serves(report)]:
                log.info("address_left", to=serving)
                self._left_at = seen.now
                self._acceptor.leave()
            return
        if self._deserted():
            self._alone_at = seen.now
        if not any(map(_serves, self._reports(seen, MOST_SILENT_S).values())):
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
        log.info("address_shared_again")
        self._left_at, self._failed = None, False
        self._acceptor.enter(listener)

    def _decides_after(self, seen: Seen, asked_at: float) -> float:
        """Return for how long calls are served although no other gateway is known to serve the address. One that is missing may
        be there in a moment: it may have been late, or this gateway itself. One whose report is older than the cordon may serve
        by now."""
        missing = self._others - self._reports(seen, seen.now - asked_at).keys()
        if not missing:
            return 0.0
        return DECIDE_S if missing.isdisjoint(seen.peers) else MOST_SILENT_S

    def _reports(self, seen: Seen, within_s: float) -> dict[str, Report]:
        """Return the reports that still count, by gateway."""
        there = {name: seen.last_reports[name] for name in self._others if name in seen.peers and name in seen.last_reports}
        counting = {name: each for name, each in there.items() if seen.now - within_s <= each.at > self._alone_at}
        return {name: each.report for name, each in counting.items()}


def leave_first(acceptor: "Acceptor", then: Callable[[], None]) -> None:
    """Leave the shared address, and call `then` once calls may be refused; for a gateway that ends."""
    acceptor.leave()
    left_at = acceptor.now()

    def look() -> None:
        if _may_refuse(acceptor, acceptor.now() - left_at):
            then()
        else:
            asyncio.get_running_loop().call_later(LOOK_S, look)

    look()


def _may_refuse(acceptor: "Acceptor", since_s: float) -> bool:
    """Return whether calls may be refused `since_s` after the address was left."""
    some_silent = any(connection.cycle is None for connection in acceptor.connections)
    return since_s >= (MOST_LEAVE_S if some_silent else LEAVE_S)


def _serves(report: Report) -> bool:
    return not report.draining and dict(report.gauges).get(LISTENING) == 1
