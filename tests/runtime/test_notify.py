"""What a service manager is told: over a path or an abstract name, in its words, and nothing where there is none."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_zmq.runtime import notify


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    name = str(tmp_path / "n") if request.param == "path" else f"\0mooncake-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(name)
        heard.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", name.replace("\0", "@"))
        monkeypatch.delenv("WATCHDOG_USEC", raising=False)
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        yield heard


def said(manager: socket.socket) -> list[str]:
    return manager.recv(4096).decode().split("\n")


def test_what_is_told_is_told_in_the_managers_words(manager: socket.socket) -> None:
    notify.ready("serving")
    assert said(manager) == ["READY=1", "STATUS=serving"]
    notify.alive("two\nlines")
    assert said(manager) == ["WATCHDOG=1", "STATUS=two lines"]
    notify.stopping("draining", 90)
    assert said(manager) == ["STOPPING=1", "STATUS=draining", "EXTEND_TIMEOUT_USEC=90000000"]


def test_a_long_step_asks_for_time_again_and_again_until_it_is_over(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "AGAIN_S", 0.01)
    with notify.extended_timeout("converting"):
        assert said(manager) == ["STATUS=converting"]
        assert [said(manager) for _ in range(3)] == [["EXTEND_TIMEOUT_USEC=60000000", "WATCHDOG=1"]] * 3
    notify.status("done")
    while said(manager) != ["STATUS=done"]:  # what it still said during the block
        pass
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(4096)


@pytest.mark.parametrize("where", [None, "", "vsock:2:1", "/nowhere/at/all"])
def test_without_a_manager_nothing_is_told(monkeypatch: pytest.MonkeyPatch, where: str | None) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", where) if where is not None else monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify.ready("serving")
    with notify.extended_timeout("converting"):
        pass


@pytest.mark.parametrize(
    ("environment", "expected_s"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
    ],
)
def test_the_watchdogs_time_is_that_of_the_process_it_watches(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected_s: float
) -> None:
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert notify.watchdog_s() == expected_s
