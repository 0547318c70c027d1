"""Where the slots of each life of each node can be reached: own memory, a neighbour's mapped file, its GPU memory, a data
endpoint."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from mooncake_zmq.core.messages import SegmentRef
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.transfer.cuda import Cuda, DeviceSegment
from mooncake_zmq.transfer.shared_memory import Segment, SharedMemoryError, is_segment_of
from mooncake_zmq.transfer.sockets import BadEndpoint, check_endpoint

log = structlog.get_logger()

Life = tuple[str, int]
"""(node, incarnation)."""


@dataclass(slots=True)
class _Neighbour:
    """A peer's segment. `mappings` by whether it is writable; most peers' memory is only ever mapped for reading."""

    segment: SegmentRef
    is_local: bool
    """Its slots can be mapped here; those of a GPU that this process does not see are as far as another host's."""
    mappings: dict[bool, Segment] = field(default_factory=dict)
    to_pin: bool = False
    """It is mapped, in host memory, and a GPU is to copy there by itself."""


class SegmentDirectory:
    """Knows one life of each peer, the newest. Mappings are made at first use, those of GPU memory at once, and vanish with
    their last reader. Where there is `cuda`, what is mapped is pinned at the first use that asks for it."""

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
        """`shm_dir`: where neighbours' files must lie, if it is to be one place."""
        self._own_life = (node, incarnation)
        self.own = own
        self._host = host
        self.layout = layout
        self._cuda = cuda
        self._shm_dir = shm_dir
        self._neighbours: dict[str, tuple[int, _Neighbour]] = {}
        self._lock = threading.Lock()
        """Guards what is known of neighbours."""
        self._mapping = threading.Lock()
        """Held while a segment is mapped."""
        self._pinning = threading.Lock()
        """Held while one is pinned: a large one takes seconds, for which only those wait who want it pinned."""

    def learn(self, life: Life, host: str, segment: SegmentRef | None) -> Life | None:
        """Remember a peer, unless it is an older life; returns the life that it replaced, which is forgotten.

        A segment that is not where such a node's can be is no segment: nothing there is opened or connected to.
        """
        node, incarnation = life
        if segment is not None and (reason := self._why_not(life, host, segment)):
            log.warning("segment_refused", node=node, incarnation=incarnation, reason=reason)
            segment = None
        with self._lock:
            known = self._neighbours.get(node)
            if known and known[0] > incarnation:
                return None
            if segment is None:
                self._neighbours.pop(node, None)
            elif not (known and known[0] == incarnation and known[1].segment == segment):
                here = host == self._host
                neighbour = _Neighbour(segment, here) if not segment.device else self._on_device(life, segment, here)
                self._neighbours[node] = (incarnation, neighbour)
            return (node, known[0]) if known and known[0] < incarnation else None

    def forget(self, node: str) -> Life | None:
        """Drop what is known of a peer; returns the life that was known."""
        with self._lock:
            known = self._neighbours.pop(node, None)
        return (node, known[0]) if known else None

    def endpoint(self, life: Life) -> str | None:
        """The data endpoint of a life on another host; None for one on this host or not known."""
        neighbour = self._neighbour(life)
        return neighbour.segment.endpoint if neighbour and not neighbour.is_local else None

    def segment(self, life: Life, *, writable: bool = False, pinned: bool = True) -> Segment | None:
        """The mapped segment of a life on this host; None if there is none, or no longer. With `pinned` it may take seconds to
        be made ready for a GPU's copies; without, the host alone is to read and write there."""
        if life == self._own_life:
            return self.own
        neighbour = self._neighbour(life)
        if neighbour is None or not neighbour.is_local:
            return None
        with self._mapping:
            mapped = neighbour.mappings.get(True) or neighbour.mappings.get(writable)
            if mapped is None:
                # What cannot be written cannot be pinned on every GPU.
                writable = writable or self._cuda is not None
                try:
                    mapped = Segment.attach(neighbour.segment.path, self.layout, life[1], writable=writable)
                except SharedMemoryError as error:
                    log.warning("segment_lost", node=life[0], incarnation=life[1], error=str(error))
                    return None
                neighbour.mappings[writable] = mapped
                neighbour.to_pin = self._cuda is not None
        if pinned and self._cuda:
            with self._pinning:
                if neighbour.to_pin:
                    self._cuda.pin(mapped)
                    neighbour.to_pin = False
        return mapped

    def _why_not(self, life: Life, host: str, segment: SegmentRef) -> str:
        """What is wrong with the places that a peer names, of those that are for us; empty if nothing is."""
        here = host == self._host
        if here and not is_segment_of(segment.path, *life, self._shm_dir):
            return f"{segment.path!r:.200} is not where its segment would be"
        if not here or segment.device:
            try:
                check_endpoint(segment.endpoint)
            except BadEndpoint as error:
                return f"{error!s:.200}"
        return ""

    def _on_device(self, life: Life, segment: SegmentRef, here: bool) -> _Neighbour:
        """Opened at once, so that it is known from the start whether its slots are within reach."""
        neighbour = _Neighbour(segment, is_local=False)
        if here and self._cuda and self._cuda.sees(segment.device):
            try:
                opened = DeviceSegment.open(self._cuda, segment.path, self.layout, life[1], segment.device, segment.handle)
            except SharedMemoryError as error:
                log.warning("device_slab_not_opened", node=life[0], incarnation=life[1], error=str(error))
            else:
                neighbour.is_local, neighbour.mappings[False] = True, opened
        return neighbour

    def clear(self) -> None:
        """Drop every mapping."""
        with self._lock:
            self._neighbours.clear()

    def _neighbour(self, life: Life) -> _Neighbour | None:
        with self._lock:
            known = self._neighbours.get(life[0])
        return known[1] if known and known[0] == life[1] else None
