"""Compiles the nodes' modules beside a cluster that runs, so that the next start has machine code."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mooncake_zmq.native.mypyc_build import hindrance, is_being_compiled
from mooncake_zmq.native.mypyc_code import NODES, SWITCH, Code, code
from mooncake_zmq.runtime.lifecycle import follow_parent

COMMAND = (sys.executable, "-P", "-m", "mooncake_zmq", "compile")
NICENESS = 19
STOP_TIMEOUT_S = 5.0
STALE = "the sources have changed since they were compiled"
MISSING = "not compiled yet"
OFF = f"{SWITCH}=0"
RUNS_AS_PYTHON: dict[Code, str] = {"off": OFF, "stale": STALE, "none": MISSING}
"""Why modules run as Python."""


def shown(found: Code, lacking: str) -> str:
    """Return what the nodes run, in words. `lacking`: what this machine lacks to compile them."""
    if found == "machine":
        return "nodes run machine code"
    reason = RUNS_AS_PYTHON[found]
    return f"nodes run as Python: {reason}" + (f"; {lacking}" if lacking and found != "off" else "")


def plan(found: Code, lacking: str, *, is_busy: bool) -> tuple[bool, str]:
    """Return whether to compile now, and the line that says so; empty if there is nothing to say."""
    if found in ("machine", "off"):
        return False, ""
    if lacking:
        return False, f"{shown(found, lacking)} (slower, and otherwise the same)"
    if is_busy:
        return False, f"{shown(found, '')}; another process compiles them"
    return True, f"{shown(found, '')}; compiling in the background, for the next start (some minutes; {OFF} turns it off)"


class Compilation:
    """One process that compiles at the lowest priority, and never for longer than the cluster runs."""

    def __init__(self, log: Path, say: Callable[[str], None], command: Sequence[str] = COMMAND) -> None:
        """Create it; `log` gets the command's output, and `say` one line for each thing that a user should know."""
        self._log = log
        self._say = say
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Begin to compile, if that is wanted and possible; return at once."""
        begins, line = plan(code(NODES), hindrance(), is_busy=is_being_compiled())
        if line:
            self._say(line)
        if begins:
            with self._log.open("wb") as output:
                # A session of its own, so that Ctrl-C does not reach it, and all that it starts is stopped with it.
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=_be_last,
                )

    def look(self) -> None:
        """Say how it ended, once it has."""
        if self._process is None or (status := self._process.poll()) is None:
            return
        self._process = None
        if status == 0:
            self._say("compiled: nodes that start from now on run machine code")
        else:
            self._say(f"not compiled, see {self._log}; nodes run as Python, which is slower and otherwise the same")

    def stop(self) -> None:
        """End it and all that it has started; what it has written so far is removed."""
        process, self._process = self._process, None
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)


def _be_last() -> None:
    follow_parent()
    os.nice(NICENESS)
