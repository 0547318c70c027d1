"""A process from its lock to its end: signals, the drain, and the crash of a worker thread."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import structlog

from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.config.records import ClusterSettings
from mooncake_zmq.runtime.zmq_runtime import ZmqRuntime
from mooncake_zmq.transfer.own_files import make_own_directory
from mooncake_zmq.transfer.process_lock import ProcessLock, is_alive
from mooncake_zmq.transfer.segment_file import sweep

log = structlog.get_logger()

PARENT_VARIABLE = "MOONCAKE_ZMQ_PARENT"
"""The pid of the `up` that started this process; when that ends, this process drains."""
PR_SET_PDEATHSIG = 1
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
PRIVATE_UMASK = 0o077
"""ZeroMQ creates sockets, and SQLite and others create files, with the permissions that this leaves: none for other users."""


class Lifecycle:
    """Hold the node's lock, and record which signals and which crash the process had."""

    def __init__(self, cluster: ClusterSettings, name: str, stack: ExitStack) -> None:
        """Raise ConfigError or ProcessLockError. `stack` releases the lock."""
        self.drain_timeout_s = cluster.drain_timeout_s
        self.signals_seen = 0
        self.drain_until = 0.0
        """Monotonic time by which everything before the end must be done; 0: no time is left for anything."""
        self.crash: BaseException | None = None
        self._runtime: ZmqRuntime | None = None
        runtime_dir = Path(cluster.runtime_dir)
        _handle_early_signals()
        _drain_with_parent()
        os.umask(PRIVATE_UMASK)
        make_private(runtime_dir)
        lock = ProcessLock.acquire(runtime_dir, name)
        stack.callback(lock.release)
        self.incarnation = lock.incarnation
        for swept in sweep(cluster.shm_dir, cluster.name, lambda node, incarnation: is_alive(runtime_dir, node, incarnation)):
            log.warning("stale_segment_removed", path=str(swept))

    def attend(self, runtime: ZmqRuntime, begin_drain: Callable[[], None]) -> None:
        """Let a signal drain the runtime from here on: `begin_drain` is called in its thread. A second signal stops it."""
        self._runtime = runtime

        def on_signal(_number: int, _frame: object) -> None:
            self.signals_seen += 1
            if self.signals_seen > 1:
                runtime.call(runtime.stop)
                return
            self.drain_until = time.monotonic() + self.drain_timeout_s
            runtime.call(begin_drain)
            runtime.call(lambda: runtime.every(self.drain_timeout_s, give_up))

        def give_up() -> None:
            log.warning("drain_timed_out")
            runtime.hand_over()

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)
        if self.crash is not None:
            runtime.stop()

    def on_crash(self, error: BaseException) -> None:
        """Stop the process for a worker thread's bug; from any thread and at any time.

        A data server runs before there is a loop: `attend` then stops that.
        """
        self.crash = error
        if self._runtime is not None:
            self._runtime.call(self._runtime.stop)

    def is_urgent(self) -> bool:
        """Whether a second signal arrived: all waiting ends."""
        return self.signals_seen > 1


def make_private(runtime_dir: Path) -> None:
    """Create the directory of sockets and locks, for this user only; raises ConfigError where another user has access."""
    try:
        make_own_directory(runtime_dir)
    except OSError as error:
        raise ConfigError(f"cluster.runtime_dir {runtime_dir}: {error.strerror}") from error


def hold_signals() -> None:
    """Block signals between two incarnations in one process: the next one's handlers take them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)


def follow_parent() -> None:
    """Have the kernel end this process, and what it becomes by exec, when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _handle_early_signals() -> None:
    """Handle signals until the loop runs: a request for a dump does not kill, and a request to stop still releases
    everything."""

    def leave(_number: int, _frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)  # see `hold_signals`


def _drain_with_parent() -> None:
    """Drain when the `up` that started this process ends for any reason."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    follow_parent()
    if os.getppid() != int(parent):  # it ended before the kernel was asked
        raise ConfigError("the process that started this one is gone")
