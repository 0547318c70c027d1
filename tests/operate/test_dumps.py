"""Collecting dumps."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mooncake_zmq.operate import local_nodes
from mooncake_zmq.operate.local_nodes import collect_dumps

NODE = """
import os, signal, sys
from mooncake_zmq.transfer.process_lock import ProcessLock
directory, answers = sys.argv[1], sys.argv[2] == "answers"
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
lock = ProcessLock.acquire(directory, "node")
print("ready", flush=True)
turn = 0
while signal.sigwait([signal.SIGUSR1]):
    turn += 1
    if answers:
        with open(f"{directory}/node.dump.tmp", "w") as file:
            file.write('{"turn": %d}' % turn)
        os.rename(f"{directory}/node.dump.tmp", f"{directory}/node.dump.json")
"""


@pytest.fixture
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    command = [sys.executable, "-c", NODE, str(tmp_path), getattr(request, "param", "answers")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        process.kill()


@pytest.mark.usefixtures("node")
def test_two_may_collect_at_once(tmp_path: Path) -> None:
    def collect(_: int) -> list[int]:
        return [collect_dumps(tmp_path, ["node", "nobody"])["node"]["turn"] for _ in range(15)]

    with ThreadPoolExecutor(3) as pool:
        for turns in pool.map(collect, range(3)):
            assert turns == sorted(turns)


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("node", ["does not answer"], indirect=True)
def test_an_old_dump_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_nodes, "DUMP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(local_nodes, "DUMP_AGAIN_S", 0.03)
    (tmp_path / "node.dump.json").write_text("{}")
    assert collect_dumps(tmp_path, ["node"]) == {}
