"""Predicts how long fetching blocks takes: by the cache-nodes' measurements for each source and destination, otherwise by the
cost model, behind what is already on its way. PURE. Nodes are identified by their bits in the index."""

import math

from mooncake_zmq.conductor.corrections import Accuracy
from mooncake_zmq.core.messages import SourceRate


class Rates:
    """The seconds that a block took from one source, by destination; they fade towards the cost model as time passes without
    news."""

    __slots__ = ("_half_life_s", "_known", "_model_s", "least_s")

    def __init__(self, block_s: float, half_life_s: float) -> None:
        self._model_s = block_s
        self._half_life_s = half_life_s
        self._known: dict[int, tuple[float, float]] = {}
        """By destination, the measurement and its time."""
        self.least_s = block_s
        """A lower bound for all destinations."""

    def report(self, now: float, destination: int, block_s: float) -> None:
        """Record a measurement at a destination."""
        self._known[destination] = block_s, now
        self.least_s = min(self.least_s, block_s)

    def block_s(self, now: float, destination: int) -> float:
        """Return the seconds per block."""
        known = self._known.get(destination)
        if known is None:
            return self._model_s
        return self._model_s + math.exp2((known[1] - now) / self._half_life_s) * (known[0] - self._model_s)

    def forget(self, destination: int) -> None:
        """Forget a cache-node that left."""
        self._known.pop(destination, None)


class Transfers:
    """Tracks all transfers between hosts and from SSD."""

    def __init__(self, *, block_s: float, disk_block_s: float, half_life_s: float, accuracy: Accuracy) -> None:
        """Create it; `block_s` and `disk_block_s` are the cost model's seconds for a block from another host and from SSD."""
        self.model_s = block_s
        """The cost model's seconds for a block from another host."""
        self._half_life_s = half_life_s
        self._accuracy = accuracy
        self._rates: dict[int, Rates] = {}
        self._unmeasured = Rates(block_s, half_life_s)
        self.disk = Rates(disk_block_s, half_life_s)
        self._in_at: dict[int, float] = {}
        """The time at which each destination will have all that is on its way to it."""
        self._out_at: dict[int, float] = {}
        """The time at which each source will have sent all that this conductor's placements fetch from it."""

    def report(self, now: float, destination: int, source: int | None, rate: SourceRate) -> float:
        """Take in a cache-node's report about one source; None is its own SSD. Return the seconds of blocks still on their
        way."""
        rates = self.disk if source is None else self._rates.setdefault(source, Rates(self.model_s, self._half_life_s))
        if rate.block_s > 0:
            before_s = rates.block_s(now, destination)
            if before_s != rate.block_s:
                self._accuracy.add("transfer", rate.block_s, before_s)
            rates.report(now, destination, rate.block_s)
        return rate.pending_blocks * rates.block_s(now, destination) if rate.pending_blocks else 0.0

    def arriving(self, now: float, destination: int, pending_s: float) -> None:
        """Set for how long a cache-node still waits for blocks."""
        self._in_at[destination] = now + pending_s

    def book(self, now: float, source: int, destination: int, seconds: float) -> None:
        """Book a fetch that takes so many seconds by itself."""
        self._in_at[destination] = max(now, self._in_at.get(destination, 0.0)) + seconds
        self._out_at[source] = max(now, self._out_at.get(source, 0.0)) + seconds

    def forget(self, bit: int) -> None:
        """Forget a cache-node that left; its bit may be given to another."""
        self._rates.pop(bit, None)
        for rates in (self.disk, *self._rates.values()):
            rates.forget(bit)
        self._in_at.pop(bit, None)
        self._out_at.pop(bit, None)

    def rates(self, source: int) -> Rates:
        """Return the rates of a source."""
        return self._rates.get(source, self._unmeasured)

    def in_at(self, destination: int) -> float:
        """Return when all that is on its way to a destination will be there; 0 if nothing ever was."""
        return self._in_at.get(destination, 0.0)

    def out_at(self, source: int) -> float:
        """Return when a source will have sent what was requested of it; 0 if nothing ever was."""
        return self._out_at.get(source, 0.0)
