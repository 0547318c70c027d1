"""What tests of the store share beside fixtures."""

import ctypes
from collections.abc import Callable

from waiting import eventually

from mooncake_zmq.pool.server.server import StoreServer

SLAB_BYTES = 4 << 20
WORK_GAUGES = ("leases", "puts", "writing_objects", "quarantined_objects", "reserved_bytes")
SSD_WORK_GAUGES = ("ssd_demoting", "ssd_promoting", "ssd_erasing")


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    eventually(condition, timeout_s, what)


def idle(server: StoreServer) -> bool:
    gauges = server.gauges()
    return not any(gauges[name] for name in WORK_GAUGES) and not any(gauges.get(name) for name in SSD_WORK_GAUGES)


class Memory:
    """Application memory at an address."""

    def __init__(self, content: bytes | int) -> None:
        self.buffer = ctypes.create_string_buffer(
            content if isinstance(content, int) else bytes(content), None if isinstance(content, int) else len(content)
        )
        self.address = ctypes.addressof(self.buffer)
        self.size = len(self.buffer)

    def bytes(self, start: int = 0, size: int | None = None) -> bytes:
        return self.buffer.raw[start : self.size if size is None else start + size]
