"""`restart --rolling` on a live cluster with two nodes of each role: every process is new, and no client has an error."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import web
from toy_cluster import ROOT, ToyCluster, eventually, expected_tokens, greedy

pytestmark = pytest.mark.timeout(400)
SECOND = {"gateway-1": "gateway", "conductor-1": "conductor"}
PAUSE_S = 0.05
"""Between two requests of a client: enough of them are under way at any time, and nodes find the CPU to start."""
PROMPTS = [[(7 * position + 31 * number) % 250 for position in range(60)] for number in range(6)]


class TwoOfEach(ToyCluster):
    nodes = (*ToyCluster.nodes, *SECOND)

    def complete(self) -> bool:
        return self.serves() >= {node for node in self.nodes if not node.startswith("gateway")}


@pytest.fixture
def two_of_each(directory: Path) -> Iterator[TwoOfEach]:
    path = directory / "two.toml"
    more = "".join(f'\n[[nodes]]\nname = "{name}"\nrole = "{role}"\n' for name, role in SECOND.items())
    path.write_text((ROOT / "configs/toy.toml").read_text() + more)
    cluster = TwoOfEach(directory / "run", config=str(path), settings=("gateway.reuse_port=true",))
    with cluster.unbroken():
        yield cluster


class Clients:
    """Clients with a new connection for each request, which check every token, until they are stopped."""

    def __init__(self, url: str, count: int) -> None:
        self.url = url
        self.answered = 0
        self.failures: list[str] = []
        self._over = threading.Event()
        self._right = [expected_tokens(prompt, 16) for prompt in PROMPTS]
        self._threads = [threading.Thread(target=self._ask_on, args=(number,)) for number in range(count)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self, number: int) -> None:
        while not self._over.is_set():
            number = (number + 1) % len(PROMPTS)
            try:
                answer = web.post(f"{self.url}/v1/completions", json=greedy(prompt=PROMPTS[number], max_tokens=16), timeout=120)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["token_ids"] == self._right[number]
            except (httpx.HTTPError, AssertionError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            self.answered += 1
            self._over.wait(PAUSE_S)


def restart(cluster: ToyCluster, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mooncake_zmq", "restart", "--rolling", *cluster.arguments, *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def peer_lines(cluster: ToyCluster, state: str) -> list[str]:
    logs = [(cluster.runtime_dir / "logs" / f"{node}.log").read_text().splitlines() for node in cluster.nodes]
    return [line for log in logs for line in log if '"peer"' in line and f'"state": "{state}"' in line]


def test_every_node_is_restarted_and_no_client_has_an_error_or_another_token(two_of_each: TwoOfEach) -> None:
    cluster = two_of_each
    before = {node: cluster.pid(node) for node in cluster.nodes}
    with Clients(cluster.url, 3) as clients:
        eventually(lambda: clients.answered > 3, 60, "clients are served")
        began_at = time.monotonic()
        done = restart(cluster, "--command", "kill {pid}")
        asked, took_s = clients.answered, time.monotonic() - began_at
        eventually(lambda: clients.answered > asked + 3, 60, "clients are served afterwards")
    assert done.returncode == 0, done.stdout + done.stderr + cluster.told()
    assert clients.failures == []
    after = {node: cluster.pid(node) for node in cluster.nodes}
    assert [node for node in cluster.nodes if before[node] == after[node]] == []
    assert f"restarted {len(cluster.nodes)} of {len(cluster.nodes)} nodes" in done.stdout
    assert cluster.errors() == []
    assert peer_lines(cluster, "left"), "its peers know of each stop"
    print(f"{asked} requests during the restart of {len(cluster.nodes)} nodes in {took_s:.0f} s, 0 errors")


def test_it_ends_at_a_node_that_does_not_come_back_and_lets_it_serve_and_the_only_gateway_is_refused(
    cluster: ToyCluster,
) -> None:
    refused = restart(cluster, "--command", "kill {pid}", "--only", "gateway-0")
    assert (refused.returncode, "no other node does what gateway-0 does" in refused.stderr) == (2, True), refused.stderr
    ended = restart(cluster, "--command", "true", "--only", "decode-a", "--only", "cache-a", "--wait", "3")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "cache-a did not come back within 3 s" in ended.stdout
    assert "--wait 3 --only cache-a --only decode-a" in ended.stdout
    assert "cache-a serves again" in ended.stdout
    assert web.get(f"{cluster.url}/health", timeout=10).json()["status"] == "ok"
