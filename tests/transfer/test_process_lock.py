"""A life is over when the kernel says so, and no two lives share an incarnation."""

import os
import subprocess
import sys
import time

import pytest

from mooncake_zmq.transfer.process_lock import ProcessLock, ProcessLockError, is_alive
from mooncake_zmq.transfer.process_lock import holder as holder_of

HOLDER = """
import sys
from mooncake_zmq.transfer.process_lock import ProcessLock
lock = ProcessLock.acquire(sys.argv[1], "node")
print(lock.incarnation, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def test_a_held_lock_means_alive_and_refuses_a_second_start(holder, tmp_path):
    incarnation = int(holder.stdout.readline())
    assert is_alive(tmp_path, "node", incarnation)
    assert not is_alive(tmp_path, "node", incarnation - 1)
    assert not is_alive(tmp_path, "stranger", incarnation)
    assert holder_of(tmp_path, "node") == holder.pid
    assert holder_of(tmp_path, "stranger") is None
    with pytest.raises(ProcessLockError, match=f"node is already running as pid {holder.pid}"):
        ProcessLock.acquire(tmp_path, "node")


def test_a_killed_holder_is_dead_and_the_next_life_is_greater(holder, tmp_path):
    incarnation = int(holder.stdout.readline())
    holder.kill()
    holder.wait()
    assert not is_alive(tmp_path, "node", incarnation)
    lock = ProcessLock.acquire(tmp_path, "node")
    assert lock.incarnation > incarnation
    assert is_alive(tmp_path, "node", lock.incarnation)
    assert not is_alive(tmp_path, "node", incarnation)
    lock.release()
    lock.release()


def test_incarnations_rise_even_when_the_clock_goes_back(tmp_path, monkeypatch):
    first = ProcessLock.acquire(tmp_path, "node")
    first.release()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    second = ProcessLock.acquire(tmp_path, "node")
    second.release()
    assert second.incarnation == first.incarnation + 1
    assert second.incarnation < 1 << 48


def test_a_damaged_file_does_not_prevent_a_start(tmp_path):
    (tmp_path / "node.lock").write_bytes(b"\xff garbage " * 9)
    lock = ProcessLock.acquire(tmp_path, "node")
    assert (tmp_path / "node.lock").read_text() == f"{os.getpid()} {lock.incarnation}\n"
    lock.release()


def test_child_programs_do_not_inherit_the_lock(tmp_path):
    lock = ProcessLock.acquire(tmp_path, "node")
    started_at = time.monotonic()
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        lock.release()
        # A spawned child may get to closing its copies a moment after `Popen` returns.
        while is_alive(tmp_path, "node", lock.incarnation):
            assert time.monotonic() < started_at + 20, "the child holds the lock"
        assert child.poll() is None
    finally:
        child.communicate()


def test_names_that_would_leave_the_directory_are_refused(tmp_path):
    for name in ("", "../x", ".hidden", "a/b"):
        with pytest.raises(ProcessLockError):
            ProcessLock.acquire(tmp_path, name)


def test_a_lock_file_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "node.lock").mkdir()
    with pytest.raises(ProcessLockError, match="cannot use .*node.lock: Is a directory; remove it, or name another"):
        ProcessLock.acquire(tmp_path, "node")
