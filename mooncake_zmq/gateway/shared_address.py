"""A gateway that rests leaves the address that it shares, as long as others serve there: the kernel deals connections to all
that listen. Where none does it stays, and says itself that it takes no calls: who has it serve again must reach somebody."""

import socket
from collections.abc import Callable, Collection

from mooncake_zmq.gateway.cluster import Seen
from mooncake_zmq.gateway.door import Door


class SharedAddress:
    """`others`: gateways that may listen there too. `listen`: a new listener, which may fail: it is tried again."""

    def __init__(self, door: Door, others: Collection[str], listen: Callable[[], socket.socket | None]) -> None:
        self._door, self._others, self._listen = door, others, listen
        self._away = False

    def mind(self, resting: bool, seen: Callable[[], Seen]) -> None:
        """Now and then: leave, come back, or neither."""
        away = resting and self._others_serve(seen())
        if away and not self._away:
            self._away = True
            self._door.leave()
        elif self._away and not away and (listener := self._listen()):
            self._away = False
            self._door.enter(listener)

    def _others_serve(self, seen: Seen) -> bool:
        reports = [seen.report(name) for name in self._others]
        return any(report is not None and not report.draining for report in reports)
