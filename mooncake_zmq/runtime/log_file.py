"""A process's own log file, turned over by itself when it is large: who writes it knows between which lines."""

import os
import sys
from pathlib import Path
from typing import TextIO, cast

from mooncake_zmq.transfer.own_files import open_own

VARIABLE = "MOONCAKE_ZMQ_LOG_FILE"
"""Where standard error goes, told by whoever made that so."""
MAX_BYTES = 4 << 20
"""A log has this much twice, current and older: the runtime directory may well be RAM."""
_STANDARD = (1, 2)


def older(log: Path) -> Path:
    """Where the older part of a log is."""
    return log.with_name(log.name + ".1")


def stderr() -> TextIO:
    """Standard error; where it is the file that `VARIABLE` names, one that is turned over."""
    path = Path(os.environ.get(VARIABLE, ""))
    try:
        is_file = path.name and os.path.samestat(path.stat(), os.fstat(sys.stderr.fileno()))
    except OSError:
        is_file = False
    return cast(TextIO, LogFile(path, MAX_BYTES)) if is_file else sys.stderr


class LogFile:
    """As much of a text file as structlog needs. Standard output and error go along when it is turned over, so that what the
    interpreter and libraries say is never in another file. Not for several threads: a logger of structlog locks."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._bytes = path.stat().st_size

    def write(self, text: str) -> int:
        """Whole lines."""
        if self._bytes + len(text) > self._max_bytes:
            self._turn_over()
        self._bytes += len(text)
        return sys.stderr.write(text)

    def flush(self) -> None:
        """See io.TextIOBase."""
        sys.stderr.flush()

    def _turn_over(self) -> None:
        """If that fails, on a full disk say, the file grows by as much before it is tried again."""
        self._bytes = 0
        sys.stderr.flush()
        sys.stdout.flush()
        try:
            fd = open_own(next_one := self._path.with_name(self._path.name + ".0"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.replace(self._path, older(self._path))
            os.replace(next_one, self._path)
        except OSError:
            return
        for standard in _STANDARD:
            os.dup2(fd, standard)
        os.close(fd)
