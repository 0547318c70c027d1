"""The seam between who wants blocks of other hosts and what brings them: reads, and the lanes to their owners.

A lane is what one owner's blocks come by, with its bytes landing where each read's sink wants them: a stream
(`block_stream.py`), or what hardware puts there by itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.transfer.directory import Life


class LaneLost(Exception):
    """The owner is gone, silent, or speaks something else: nothing more comes. The message says which."""


class ReadSink(Protocol):
    """Where a read's bytes go. Called on the reader's thread: `buffer` once at most, `part` per layer, then `end` once."""

    def buffer(self) -> memoryview | None:
        """Memory to receive all bytes straight into, or None to be handed views of them."""

    def part(self, layer: int, payload: memoryview, checksum: int) -> None:
        """A part that verified; `payload` lies in `buffer` if there was one."""

    def end(self, failure: ReadFailure | None) -> None:
        """Nothing more comes, nor lands in `buffer`; None: all layers arrived and verified."""


@dataclass(slots=True, eq=False)
class RemoteRead:
    """One block, or some layers of it, to fetch."""

    source: SlotRef
    layers: range
    sink: ReadSink
    batch: "ReadBatch | None" = field(default=None, init=False)
    """None once it has ended."""
    size_bytes: int = field(default=0, init=False)

    @property
    def is_wanted(self) -> bool:
        """Has it not ended yet?"""
        return self.batch is not None


@dataclass(slots=True, eq=False)
class ReadBatch:
    """Reads that share a deadline. `finished` is called once, when all have ended."""

    reads: Sequence[RemoteRead]
    deadline: float
    finished: Callable[[], None]
    left: int


class Lane(Protocol):
    """Reads of one life's blocks. All on the reader's thread, and nothing in it waits. Each may raise LaneLost."""

    def fileno(self) -> int:
        """Ready to be read when `ended` may have more to tell."""

    def ask(self, reads: Sequence[RemoteRead]) -> None:
        """For these ranges, to their sinks. The sink of a read that is not wanted any more is not called."""

    def ended(self) -> Iterator[tuple[RemoteRead, ReadFailure | None]]:
        """What has ended, until nothing more is here. May be left early, and asked again."""

    def landing(self) -> Sequence[RemoteRead]:
        """Reads into whose buffers bytes may still come; only `close` keeps them out."""

    def close(self) -> None:
        """No byte lands anywhere any more."""


OpenLane = Callable[[Life, str, Callable[[], bool]], Lane]
"""(owner, its data endpoint, is it not wanted any more?). On a thread of its own, where it may wait. Raises LaneLost."""
