"""Beside other users of the machine: only regular files of ours are opened, and nothing that waits for us is waited for."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from mooncake_zmq.pool.ssd.disk_directory import DiskError, take
from mooncake_zmq.store.segment import ClientLock, ObjectSegment, client_runs, lock_path, remove_lock
from mooncake_zmq.transfer.own_files import NotOurs, make_own_directory, open_own, own_files, read_own, replace_own
from mooncake_zmq.transfer.process_lock import ProcessLock, ProcessLockError, holder, is_alive
from mooncake_zmq.transfer.segment_file import SharedMemoryError, sweep
from mooncake_zmq.transfer.shared_memory import Segment


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_directory(path: Path) -> None:
    path.mkdir()


def a_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    target.write_bytes(b"precious")
    path.symlink_to(target)


def a_loose_link(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def become_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made so far is another user's from here on."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 4242)


TRAPS = pytest.mark.parametrize("trap", [a_fifo, a_directory, a_link, a_loose_link, a_socket])
FLAGS = pytest.mark.parametrize(
    "flags", [os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT], ids=["read", "both", "make", "write"]
)


@TRAPS
@FLAGS
def test_only_a_regular_file_is_opened_and_at_once(tmp_path: Path, trap: Callable[[Path], None], flags: int) -> None:
    trap(tmp_path / "x")
    with pytest.raises(OSError):
        open_own(tmp_path / "x", flags)
    assert not (tmp_path / "nowhere").exists()


@FLAGS
def test_another_users_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int) -> None:
    (tmp_path / "x").touch()
    become_another_user(monkeypatch)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotOurs, match="another user"):
        open_own(tmp_path / "x", flags)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_path_with_a_nul_is_an_error_like_others() -> None:
    with pytest.raises(NotOurs, match="null"):
        open_own("/dev/shm/a\0b", os.O_RDONLY)


def test_what_is_made_is_for_us_alone_whatever_the_umask(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        os.close(open_own(tmp_path / "x", os.O_RDWR | os.O_CREAT))
        replace_own(tmp_path / "y.json", b"{}")
        make_own_directory(tmp_path / "z")
        modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in tmp_path.iterdir()}
    finally:
        os.umask(former)
    assert modes == {"x": 0o600, "y.json": 0o600, "z": 0o700}


@TRAPS
def test_a_file_is_replaced_whatever_stood_in_its_way(tmp_path: Path, trap: Callable[[Path], None]) -> None:
    if trap is not a_directory:
        trap(tmp_path / "x.json")
        (tmp_path / "x.tmp").symlink_to(tmp_path / "x.json")
        replace_own(tmp_path / "x.json", b"new")
        assert read_own(tmp_path / "x.json") == b"new"
        assert not (tmp_path / "x.tmp").exists()
        assert trap is not a_link or (tmp_path / "elsewhere").read_bytes() == b"precious"
        return
    trap(tmp_path / "x.json")
    with pytest.raises(OSError):
        replace_own(tmp_path / "x.json", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"], "nothing is left behind"


@TRAPS
def test_a_directory_that_is_something_else_is_refused_with_a_reason(tmp_path: Path, trap: Callable[[Path], None]) -> None:
    trap(tmp_path / "x")
    if trap is a_directory:
        (tmp_path / "x").chmod(0o777)
    with pytest.raises(NotOurs, match=r"no directory|symbolic link|chmod go-w"):
        make_own_directory(tmp_path / "x")
    assert not (tmp_path / "nowhere").exists()


def test_a_link_to_a_directory_redirects_nobody_but_one_above_it_may(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(NotOurs, match="symbolic link: name the directory itself"):
        make_own_directory(tmp_path / "link")
    make_own_directory(tmp_path / "link" / "run")
    assert (tmp_path / "real" / "run").is_dir()


def test_a_directory_that_others_look_into_is_closed_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").mkdir(mode=0o755)
    make_own_directory(tmp_path / "x")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o700
    become_another_user(monkeypatch)
    with pytest.raises(NotOurs, match="another user"):
        make_own_directory(tmp_path / "x")


@TRAPS
def test_the_files_of_ours_are_found_among_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: Callable[[Path], None]
) -> None:
    trap(tmp_path / "a-trap")
    (tmp_path / "a-file").touch()
    (tmp_path / "b-file").touch()
    assert list(own_files(tmp_path, "a-")) == [tmp_path / "a-file"]
    assert not list(own_files(tmp_path / "none", "a-"))
    become_another_user(monkeypatch)
    assert not list(own_files(tmp_path, "a-"))


# --- what is built on it


@TRAPS
def test_a_sweep_neither_hangs_nor_ends_at_what_others_put_there(tmp_path: Path, trap: Callable[[Path], None]) -> None:
    trap(tmp_path / "mooncake=test=x=1")
    for odd in ("=", "=x", "=test=..=1", "=test==1", "=test=%2E%2E%2Fetc%2Fx=1", f"=test=x={'9' * 200}", "=test=\udcff=1"):
        (tmp_path / f"mooncake{odd}").touch()
    (tmp_path / "run").mkdir(mode=0o700)
    sweep(tmp_path, "test", lambda name, lock: is_alive(tmp_path / "run", name, lock))
    assert os.path.lexists(tmp_path / "mooncake=test=x=1")


def test_a_sweep_leaves_another_users_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake=test=x=1").touch()
    become_another_user(monkeypatch)
    assert sweep(tmp_path, "test", lambda *_: False) == []
    assert (tmp_path / "mooncake=test=x=1").exists()


@TRAPS
def test_a_segment_whose_name_is_taken_gets_another(tmp_path: Path, trap: Callable[[Path], None], layout) -> None:
    trap(tmp_path / "mooncake=test=a=7")
    segment = Segment.create(tmp_path, "test", "a", layout, 2, 7)
    try:
        assert segment.path.name.startswith("mooncake=test=a=7=")
        assert Segment.attach(segment.path, layout, 7).slots == 2
        assert stat.S_IMODE(segment.path.stat().st_mode) == 0o600
        assert sweep(tmp_path, "test", lambda *_: False) == [], "its owner lives"
    finally:
        segment.close()
    segment.path.touch()
    assert sweep(tmp_path, "test", lambda *_: False) == [segment.path], "it is swept like others"


@TRAPS
def test_a_segment_is_attached_only_where_it_is_a_file_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: Callable[[Path], None], layout, make_segment
) -> None:
    trap(tmp_path / "x")
    for path in (tmp_path / "x", "a\0b"):
        with pytest.raises(SharedMemoryError, match="cannot attach"):
            Segment.attach(path, layout, 1)
    segment = make_segment("a")
    become_another_user(monkeypatch)
    with pytest.raises(SharedMemoryError, match="another user"):
        Segment.attach(segment.path, layout, 1, writable=True)


@TRAPS
def test_a_stores_segment_whose_name_is_taken_gets_another(tmp_path: Path, trap: Callable[[Path], None]) -> None:
    trap(tmp_path / "mooncake=test=a.objects=7")
    segment = ObjectSegment.create(tmp_path, "test", "a", 7, entries=8, memory_bytes=1 << 20)
    try:
        assert segment.path.name.startswith("mooncake=test=a.objects=7=")
        assert ObjectSegment.attach(segment.path, 7, entries=8, memory_bytes=1 << 20).memory_bytes == 1 << 20
    finally:
        segment.close()


@TRAPS
def test_a_stores_segment_is_attached_only_where_it_is_a_file_of_ours_with_such_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: Callable[[Path], None]
) -> None:
    shape = {"entries": 8, "memory_bytes": 1 << 20}
    segment = ObjectSegment.create(tmp_path, "test", "a", 7, **shape)
    try:
        trap(tmp_path / "mooncake=test=b.objects=7")
        for name in ("mooncake=test=b.objects=7", "mooncake=test=\0.objects=7"):
            with pytest.raises(SharedMemoryError, match="cannot attach"):
                ObjectSegment.attach(tmp_path / name, 7, **shape)
        for name in ("x", "mooncake=test=a=7", "mooncake=test=a.objects=8"):
            os.link(segment.path, tmp_path / name)
            with pytest.raises(SharedMemoryError, match="no name of a store's segment"):
                ObjectSegment.attach(tmp_path / name, 7, **shape)
        become_another_user(monkeypatch)
        with pytest.raises(SharedMemoryError, match="another user"):
            ObjectSegment.attach(segment.path, 7, **shape)
    finally:
        segment.close()


@TRAPS
def test_a_life_file_is_a_file_of_ours_or_none(tmp_path: Path, trap: Callable[[Path], None]) -> None:
    path = lock_path(tmp_path, "test", b"me")
    trap(path)
    with pytest.raises(OSError):
        ClientLock(tmp_path, "test", b"me")
    assert not client_runs(path)
    assert not remove_lock(path)
    assert path.exists() or path.is_symlink(), "what others put there stays"


def test_another_users_file_is_no_life_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = ClientLock(tmp_path, "test", b"me")
    assert client_runs(lock.path)
    become_another_user(monkeypatch)
    assert not client_runs(lock.path)
    assert not remove_lock(lock.path)
    monkeypatch.undo()
    lock.disown()
    assert remove_lock(lock.path), "its process died"
    assert not lock.path.exists()
    assert not remove_lock(lock.path)


@TRAPS
def test_a_lock_that_is_something_else_is_told_and_nobody_is_signalled(tmp_path: Path, trap: Callable[[Path], None]) -> None:
    trap(tmp_path / "node.lock")
    with pytest.raises(ProcessLockError, match="cannot use .*node.lock"):
        ProcessLock.acquire(tmp_path, "node")
    assert holder(tmp_path, "node") is None


def test_a_lock_of_another_user_names_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = ProcessLock.acquire(tmp_path, "node")
    assert holder(tmp_path, "node") == os.getpid()
    become_another_user(monkeypatch)
    assert holder(tmp_path, "node") is None
    assert is_alive(tmp_path, "node", lock.incarnation), "who cannot be seen may live"
    lock.release()


def test_a_negative_pid_is_no_process_group(tmp_path: Path) -> None:
    lock = ProcessLock.acquire(tmp_path, "node")
    lock.path.write_text("-1 5\n")
    assert holder(tmp_path, "node") == 0
    lock.release()


@TRAPS
def test_a_tier_takes_only_a_directory_of_its_own(tmp_path: Path, trap: Callable[[Path], None]) -> None:
    trap(tmp_path / "x")
    if trap is a_directory:
        (tmp_path / "x").chmod(0o777)
    with pytest.raises(DiskError, match="cannot use .*x: "):
        take(tmp_path / "x")
