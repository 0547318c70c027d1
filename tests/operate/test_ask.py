"""What an operator asks of a running node, through files and a signal."""

import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.core.commands import AskError, SetCopies, decode, encode
from mooncake_zmq.operate import local_nodes
from mooncake_zmq.operate.local_nodes import ask
from mooncake_zmq.transfer.process_lock import ProcessLock

CONFIG = """
[model]
path = "toy"
[[nodes]]
name = "c"
role = "conductor"
[[nodes]]
name = "d"
role = "decode"
"""
KEY = "0d3f29c1a4e87b5596d2a80c1be47f33"


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"type":"SetCopies","key":"zz","copies":1}', b"x" * (1 << 20)])
def test_what_is_no_ask_is_one_error(content: bytes) -> None:
    with pytest.raises(AskError):
        decode(content)


def test_an_ask_reads_as_it_was_written() -> None:
    assert decode(encode(SetCopies(KEY, 3))) == SetCopies(KEY, 3)


def test_a_node_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="c does not run on this machine"):
        ask(tmp_path, "c", SetCopies(KEY, 3))


def test_a_node_that_does_not_answer_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_nodes, "ASK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(local_nodes.os, "kill", lambda pid, number: None)
    lock = ProcessLock.acquire(tmp_path, "c")
    try:
        with pytest.raises(ConfigError, match="c did not answer"):
            ask(tmp_path, "c", SetCopies(KEY, 3))
        assert not list(tmp_path.glob("*.ask.*"))
    finally:
        lock.release()


def test_the_command_brings_a_running_conductors_answer(tmp_path: Path) -> None:
    config = tmp_path / "x.toml"
    config.write_text(CONFIG)
    common = ["--config", str(config), "--set", f"cluster.runtime_dir={tmp_path}/run"]
    run = [sys.executable, "-m", "mooncake_zmq"]

    def replica(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*run, "replica", KEY, "2", *common, *more], capture_output=True, text=True, timeout=60)

    with subprocess.Popen(
        [*run, "conductor", *common, "--node", "c"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as node:
        try:
            assert node.stdout is not None
            assert any(b'"ready"' in line for line in node.stdout)
            told = replica()
            assert (told.returncode, told.stderr) == (
                2,
                "mooncake-zmq: c: that prefix is not known: see recent in this conductor's dump\n",
            )
            assert "d does not run" in replica("--node", "d").stderr
        finally:
            node.terminate()
    assert not list((tmp_path / "run").glob("*.answer.*"))
