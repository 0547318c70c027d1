"""A prefill that becomes a decode in the live cluster, and back: nobody's request breaks, and nothing is left behind."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from toy_cluster import ROOT, ToyCluster, eventually, expected_tokens, until_none

pytestmark = pytest.mark.timeout(240)


def changeable(directory: Path) -> Path:
    """The toy cluster, in which the nodes of host-b may change."""
    text = (ROOT / "configs/toy.toml").read_text()
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        text = text.replace(f'name = "{role}-b"\n', f'name = "{role}-b"\nmay_become = "{other}"\n')
    path = directory / "changeable.toml"
    path.write_text(text)
    return path


def change(cluster: ToyCluster, node: str, role: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mooncake_zmq", "role", node, role, *cluster.arguments[:6]]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def peers(cluster: ToyCluster) -> dict[str, list[str]]:
    detail = cluster.health()
    return {role: names for role, names in detail["peers"].items() if role != "cache-node"} if detail else {}


def test_a_prefill_becomes_a_decode_and_back_without_a_failed_request(directory: Path) -> None:
    config = changeable(directory)
    cluster = ToyCluster(directory, config=str(config))
    prompt = list(range(1, 80))
    try:
        cluster.start()
        assert cluster.complete_text(prompt=prompt, max_tokens=8)["choices"][0]["token_ids"] == expected_tokens(prompt, 8)
        assert "may not become" in change(cluster, "prefill-a", "decode").stderr
        pid, segments = cluster.pid("prefill-b"), set(Path("/dev/shm").glob(f"mooncake={cluster.name}=prefill-b=*"))
        with cluster.stream(prompt=[1, 2, 3], max_tokens=3000) as running:
            running.read(5)
            told = change(cluster, "prefill-b", "decode")
            assert told.returncode == 0, told.stderr
            assert "becomes a decode" in told.stdout
            there = {"conductor": ["conductor-0"], "prefill": ["prefill-a"], "decode": ["decode-a", "decode-b", "prefill-b"]}
            eventually(lambda: peers(cluster) == there, 30, "prefill-b is a decode")
            assert running.read() == expected_tokens([1, 2, 3], 3000)
        assert cluster.pid("prefill-b") == pid, "the same process, whoever started it"
        assert segments
        assert not any(path.exists() for path in segments), "a decode has no slab"
        for first in range(6):
            words = [first, *prompt]
            assert cluster.complete_text(prompt=words, max_tokens=8)["choices"][0]["token_ids"] == expected_tokens(words, 8)
        assert change(cluster, "prefill-b", "prefill").returncode == 0
        eventually(cluster.complete, 30, "prefill-b is a prefill again")
        # As a decode it is killed outright: the supervisor starts it as what it is configured for. The gateway may have heard
        # of the last change before the conductor, which until then refuses the next.
        eventually(lambda: change(cluster, "prefill-b", "decode").returncode == 0, 30, "prefill-b is asked")
        eventually(lambda: peers(cluster) == there, 30, "prefill-b is a decode again")
        cluster.signal("prefill-b", signal.SIGKILL)
        eventually(cluster.complete, 30, "prefill-b has its own role")
        assert cluster.complete_text(prompt=prompt, max_tokens=8)["choices"][0]["token_ids"] == expected_tokens(prompt, 8)
        until_none(cluster.busy_gauges, 30)
        cluster.stop()
        assert [name for name in cluster.leftovers() if name != config.name] == []
        assert cluster.errors() == []
        assert "starting it again" in cluster.told()
        assert cluster.told().count("starting it again") == 1, "only the one that was killed"
    finally:
        cluster.kill()


def test_a_stop_in_the_middle_of_a_change_ends_the_process(directory: Path) -> None:
    cluster = ToyCluster(directory, config=str(config := changeable(directory)))
    try:
        cluster.start()
        with (
            cluster.stream(prompt=[1, 2, 3], max_tokens=1500) as first,
            cluster.stream(prompt=[4, 5, 6], max_tokens=1500) as second,
        ):
            for stream in (first, second):
                stream.read(5)
            assert change(cluster, "decode-b", "prefill").returncode == 0
            assert cluster.process is not None
            cluster.process.send_signal(signal.SIGTERM)
            for stream in (first, second):
                assert len(stream.read()) == 1500
        assert cluster.process.wait(30) == 0
        assert [name for name in cluster.leftovers() if name != config.name] == []
    finally:
        cluster.kill()
