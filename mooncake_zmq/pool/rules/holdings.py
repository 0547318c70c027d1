"""Bytes and rows that each tenant has of one tier of a store. PURE."""

import itertools
from array import array
from collections.abc import Iterable, Iterator

from mooncake_zmq.pool.rules.linked_rows import LinkedRows
from mooncake_zmq.pool.rules.tenants import NO_TENANT, Tenants


class Holdings:
    """Bytes of each tenant in one tier, against its quotas, and its rows of the tier's table in the order of their use.

    `kinds`: several such orders for each tenant. Rows are in one of them, or in none.
    """

    def __init__(self, tenants: Tenants, quotas: Iterable[int], *, rows: int = 0, kinds: int = 1) -> None:
        self.tenants = tenants
        self.quotas = [0, *quotas]
        self.bytes = [0] * len(self.quotas)
        self.of = array("H")
        """The tenant of each row."""
        self._kinds = kinds
        self._lists = kinds * len(self.quotas)
        self._order = LinkedRows(self._lists)
        self._readable = LinkedRows(len(self.quotas))
        for _ in range(rows):
            self.add_row()

    def add_row(self) -> None:
        self.of.append(NO_TENANT)
        self._order.add_row()
        self._readable.add_row()

    def take(self, row: int, tenant: int, size_bytes: int) -> None:
        """From now on the row is the tenant's."""
        self.of[row] = tenant
        self.bytes[tenant] += size_bytes

    def give(self, row: int, size_bytes: int) -> None:
        """It is free."""
        self.bytes[self.of[row]] -= size_bytes

    def append(self, row: int, kind: int = 0) -> None:
        """It was used last, of its order."""
        self._order.append(self._kinds * self.of[row] + kind, self._lists + row)

    def remove(self, row: int) -> None:
        """From its order."""
        self._order.remove(self._lists + row)

    def show(self, row: int) -> None:
        """It has a value that can be read."""
        self._readable.append(self.of[row], len(self.quotas) + row)

    def hide(self, row: int) -> None:
        """No more."""
        self._readable.remove(len(self.quotas) + row)

    def readable(self, tenant: int) -> Iterator[int]:
        """Rows of one tenant that were shown, the oldest first; nothing may change meanwhile."""
        return (row - len(self.quotas) for row in self._readable.rows(tenant))

    def coldest(self, tenant: int) -> Iterator[int]:
        """Rows of one tenant, those used longest ago first, one kind after the other; nothing may change meanwhile."""
        orders = (self._order.rows(self._kinds * tenant + kind) for kind in range(self._kinds))
        return (row - self._lists for row in itertools.chain.from_iterable(orders))

    def over(self, tenant: int, more_bytes: int = 0) -> int:
        """By how many bytes it is over its quota, or would be with some more; 0 or less: it is not."""
        quota = self.quotas[tenant]
        return self.bytes[tenant] + more_bytes - quota if quota else 0

    def named(self) -> dict[str, int]:
        """Bytes by name of the tenant."""
        return {each.name: self.bytes[number] for number, each in enumerate(self.tenants.known, 1)}
