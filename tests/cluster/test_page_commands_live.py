"""The commands of the README and the pages that ask a running cluster, or start one, are tried at toy size."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from page_commands import LIVE, ROOT, PageCommand, how, page_commands
from toy_cluster import ToyCluster

pytestmark = pytest.mark.timeout(240)
COMMANDS = [command for command in page_commands() if how(command, LIVE) is not None]
TRACE = '{"timestamp": 0, "input_length": 24, "output_length": 4, "hash_ids": [1]}\n' * 8
ENDLESS = "mooncake-zmq top"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.line[:60]}")
def test_a_command_of_a_page_ends_well(command: PageCommand, cluster: ToyCluster, tmp_path: Path) -> None:
    (tmp_path / "conversation_trace.jsonl").write_text(TRACE)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    request = cluster.complete_text(prompt=list(range(40)), max_tokens=2)["mooncake"]["request"]
    address = cluster.url.removeprefix("http://")
    words = [word.replace("localhost:8000", address).replace("127.0.0.1:8000", address) for word in command.words]
    words = [word.replace("GATEWAY:8000", address).replace("SmolLM2-135M-Instruct", "toy") for word in words]
    known = {"NODE": "decode-b", "ID": request, "prefill-a": "prefill-a"}
    words = [known.get(word, word) for word in words]
    if words[0] == "mooncake-zmq":
        words[:1] = [sys.executable, "-m", "mooncake_zmq"]
        if words[3] in ("status", "top", "trace", "dump", "drain"):
            at = words.index("--config") if "--config" in words else len(words)
            words[at : at + 2] = cluster.arguments
        words += (how(command, LIVE) or "").split()
    elif shutil.which(words[0]) is None:
        pytest.skip(f"there is no {words[0]} here")
    if command.line.startswith(ENDLESS):
        assert _first_line(words, tmp_path)
        return
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _first_line(words: list[str], directory: Path) -> str:
    """Run a command that never ends until it prints a line, and stop it."""
    with subprocess.Popen(words, cwd=directory, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
        return line
