"""What was placed and has not ended, as far as this conductor knows. PURE."""

import hashlib
import math

from mooncake_zmq.conductor.booking import Booking, BookingKey

COUNTER_BITS = 28
"""A quarter of a billion placements before a number comes again; the 20 bits above tell conductors and their lives apart."""


class Bookings:
    """In the order they were made, which is the order they expire in."""

    def __init__(self, name: str, incarnation: int, *, limit: int) -> None:
        self._limit = limit
        self._by_key: dict[BookingKey, Booking] = {}
        self._by_number: dict[int, Booking] = {}
        digest = hashlib.sha256(f"{name}/{incarnation}".encode()).digest()
        self._prefix = (int.from_bytes(digest[:4], "big") >> 12) << COUNTER_BITS
        self._count = 0
        self._since = math.inf
        """No booking is older than this."""

    def __len__(self) -> int:
        return len(self._by_key)

    def next_number(self) -> int:
        """A number for a placement: never 0, and no other conductor's."""
        self._count = self._count % ((1 << COUNTER_BITS) - 1) + 1
        return self._prefix | self._count

    def add(self, booking: Booking) -> None:
        """Remember it."""
        if not self._by_key:
            self._since = booking.at
        self._by_key[booking.key] = booking
        self._by_number[booking.placed.booking] = booking

    def remove(self, booking: Booking) -> None:
        """Forget it."""
        del self._by_key[booking.key]
        del self._by_number[booking.placed.booking]

    def get(self, key: BookingKey) -> Booking | None:
        """What is booked for a request."""
        return self._by_key.get(key)

    def numbered(self, number: int) -> Booking | None:
        """The one with this number, if it is ours and has not ended."""
        return self._by_number.get(number)

    @property
    def is_full(self) -> bool:
        """Whether another one costs the oldest its place."""
        return len(self._by_key) >= self._limit

    @property
    def oldest(self) -> Booking | None:
        """The one that expires next."""
        return next(iter(self._by_key.values()), None)

    def is_due(self, now: float, ttl_s: float) -> bool:
        """Whether the oldest is as old as this."""
        if now - self._since < ttl_s:
            return False
        oldest = self.oldest
        self._since = oldest.at if oldest is not None else math.inf
        return now - self._since >= ttl_s

    def all(self) -> list[Booking]:
        """Oldest first."""
        return list(self._by_key.values())

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._by_key) == len(self._by_number) <= self._limit
        for key, booking in self._by_key.items():
            assert self._since <= booking.at
            assert key == booking.key
            assert key[1] == booking.placed.request_id
            assert self._by_number[booking.placed.booking] is booking
