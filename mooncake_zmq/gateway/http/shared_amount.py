"""An amount of memory that all calls of a gateway share. PURE."""

from collections import Counter

from mooncake_zmq.gateway.requests.tenants import Limited

TENANT_PART = 2
"""Divisor of an amount for one tenant: it may hold a half, so that it never holds what others need."""


class SharedAmount:
    """The parts of one amount that calls hold, by tenant; calls without a key are bounded only all together."""

    def __init__(self, most: int, what: str) -> None:
        """`what`: a name of it, for the refusal of a tenant."""
        self._most = most
        self._what = what
        self.taken = 0
        """Zero when idle."""
        self._by_tenant: Counter[str] = Counter()

    def take(self, tenant: str, amount: int) -> bool:
        """Take an amount, unless all calls together hold too much with it: then return False. Raises Limited where the tenant
        alone would hold too much."""
        if tenant and self._by_tenant[tenant] + amount > self._most // TENANT_PART:
            text = f"{tenant} may hold {self._most // TENANT_PART} {self._what} in this gateway at a time"
            raise Limited(text, None)
        if self.taken + amount > self._most:
            return False
        self.taken += amount
        self._by_tenant[tenant] += amount
        return True

    def give_back(self, tenant: str, amount: int) -> None:
        """Return an amount, or a part of it."""
        self.taken -= amount
        self._by_tenant[tenant] -= amount
        assert self._by_tenant[tenant] >= 0
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
