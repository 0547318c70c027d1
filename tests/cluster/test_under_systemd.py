"""The same cluster under systemd itself, installed on this machine and removed again. For a machine that is there for this:

    REQUIRE_SYSTEMD=/usr/bin/python3 bin/test tests/cluster/test_under_systemd.py

The value: a Python with the project, which the user mooncake can run.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import web
from toy_cluster import Stream, eventually, expected_tokens, greedy
from unit_files import ROOT, config_text

PYTHON = os.environ.get("REQUIRE_SYSTEMD", "")
PORT = 8017
URL = f"http://127.0.0.1:{PORT}"
MADE = ("/etc/mooncake-zmq", "/var/lib/mooncake-zmq", "/opt/mooncake-zmq", "/usr/local/bin/mooncake-zmq")
DROP_IN = Path("/etc/systemd/system/mooncake-decode@decode-b.service.d/haste.conf")

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="installs on this machine, and so wants REQUIRE_SYSTEMD=PYTHON and root"),
    pytest.mark.timeout(200),
]


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=90).stdout


def systemctl(*arguments: str) -> str:
    return output("systemctl", *arguments)


def shown(unit: str, key: str) -> str:
    return systemctl("show", "--value", "-p", key, unit).strip()


def serves() -> bool:
    try:
        return web.get(f"{URL}/health").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def units() -> Iterator[dict[str, str]]:
    subprocess.run([ROOT / "bin/install", "--python", PYTHON], check=True)
    config = Path("/etc/mooncake-zmq/cluster.toml")
    config.write_text(config_text(Path("/dev/shm"), Path("/"), PORT))
    config.with_name("stuck.json").chmod(0o644)
    DROP_IN.parent.mkdir(parents=True, exist_ok=True)
    DROP_IN.write_text("[Service]\nWatchdogSec=2\n")
    key = Path("/etc/credstore/mooncake-zmq.decode-a.key")
    key.write_text("a key")
    named = output("mooncake-zmq", "config", "units", config).split()
    try:
        systemctl("daemon-reload")
        yield {unit.partition("@")[2].removesuffix(".service"): unit for unit in named}
    finally:
        DROP_IN.unlink()
        DROP_IN.parent.rmdir()
        key.unlink()
        subprocess.run([ROOT / "bin/uninstall", "--purge"], check=True)
    assert [path for path in MADE if os.path.lexists(path)] == []
    assert "mooncake" not in systemctl("list-unit-files")


def test_a_cluster_under_systemd(units: dict[str, str]) -> None:
    systemctl("enable", *(unit for node, unit in units.items() if node != "decode-b"))
    systemctl("start", "mooncake.target")
    eventually(serves, 30, "the gateway serves")
    with Stream(URL, greedy(prompt=[1, 2, 3], max_tokens=50, stream=True)) as stream:
        assert stream.read() == expected_tokens([1, 2, 3], 50)
    pid = shown(units["decode-a"], "MainPID")
    environment = Path(f"/proc/{pid}/environ").read_text()
    assert "CREDENTIALS_DIRECTORY=" in environment
    assert shown(units["cache-a"], "LimitMEMLOCK") == "infinity"

    os.kill(int(pid), 9)
    eventually(lambda: shown(units["decode-a"], "NRestarts") == "1" and serves(), 30, "the decode is started again")

    systemctl("start", units["decode-b"])
    systemctl("stop", units["decode-a"])
    assert shown(units["decode-a"], "Result") == "success"
    eventually(lambda: web.get(f"{URL}/health").json()["peers"]["decode"] == ["decode-b"], 30, "only the one that hangs")
    with Stream(URL, greedy(prompt=[1, 2, 3], max_tokens=5, stream=True)) as stream:
        stream.read(1)
        eventually(lambda: shown(units["decode-b"], "NRestarts") == "1", 40, "the watchdog ends the one that hangs")
    log = output("journalctl", "-u", units["decode-b"], "-o", "cat")
    assert "engine_stuck" in log
    assert "modelled.py" in log

    systemctl("stop", "mooncake.target")
    eventually(lambda: {shown(unit, "ActiveState") for unit in units.values()} == {"inactive"}, 40, "all have ended")
    told = [line for line in output("journalctl", "-u", "mooncake-*", "-o", "cat").splitlines() if line.startswith("{")]
    last = {(event["event"], event["node"]): at for at, event in enumerate(map(json.loads, told))}
    assert last["stopped", "gateway-0"] < min(last["draining", node] for node in ("conductor-0", "cache-a", "prefill-a"))
    assert list(Path("/dev/shm").glob("mooncake=*")) == []
