"""Draining state of a node: whether it accepts work, whether it ends once idle, the role that it changes to, and the requests
that it wants to be placed elsewhere. PURE."""

from collections.abc import Iterable, Mapping

from mooncake_zmq.core.actor import CancelTimer, CordonWanted, Drained, DrainWanted, Effect, Send, SetTimer, TimerKey
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import MAX_MOVED, ChangeRole, Hello, PlaceElsewhere

MOVE: TimerKey = ("move",)
"""Key of the timer after which a draining node asks to place its requests elsewhere."""
MOVE_AGAIN_S = 1.0
"""Time after which it asks again for those that stayed: another node may have room by then."""
GRACE_S = 0.5
"""Default of `drain_grace_s`: a drain then ends within 2 s, in which reports once a second show it to the operator."""
Attempt = tuple[str, str, int]
"""Gateway, request and number of an attempt."""


def changes_role(counts: Mapping[str, float]) -> bool:
    """Return whether a node has begun a change of its role that an operator has not undone, as `Drain` counts them."""
    return counts.get("role_changes_begun", 0) > counts.get("role_changes_undone", 0)


class Drain:
    """Draining state. `may_become`: the role that a conductor may request, if any. An operator's drain or cordon
    takes precedence over a change of role."""

    def __init__(self, may_become: str, counts: Tally) -> None:
        self.draining = False
        """Whether the node accepts nothing new, because it leaves or is cordoned."""
        self.cordoned = False
        self.leaves = False
        """Whether the process ends, or changes its role, once it is idle."""
        self._may_become = may_become
        self._become = ""
        self._counts = counts

    def drain(self) -> None:
        """Begin to drain for the end of the process, as the operator wants."""
        self.draining = self.leaves = True
        self._become = ""

    def set_cordon(self, cordoned: bool) -> None:
        """Cordon the node, or accept again if not `cordoned`, as the operator wants. A cordon undoes a change of role: the
        process would lose it with its restart."""
        if cordoned and self._become:
            self._counts.add("role_changes_undone")
            self._become, self.leaves = "", False
        self.cordoned = cordoned
        self.draining = self.leaves or cordoned

    def change(self, sender: str, message: ChangeRole, peers: Mapping[str, Hello]) -> bool:
        """Begin to drain for another role if that is allowed; return whether it does."""
        if self.draining and self._become == message.role:
            return False
        allowed = message.role == self._may_become and not self.draining
        if not allowed or peers[sender].role != "conductor":
            self._counts.add("role_changes_refused")
            return False
        self._counts.add("role_changes_begun")
        self.draining = self.leaves = True
        self._become = message.role
        return True

    def wanted(self, order: DrainWanted | CordonWanted) -> None:
        """Carry out the operator's order."""
        if isinstance(order, CordonWanted):
            self.set_cordon(order.cordoned)
        else:
            self.drain()

    def move_timer(self, grace_s: float) -> Effect:
        """Arm the timer `MOVE` for a drain that has begun, or disarm it after one that was undone."""
        return SetTimer(MOVE, grace_s) if self.draining else CancelTimer(MOVE)

    def move(self, attempts: Iterable[Attempt], *, left: bool = False) -> list[Effect]:
        """Ask the gateways to place these attempts elsewhere, and arm `MOVE` for those that stay, or are `left` for now. Of
        more than a message can name, the rest is named the next time."""
        of_gateways: dict[str, list[tuple[str, int]]] = {}
        for gateway, request_id, attempt in attempts:
            of_gateways.setdefault(gateway, []).append((request_id, attempt))
        self._counts.add("relocations_wanted", sum([len(those) for those in of_gateways.values()]))
        asked = [Send(to, PlaceElsewhere(attempts=tuple(those[:MAX_MOVED]))) for to, those in of_gateways.items()]
        return [*asked, SetTimer(MOVE, MOVE_AGAIN_S)] if asked or left else []

    def drained(self, *, idle: bool) -> list[Effect]:
        """Return `Drained` once a leaving node is idle; actors call this after every event."""
        return [Drained(self._become)] if self.leaves and idle else []
