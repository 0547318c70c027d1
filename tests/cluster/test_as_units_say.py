"""A cluster as bin/install's units say, with a service manager of the test's own: ready, alive, drained, stuck."""

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from toy_cluster import Stream, eventually, expected_tokens, free_port, greedy
from unit_files import ROOT, Service, running

from mooncake_zmq.core.profile import PrefillTime, Profile, StepTime
from mooncake_zmq.operate import collect_dumps

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(120)]

CONFIG = """
[cluster]
name = "units"
shm_dir = "{root}/shm"
drain_timeout_s = 10.0
[model]
path = "toy"
max_model_len = 4096
[cache_node]
pool_bytes = 4_194_304
[prefill]
slab_bytes = 8_388_608
[gateway]
http_port = {port}
[[nodes]]
name = "conductor-0"
role = "conductor"
[[nodes]]
name = "cache-a"
role = "cache-node"
[[nodes]]
name = "prefill-a"
role = "prefill"
[[nodes]]
name = "decode-a"
role = "decode"
[[nodes]]
name = "decode-b"
role = "decode"
backend = "modelled:{root}/stuck.json"
settings = {{ step_deadline_s = 0.2 }}
[[nodes]]
name = "gateway-0"
role = "gateway"
"""
STUCK = Profile(
    model="toy",
    fingerprint="f" * 32,
    threads=1,
    backend="numpy",
    machine="one that hangs",
    prefill=(PrefillTime(8, 0, 0.008), PrefillTime(16, 0, 0.016)),
    decode=tuple(StepTime(batch, 8 * batch, 1e5 + batch) for batch in (1, 2, 4, 8)),
)
"""An engine whose first step takes a day."""


@pytest.fixture
def root(directory: Path) -> Path:
    install = [ROOT / "bin/install", "--root", directory, "--python", sys.executable]
    subprocess.run(install, check=True, capture_output=True)
    (directory / "shm").mkdir()
    (directory / "etc/mooncake-zmq/cluster.toml").write_text(CONFIG.format(root=directory, port=free_port()))
    (directory / "stuck.json").write_bytes(msgspec.json.encode(STUCK))
    return directory


def ask(root: Path, tokens: int) -> Stream:
    config = (root / "etc/mooncake-zmq/cluster.toml").read_text()
    port = config.partition("http_port = ")[2].split()[0]
    return Stream(f"http://127.0.0.1:{port}", greedy(prompt=[1, 2, 3], max_tokens=tokens, stream=True))


def hears(root: Path, node: str, peer: str) -> bool:
    dump = collect_dumps(root / "run/mooncake-zmq", [node]).get(node)
    return dump is not None and dump["session"]["peers"][peer]["up"]


def units(root: Path) -> dict[str, str]:
    command = [root / "opt/mooncake-zmq/bin/mooncake-zmq", "config", "units", root / "etc/mooncake-zmq/cluster.toml"]
    named = subprocess.run(command, check=True, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}).stdout.split()
    return {unit.partition("@")[2].removesuffix(".service"): unit for unit in named}


def test_a_cluster_serves_drains_and_shows_an_engine_that_hangs(root: Path) -> None:
    known = units(root)
    with running(root, [unit for node, unit in known.items() if node != "decode-b"]) as services:
        for service in services.values():
            service.await_said("WATCHDOG=1", times=2)
            service.await_said("STATUS=serving; hears ")
        assert any(word == "STATUS=allocating shared memory" for word in services["cache-a"].said)
        assert any(word.startswith("EXTEND_TIMEOUT_USEC=") for word in services["prefill-a"].said)

        with ask(root, 400) as stream:
            stream.read(5)
            services["decode-a"].stop()
            stuck = services["decode-b"] = Service(root, known["decode-b"])
            assert stream.read() == expected_tokens([1, 2, 3], 400)
        assert services["decode-a"].ended() == 0
        assert {"STOPPING=1", "STATUS=draining", "EXTEND_TIMEOUT_USEC=70000000"} <= set(services["decode-a"].listen())

        stuck.await_ready()
        stuck.await_said("WATCHDOG=1")
        eventually(lambda: hears(root, "gateway-0", "decode-b"), what="the gateway hears the decode")
        with ask(root, 5) as stream:
            stream.read(1)  # the prefill's
            stuck.await_said("STATUS=the engine is ", times=4)
            assert "WATCHDOG=1" not in stuck.said[stuck.said.index(next(w for w in stuck.said if "the engine is" in w)) :]
            services["prefill-a"].await_said("WATCHDOG=1", from_now=True)
        stuck.process.send_signal(signal.SIGABRT)  # what the watchdog does
        assert stuck.process.wait(10) == -signal.SIGABRT
        assert "modelled.py" in stuck.told(), "where the engine hung"

        services["gateway-0"].stop()
        assert services["gateway-0"].ended() == 0
        workers = [services[node] for node in ("prefill-a", "cache-a", "conductor-0")]
        for worker in workers:
            worker.stop()
        assert [worker.ended() for worker in workers] == [0, 0, 0]
    assert list((root / "shm").iterdir()) == []
