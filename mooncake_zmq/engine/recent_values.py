"""Values that are kept within a number of bytes: the least recently used go first."""

from array import array
from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

ENTRY_BYTES = 200
"""Memory of a value beside its bytes."""

ValueT = TypeVar("ValueT", bytes, "array[int]")


class RecentValues(Generic[ValueT]):
    """Values by name, each of which counts with its bytes. Safe to share between threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._values: OrderedDict[bytes, ValueT] = OrderedDict()
        self.bytes = 0
        """The bytes that are kept."""

    def find(self, name: bytes) -> ValueT | None:
        """Return the value of this name, which counts as used, or None."""
        with self._lock:
            found = self._values.get(name)
            if found is not None:
                self._values.move_to_end(name)
            return found

    def keep(self, name: bytes, value: ValueT) -> None:
        """Keep a value, which any caller that has the same name would keep, and let go of others."""
        with self._lock:
            if name not in self._values:
                self.bytes += _size(value)
            self._values[name] = value
            self._values.move_to_end(name)
            while self.bytes > self._max_bytes:
                self.bytes -= _size(self._values.popitem(last=False)[1])


def _size(value: "bytes | array[int]") -> int:
    return ENTRY_BYTES + memoryview(value).nbytes
