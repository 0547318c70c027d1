"""Two hosts made of network namespaces: nothing shared but a TCP network, which can be cut, and keys. Skipped where not
permitted."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import web
from toy_cluster import ROOT, Stream, eventually, expected_tokens, greedy, stopped, until_none

from mooncake_zmq.chaos.checks import busy, unreached
from mooncake_zmq.config.load import load
from mooncake_zmq.operate.local_nodes import collect_dumps
from mooncake_zmq.transfer import key_files

pytestmark = pytest.mark.timeout(180)

TAG = uuid.uuid4().hex[:6]
BRIDGE = f"mzb{TAG}"
NETWORK = "10.211.77"
HOSTS = {"a": 2, "b": 3}
CONFIG = ROOT / "configs/two-hosts.toml"
NODES = {node.name: (node.role, node.host[-1]) for node in load(CONFIG, environment={}).config.nodes}
SETTINGS = {
    "cluster.name": f"two-{TAG}",
    "model.path": "toy",
    "model.max_model_len": 4096,
    "prefill.own_reuse": "false",
    "prefill.slab_bytes": 8388608,
    "cache_node.pool_bytes": 16777216,
    "cache_node.ssd.directory": "",
    "gateway.api_keys": "",
    "gateway.allow_open": "true",
    "gateway.tls_certificate": "",
    "gateway.tls_key": "",
}
PROMPT = [(11 * position) % 250 for position in range(500)]
REUSABLE = (len(PROMPT) - 1) // 32 * 32


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def network() -> None:
    """A bridge in this namespace, and a namespace per host plugged into it."""
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")
    for host, number in HOSTS.items():
        space, here = f"mz{TAG}{host}", f"mz{TAG}{host}"
        ip("netns", "add", space)
        ip("link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", here, "master", BRIDGE, "up")
        ip("-n", space, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        ip("-n", space, "link", "set", "lo", "up")


def no_network() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", f"mz{TAG}{host}"], capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)


class TwoHosts:
    """Eight processes on two hosts, each with directories of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = f"http://{NETWORK}.{HOSTS['a']}:8000"
        self.config = directory / "two.toml"
        addresses = CONFIG.read_text()
        for host, number in enumerate(HOSTS.values(), 1):
            addresses = addresses.replace(f"10.0.0.{host}", f"{NETWORK}.{number}")
        self.config.write_text(addresses)
        key_files.make(directory / "keys", [(name, ("node",)) for name in NODES])
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def runtime_dir(self, host: str) -> Path:
        return self.directory / host / "run"

    def start(self, name: str) -> None:
        role, host = NODES[name]
        shm = self.directory / host / "shm"
        shm.mkdir(parents=True, exist_ok=True)
        command = ["ip", "netns", "exec", f"mz{TAG}{host}", sys.executable, "-m", "mooncake_zmq", role]
        command += ["--config", str(self.config), "--node", name]
        settings = {
            **SETTINGS,
            "security.keys": self.directory / "keys",
            "cluster.runtime_dir": self.runtime_dir(host),
            "cluster.shm_dir": shm,
        }
        command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def dumps(self) -> dict[str, Any]:
        dumps: dict[str, Any] = {}
        for host in HOSTS:
            dumps |= collect_dumps(self.runtime_dir(host), [name for name, (_, where) in NODES.items() if where == host])
        return dumps

    def missing(self) -> list[str]:
        return unreached(self.dumps(), NODES)

    def busy(self) -> list[str]:
        return busy(self.dumps())

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        with Stream(
            self.url,
            greedy(prompt=prompt, max_tokens=12, stream=True, stream_options={"include_usage": True}, cache_salt="tests"),
        ) as answer:
            assert answer.read() == expected_tokens(prompt, 12)
            assert answer.errors == []
            return answer.served

    @contextlib.contextmanager
    def only(self, host: str) -> Iterator[None]:
        """Let only this host's engines serve."""
        with self.without([name for name, (role, where) in NODES.items() if role in ("prefill", "decode") and where != host]):
            yield

    @contextlib.contextmanager
    def without(self, names: list[str]) -> Iterator[None]:
        """Stop these processes; the gateway has missed them."""
        locks = {name: self.runtime_dir(NODES[name][1]) / f"{name}.lock" for name in names}
        with stopped({name: int(lock.read_text().split()[0]) for name, lock in locks.items()}, self.serves):
            yield

    def serves(self) -> set[str]:
        try:
            peers = web.get(f"{self.url}/health", timeout=2).json()["peers"]
        except (httpx.HTTPError, ValueError, KeyError):
            return set()
        return {name for names in peers.values() for name in names}


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making network namespaces needs root and iproute2")
    try:
        network()
    except subprocess.CalledProcessError as error:
        no_network()
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory(prefix="mz-") as path:
        hosts = TwoHosts(Path(path))
        try:
            for name in NODES:
                hosts.start(name)
            eventually(lambda: hosts.serves() >= {"prefill-a", "prefill-b", "decode-a", "decode-b"}, 60, "both hosts serve")
            until_none(hosts.missing, 60)
            yield hosts
        finally:
            hosts.stop()
            no_network()
    assert not subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.count(f"mz{TAG}")


def test_blocks_cross_the_network_to_the_other_host(hosts: TwoHosts) -> None:
    with hosts.only("a"):
        hosts.ask(PROMPT)
        until_none(hosts.busy, 30)
    until_none(hosts.missing, 60)
    with hosts.only("b"):
        assert hosts.ask(PROMPT)["cached_remote"] == REUSABLE
    until_none(hosts.missing, 60)


def test_a_decode_copies_what_a_prompt_has_in_common_with_an_earlier_one_there(hosts: TwoHosts) -> None:
    prompt = [7, *PROMPT]
    with hosts.without(["prefill-b", "decode-a"]):
        hosts.ask(prompt)
        until_none(hosts.busy, 30)
        before = hosts.dumps()["decode-b"]["counts"].get("handoff_blocks_kept", 0)
        hosts.ask(prompt)
        hosts.ask([*prompt, *expected_tokens(prompt, 12), *PROMPT])
        assert hosts.dumps()["decode-b"]["counts"]["handoff_blocks_kept"] - before >= 2 * REUSABLE // 32
    until_none(hosts.missing, 60)


def test_a_cut_cable_costs_time_and_changes_no_token(hosts: TwoHosts) -> None:
    prompt = [5, *PROMPT]
    hosts.ask(prompt)
    until_none(hosts.busy, 30)
    cable = f"mz{TAG}b"
    ip("link", "set", cable, "down")
    try:
        eventually(lambda: "prefill-b" not in hosts.serves(), 30, "the other host is missed")
        assert hosts.ask(prompt)["prefill"] == "prefill-a"
    finally:
        ip("link", "set", cable, "up")
    until_none(hosts.missing, 60)
    hosts.ask(prompt)
