"""Who is there: the nodes the conductor is in conversation with, by role and host. PURE."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class Member:
    """`draining` nodes say so in their load reports and get nothing new."""

    name: str
    role: str
    host: str
    incarnation: int
    draining: bool = False


class Membership:
    """The members that are up. Listings are in name order, so that the order of arrival decides nothing."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}

    def join(self, member: Member) -> None:
        """A conversation began."""
        self._members[member.name] = member
        self._members = dict(sorted(self._members.items()))

    def leave(self, name: str) -> None:
        """A conversation ended."""
        self._members.pop(name, None)

    def get(self, name: str) -> Member | None:
        """The member, if it is up."""
        return self._members.get(name)

    def role_of(self, name: str) -> str | None:
        """Its role, or None if it is not up."""
        member = self._members.get(name)
        return member.role if member else None

    def of_role(self, role: str) -> list[Member]:
        """All members of a role, draining ones too."""
        return [member for member in self._members.values() if member.role == role]

    def usable(self, role: str, exclude: Collection[str]) -> tuple[list[Member], list[Member]]:
        """Members that take new work, and the excluded ones among them: a last resort, better than no answer."""
        working = [member for member in self._members.values() if member.role == role and not member.draining]
        return (
            [member for member in working if member.name not in exclude],
            [member for member in working if member.name in exclude],
        )
