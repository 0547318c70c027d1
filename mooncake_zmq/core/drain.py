"""Draining state of a node: whether it accepts work, whether it ends once idle, and the role that it changes to. PURE."""

from collections.abc import Mapping

from mooncake_zmq.core.actor import Drained, Effect
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import ChangeRole, Hello


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
        """Cordon the node, or accept again if not `cordoned`, as the operator wants."""
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

    def drained(self, *, idle: bool) -> list[Effect]:
        """Return `Drained` once a leaving node is idle; actors call this after every event."""
        return [Drained(self._become)] if self.leaves and idle else []
