"""What the threads of a store's server share: the pure `Objects` and the segment that shows their generations."""

import threading

from mooncake_zmq.store.rules.objects import Objects
from mooncake_zmq.store.segment import ObjectSegment


class StoreMemory:
    """`with memory as objects` is every look and change, for moments only and never across a wait.

    What changed is visible in the segment when the block ends, so before anybody can be told.
    """

    def __init__(self, objects: Objects, segment: ObjectSegment) -> None:
        self.segment = segment
        self._objects = objects
        self._lock = threading.Lock()

    def __enter__(self) -> Objects:
        self._lock.acquire()
        return self._objects

    def __exit__(self, *_: object) -> None:
        try:
            fences = self._objects.fences
            if fences:
                generations = self.segment.generations
                for entry, generation in fences:
                    generations[entry] = generation
                fences.clear()
        finally:
            self._lock.release()

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes of a cell."""
        return self.segment.memory[offset : offset + size]
