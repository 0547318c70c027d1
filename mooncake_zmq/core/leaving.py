"""Whether a node takes nothing new, whether it ends once it is idle, and what its process then becomes. PURE."""

from collections.abc import Mapping

from mooncake_zmq.core.actor import Drained, Effect
from mooncake_zmq.core.messages import ChangeRole, Hello
from mooncake_zmq.core.shell import Tally


class Leaving:
    """`may_become`: the role that a conductor may ask for, if any, of a node that takes requests. An operator who wants the
    node gone outranks that, and one who wants it to rest."""

    def __init__(self, may_become: str, counts: Tally) -> None:
        self.draining = False
        """It takes nothing new, whether it leaves or rests."""
        self.resting = False
        self.leaves = False
        """Its process ends, or becomes something else, once it is idle."""
        self._may_become = may_become
        self._become = ""
        self._counts = counts

    def drain(self) -> None:
        """The operator wants the process gone."""
        self.draining = self.leaves = True
        self._become = ""

    def rest(self, resting: bool) -> None:
        """The operator wants the process to stay and take nothing new, or to take again."""
        self.resting = resting
        self.draining = self.leaves or resting

    def change(self, sender: str, message: ChangeRole, peers: Mapping[str, Hello]) -> bool:
        """Whether the node begins to drain for another role."""
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
        """What an actor says after every event."""
        return [Drained(self._become)] if self.leaves and idle else []
