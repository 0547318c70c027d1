"""`mooncake-zmq chaos` itself: half a minute of it, and a planted bug that its clients must find."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parent.parent.parent


def chaos(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "mooncake_zmq", "chaos", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_cluster_broken_in_many_ways_gives_every_token_once_and_leaves_nothing() -> None:
    code, told = chaos("--minutes", "1", "--seed", "23")
    assert told["problems"] == []
    assert code == 0
    assert told["answered"] > 10
    assert len({fault["kind"] for fault in told["faults"]}) >= 5
    assert not Path(told["directory"]).exists()


def test_clients_find_a_cluster_that_trusts_damaged_bytes() -> None:
    code, told = chaos("--minutes", "0.2", "--fault", "flip_memory", "--planted", "trust_all_bytes")
    assert code == 1
    assert told["verdicts"]["wrong"] > 0
    shutil.rmtree(told["directory"])
