"""Access to the slots of each incarnation of each node: own memory, a neighbour's mapped file, its GPU memory, a data
endpoint."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from mooncake_zmq.core.messages import SegmentRef
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.transfer.cuda import Cuda, DeviceSegment
from mooncake_zmq.transfer.segment_file import SharedMemoryError, is_segment_of
from mooncake_zmq.transfer.shared_memory import Segment
from mooncake_zmq.transfer.sockets import BadEndpoint, check_endpoint

log = structlog.get_logger()

Incarnation = tuple[str, int]
"""One incarnation of a node: (node, incarnation)."""


@dataclass(slots=True)
class _Neighbour:
    """A peer's segment. `mappings` are by whether they are writable; most peers' memory is mapped for reading only."""

    segment: SegmentRef
    is_local: bool
    """Whether its slots can be mapped here; those of a GPU that this process does not see are read as another host's."""
    mappings: dict[bool, Segment] = field(default_factory=dict)
    to_pin: bool = False
    """Whether it is mapped, in host memory, and is to be pinned for a GPU's copies."""


class SegmentDirectory:
    """Holds the newest incarnation of each peer. Mappings are made at first use, those of GPU memory at once, and end with
    their last reader. With `cuda`, mapped memory is pinned at the first use that requires it."""

    def __init__(
        self,
        node: str,
        incarnation: int,
        host: str,
        layout: BlockLayout,
        own: Segment | None,
        cuda: Cuda | None = None,
        shm_dir: Path | None = None,
    ) -> None:
        """Make an empty directory. `shm_dir`: the only directory where neighbours' files may lie; None: any."""
        self._own = (node, incarnation)
        self.own = own
        self._host = host
        self.layout = layout
        self._cuda = cuda
        self._shm_dir = shm_dir
        self._neighbours: dict[str, tuple[int, _Neighbour]] = {}
        self._lock = threading.Lock()
        """Guards the neighbours."""
        self._mapping = threading.Lock()
        """Held while a segment is mapped."""
        self._pinning = threading.Lock()
        """Held while a segment is pinned: a large one takes seconds, for which only the threads wait that need it pinned."""

    def learn(self, incarnation: Incarnation, host: str, segment: SegmentRef | None) -> Incarnation | None:
        """Add a peer, unless it is an older incarnation; returns the incarnation that it replaced, which is removed.

        A segment that is not where such a node's can be is ignored: nothing there is opened or connected to.
        """
        node, number = incarnation
        if segment is not None and (reason := self._why_not(incarnation, host, segment)):
            log.warning("segment_refused", node=node, incarnation=number, reason=reason)
            segment = None
        with self._lock:
            known = self._neighbours.get(node)
            if known and known[0] > number:
                return None
            if segment is None:
                self._neighbours.pop(node, None)
            elif not (known and known[0] == number and known[1].segment == segment):
                here = host == self._host
                neighbour = _Neighbour(segment, here) if not segment.device else self._on_device(incarnation, segment, here)
                self._neighbours[node] = (number, neighbour)
            return (node, known[0]) if known and known[0] < number else None

    def forget(self, node: str) -> Incarnation | None:
        """Remove a peer; returns its known incarnation."""
        with self._lock:
            known = self._neighbours.pop(node, None)
        return (node, known[0]) if known else None

    def endpoint(self, incarnation: Incarnation) -> str | None:
        """Return the data endpoint of an incarnation on another host; None for one on this host or unknown."""
        neighbour = self._neighbour(incarnation)
        return neighbour.segment.endpoint if neighbour and not neighbour.is_local else None

    def segment(self, incarnation: Incarnation, *, writable: bool = False, pinned: bool = True) -> Segment | None:
        """Return the mapped segment of an incarnation on this host; None if there is none, or no longer. With `pinned` it may
        take seconds to be made ready for a GPU's copies; without, only the host may read and write it."""
        if incarnation == self._own:
            return self.own
        neighbour = self._neighbour(incarnation)
        if neighbour is None or not neighbour.is_local:
            return None
        with self._mapping:
            mapped = neighbour.mappings.get(True) or neighbour.mappings.get(writable)
            if mapped is None:
                # Not every GPU can pin read-only memory.
                writable = writable or self._cuda is not None
                try:
                    mapped = Segment.attach(neighbour.segment.path, self.layout, incarnation[1], writable=writable)
                except SharedMemoryError as error:
                    log.warning("segment_lost", node=incarnation[0], incarnation=incarnation[1], error=str(error))
                    return None
                neighbour.mappings[writable] = mapped
                neighbour.to_pin = self._cuda is not None
        if pinned and self._cuda:
            with self._pinning:
                if neighbour.to_pin:
                    self._cuda.pin(mapped)
                    neighbour.to_pin = False
        return mapped

    def _why_not(self, incarnation: Incarnation, host: str, segment: SegmentRef) -> str:
        """Return the error in the places of a peer's segment, among those that this process would use; empty if there is
        none."""
        here = host == self._host
        if here and not is_segment_of(segment.path, *incarnation, self._shm_dir):
            return f"{segment.path!r:.200} is not where its segment would be"
        if not here or segment.device:
            try:
                check_endpoint(segment.endpoint)
            except BadEndpoint as error:
                return f"{error!s:.200}"
        return ""

    def _on_device(self, incarnation: Incarnation, segment: SegmentRef, here: bool) -> _Neighbour:
        """Open a segment in GPU memory at once, to find whether its slots can be mapped here."""
        neighbour = _Neighbour(segment, is_local=False)
        if here and self._cuda and self._cuda.sees(segment.device):
            try:
                opened = DeviceSegment.open(
                    self._cuda, segment.path, self.layout, incarnation[1], segment.device, segment.handle
                )
            except SharedMemoryError as error:
                log.warning("device_slab_not_opened", node=incarnation[0], incarnation=incarnation[1], error=str(error))
            else:
                neighbour.is_local, neighbour.mappings[False] = True, opened
        return neighbour

    def clear(self) -> None:
        """Drop every mapping."""
        with self._lock:
            self._neighbours.clear()

    def _neighbour(self, incarnation: Incarnation) -> _Neighbour | None:
        with self._lock:
            known = self._neighbours.get(incarnation[0])
        return known[1] if known and known[0] == incarnation[1] else None
