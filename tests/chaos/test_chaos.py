"""`mooncake-zmq chaos` itself: a minute of it, as machine code where the nodes are compiled, as in CI; and a planted bug, which
clients must find, in the sources."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mooncake_zmq.native.mypyc_code import SWITCH

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parent.parent.parent


def chaos(*arguments: str, environment: Mapping[str, str] = os.environ) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "mooncake_zmq", "chaos", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_cluster_broken_in_many_ways_gives_every_token_once_and_leaves_nothing() -> None:
    as_compiled = {name: value for name, value in os.environ.items() if name != SWITCH}
    code, told = chaos("--minutes", "1", "--seed", "23", environment=as_compiled)
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
