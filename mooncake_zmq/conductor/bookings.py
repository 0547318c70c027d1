"""The placements that have not ended, as far as this conductor knows. PURE."""

import hashlib
import math
from typing import Final

from mooncake_zmq.conductor.booking import Booking, BookingKey

COUNTER_BITS: Final = 28
"""The bits of the counter in a booking number: it repeats after a quarter of a billion placements. The 20 bits above it
identify the conductor and its incarnation."""


class Bookings:
    """Holds bookings in the order in which they were made, which is also the order in which they expire."""

    def __init__(self, name: str, incarnation: int, *, limit: int) -> None:
        self._limit = limit
        self._by_key: dict[BookingKey, Booking] = {}
        self._by_number: dict[int, Booking] = {}
        digest = hashlib.sha256(f"{name}/{incarnation}".encode()).digest()
        self._prefix = (int.from_bytes(digest[:4], "big") >> 12) << COUNTER_BITS
        self._count = 0
        self._since = math.inf
        """A lower bound of the time at which the oldest booking was made."""

    def __len__(self) -> int:
        return len(self._by_key)

    def next_number(self) -> int:
        """Return a new number for a placement: never 0, and different from those of other conductors."""
        self._count = self._count % ((1 << COUNTER_BITS) - 1) + 1
        return self._prefix | self._count

    def add(self, booking: Booking) -> None:
        """Add a booking."""
        if not self._by_key:
            self._since = booking.at
        self._by_key[booking.key] = booking
        self._by_number[booking.number] = booking

    def remove(self, booking: Booking) -> None:
        """Remove a booking."""
        del self._by_key[booking.key]
        del self._by_number[booking.number]

    def get(self, key: BookingKey) -> Booking | None:
        """Return the booking of a request, if there is one."""
        return self._by_key.get(key)

    def numbered(self, number: int) -> Booking | None:
        """Return the booking with this number, if this conductor made it and it has not ended."""
        return self._by_number.get(number)

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached, so that a further booking needs the oldest removed."""
        return len(self._by_key) >= self._limit

    @property
    def oldest(self) -> Booking | None:
        """The oldest booking, which expires next."""
        return next(iter(self._by_key.values()), None)

    def is_due(self, now: float, ttl_s: float) -> bool:
        """Return whether the oldest booking has reached this age."""
        if now - self._since < ttl_s:
            return False
        oldest = self.oldest
        self._since = oldest.at if oldest is not None else math.inf
        return now - self._since >= ttl_s

    def all(self) -> list[Booking]:
        """Return all bookings, the oldest first."""
        return list(self._by_key.values())

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._by_key) == len(self._by_number) <= self._limit
        for key, booking in self._by_key.items():
            assert self._since <= booking.at
            assert key == booking.key
            assert key[1] == booking.placed.request_id
            assert self._by_number[booking.number] is booking
