"""What fetching blocks takes: measured by the cache-nodes for each source and destination, else by the cost model, behind
what is on its way there already. PURE. Nodes are named by their bit in the index; the last column stands for no cache-node at
all."""

import numpy as np

from mooncake_zmq.conductor.columns import Floats
from mooncake_zmq.conductor.corrections import Accuracy
from mooncake_zmq.core.messages import SourceRate


class Rates:
    """Seconds a block took from one source, by destination; fades towards the cost model's as time passes without news."""

    def __init__(self, width: int, block_s: float, half_life_s: float) -> None:
        self._model_s = block_s
        self._half_life_s = half_life_s
        self._block_s = np.full(width, block_s)
        self._at = np.full(width, -np.inf)

    def report(self, now: float, destination: int, block_s: float) -> None:
        self._block_s[destination], self._at[destination] = block_s, now

    def now_s(self, now: float) -> Floats:
        """Seconds per block, by destination."""
        fade = np.exp2((self._at - now) / self._half_life_s)
        rates: Floats = self._model_s + fade * (self._block_s - self._model_s)
        return rates

    def one_s(self, now: float, destination: int) -> float:
        """The same for one destination."""
        fade = float(np.exp2((self._at[destination] - now) / self._half_life_s))
        return self._model_s + fade * (float(self._block_s[destination]) - self._model_s)

    def forget(self, destination: int) -> None:
        self._at[destination] = -np.inf

    def widen(self, width: int) -> None:
        more = width - len(self._at)
        self._block_s = np.concatenate((self._block_s, np.full(more, self._model_s)))
        self._at = np.concatenate((self._at, np.full(more, -np.inf)))


class Transfers:
    """All that moves between hosts, and from SSD."""

    def __init__(self, *, block_s: float, disk_block_s: float, half_life_s: float, accuracy: Accuracy) -> None:
        """`block_s`, `disk_block_s`: what the cost model says of a block from another host, and from SSD."""
        self._block_s = block_s
        self._half_life_s = half_life_s
        self._accuracy = accuracy
        self._rates: dict[int, Rates] = {}
        self._disk = Rates(1, disk_block_s, half_life_s)
        self._measured_disk = False
        self._disk_block_s = disk_block_s
        self.width = 1
        self._in_at = np.zeros(1)
        """When a destination will have what is on its way to it."""
        self._out_at = np.zeros(1)
        """When a source will have sent what was asked of it, as far as we placed it."""

    @property
    def nowhere(self) -> int:
        """The column of no cache-node."""
        return self.width - 1

    def widen(self, bits: int) -> None:
        """Have columns for so many bits."""
        if bits < self.width:
            return
        width = max(bits + 1, 2 * self.width)
        more = np.zeros(width - self.width)
        self._in_at, self._out_at = np.concatenate((self._in_at, more)), np.concatenate((self._out_at, more))
        for rates in (self._disk, *self._rates.values()):
            rates.widen(width)
        self.width = width

    def report(self, now: float, destination: int, source: int | None, rate: SourceRate) -> float:
        """What one cache-node says of one source; None: its own SSD. Returns the seconds that are still on their way."""
        if source is None:
            rates, self._measured_disk = self._disk, True
        else:
            known = self._rates.get(source)
            rates = self._rates[source] = known or Rates(self.width, self._block_s, self._half_life_s)
        if rate.block_s > 0:
            before_s = rates.one_s(now, destination)
            if before_s != rate.block_s:
                self._accuracy.add("transfer", rate.block_s, before_s)
            rates.report(now, destination, rate.block_s)
        return rate.pending_blocks * rates.one_s(now, destination) if rate.pending_blocks else 0.0

    def arriving(self, now: float, destination: int, pending_s: float) -> None:
        """All that a cache-node waits for takes so long still."""
        self._in_at[destination] = now + pending_s

    def book(self, now: float, source: int, destination: int, seconds: float) -> None:
        """A fetch was placed, which takes so long by itself."""
        self._in_at[destination] = max(now, float(self._in_at[destination])) + seconds
        self._out_at[source] = max(now, float(self._out_at[source])) + seconds

    def forget(self, bit: int) -> None:
        """This cache-node left; its bit may come to mean another."""
        self._rates.pop(bit, None)
        for rates in (self._disk, *self._rates.values()):
            rates.forget(bit)
        self._in_at[bit] = self._out_at[bit] = 0.0

    def block_s(self, now: float, source: int) -> Floats | float:
        """Seconds per block from this source, by destination or the same for all."""
        rates = self._rates.get(source)
        return rates.now_s(now) if rates else self._block_s

    def disk_s(self, now: float) -> Floats | float:
        """Seconds per block from its own SSD, by destination or the same for all."""
        return self._disk.now_s(now) if self._measured_disk else self._disk_block_s

    def behind_s(self, now: float, source: int) -> Floats:
        """How long a new fetch waits for those before it, by destination."""
        waits: Floats = np.maximum(self._in_at, self._out_at[source]) - now
        return np.maximum(waits, 0.0, out=waits)
