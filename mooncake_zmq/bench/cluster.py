"""A cluster for one benchmark: started on a free port, measured over HTTP, stopped at the end."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import click
import httpx
from httpx_sse import EventSource

from mooncake_zmq.bench.others.store_driver import free_port
from mooncake_zmq.config.load import load
from mooncake_zmq.config.records import Config
from mooncake_zmq.operate.local_nodes import collect_dumps

START_TIMEOUT_S = 300.0
STATE_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 300.0
STOP_S = 60.0
T = TypeVar("T")
BUSY = ("puts", "fetches", "requests_", "writing_", "unacknowledged")
"""Gauges that are zero at an idle node."""


class Full(click.ClickException):
    """Raised for a request that was refused for now."""


@dataclass(slots=True)
class Answer:
    """One streamed completion. Times in seconds since the request was sent."""

    token_times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.token_times[0]

    @property
    def served(self) -> dict[str, Any]:
        """The nodes that served the request and the sources of its reused tokens."""
        mooncake: dict[str, Any] = self.usage["mooncake"]
        return mooncake


class BenchCluster:
    """A running cluster: its address, and the processes behind it."""

    def __init__(self, url: str, runtime_dir: Path, nodes: list[str]) -> None:
        self.url = url
        self._runtime_dir = runtime_dir
        self.nodes = nodes
        # Kept connections: setting up a client takes tens of milliseconds, which do not belong to an answer's time.
        self._client = httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S)
        model = self._client.get("/v1/models").json()["data"][0]
        self.model = str(model["id"])
        self.max_model_len = int(model["max_model_len"])
        """The most tokens of a prompt and its answer together."""

    def complete(self, tokens: list[int], *, max_tokens: int, answer: Answer | None = None) -> Answer:
        """Stream a greedy completion of a token-id prompt that ends only at `max_tokens`, into `answer` if that is given."""
        body = {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        answer = Answer() if answer is None else answer
        began = time.perf_counter()
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                kind = Full if response.status_code in (429, 503) else click.ClickException
                raise kind(f"the cluster answered {response.status_code}: {response.text}")
            for event in EventSource(response).iter_sse():
                if event.data == "[DONE]":
                    continue
                now = time.perf_counter() - began
                chunk = event.json()
                if "error" in chunk:
                    raise click.ClickException(f"the cluster failed: {chunk['error']['message']}")
                if chunk.get("usage"):
                    answer.usage = {**chunk["usage"], "mooncake": chunk.get("mooncake", {})}
                for choice in chunk["choices"]:
                    ids = choice.get("token_ids") or []
                    answer.tokens += ids
                    answer.token_times += [now] * len(ids)
                    answer.text += choice["text"]
        return answer

    def dumps(self, nodes: list[str]) -> dict[str, Any]:
        """Return the state of these nodes, as `mooncake-zmq dump` prints it."""
        return collect_dumps(self._runtime_dir, nodes)

    def pid(self, node: str) -> int:
        """Return the process id of a node, from its lock file."""
        return int((self._runtime_dir / f"{node}.lock").read_text().split()[0])

    @contextmanager
    def paused(self, *nodes: str) -> Iterator[None]:
        """SIGSTOP nodes until the cluster has noticed; continue them afterwards and wait until all are back."""
        pids, names = [self.pid(node) for node in nodes], " and ".join(nodes)
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            self.wait(lambda: {*nodes} <= {*self.missing()}, f"{names} to be missed")
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            self.wait(lambda: not {*nodes} & {*self.missing()}, f"{names} to be back")

    def settle(self) -> None:
        """Wait until every node is idle: all blocks of the requests so far are in the pool, and the conductor knows them."""
        deadline = time.monotonic() + STATE_TIMEOUT_S
        while time.monotonic() < deadline:
            gauges = [dump["gauges"] for dump in collect_dumps(self._runtime_dir, self.nodes).values()]
            if not any(value for node in gauges for name, value in node.items() if name.startswith(BUSY)):
                return
        raise click.ClickException(f"the cluster was not idle within {STATE_TIMEOUT_S:g} s")

    def missing(self) -> list[str]:
        """Return the nodes with which the gateway is not in conversation."""
        names: list[str] = self._client.get("/health").json()["not_connected"]
        return names

    def wait(self, condition: Callable[[], T], what: str) -> T:
        """Return what a condition gives once that is true."""
        deadline = time.monotonic() + STATE_TIMEOUT_S
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.05)
        raise click.ClickException(f"waited {STATE_TIMEOUT_S:g} s in vain for {what}")


def variables_of(directory: Path, port: int, overrides: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of nodes in a runtime directory of their own. `overrides`: "section.key" -> TOML value."""
    settings = {"cluster.runtime_dir": str(directory), "cluster.name": directory.name.lower().replace("_", "-")}
    settings |= {"gateway.http_port": str(port), **overrides}
    return {f"MOONCAKE_ZMQ_{key.upper().replace('.', '__')}": value for key, value in settings.items()}


def connected(port: int, process: "subprocess.Popen[bytes]", log: Path, config: Config) -> BenchCluster:
    """Return a cluster whose processes write `log` in its runtime directory, once its gateway at `port` answers. Raises
    click.ClickException."""
    url = f"http://127.0.0.1:{port}"
    # Over HTTP; a TLS context costs 20 ms.
    healthy = partial(httpx.get, f"{url}/health", timeout=5, verify=False)
    if not answers(healthy, process, START_TIMEOUT_S):
        raise click.ClickException(f"the cluster did not start:\n{last_lines(log)}")
    return BenchCluster(url, log.parent, [node.name for node in config.nodes])


@contextmanager
def bench_cluster(path: Path, overrides: Mapping[str, str] = MappingProxyType({})) -> Iterator[BenchCluster]:
    """Start the cluster of the file at `path` in a runtime directory of its own. `overrides`: "section.key" -> TOML value."""
    config = load(path).config
    with tempfile.TemporaryDirectory(prefix="mczmq-") as directory:
        port = free_port()
        variables = variables_of(Path(directory), port, overrides)
        log = Path(directory) / "up.log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "mooncake_zmq", "up", "--config", str(path)]
            up = subprocess.Popen(command, env=os.environ | variables, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield connected(port, up, log, config)
        finally:
            stop([up])


@contextmanager
def written_cluster(settings: str) -> Iterator[BenchCluster]:
    """Start the cluster of a configuration in TOML; see `bench_cluster`."""
    with tempfile.TemporaryDirectory(prefix="mczmq-") as directory:
        path = Path(directory) / "cluster.toml"
        path.write_text(settings)
        with bench_cluster(path) as cluster:
            yield cluster


def stop(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    """Stop processes as an operator does, all at once, and kill those that do not end."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in processes:
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(ask: Callable[[], httpx.Response], process: "subprocess.Popen[bytes]", timeout_s: float) -> bool:
    """Ask a server that starts until it answers 200; return False if its process ends or the time is over before."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError):
            if ask().status_code == 200:
                return True
        time.sleep(0.2)
    return False


def last_lines(log: Path) -> str:
    """Return the end of a program's output."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
