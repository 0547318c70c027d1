"""`bench gpu` on the stand-in's GPU: what is timed is also compared. Its figures mean nothing there."""

import json
import os
import subprocess
import sys
from pathlib import Path

STAND_IN = Path(__file__).parent.parent / "cluster" / "stand_in_gpu"


def test_every_way_of_a_block_is_taken_and_compared(tmp_path):
    roots = os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": roots, "STAND_IN_GPU": str(tmp_path)}
    options = ["--model", "dummy:tiny", "--cache-dir", str(tmp_path), "--rounds", "1", "--only", "blocks", "--json"]
    command = [sys.executable, "-m", "mooncake_zmq", "bench", "gpu", *options]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    report = json.loads(told.stdout)
    assert [row["unit"] for row in report["rows"]] == ["GB/s"] * 7
    assert all(row["value"] > 0 for row in report["rows"])
    assert report["notes"] == ["stand-in, CUDA 13.0, CuPy 14"]
