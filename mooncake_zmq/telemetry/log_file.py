"""Where a process's log goes: standard error, and never an error of whoever logs. A file of its own is turned over when it is
large: who writes it knows between which lines."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from mooncake_zmq.transfer.own_files import open_own

VARIABLE = "MOONCAKE_ZMQ_LOG_FILE"
"""Names the file that standard error goes to; the process that redirected it sets it."""
MAX_BYTES = 4 << 20
"""A log has this much twice, current and older: the runtime directory may well be RAM."""
_ERROR = 2
_STANDARD = (1, _ERROR)


def older(log: Path) -> Path:
    """Where the older part of a log is."""
    return log.with_name(log.name + ".1")


def stderr() -> "Lines":
    """Standard error; where it is the file that `VARIABLE` names, one that is turned over. A process that was started without
    any gets one that goes nowhere, before whatever is opened next takes its number."""
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
    """As much of a text file as structlog needs. A line that cannot be written, on a full disk say, is lost. Standard output
    and error go along when a file is turned over, so that what the interpreter and libraries say is never in another one. Not
    for several threads: a logger of structlog locks."""

    def __init__(self, path: Path | None, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._bytes = path.stat().st_size if path else 0
        self.lost = 0
        """Lines since the last one that was written."""
        self._torn = False
        """The last one was written in part."""

    def write(self, text: str) -> int:
        """Whole lines. Past the interpreter's buffers: what these cannot write they keep, and fail over at the exit."""
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
        """See io.TextIOBase: nothing is kept here."""

    def _turn_over(self, path: Path) -> None:
        """If that fails, on a full disk say, the file grows by as much before it is tried again."""
        self._bytes = 0
        for stream in (sys.stderr, sys.stdout):
            with suppress(OSError):
                stream.flush()
        try:
            fd = open_own(next_one := path.with_name(path.name + ".0"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.replace(path, older(path))
            os.replace(next_one, path)
        except OSError:
            return
        for standard in _STANDARD:
            os.dup2(fd, standard)
        os.close(fd)
