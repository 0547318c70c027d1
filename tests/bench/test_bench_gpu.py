"""`bench gpu` on the stand-in's GPU: what is timed is also compared. Its figures mean nothing there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STAND_IN = Path(__file__).parent.parent / "cluster" / "stand_in_gpu"


def run(tmp_path, program):
    roots = os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": roots, "STAND_IN_GPU": str(tmp_path)}
    options = ["--model", "dummy:tiny", "--cache-dir", str(tmp_path), "--rounds", "1", "--only", "blocks", "--json"]
    command = [sys.executable, "-c", f"{program}\nfrom mooncake_zmq.cli import main\nmain()", "bench", "gpu", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_every_way_of_a_block_is_taken_and_compared(tmp_path):
    told = run(tmp_path, "")
    assert told.returncode == 0, told.stderr
    report = json.loads(told.stdout)
    assert [row["unit"] for row in report["rows"]] == ["GB/s"] * 7
    assert all(row["value"] > 0 for row in report["rows"])
    assert report["notes"] == ["stand-in, CUDA 13.0, CuPy 14"]


NOT_LOADED = """
from mooncake_zmq.bench import gpu
real = gpu.load_blocks
def load_blocks(loads, sequence, verify_committed):
    if verify_committed == {verify} and isinstance(loads[0][0], gpu.DeviceSegment) == {slab}:
        return [segment.parts(slot).tolist() for slot, (segment, _, _) in enumerate(loads)]
    return real(loads, sequence, verify_committed=verify_committed)
gpu.load_blocks = load_blocks
"""
NOT_SENT = """
from mooncake_zmq.bench import gpu
real = gpu.send_bare
gpu.send_bare = lambda listener, blocks: real(listener, [memoryview(bytes(len(block))) for block in blocks])
"""


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (NOT_LOADED.format(slab=True, verify=False), "the slab's"),
        (NOT_LOADED.format(slab=False, verify=True), "the pool's"),
        (NOT_SENT, "the neighbour's"),
    ],
)
def test_a_way_that_moves_nothing_is_noticed(tmp_path, planted, said):
    told = run(tmp_path, planted)
    assert told.returncode != 0
    assert f"{said} blocks are not what was computed" in told.stderr
