"""What the kernel shows of a silent process, and how often the log speaks of lateness."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from waiting import eventually

from mooncake_zmq.runtime.starvation import LOG_EVERY_S, LatenessLog, waits_for_cpu
from mooncake_zmq.transfer.process_lock import ProcessLock

NODE = "node-0"
HOLDER = """
import sys
from mooncake_zmq.transfer.process_lock import ProcessLock
print(ProcessLock.acquire(sys.argv[1], "node-0").incarnation, flush=True)
sys.stdin.readline()
while True:
    pass
"""


@contextmanager
def life(directory: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds the lock and waits for input; after a line of it, it computes for ever."""
    command = [sys.executable, "-c", HOLDER, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def until(directory: Path, incarnation: int, expected: bool) -> None:
    eventually(lambda: waits_for_cpu(directory, NODE, incarnation) is expected)


def test_only_who_is_ready_to_run_waits_for_a_cpu(tmp_path: Path) -> None:
    with life(tmp_path) as (process, incarnation):
        until(tmp_path, incarnation, False)  # it waits for input
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        until(tmp_path, incarnation, True)
        assert not waits_for_cpu(tmp_path, NODE, incarnation - 1), "a former life does not"
        os.kill(process.pid, signal.SIGSTOP)
        until(tmp_path, incarnation, False)
        os.kill(process.pid, signal.SIGCONT)
        until(tmp_path, incarnation, True)
        process.kill()
        process.wait()
        assert not waits_for_cpu(tmp_path, NODE, incarnation)


@pytest.mark.parametrize("node", ["nobody", "../etc", ""])
def test_of_whom_nothing_is_known_here_nothing_is_said(tmp_path: Path, node: str) -> None:
    assert not waits_for_cpu(tmp_path, node, 1)


def test_a_lock_that_names_no_process_spares_nobody(tmp_path: Path) -> None:
    lock = ProcessLock.acquire(tmp_path, NODE)
    try:
        (tmp_path / f"{NODE}.lock").write_text(f"{1 << 30} {lock.incarnation}\n")
        assert not waits_for_cpu(tmp_path, NODE, lock.incarnation)
    finally:
        lock.release()


def test_lateness_that_explains_what_is_logged_next_does_not_wait_for_its_minute() -> None:
    lateness = LatenessLog()
    with capture_logs() as logs:
        lateness.note(0.0, 1, 0.7)
        lateness.note(1.0, 2, 0.7)
        lateness.note(2.0, 3, 0.9, at_once=True)
        lateness.note(3.0, 3, 0.9, at_once=True)
    assert [(line["times"], line["late_s"]) for line in logs] == [(1, 0.7), (2, 0.9)]


def test_lateness_is_logged_once_in_a_while_with_what_to_do() -> None:
    lateness = LatenessLog()
    with capture_logs() as logs:
        lateness.note(0.0, 0, 0.0)
        lateness.note(1.0, 2, 0.7)
        for second in range(2, 60):
            lateness.note(float(second), 2 + second, 0.8)
        lateness.note(1.0 + LOG_EVERY_S, 100, 0.9)
        lateness.note(500.0, 100, 0.0)
    assert [(line["event"], line["times"], line["late_s"]) for line in logs] == [
        ("loop_was_late", 2, 0.7),
        ("loop_was_late", 98, 0.9),
    ]
    assert "more cores" in logs[0]["do"]
