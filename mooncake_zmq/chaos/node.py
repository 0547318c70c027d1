"""One node of a chaos run: the product's own command line, on a host whose wall clock and disk the run can change.

`python -m mooncake_zmq.chaos.node ROLE ...` is `python -m mooncake_zmq ROLE ...`, except that (1) time.time() is off by what
the host's dials say, (2) vectored reads and writes of files, as SSD tiers do them, fail with the errno that stands there, and
(3) a decode's toy engine takes its time: for each token, or for a whole step of its batch. Nothing else is different, and the
product's code does not depend on it.
"""

import functools
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DIALS_VARIABLE = "MOONCAKE_ZMQ_CHAOS_DIALS"
TOKEN_VARIABLE = "MOONCAKE_ZMQ_CHAOS_TOKEN_S"
STEP_VARIABLE = "MOONCAKE_ZMQ_CHAOS_STEP_S"
PLANTED_VARIABLE = "MOONCAKE_ZMQ_CHAOS_PLANTED"
_DIALS = struct.Struct("<dq")


class Dials:
    """The faults of one host, in a file that its processes map: the seconds that its wall clock is off, and the errno of its
    disk."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, _DIALS.size)
            self._memory = mmap.mmap(fd, _DIALS.size)
        finally:
            os.close(fd)

    @property
    def clock_s(self) -> float:
        return float(_DIALS.unpack_from(self._memory)[0])

    @property
    def disk_errno(self) -> int:
        return int(_DIALS.unpack_from(self._memory)[1])

    def turn(self, *, clock_s: float | None = None, disk_errno: int | None = None) -> None:
        """Change one or both, for all processes of the host at once."""
        clock = self.clock_s if clock_s is None else clock_s
        _DIALS.pack_into(self._memory, 0, clock, self.disk_errno if disk_errno is None else disk_errno)


def _follow_clock(dials: Dials) -> None:
    seconds, nanoseconds = time.time, time.time_ns
    _replace(time, "time", lambda: seconds() + dials.clock_s)
    _replace(time, "time_ns", lambda: nanoseconds() + int(dials.clock_s * 1e9))


def _follow_disk(dials: Dials) -> None:
    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*arguments: Any) -> Any:
            if number := dials.disk_errno:
                raise OSError(number, os.strerror(number))
            return call(*arguments)

        return checked

    for name in ("preadv", "pwritev", "fdatasync"):
        _replace(os, name, failing(getattr(os, name)))


def _take_time(token_s: float) -> None:
    from mooncake_zmq.engine import weights
    from mooncake_zmq.engine.toy import ToyEngine

    _replace(weights, "ToyEngine", functools.partial(ToyEngine, delay_s_per_token=token_s))


def _take_time_a_step(step_s: float) -> None:
    """Make a step take as long for many rows as for one, as on a GPU with room in its batch."""
    from mooncake_zmq.engine import weights
    from mooncake_zmq.engine.toy import ToyEngine

    class Batching(ToyEngine):
        def decode(self, sequences: Any, tokens: Any) -> Any:
            time.sleep(step_s)
            return super().decode(sequences, tokens)

    _replace(weights, "ToyEngine", Batching)


def _trust_all_bytes() -> None:
    """Plant a bug: checksums are made and never compared."""
    from mooncake_zmq.kv import reading

    _replace(reading, "part_stands", lambda _found, _checksum: True)
    _replace(reading, "payload_stands", lambda _parts, _checksum: True)


def _admit_strangers() -> None:
    """Plant a bug: any client with a key is admitted, as a node that does not exist."""
    from mooncake_zmq.core.keys import KeyBook

    admitted = KeyBook.admitted
    _replace(KeyBook, "admitted", lambda book, plane, key: admitted(book, plane, key) or "stranger")


PLANTED = {"trust_all_bytes": _trust_all_bytes, "admit_strangers": _admit_strangers}


def _replace(module: Any, name: str, value: Any) -> None:
    setattr(module, name, value)


def main() -> None:
    """Run the node."""
    from mooncake_zmq.engine.cpu import limit_blas

    limit_blas()  # before anything below loads NumPy
    dials = Dials(Path(os.environ[DIALS_VARIABLE]))
    _follow_clock(dials)
    _follow_disk(dials)
    if sys.argv[1] == "decode":
        if step_s := float(os.environ.get(STEP_VARIABLE, "0")):
            _take_time_a_step(step_s)
        else:
            _take_time(float(os.environ.get(TOKEN_VARIABLE, "0")))
    if planted := os.environ.get(PLANTED_VARIABLE):
        PLANTED[planted]()
    from mooncake_zmq.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
