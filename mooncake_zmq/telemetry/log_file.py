"""Writes a process's log to standard error, without ever raising an error in the code that logs. A log file of its own is
rotated when it is large, by its writer, which knows where lines end."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from mooncake_zmq.transfer.own_files import open_own

VARIABLE = "MOONCAKE_ZMQ_LOG_FILE"
"""The environment variable with the file that standard error goes to; the process that redirected it sets it."""
MAX_BYTES = 4 << 20
"""The size at which a log is rotated; there are two files, current and older, and the runtime directory may be in RAM."""
_ERROR = 2
_STANDARD = (1, _ERROR)


def older(log: Path) -> Path:
    """Return the path of a log's older file."""
    return log.with_name(log.name + ".1")


def stderr() -> "Lines":
    """Return standard error; if it is the file that `VARIABLE` names, a file that is rotated. A process that was started
    without standard error gets one that discards its output, before another file takes its descriptor."""
    try:
        os.fstat(_ERROR)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _ERROR)
        if nowhere != _ERROR:
            os.close(nowhere)
    path = Path(os.environ.get(VARIABLE, ""))
    try:
        is_file = path.name and os.path.samestat(path.stat(), os.fstat(_ERROR))
    except OSError:
        is_file = False
    return Lines(path if is_file else None, MAX_BYTES)


class Lines:
    """The part of a text file's interface that structlog needs. A line that cannot be written, on a full disk say, is lost.
    Standard output and error move along when a file is rotated, so that the output of the interpreter and libraries goes to
    the same file. It is not thread-safe: a logger of structlog locks."""

    def __init__(self, path: Path | None, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._bytes = path.stat().st_size if path else 0
        self.lost = 0
        """The number of lines lost since the last one that was written."""
        self._torn = False
        """Whether the last line was written in part."""

    def write(self, text: str) -> int:
        """Write whole lines, without the interpreter's buffers: these keep what they cannot write, and fail again at exit."""
        if self._path and self._bytes + len(text) > self._max_bytes:
            self._turn_over(self._path)
        rest = memoryview(("\n" * self._torn + text).encode(errors="backslashreplace"))
        try:
            while rest:
                written = os.write(_ERROR, rest)
                self._bytes += written
                self._torn = written < len(rest)
                rest = rest[written:]
            self.lost = 0
        except OSError:
            self.lost += 1
        return len(text)

    def flush(self) -> None:
        """Do nothing, as nothing is buffered here; see io.TextIOBase."""

    def _turn_over(self, path: Path) -> None:
        """Rotate the file, or begin one where an operator removed it. If that fails, on a full disk for example, the file grows
        by the same size before the next attempt."""
        self._bytes = 0
        for stream in (sys.stderr, sys.stdout):
            with suppress(OSError):
                stream.flush()
        next_one = path.with_name(path.name + ".0")
        with suppress(OSError), open(open_own(next_one, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "wb") as file:
            with suppress(FileNotFoundError):
                os.replace(path, older(path))
            os.replace(next_one, path)
            for standard in _STANDARD:
                os.dup2(file.fileno(), standard)
