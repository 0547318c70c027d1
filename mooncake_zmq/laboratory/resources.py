"""The resources that the works of one host share: its NIC, the bus to its engines, its SSD. PURE.

First come, first served by bytes, not processor sharing: k transfers together take exactly as long either way, and only the
order in which they end differs. In return a transfer's end is known when it begins, so it is one event, and need not be planned
again when another one comes. The live system moves blocks in the same way: by one copying thread, and in order.
"""

from collections.abc import Iterable


class Shared:
    """One resource of `bytes_per_s`. A transfer over several ends when the last of them has finished its bytes: each continues
    without waiting for the others, as with buffers in between."""

    __slots__ = ("busy_s", "bytes_per_s", "free_at")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_at = 0.0
        self.busy_s = 0.0

    def take(self, now: float, size_bytes: float) -> float:
        """Return when bytes that come now are finished."""
        took_s = size_bytes / self.bytes_per_s
        self.busy_s += took_s
        self.free_at = (now if now > self.free_at else self.free_at) + took_s
        return self.free_at


def through(now: float, size_bytes: float, resources: Iterable[Shared]) -> float:
    """Return when bytes that come now are finished by all of these; now, if there are none."""
    end = now
    for resource in resources:
        end = max(end, resource.take(now, size_bytes)) if size_bytes else end
    return end


class Host:
    """The shared resources of one host."""

    __slots__ = ("bus", "disk", "incoming", "outgoing")

    def __init__(self, *, network_bytes_per_s: float, bus_bytes_per_s: float, disk_bytes_per_s: float) -> None:
        self.incoming = Shared(network_bytes_per_s)
        self.outgoing = Shared(network_bytes_per_s)
        self.bus = Shared(bus_bytes_per_s)
        self.disk = Shared(disk_bytes_per_s)
