"""Leases seen from both sides: the granter's table with expiry, and the holder's clock, which always stops first. PURE."""

from dataclasses import dataclass

from msgspec import Struct

Process = tuple[str, int]
"""A node and its incarnation."""


class HolderId(Struct, frozen=True):
    """One lease of one incarnation of one node: a later incarnation never inherits it."""

    node: str
    incarnation: int
    number: int

    @property
    def process(self) -> Process:
        """The incarnation that holds it."""
        return self.node, self.incarnation


@dataclass(slots=True)
class HeldLease:
    """The holder's side: counts `ttl_s` from when it *sent* the request, so it stops reading before the granter forgets."""

    expires_at: float
    granted: bool = False
    renewal_sent_at: float | None = None
