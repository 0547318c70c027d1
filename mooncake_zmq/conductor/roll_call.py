"""Which of the config's nodes were heard, and whose blocks: told to gateways, who are ready when all are. So is whether this
conductor rests, since they then ask another one, and who takes nothing new, since without him nothing may be served. PURE."""

from collections.abc import Sequence

from mooncake_zmq.conductor.membership import Membership
from mooncake_zmq.core.actor import Effect, Send, SetTimer, TimerKey
from mooncake_zmq.core.messages import MAX_NODES, NodesHeard

ROLL_CALL: TimerKey = ("roll call",)
TELL_AFTER_S = 0.05
"""Nodes that start together are told of together."""


class RollCall:
    """`expected`: names of the nodes to wait for; with none, gateways are told nothing until somebody rests."""

    def __init__(self, expected: Sequence[str], members: Membership) -> None:
        self._expected = tuple(expected)
        self._tells = bool(expected)
        self._members = members
        self._announced: set[str] = set()
        """Cache-nodes whose whole set of blocks is here."""
        self._armed = False
        self._resting = False
        self._closed: set[str] = set()

    def announced(self, node: str) -> list[Effect]:
        """A cache-node has told of all that it holds."""
        self._announced.add(node)
        return self.changed()

    def left(self, node: str) -> list[Effect]:
        """A node is gone; when it comes back it tells of its blocks anew."""
        self._announced.discard(node)
        self._closed.discard(node)
        return self.changed()

    def rest(self, resting: bool) -> list[Effect]:
        """An operator wants other conductors to be asked, or this one again: gateways hear it at once."""
        self._resting, self._tells = resting, True
        return self.tell()

    def takes(self, node: str, *, closed: bool) -> list[Effect]:
        """A prefill, decode or vLLM says whether it takes nothing new: gateways hear of a change at once."""
        if closed == (node in self._closed):
            return []
        self._closed ^= {node}
        self._tells = True
        return self.tell()

    def changed(self) -> list[Effect]:
        """Tell the gateways soon."""
        if self._armed or not self._tells:
            return []
        self._armed = True
        return [SetTimer(ROLL_CALL, TELL_AFTER_S)]

    def tell(self) -> list[Effect]:
        """All gateways hear how it stands."""
        self._armed = False
        news = NodesHeard(
            cache_nodes=tuple(member.name for member in self._members.of_role("cache-node"))[:MAX_NODES],
            missing=tuple(name for name in self._expected if not self._is_heard(name))[:MAX_NODES],
            resting=self._resting,
            closed=tuple(sorted(self._closed))[:MAX_NODES],
        )
        return [Send(gateway.name, news) for gateway in self._members.of_role("gateway")]

    def _is_heard(self, name: str) -> bool:
        role = self._members.role_of(name)
        return role is not None and (role != "cache-node" or name in self._announced)
