"""What fetching blocks takes: measured by the cache-nodes for each source and destination, else by the cost model, behind
what is on its way there already. PURE. Nodes are named by their bit in the index."""

import math

from mooncake_zmq.conductor.corrections import Accuracy
from mooncake_zmq.core.messages import SourceRate


class Rates:
    """Seconds a block took from one source, by destination; fades towards the cost model's as time passes without news."""

    __slots__ = ("_half_life_s", "_known", "_model_s", "least_s")

    def __init__(self, block_s: float, half_life_s: float) -> None:
        self._model_s = block_s
        self._half_life_s = half_life_s
        self._known: dict[int, tuple[float, float]] = {}
        """By destination: what was measured, and when."""
        self.least_s = block_s
        """No destination's is below this."""

    def report(self, now: float, destination: int, block_s: float) -> None:
        """What was measured there."""
        self._known[destination] = block_s, now
        self.least_s = min(self.least_s, block_s)

    def block_s(self, now: float, destination: int) -> float:
        """Seconds per block."""
        known = self._known.get(destination)
        if known is None:
            return self._model_s
        return self._model_s + math.exp2((known[1] - now) / self._half_life_s) * (known[0] - self._model_s)

    def forget(self, destination: int) -> None:
        """This cache-node left."""
        self._known.pop(destination, None)


class Transfers:
    """All that moves between hosts, and from SSD."""

    def __init__(self, *, block_s: float, disk_block_s: float, half_life_s: float, accuracy: Accuracy) -> None:
        """`block_s`, `disk_block_s`: what the cost model says of a block from another host, and from SSD."""
        self.model_s = block_s
        """What the cost model says of a block."""
        self._half_life_s = half_life_s
        self._accuracy = accuracy
        self._rates: dict[int, Rates] = {}
        self._unmeasured = Rates(block_s, half_life_s)
        self.disk = Rates(disk_block_s, half_life_s)
        self._in_at: dict[int, float] = {}
        """When a destination will have what is on its way to it."""
        self._out_at: dict[int, float] = {}
        """When a source will have sent what was asked of it, as far as we placed it."""

    def report(self, now: float, destination: int, source: int | None, rate: SourceRate) -> float:
        """What one cache-node says of one source; None: its own SSD. Returns the seconds that are still on their way."""
        rates = self.disk if source is None else self._rates.setdefault(source, Rates(self.model_s, self._half_life_s))
        if rate.block_s > 0:
            before_s = rates.block_s(now, destination)
            if before_s != rate.block_s:
                self._accuracy.add("transfer", rate.block_s, before_s)
            rates.report(now, destination, rate.block_s)
        return rate.pending_blocks * rates.block_s(now, destination) if rate.pending_blocks else 0.0

    def arriving(self, now: float, destination: int, pending_s: float) -> None:
        """All that a cache-node waits for takes so long still."""
        self._in_at[destination] = now + pending_s

    def book(self, now: float, source: int, destination: int, seconds: float) -> None:
        """A fetch was placed, which takes so long by itself."""
        self._in_at[destination] = max(now, self._in_at.get(destination, 0.0)) + seconds
        self._out_at[source] = max(now, self._out_at.get(source, 0.0)) + seconds

    def forget(self, bit: int) -> None:
        """This cache-node left; its bit may come to mean another."""
        self._rates.pop(bit, None)
        for rates in (self.disk, *self._rates.values()):
            rates.forget(bit)
        self._in_at.pop(bit, None)
        self._out_at.pop(bit, None)

    def rates(self, source: int) -> Rates:
        """What blocks from this source take."""
        return self._rates.get(source, self._unmeasured)

    def in_at(self, destination: int) -> float:
        """When what is on its way there will be there; 0 if nothing ever was."""
        return self._in_at.get(destination, 0.0)

    def out_at(self, source: int) -> float:
        """When it will have sent what was asked of it; 0 if nothing ever was."""
        return self._out_at.get(source, 0.0)
