"""Reports to gateways which of the configured nodes are connected and have announced their blocks: a gateway is ready once all
are. The reports also contain whether this conductor is cordoned, since gateways then use another one, and which nodes are
closed for new requests, since without them there may be no node to serve. PURE."""

from collections.abc import Sequence

from mooncake_zmq.conductor.membership import Membership
from mooncake_zmq.core.actor import Effect, Send, SetTimer, TimerKey
from mooncake_zmq.core.messages import MAX_NODES, NodesReported

ROLL_CALL: TimerKey = ("roll call",)
REPORT_AFTER_S = 0.05
"""The delay of a report, so that nodes that start together are in one report."""


class RollCall:
    """Sends the reports. `expected` holds the names of the nodes to wait for; without any, no report is sent until a conductor
    is cordoned or a node closed."""

    def __init__(self, expected: Sequence[str], members: Membership) -> None:
        self._expected = tuple(expected)
        self._is_reporting = bool(expected)
        self._members = members
        self._announced: set[str] = set()
        """The cache-nodes that have announced all their blocks."""
        self._armed = False
        self._cordoned = False
        self._closed: set[str] = set()

    def announced(self, node: str) -> list[Effect]:
        """Note that a cache-node has announced all its blocks."""
        self._announced.add(node)
        return self.changed()

    def left(self, node: str) -> list[Effect]:
        """Remove a node that left; when it is back it announces its blocks again."""
        self._announced.discard(node)
        self._closed.discard(node)
        return self.changed()

    def set_cordon(self, cordoned: bool) -> list[Effect]:
        """Cordon this conductor by an operator's request, or use it again; gateways receive a report at once."""
        self._cordoned, self._is_reporting = cordoned, True
        return self.report()

    def takes(self, node: str, *, closed: bool) -> list[Effect]:
        """Note whether a prefill, decode or vLLM is closed for new requests; gateways receive a report of a change at once."""
        if closed == (node in self._closed):
            return []
        self._closed ^= {node}
        self._is_reporting = True
        return self.report()

    def changed(self) -> list[Effect]:
        """Send a report soon."""
        if self._armed or not self._is_reporting:
            return []
        self._armed = True
        return [SetTimer(ROLL_CALL, REPORT_AFTER_S)]

    def report(self) -> list[Effect]:
        """Send the report to all gateways."""
        self._armed = False
        news = NodesReported(
            cache_nodes=tuple(member.name for member in self._members.of_role("cache-node"))[:MAX_NODES],
            missing=tuple(name for name in self._expected if not self._is_ready(name))[:MAX_NODES],
            cordoned=self._cordoned,
            closed=tuple(sorted(self._closed))[:MAX_NODES],
        )
        return [Send(gateway.name, news) for gateway in self._members.of_role("gateway")]

    def _is_ready(self, name: str) -> bool:
        role = self._members.role_of(name)
        return role is not None and (role != "cache-node" or name in self._announced)
