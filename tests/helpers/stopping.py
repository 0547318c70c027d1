"""Stops another process as a debugger would, for tests of peers that hang."""

import os
import signal
import time
from pathlib import Path

PATIENCE_S = 60.0


def stop(pid: int) -> None:
    """Stop a process, and return once all of its threads stand still: until one of them has taken the signal, the others go on,
    which on a loaded machine is long enough to answer."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE_S
    while any(_state(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"{pid} does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    return task.joinpath("stat").read_text().rpartition(")")[2].split()[0]
