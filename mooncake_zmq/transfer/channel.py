"""Interface between the readers of other hosts' blocks and their transports: reads, and a `Channel` to each owner.

A `Channel` brings one owner's blocks, with the bytes written into each read's sink: a stream (`block_stream.py`), or hardware
that writes them by itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.transfer.directory import Incarnation


class ChannelLost(Exception):
    """End of a `Channel`: the owner is gone, silent, or breaks the protocol. The message says which."""


class ReadSink(Protocol):
    """Receiver of a read's bytes. Called on the reader's thread: `buffer` once at most, `part` per layer, then `end` once."""

    def buffer(self) -> memoryview | None:
        """Return memory to receive all bytes into, or None to get views of them."""

    def part(self, layer: int, payload: memoryview, checksum: int) -> None:
        """Take a verified part; `payload` lies in `buffer` if there was one."""

    def end(self, failure: ReadFailure | None) -> None:
        """Take the read's end: no more bytes are written to `buffer`. None: all layers arrived and verified."""


@dataclass(slots=True, eq=False)
class RemoteRead:
    """A read of one block, or of some of its layers."""

    source: SlotRef
    layers: range
    sink: ReadSink
    batch: "ReadBatch | None" = field(default=None, init=False)
    """The read's batch; None once it has ended."""
    size_bytes: int = field(default=0, init=False)

    @property
    def is_wanted(self) -> bool:
        """Return whether the read has not ended yet."""
        return self.batch is not None


@dataclass(slots=True, eq=False)
class ReadBatch:
    """Reads that share a deadline. `finished` is called once, when all have ended."""

    reads: Sequence[RemoteRead]
    deadline: float
    finished: Callable[[], None]
    left: int


class Channel(Protocol):
    """Reads of one incarnation's blocks, called on the reader's thread. No method blocks; each may raise ChannelLost."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `ended` may yield more."""

    def ask(self, reads: Sequence[RemoteRead]) -> None:
        """Request these reads. The sink of a read that has ended is not called."""

    def ended(self) -> Iterator[tuple[RemoteRead, ReadFailure | None]]:
        """Yield reads that have ended, until no more bytes are available. May be left early, and called again."""

    def landing(self) -> Sequence[RemoteRead]:
        """Return the reads into whose buffers bytes may still be written; only `close` prevents that."""

    def close(self) -> None:
        """Close the transport: no byte is written anywhere after this."""


OpenChannel = Callable[[Incarnation, str, Callable[[], bool]], Channel]
"""Opens a `Channel` from (owner, its data endpoint, a function that returns whether it is no longer wanted), on a thread of its
own, where it may block. Raises ChannelLost."""
