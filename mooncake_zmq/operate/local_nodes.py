"""Asks nodes on this machine for their state, and sends an operator's requests to a conductor."""

import json
import os
import secrets
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.core.commands import Answer, Ask, encode
from mooncake_zmq.transfer.own_files import read_own, replace_own
from mooncake_zmq.transfer.process_lock import holder

DUMP_TIMEOUT_S, DUMP_AGAIN_S = 5.0, 0.5
ASK_TIMEOUT_S = 5.0
POLL_S = 0.01
STOPPED = ("T", "t")
"""Letters of /proc/PID/stat for a process that a signal or a debugger has stopped."""


def collect_dumps(runtime_dir: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return the state of running nodes; those that do not run or do not answer are left out.

    A node renames a new file over its last one. No other process removes it: several may be collecting at the same time.
    """
    dumps: dict[str, Any] = {}
    waiting = {name: runtime_dir / f"{name}.dump.json" for name in names}
    before = {name: _identity(path) for name, path in waiting.items()}
    deadline = time.monotonic() + DUMP_TIMEOUT_S
    while waiting and time.monotonic() < deadline:
        # Asked repeatedly: a process that is just starting does not handle the signal yet.
        waiting = {name: path for name, path in waiting.items() if _ask_for_dump(runtime_dir, name)}
        again_at = time.monotonic() + DUMP_AGAIN_S
        while waiting and time.monotonic() < again_at:
            for name, path in list(waiting.items()):
                if _identity(path) not in (None, before[name]):
                    with suppress(OSError):  # an `up` that ends removes it
                        dumps[name] = json.loads(read_own(path))
                        del waiting[name]
            time.sleep(POLL_S)
    return dumps


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        state = path.lstat()
    except OSError:  # there is none, or the directory belongs to another user
        return None
    return state.st_ino, state.st_mtime_ns


def _ask_for_dump(runtime_dir: Path, name: str) -> bool:
    """Signal a node to write its state; return False if it does not run, or is stopped and thus cannot answer."""
    pid = holder(runtime_dir, name)
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    return pid is not None and not _is_stopped(pid)


def _is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in STOPPED


def ask(runtime_dir: Path, name: str, request: Ask) -> Answer:
    """Send a request to a node on this machine, and return its answer. Raises ConfigError if it does not run or answer."""
    pid = holder(runtime_dir, name)
    if not pid:
        raise ConfigError(f"{name} does not run on this machine: ask where it does")
    ask_id = secrets.token_hex(8)
    question, answer = (runtime_dir / f"{name}.{what}.{ask_id}.json" for what in ("ask", "answer"))
    try:
        replace_own(question, encode(request))
    except OSError as error:
        raise ConfigError(f"cannot ask in {runtime_dir}: {error.strerror}") from error
    deadline = time.monotonic() + ASK_TIMEOUT_S
    try:
        while time.monotonic() < deadline:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
            again_at = time.monotonic() + DUMP_AGAIN_S
            while time.monotonic() < again_at:
                with suppress(FileNotFoundError):
                    found: Answer = json.loads(read_own(answer))
                    return found
                time.sleep(POLL_S)
    finally:
        question.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
    raise ConfigError(f"{name} did not answer within {ASK_TIMEOUT_S:g} s")
