"""The nodes that the conductor is connected to, by role and host. PURE."""

from dataclasses import dataclass

from mooncake_zmq.core.messages import PROTOCOL_VERSION, Part, has_field


@dataclass(frozen=True, slots=True)
class Member:
    """One incarnation of a node."""

    name: str
    role: str
    host: str
    incarnation: int
    may_become: str = ""
    part: Part = "both"
    protocol: int = PROTOCOL_VERSION
    """The protocol of the conversation with it."""


class Membership:
    """The members that are up. Listings are in name order, so that the order of arrival decides nothing."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._roles: dict[str, str] = {}

    def join(self, member: Member) -> None:
        """Add a member."""
        self._members[member.name] = member
        self._roles[member.name] = member.role
        self._members = dict(sorted(self._members.items()))

    def leave(self, name: str) -> None:
        """Remove a member."""
        self._members.pop(name, None)
        self._roles.pop(name, None)

    def get(self, name: str) -> Member | None:
        """Return the member of that name, if it is up."""
        return self._members.get(name)

    def role_of(self, name: str) -> str | None:
        """Return the role of a node, or None if it is not up."""
        return self._roles.get(name)

    def know(self, field: str) -> bool:
        """Return whether all members know a field of a message, which then passes through any of them."""
        return all([has_field(member.protocol, field) for member in self._members.values()])

    def of_role(self, role: str) -> list[Member]:
        """Return all members of a role, including those that drain."""
        return [member for member in self._members.values() if member.role == role]
