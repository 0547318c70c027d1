"""The use of each API key by day, for bills: it is counted in memory and appended to files of JSON lines.

A line holds what was used since the line before it, so that files are only appended to, and sums over lines are right after a
crash too. `operate/usage.py` reads them.
"""

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from mooncake_zmq.transfer.own_files import DIRECTORY_MODE, open_own

PREFIX, SUFFIX = "usage-", ".jsonl"
NOT_WRITTEN = "not_written"
MOST_LINE_BYTES = 4096
"""No record is longer."""
WRITE_S = 1.0
"""The time between two appends: what a killed gateway had not appended is lost."""


class Used(msgspec.Struct, omit_defaults=False, kw_only=True):
    """The use of one key on one day. Tokens of prompts are counted once a call, however many choices it has."""

    day: str
    """The day in UTC on which the answers ended, as YYYY-MM-DD."""
    key: str
    """The name of the API key; empty for calls without one."""
    calls: int = 0
    prompt_tokens: int = 0
    cached_own: int = 0
    """Prompt tokens whose KV was loaded from the prefill's own memory, then from its host's pool, and from other hosts."""
    cached_local: int = 0
    cached_remote: int = 0
    completion_tokens: int = 0

    def add(self, other: "Used") -> None:
        """Add another's numbers to these."""
        self.calls += other.calls
        self.prompt_tokens += other.prompt_tokens
        self.cached_own += other.cached_own
        self.cached_local += other.cached_local
        self.cached_remote += other.cached_remote
        self.completion_tokens += other.completion_tokens


class Meter:
    """Counts what calls use, and appends it to one file a day of a directory. What could not be appended, to a full disk say,
    stays in memory, one record for each key and day, and is appended later; `counts` shows how often that happened."""

    def __init__(self, directory: Path, name: str, *, now: Callable[[], float] = time.time) -> None:
        """`name`: the gateway's, part of the files' names. `now` returns the wall clock's time, in seconds. Raises OSError
        where the directory cannot be written."""
        directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        self._directory, self._name = directory, name
        self._now = now
        self.counts: dict[str, float] = {NOT_WRITTEN: 0}
        self._unwritten: dict[tuple[str, str], Used] = {}
        os.close(self._open(self._today()))

    def note(self, key: str, *, prompt: int, cached: tuple[int, int, int], completion: int) -> None:
        """Count a call that ended. `cached`: the prompt's tokens that were loaded from each tier, as in `Used`."""
        own, local, remote = cached
        used = Used(day=self._today(), key=key, calls=1, prompt_tokens=prompt, completion_tokens=completion)
        used.cached_own, used.cached_local, used.cached_remote = own, local, remote
        if (known := self._unwritten.get((used.day, key))) is None:
            self._unwritten[used.day, key] = used
        else:
            known.add(used)

    def write(self) -> None:
        """Append what was counted since the last call; to be called regularly, and at the end."""
        for day in sorted({day for day, _ in self._unwritten}):
            lines = {place: used for place, used in self._unwritten.items() if place[0] == day}
            try:
                self._append(day, b"".join(msgspec.json.encode(used) + b"\n" for used in lines.values()))
            except OSError:
                self.counts[NOT_WRITTEN] += 1
                continue  # another day's file may take its lines
            for place in lines:
                del self._unwritten[place]

    def _today(self) -> str:
        return datetime.fromtimestamp(self._now(), UTC).date().isoformat()

    def _open(self, day: str) -> int:
        path = self._directory / f"{PREFIX}{day}-{self._name}{SUFFIX}"
        return open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def _append(self, day: str, lines: bytes) -> None:
        """Append lines whole or not at all. Raises OSError."""
        fd = self._open(day)
        try:
            length = _cut_torn_line(fd)
            if os.write(fd, lines) < len(lines):
                os.ftruncate(fd, length)
                raise OSError("the disk is full")
        finally:
            os.close(fd)


def _cut_torn_line(fd: int) -> int:
    """Remove a last line without an end, which a crash left, so that the next one does not join it; return the length."""
    length = os.fstat(fd).st_size
    if length and os.pread(fd, 1, length - 1) != b"\n":
        torn = os.pread(fd, MOST_LINE_BYTES, max(0, length - MOST_LINE_BYTES))
        length -= len(torn) - (torn.rfind(b"\n") + 1)
        os.ftruncate(fd, length)
    return length
