"""Leases seen from both sides: the granter's table with expiry, and the holder's clock, which always stops first. PURE."""

from dataclasses import dataclass

from msgspec import Struct


class HolderId(Struct, frozen=True):
    """One lease of one life of one node: a later life never inherits it."""

    node: str
    incarnation: int
    number: int


@dataclass(slots=True)
class GrantedLease:
    """The granter's side: expires `ttl_s` after the granter *handled* the request or a renewal."""

    slots: tuple[int, ...]
    expires_at: float


@dataclass(slots=True)
class HeldLease:
    """The holder's side: counts `ttl_s` from when it *sent* the request, so it stops reading before the granter forgets."""

    expires_at: float
    granted: bool = False
    renewal_sent_at: float | None = None
