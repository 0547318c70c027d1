"""The shell around a role: what it died of is told, however early that was."""

import subprocess
import sys
import tempfile
from pathlib import Path

TOY = Path(__file__).parent.parent.parent / "configs/toy.toml"
CRASHES_EARLY = """
import sys
from mooncake_zmq.config import load
from mooncake_zmq.runtime import process

def crashing_server(*arguments, on_crash, **settings):
    server = real(*arguments, on_crash=on_crash, **settings)
    on_crash(RuntimeError("an early bug"))
    return server

real, process.DataServer = process.DataServer, crashing_server
loaded = load(sys.argv[1], {"cluster.runtime_dir": sys.argv[2], "cluster.shm_dir": sys.argv[2]})
sys.exit(process.main(loaded, "cache-a"))
"""


def test_a_data_server_that_dies_before_the_loop_exists_ends_the_process_with_its_reason() -> None:
    with tempfile.TemporaryDirectory(prefix="mz-") as directory:
        ended = subprocess.run(
            [sys.executable, "-c", CRASHES_EARLY, str(TOY), directory], capture_output=True, text=True, timeout=30
        )
        assert ended.returncode == 1, ended.stderr
        assert "an early bug" in ended.stderr
        assert "AttributeError" not in ended.stderr
        assert [path.name for path in Path(directory).iterdir()] == ["cache-a.lock"]
