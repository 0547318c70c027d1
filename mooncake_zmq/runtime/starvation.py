"""Lack of CPU: detected at a silent peer from what the kernel shows, and logged for this process's own lateness."""

import os
from pathlib import Path

import structlog

from mooncake_zmq.transfer.process_lock import ProcessLockError, holder, is_alive

log = structlog.get_logger()

LOG_EVERY_S = 60.0
"""Least interval between log lines about a loop that is late."""


def waits_for_cpu(runtime_dir: str | Path, node: str, incarnation: int) -> bool:
    """Return whether this incarnation of `node` runs on this machine and one of its threads is ready to run. A process that
    is stopped, blocked or dead has no such thread, and nothing is known about one on another machine."""
    try:
        pid = holder(runtime_dir, node) if is_alive(runtime_dir, node, incarnation) else None
    except ProcessLockError:
        return False
    return bool(pid) and any(_state(task) == "R" for task in _tasks(Path(f"/proc/{pid}/task")))


def _tasks(directory: Path) -> list[Path]:
    try:
        return [directory / name for name in os.listdir(directory)]
    except OSError:  # it has just ended
        return []


def _state(task: Path) -> str:
    """Return the letter of a task's state, which follows the program's name; that may hold any character."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


class LatenessLog:
    """Log at most one line a minute on what an operator should do about a loop that gets no CPU."""

    def __init__(self) -> None:
        self._logged_at = float("-inf")
        self._logged = 0

    def note(self, now: float, late_loops: int, late_s: float, *, at_once: bool = False) -> None:
        """Log if the loop was late. `late_loops`: the count so far; `late_s`: how late the loop was recently; `at_once`:
        whether the line explains what is about to be logged, and does not wait for the minute to end."""
        if late_loops == self._logged or (not at_once and now - self._logged_at < LOG_EVERY_S):
            return
        log.warning(
            "loop_was_late",
            late_s=round(late_s, 3),
            times=late_loops - self._logged,
            do="this process gets too little CPU or memory: give the machine more cores, or run fewer processes on it",
        )
        self._logged_at, self._logged = now, late_loops
