"""Starts all nodes of a cluster on one machine from a single process, which imports once what every node runs.

Importing takes a node half a second of CPU, which all nodes of a machine would spend at the same time. Instead, a short-lived
process imports, forks into one process for each node, and ends. Its children, the nodes, then belong to the caller, which has
asked the kernel for orphans of its own (`PR_SET_CHILD_SUBREAPER`). Only Linux can do this. Nodes that start again later are
processes of their own, so that they run the sources as they are by then.
"""

import ctypes
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mooncake_zmq.core.roles import Role
from mooncake_zmq.engine.cpu import limit_blas
from mooncake_zmq.native import mypyc_code
from mooncake_zmq.telemetry import log_file
from mooncake_zmq.transfer.own_files import open_own

PR_SET_CHILD_SUBREAPER = 36
FORKS_IN_S = 60.0
"""The longest time to import and fork; beyond it the caller starts each node by itself."""
ORPHAN_POLL_S = 0.001
_BY_ALL = ("runtime.actor_process", "runtime.executor.executor", "runtime.generation", "telemetry.metrics")
_BY_ROLE: dict[Role, tuple[str, ...]] = {
    "gateway": ("runtime.gateway_process", "gateway.http.acceptor", "gateway.http.app", "engine.tokenizer"),
    "cache-node": ("pool.server.server",),
}
"""Modules that nodes import when they run, beside that of their actor."""


@dataclass(frozen=True, slots=True)
class NodeStart:
    """A node to start: its role, the arguments after `python -m mooncake_zmq` and the file that its output is appended to."""

    role: Role
    arguments: tuple[str, ...]
    log: Path


class Process(Protocol):
    """The part of `subprocess.Popen` that this machine's nodes are watched by."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


class ForkedNode:
    """A child that another process forked, behind the interface of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, negative for the number of a signal, or None while the process runs; 0 where the kernel has
        dropped it, as it does if SIGCHLD is ignored."""
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    self.returncode = os.waitstatus_to_exitcode(status) if pid else None
                except ChildProcessError:
                    self.returncode = 0
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code. Raises subprocess.TimeoutExpired."""
        ends_at = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and ends_at is not None and time.monotonic() > ends_at:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(ORPHAN_POLL_S)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, if the process still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send SIGKILL, if the process still runs."""
        self.send_signal(signal.SIGKILL)


def start_together(nodes: Sequence[NodeStart], environment: dict[str, str]) -> list[ForkedNode] | None:
    """Start these nodes as children of this process, in this order; None if that is not possible here, and none runs then."""
    if not sys.platform.startswith("linux") or not nodes:
        return None
    request = json.dumps([[node.role, node.arguments, str(node.log)] for node in nodes])
    room = "-" * max(len(_command_line(node.arguments)) for node in nodes)
    _take_orphans(True)
    try:
        command = [sys.executable, "-m", __name__, room]
        forked = subprocess.run(
            command, input=request, capture_output=True, text=True, env=environment, timeout=FORKS_IN_S, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        return None
    finally:
        _take_orphans(False)
    lines = forked.stdout.splitlines()[-1:]
    pids = [int(pid) for line in lines for pid in line.split() if pid.isdigit()]
    if forked.returncode or len(pids) != len(nodes):
        for pid in pids:
            ForkedNode(pid).kill()
        return None
    return [ForkedNode(pid) for pid in pids]


def _take_orphans(wanted: bool) -> None:
    """Have the kernel give this process the orphans among its descendants, or no more of them."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def _command_line(arguments: Sequence[str]) -> bytes:
    """Return the command line of a node as the kernel shows it."""
    return b"".join(os.fsencode(part) + b"\0" for part in (sys.executable, "-m", "mooncake_zmq", *arguments))


def main() -> None:
    """Import what the nodes run, become one process for each node, and write their pids to standard output.

    Standard input has the nodes as JSON. The only argument has no meaning: its bytes are room for the nodes' command lines.
    """
    nodes = [NodeStart(role, tuple(arguments), Path(log)) for role, arguments, log in json.load(sys.stdin)]
    limit_blas()
    mypyc_code.use(mypyc_code.NODES)
    _import_for({node.role for node in nodes})
    pids, this, (waits, goes) = [], os.getpid(), os.pipe()
    for node in nodes:
        if not (pid := os.fork()):
            os.close(goes)
            _become(node, this, waits)
            runpy.run_module("mooncake_zmq", run_name="__main__", alter_sys=True)
        pids.append(pid)
    sys.stdout.write("\n" + " ".join(map(str, pids)))
    sys.stdout.flush()
    os.write(goes, b"." * len(pids))
    os._exit(0)  # not Python's own end, which would take the time of several forks


def _import_for(roles: set[Role]) -> None:
    from mooncake_zmq.roles import PARTS

    names = {*_BY_ALL, *(PARTS[role].module for role in roles)}.union(*(_BY_ROLE.get(role, ()) for role in roles))
    for name in sorted(names):
        importlib.import_module(f"mooncake_zmq.{name}")


def _become(node: NodeStart, parent: int, waits: int) -> None:
    """Make this fork the process of a node: with a session, a log and a command line of its own, and the caller as parent. If
    `parent` ends before it has forked all, it does not write to the pipe `waits`, and no node runs."""
    os.setsid()
    os.environ[log_file.VARIABLE] = str(node.log)
    output = open_own(node.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(fd, standard)
    os.close(nothing)
    os.close(output)
    sys.argv = ["mooncake-zmq", *node.arguments]
    _show_command_line(_command_line(node.arguments))
    if not os.read(waits, 1):
        os._exit(1)
    os.close(waits)
    while os.getppid() == parent:
        time.sleep(ORPHAN_POLL_S)


def _show_command_line(line: bytes) -> None:
    """Write this over the command line that `ps` shows of this process; it is cut to the room there is."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, the 48th and 49th of all fields
    if 0 < begin < end:
        ctypes.memmove(begin, line[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()
