"""The supervisor's own work, without a cluster: logs of bounded size, holding a node, what RAM is in use."""

import fcntl
import io
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from waiting import eventually

from mooncake_zmq.config.load import load
from mooncake_zmq.engine import cpu
from mooncake_zmq.operate import up as up_module
from mooncake_zmq.operate.up import Up, _Child
from mooncake_zmq.transfer.process_lock import ProcessLock, ProcessLockError

TOY = Path(__file__).parents[2] / "configs/toy.toml"


class Process:
    """A child that does not end by itself. `on_signal` is called with each signal."""

    def __init__(self, on_signal: Any = lambda _number: None) -> None:
        self.pid = 1 << 30
        self.send_signal = on_signal

    def poll(self) -> None:
        return None


@pytest.fixture
def up(tmp_path: Path) -> Up:
    settings = {"cluster.runtime_dir": str(tmp_path), "cluster.shm_dir": str(tmp_path)}
    return Up(load(TOY, settings, {}), str(TOY), None, ())


def add(up: Up, name: str, process: Any) -> _Child:
    child = up._children[name] = _Child(up.config.node(name), up.runtime_dir / f"{name}.log", process)
    return child


@pytest.mark.parametrize("start", ["a node", "all nodes", "a vllm"])
def test_what_is_started_imports_nothing_from_the_directory_of_the_user(
    up: Up, tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mooncake_zmq", "vllm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the directory')")
    monkeypatch.chdir(tmp_path)
    up._arguments = ["--no-such"]
    child = add(up, "decode-a", None)
    if start == "a vllm":
        child.server = (sys.executable, "-m", "vllm.entrypoints")
    up._spawn(child) if start == "a node" else up._spawn_all()
    assert child.process is not None
    child.process.wait(20)
    assert "of the directory" not in child.log.read_text()
    assert "--no-such" in child.log.read_text() or child.server


def test_the_end_of_a_vllm_is_shown_with_its_first_error(up: Up) -> None:
    child = add(up, "decode-a", None)
    child.server, cause = ("vllm",), "ERROR ValueError: Available memory is less than desired"
    child.log.write_text("\n".join(["INFO begins", cause, *["at a place"] * 30, "RuntimeError: see above"]))
    shown = up._tail(child)
    assert cause in shown
    assert shown.endswith("see above")
    assert "INFO" not in shown


def test_a_servers_log_that_grows_is_cut_under_its_writer(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up_module.log_file, "MAX_BYTES", 100)
    child = add(up, "decode-a", Process())
    child.server = ("vllm",)
    older = up.runtime_dir / "decode-a.log.1"
    with child.log.open("ab", buffering=0) as writer:  # as a child's stderr is opened
        writer.write(b"a" * 100)
        up._look_after_children(starting=False)
        assert not older.exists()
        for letter in (b"b", b"c"):
            writer.write(letter * 101)
            up._look_after_children(starting=False)
            assert older.read_bytes().endswith(letter * 101)
            writer.write(letter)
            assert child.log.read_bytes() == letter
    assert sorted(path.name for path in up.runtime_dir.iterdir()) == ["decode-a.log", "decode-a.log.1"]


def test_a_log_that_cannot_be_copied_is_cut_all_the_same(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(up_module.shutil, "copyfile", full_disk)
    log = up.runtime_dir / "x.log"
    log.write_bytes(b"much")
    up_module._cut(log)
    assert log.read_bytes() == b""
    log.unlink()
    up_module._cut(log)  # the operator removed it


@pytest.mark.timeout(10)
def test_holding_a_node_also_ends_the_life_that_just_began(up: Up) -> None:
    """The main thread saw it wanted, and started it again while the signal went to the old life."""
    told: list[tuple[str, int]] = []

    def end_second(number: int) -> None:
        told.append(("second", number))
        child.process = None

    def end_first(number: int) -> None:
        told.append(("first", number))
        child.process = second

    second: Any = Process(end_second)
    child = add(up, "prefill-a", Process(end_first))
    up.hold("prefill-a")
    assert told == [("first", signal.SIGTERM), ("second", signal.SIGTERM)]
    assert not child.wanted


def test_ram_of_what_has_just_vanished_is_none(up: Up) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    alone = up.ram_bytes()
    add(up, "decode-a", gone)
    (up.runtime_dir / f"mooncake={up.config.cluster.name}=cache-a=1").symlink_to(up.runtime_dir / "removed")
    assert alone > 0
    assert up.ram_bytes() == pytest.approx(alone, rel=0.2)


def test_models_of_earlier_versions_are_removed_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "lacking", lambda: "kernels take half a minute")
    settings = {"cluster.runtime_dir": str(tmp_path), "model.path": "dummy:tiny", "model.cache_dir": str(tmp_path / "cache")}
    up = Up(load(TOY, settings, {}), str(TOY), None, ())
    up.console = Console(file=io.StringIO(), width=400)
    former = tmp_path / "cache" / "dummy-tiny-0123456789ab"
    former.mkdir(parents=True)
    (former / "weights.bin").touch()
    (former / "header.json").write_text('{"format": 1}')
    up._prepare_model()
    assert not former.exists()
    assert f"removed {former}" in up.console.file.getvalue()


def test_what_tells_of_former_lives_outlasts_the_cluster(up: Up) -> None:
    first = ProcessLock.acquire(up.runtime_dir, "decode-a")
    for socket in ("ipc", "ipc-stream", "data.ipc", "data.ipc-stream"):
        (up.runtime_dir / f"decode-a.{socket}").touch()
    first.release()
    up._sweep()
    assert sorted(path.name for path in up.runtime_dir.iterdir()) == ["decode-a.lock"]
    ahead = str(first.incarnation + 86_400_000)
    first.path.write_text(f"1 {ahead}\n")
    second = ProcessLock.acquire(up.runtime_dir, "decode-a")
    second.release()
    assert second.incarnation == int(ahead) + 1


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_each_process_has_a_session_of_its_own(up: Up) -> None:
    child = add(up, "decode-a", None)
    child.server = ("sleep", "300")
    up._spawn(child)
    assert child.process is not None
    try:
        assert os.getsid(child.process.pid) == child.process.pid
    finally:
        child.process.kill()
        child.process.wait()


def test_what_a_killed_vllm_leaves_ends_too(up: Up) -> None:
    command = ["sh", "-c", "sleep 300 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as server:
        assert server.stdout is not None
        engine = int(server.stdout.readline())
        child = add(up, "decode-a", server)
        child.server, child.wanted = ("vllm",), False
        server.kill()
        server.wait()
        assert _lives(engine)
        up._look_after_children(starting=False)
        eventually(lambda: not _lives(engine))


def test_sockets_of_nodes_that_live_stay(up: Up) -> None:
    """As of one that somebody started by hand while this cluster was starting."""
    lock = ProcessLock.acquire(up.runtime_dir, "decode-a")
    for name in ("decode-a", "decode-b"):
        (up.runtime_dir / f"{name}.ipc").touch()
    up._sweep()
    assert sorted(path.name for path in up.runtime_dir.glob("*.ipc")) == ["decode-a.ipc"]
    lock.release()


def test_only_one_can_hold_the_runtime_directory_whenever_another_ends(up: Up) -> None:
    first = ExitStack()
    up._claim(first)
    waiting = os.open(up.runtime_dir / "up.lock", os.O_RDWR)  # one that opened the file while the first held it
    first.close()
    fcntl.flock(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(ProcessLockError, match="already running"), ExitStack() as third:
        up._claim(third)
    os.close(waiting)


def test_a_child_that_cannot_be_started_is_tried_later_and_costs_no_other(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    child = add(up, "decode-a", None)

    def fails(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", fails)
    up._look_after_children(starting=False)
    assert child.crashes == 1
    assert child.start_at > time.monotonic()


def test_a_log_that_somebody_removed_is_empty(up: Up) -> None:
    child = add(up, "decode-a", None)
    assert up._tail(child) == ""
    assert "gave no reason" in up._last_words(child)
