"""Transfer of a chunk's hidden states from one stage of a pipeline to the next, in block slots.

They are opaque bytes there, row after row, cut into parts as long as a layer's part of a block, under the part checksums of
their slots: so block reads, from shared memory or another host, transfer and verify them too.

Sketch: SmolLM2-135M, 512 tokens: 1.2 MB, one slot, 0.4 ms to write and to read, of a stage of half a second on one core.
"""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import SlotGrant
from mooncake_zmq.kv.layout import BlockLayout, div_ceil
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.transfer.block_copy import granted, read_parts
from mooncake_zmq.transfer.channel import RemoteRead
from mooncake_zmq.transfer.shared_memory import Segment


def store_hidden(states: NDArray[np.float32], target: Segment, grants: Sequence[SlotGrant]) -> bool:
    """Write hidden states [n, hidden] into granted slots of the own segment; False if a grant is void."""
    layout = target.layout
    parts = div_ceil(states.nbytes, layout.part_bytes)
    padded = np.zeros(parts * layout.part_bytes, dtype=np.uint8)
    padded[: states.nbytes] = np.ascontiguousarray(states).reshape(-1).view(np.uint8)
    shaped = padded.view(layout.dtype).reshape(parts, *layout.part_shape)
    assert div_ceil(parts, layout.layers) <= len(grants), "the slots hold the hidden states"
    for index, part in enumerate(shaped):
        grant = grants[index // layout.layers]
        if not granted(target, grant):
            return False
        target.write_part(grant.slot, index % layout.layers, part)
    return True


class EnteringStates:
    """Incoming hidden states [n, hidden]. The reads end in several threads; one thread waits for them all."""

    def __init__(self, layout: BlockLayout, sources: Sequence[SlotRef], rows: int, width: int) -> None:
        self._layout = layout
        self._shape = (rows, width)
        parts = div_ceil(rows * width * 4, layout.part_bytes)
        self._bytes = np.zeros(parts * layout.part_bytes, dtype=np.uint8)
        assert div_ceil(parts, layout.layers) == len(sources), "one slot after the other is filled"
        self._reads = [
            (source, range(min(layout.layers, parts - index * layout.layers))) for index, source in enumerate(sources)
        ]
        self._changed = threading.Condition()
        self._missing = len(sources)
        self.failure: ReadFailure | None = None

    def remote_reads(self, is_remote: Callable[[SlotRef], bool]) -> list[RemoteRead]:
        """Return the reads from other hosts; each ends in this object."""
        return [
            RemoteRead(source, layers, _PartsSink(self, self._view(index), self._layout.part_bytes))
            for index, (source, layers) in enumerate(self._reads)
            if is_remote(source)
        ]

    def read_here(self, segment_of: Callable[[SlotRef], Segment | None], is_remote: Callable[[SlotRef], bool]) -> None:
        """Read the slots on this host, in the calling thread."""
        for index, (source, layers) in enumerate(self._reads):
            if not is_remote(source):
                segment = segment_of(source)
                failure = read_parts(segment, source, layers, self._view(index)) if segment else ReadFailure.UNREACHED
                self.arrived(failure)

    def arrived(self, failure: ReadFailure | None) -> None:
        """Note the end of one read."""
        with self._changed:
            self._missing -= 1
            self.failure = self.failure or failure
            self._changed.notify_all()

    def wake(self) -> None:
        """Make the waiting thread call its `check` again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, check: Callable[[], None], deadline: float) -> NDArray[np.float32] | None:
        """Wait for the states; returns None if a read failed or the deadline passed. `check` raises when waiting is no use."""
        with self._changed:
            while self._missing and not self.failure:
                check()
                self._changed.wait(max(0.0, deadline - time.monotonic()))
        if self.failure:
            return None
        rows, width = self._shape
        states: NDArray[np.float32] = self._bytes[: rows * width * 4].view(np.float32).reshape(rows, width)
        return states

    def _view(self, index: int) -> NDArray[np.uint8]:
        start = index * self._layout.block_bytes
        return self._bytes[start : start + len(self._reads[index][1]) * self._layout.part_bytes]


class _PartsSink:
    """Receives the parts of one slot on another host in their place."""

    def __init__(self, states: EnteringStates, out: NDArray[np.uint8], part_bytes: int) -> None:
        self._states = states
        self._out = out
        self._part_bytes = part_bytes

    def buffer(self) -> memoryview | None:
        return self._out.data

    def part(self, layer: int, payload: memoryview, checksum: int) -> None:
        """Ignore the part, as it is in `buffer` already."""

    def end(self, failure: ReadFailure | None) -> None:
        self._states.arrived(failure)
