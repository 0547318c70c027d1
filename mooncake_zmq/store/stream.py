"""A stream between a store and its client, see `transfer/stream.py`: the order of what goes over it, and values with checksums.

client  -- Attach(client, token) --------------> server     once; the token is that of the Welcome
        <- Attached ---------------------------
        -- Get(keys, caps) -------------------->
        <- Values(sizes, checksums), bytes ----             again until all keys are answered
        -- Put(keys, sizes), no checksums ----->            or with checksums: the bytes follow at once
        <- Ended(codes) -----------------------             what is granted
        -- bytes of what is, Checksums -------->
        <- Ended(codes) -----------------------
        -- Promote(keys, leases) --------------->           of a client that shares memory
        <- Ended() -----------------------------
        -- Reserve, Commit or Lease ----------->           see `protocol.py`; `Release` and `ReportCorrupt` are not answered
        <- its reply --------------------------
"""

from collections.abc import Iterable, Iterator, Sequence

from mooncake_zmq.store.memory import Checksum, checksum_of
from mooncake_zmq.store.protocol import PIECE_BYTES
from mooncake_zmq.transfer.stream import MAX_VIEWS, Stream


def send_values(stream: Stream, values: Iterable[Sequence[memoryview]]) -> list[int]:
    """Send the bytes of values, each of which lies in one or several places; returns their checksums."""
    checksums = _Checksums()
    for run in _runs(values):
        checksums.update(run)  # while they come into the CPU's cache anyway
        stream.send_views([view for view, _, _ in run])
    return checksums.made


def receive_values(stream: Stream, values: Iterable[Sequence[memoryview]]) -> list[int]:
    """Fill the places of values with what comes; returns the checksums of what came."""
    checksums = _Checksums()
    for run in _runs(values):
        stream.receive_views([view for view, _, _ in run])
        checksums.update(run)
    return checksums.made


class _Checksums:
    """Makes the checksums of values that pass by in runs."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self._begun: Checksum | None = None

    def update(self, run: "_Run") -> None:
        for view, first, last in run:
            if first and last:
                self.made.append(checksum_of(view))
                continue
            if first or self._begun is None:
                self._begun = Checksum()
            self._begun.update(view)
            if last:
                self.made.append(self._begun.value())


_Run = list[tuple[memoryview, bool, bool]]
"""(bytes, do they begin a value, do they end one)."""


def _runs(values: Iterable[Sequence[memoryview]]) -> Iterator[_Run]:
    """The places of all values in runs of at most PIECE_BYTES: as much as stays in the CPU's cache to be hashed."""
    run: _Run = []
    room = PIECE_BYTES
    for views in values:
        last = len(views) - 1
        for number, view in enumerate(views):
            start = 0
            while len(view) - start > room:
                run.append((view[start : start + room], number == 0 and start == 0, False))
                start += room
                yield run
                run, room = [], PIECE_BYTES
            run.append((view[start:] if start else view, number == 0 and start == 0, number == last))
            room -= len(view) - start
            if room == 0 or len(run) == MAX_VIEWS:
                yield run
                run, room = [], PIECE_BYTES
    if run:
        yield run
