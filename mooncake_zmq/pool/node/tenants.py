"""How much of a pool each tenant's KV blocks may take up. PURE.

A tenant is the name of an API key: the gateway puts it into a request, whoever computes the request into its puts. Its salt
is in its blocks' keys, so a block is one tenant's, and stays its when it is copied to another host or tier.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_zmq.core.keys import NAME_PATTERN
from mooncake_zmq.kv.shares import NOBODY

MAX_TENANTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTenant:
    """What one tenant may have of each pool."""

    name: str
    """Of an API key."""
    dram_bytes: int = 0
    """Of `pool_bytes`; 0: what the others' shares leave, which all without one have in common. Over it, the tenant's own blocks
    make room, least recently used first, and a put gets none where all are leased. Within it, it loses no block to others."""
    ssd_bytes: int = 0
    """Of `ssd.bytes`, likewise."""

    def __post_init__(self) -> None:
        if not NAME_PATTERN.fullmatch(self.name):
            raise ValueError(f"tenants: {self.name!r} is no name: write 1 to 63 of a-z, 0-9, '.', '_', '-'")
        if min(self.dram_bytes, self.ssd_bytes) < 0:
            raise ValueError(f"tenants: {self.name}: dram_bytes and ssd_bytes are at least 0")


class PoolTenants:
    """Those of one pool, numbered from 1."""

    def __init__(self, known: Sequence[PoolTenant]) -> None:
        self.names = ("", *(each.name for each in known))
        """By number."""
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def number(self, name: str) -> int:
        """Of a tenant; one that the configuration does not name is nobody."""
        return self._numbers.get(name, NOBODY)


def slots_of(shares_bytes: Sequence[int], room_bytes: int, slots: int) -> tuple[int, ...]:
    """How many of all slots each share of a tier's bytes is. One of less than a block is none."""
    return tuple(share * slots // room_bytes for share in shares_bytes)


def check_shares(known: Sequence[PoolTenant], dram_bytes: int, ssd_bytes: int) -> None:
    """Raises ValueError for shares that cannot all be kept. `ssd_bytes`: 0 where there is no SSD."""
    if len(known) > MAX_TENANTS:
        raise ValueError(f"more than {MAX_TENANTS} tenants")
    names = [each.name for each in known]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"tenants: {repeated[0]} is there twice")
    if sum(each.dram_bytes for each in known) > dram_bytes:
        raise ValueError(f"tenants: their dram_bytes are more than pool_bytes, {dram_bytes}: a share is a promise")
    if ssd_bytes and sum(each.ssd_bytes for each in known) > ssd_bytes:
        raise ValueError(f"tenants: their ssd_bytes are more than ssd.bytes, {ssd_bytes}: a share is a promise")
