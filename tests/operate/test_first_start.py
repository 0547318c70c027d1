"""All nodes of a machine begin in one process, which imports once for all of them."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from helpers.waiting import eventually

from mooncake_zmq.operate import first_start
from mooncake_zmq.operate.first_start import ForkedNode, NodeStart, start_together
from mooncake_zmq.runtime.lifecycle import PARENT_VARIABLE

SECOND_FORK_FAILS = """
import os
fork, calls = os.fork, []
def failing():
    calls.append(1)
    if len(calls) > 1:
        raise BlockingIOError
    return fork()
os.fork = failing
"""
TOY = str(Path(__file__).parents[2] / "configs" / "toy.toml")


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def ended() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def conductor(directory: Path, name: str = "conductor-0") -> NodeStart:
    arguments = ("conductor", "--config", TOY, "--set", f"cluster.runtime_dir={directory}", "--node", name)
    return NodeStart("conductor", arguments, directory / f"{name}.log")


def running(directory: Path) -> list[str]:
    """Processes that name this directory in their command line; a zombie has none."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if str(directory).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_a_forked_node_is_a_child_with_a_session_a_log_and_a_command_line_of_its_own(
    directory: Path, environment: dict[str, str], ended: ExitStack
) -> None:
    nodes = start_together([conductor(directory)], environment)
    assert nodes is not None
    ended.callback(nodes[0].wait, 20)
    ended.callback(nodes[0].kill)
    log = directory / "conductor-0.log"
    eventually(lambda: '"started"' in log.read_text(), 20, "the node runs")
    pid = nodes[0].pid
    status = Path(f"/proc/{pid}/status").read_text()
    assert f"PPid:\t{os.getpid()}\n" in status
    assert os.getsid(pid) == pid
    shown = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert shown[1:] == [b"-m", b"mooncake_zmq", *(part.encode() for part in conductor(directory).arguments)]
    assert nodes[0].poll() is None
    nodes[0].send_signal(signal.SIGTERM)
    assert nodes[0].wait(20) == 0


def test_a_mistake_is_each_nodes_own_end_and_is_in_its_log(directory: Path, environment: dict[str, str]) -> None:
    nodes = start_together([conductor(directory, "nowhere"), conductor(directory, "elsewhere")], environment)
    assert nodes is not None
    assert [node.wait(20) for node in nodes] == [2, 2]
    assert "nowhere" in (directory / "nowhere.log").read_text()
    assert "elsewhere" in (directory / "elsewhere.log").read_text()


def test_if_not_all_can_be_forked_none_runs(directory: Path, environment: dict[str, str]) -> None:
    forks = directory / "sitecustomize.py"
    forks.write_text(SECOND_FORK_FAILS)
    started = start_together([conductor(directory), conductor(directory)], {**environment, "PYTHONPATH": str(directory)})
    assert started is None
    eventually(lambda: not running(directory), 20, "what was forked ends")
    assert not (directory / "conductor-0.log").read_text()


def test_where_forks_cannot_become_children_nothing_is_started(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setattr(first_start.sys, "platform", "darwin")
    assert start_together([conductor(directory)], {}) is None


def test_a_node_killed_by_a_signal_has_its_number_as_exit_code() -> None:
    if not (pid := os.fork()):
        signal.pause()
    node = ForkedNode(pid)
    assert node.poll() is None
    node.kill()
    assert node.wait(10) == -signal.SIGKILL
    node.kill()  # it is gone, and its pid may be another's


def test_a_node_that_something_else_has_reaped_has_ended() -> None:
    if not (pid := os.fork()):
        os._exit(7)
    os.waitpid(pid, 0)
    assert ForkedNode(pid).poll() == 0
