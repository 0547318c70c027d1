"""Runs one node whose data link is as slow as a file says, for `bench meet`, by `python -m mooncake_zmq.bench.throttled`.

A token bucket pauses the thread that sends blocks to other hosts. A cache-node started so also fetches from sources that are
slower than computing, which it would not ask otherwise, if the file's second word is "all".
"""

import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from mooncake_zmq.pool.node.gathering import Gatherer
from mooncake_zmq.transfer.stream import Stream

SMALL_BYTES = 4096
"""Messages up to this size are not counted: requests and replies without blocks."""
BURST_S = 0.005
"""Seconds of a link's rate that may be sent at once."""


class Bucket:
    """A token bucket whose rate, in bytes per second, is the first word of a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._free_at = 0.0

    def take(self, size: int) -> None:
        """Wait until so many bytes may have been sent."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + size / float(self._file.read_text().split()[0])
        time.sleep(max(0.0, self._free_at - now - BURST_S))


def run(file: Path, arguments: Sequence[str]) -> None:
    """Run a node with a throttled data link."""
    bucket, send = Bucket(file), Stream.send_views

    def send_slowly(stream: Stream, views: Sequence[memoryview]) -> None:
        size = sum(view.nbytes for view in views)
        send(stream, views)
        if size > SMALL_BYTES:
            bucket.take(size)

    too_slow = (lambda *_: False) if file.read_text().split()[1:] == ["all"] else Gatherer._too_slow
    with patch.object(Stream, "send_views", send_slowly), patch.object(Gatherer, "_too_slow", too_slow):
        sys.argv = ["mooncake-zmq", *arguments]
        runpy.run_module("mooncake_zmq", run_name="__main__")


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
