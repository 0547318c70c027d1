"""The toy cluster as real processes. Tests wait on conditions, never for a time, and nothing may stay behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import waiting
import web
from ports import free_port
from stopping import stop

from mooncake_zmq.chaos.checks import busy, unreached
from mooncake_zmq.chaos.clients import Truth
from mooncake_zmq.engine.spec import Engine
from mooncake_zmq.operate.local_nodes import collect_dumps

ROOT = Path(__file__).parent.parent.parent
NODES = ("conductor-0", "cache-a", "prefill-a", "decode-a", "cache-b", "prefill-b", "decode-b", "gateway-0")


eventually = partial(waiting.eventually, poll_s=0.05)


@contextlib.contextmanager
def stopped(pids: dict[str, int], serves: Callable[[], set[str]]) -> Iterator[None]:
    """These nodes stand still, and the gateway, whose peers `serves` tells, has missed them."""
    for pid in pids.values():
        stop(pid)
    try:
        eventually(lambda: (peers := serves()) and not pids.keys() & peers, 30, f"{list(pids)} are missed")
        yield
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """What an undisturbed greedy run gives: the engine alone, no cluster."""
    return Truth().tokens(prompt, count)


def of_the_engine_alone(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    """What an engine answers without a cluster."""
    sequence = engine.new_sequence(len(prompt) + count)
    logits = engine.prefill(sequence, np.asarray(prompt, np.int32))
    assert logits is not None
    tokens = [int(np.argmax(logits[-1]))]
    while len(tokens) < count:
        tokens.append(int(np.argmax(engine.decode([sequence], np.asarray(tokens[-1:], np.int32))[0])))
    return tokens


def until_none(remaining: Callable[[], Any], timeout_s: float) -> None:
    """Wait until `remaining()` is empty."""
    deadline = time.monotonic() + timeout_s
    while left := remaining():
        assert time.monotonic() < deadline, f"after {timeout_s} s there is still {left}"
        time.sleep(0.02)


class ToyCluster:
    """`mooncake-zmq up`, with the toy model by default, in a directory and under a cluster name of its own."""

    nodes = NODES
    start_s = 60.0

    def __init__(
        self, directory: Path, *, config: str = "configs/toy.toml", settings: tuple[str, ...] = (), port: int | None = None
    ) -> None:
        self.runtime_dir = directory
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.trusts = web.TRUST
        """Of a gateway that speaks TLS: what it is known by."""
        self.operators_key = ""
        self.name = f"test-{os.getpid()}-{self.port}"
        self.arguments = [
            *("--config", str(ROOT / config)),
            *("--set", f"cluster.runtime_dir={directory}"),
            *("--set", f"cluster.name={self.name}"),
            *("--set", f"gateway.http_port={self.port}"),
            *(part for setting in settings for part in ("--set", setting)),
        ]
        self.output = directory / "up.out"
        self.process: subprocess.Popen[bytes] | None = None

    def up(self) -> subprocess.Popen[bytes]:
        """Start `up` without waiting."""
        self.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.output.open("ab") as output:
            command = [sys.executable, "-m", "mooncake_zmq", "up", *self.arguments]
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        return self.process

    def start(self) -> None:
        process = self.up()
        eventually(lambda: process.poll() is not None or self.complete(), self.start_s, "the cluster starts")
        assert process.poll() is None, self.told()

    def stop(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 0, self.told()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run it; at the end nothing is left in it that a request needs."""
        try:
            self.start()
            yield
            until_none(self.busy_gauges, 30)
            self.stop()
        finally:
            self.kill()

    @contextlib.contextmanager
    def unbroken(self) -> Iterator[None]:
        """Run it; at the end it leaves nothing behind, and no actor broke a rule."""
        try:
            self.start()
            yield
            self.stop()
            assert not (left := self.leftovers()), left
            assert not (errors := self.errors()), errors  # all that died was killed
        finally:
            self.kill()

    def kill(self) -> None:
        """End what a test left running."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait(20)

    def told(self) -> str:
        return self.output.read_text()

    def leftovers(self) -> list[str]:
        """Sockets and segments of this cluster; all must be gone after its end. Locks record former processes, and stay."""
        stay = {"logs", "up.out", *(f"{node}.lock" for node in (*self.nodes, "up"))}
        files = [path.name for path in self.runtime_dir.iterdir() if path.name not in stay]
        segments = [path.name for path in Path("/dev/shm").glob(f"mooncake={self.name}=*")]
        processes = [pid for pid in os.listdir("/proc") if pid.isdigit() and self._belongs(int(pid))]
        return files + segments + processes

    def errors(self) -> list[str]:
        """Lines of the nodes' logs that tell of a broken rule, and logs that do not even tell of a start."""
        logs = [self.runtime_dir / "logs" / f"{node}.log" for node in self.nodes]
        texts = {log.name: log.read_text() for log in logs}
        silent = [name for name, text in texts.items() if '"started"' not in text]
        return silent + [line for text in texts.values() for line in text.splitlines() if _tells_of_an_error(line)]

    def _belongs(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return f"cluster.name={self.name}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return False

    # --- what a test does to it

    def pid(self, node: str) -> int:
        return int((self.runtime_dir / f"{node}.lock").read_text().split()[0])

    def signal(self, node: str, number: signal.Signals) -> None:
        if number == signal.SIGSTOP:
            stop(self.pid(node))
        else:
            os.kill(self.pid(node), number)

    @contextlib.contextmanager
    def only(self, host: str) -> Iterator[None]:
        """Let only this host's engines serve: the others are stopped, and the gateway has missed them.

        With a decode elsewhere the prompt's blocks come into the pool of that host too.
        """
        others = [node for node in self.nodes if node.startswith(("prefill", "decode")) and not node.endswith(f"-{host}")]
        with stopped({other: self.pid(other) for other in others}, self.serves):
            yield

    def serves(self) -> set[str]:
        """Every peer that the gateway is in conversation with; none when it does not answer."""
        health = self.health()
        return {name for names in health["peers"].values() for name in names} if health else set()

    def health(self) -> dict[str, Any] | None:
        with contextlib.suppress(httpx.HTTPError):
            headers = {"authorization": f"Bearer {self.operators_key}"} if self.operators_key else {}
            answer = web.get(f"{self.url}/health", headers=headers, verify=self.trusts, timeout=2)
            return answer.json() if answer.status_code == 200 else None
        return None

    def complete(self) -> bool:
        detail = self.health()
        return detail is not None and detail["peers"] == {
            "conductor": ["conductor-0"],
            "prefill": ["prefill-a", "prefill-b"],
            "decode": ["decode-a", "decode-b"],
            "cache-node": ["cache-a", "cache-b"],
        }

    def dumps(self) -> dict[str, Any]:
        return collect_dumps(self.runtime_dir, self.nodes)

    def missing(self) -> list[str]:
        """Nodes that do not answer, and peers that are not in conversation."""
        return unreached(self.dumps(), self.nodes)

    def busy_gauges(self) -> list[str]:
        return busy(self.dumps())

    # --- requests

    def complete_text(self, **body: Any) -> dict[str, Any]:
        answer = web.post(f"{self.url}/v1/completions", json=greedy(**body), timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, **body: Any) -> "Stream":
        return Stream(self.url, greedy(**body, stream=True, stream_options={"include_usage": True}))


SMALL_NODES = """[costs]
decode_step_s = 0.023  # given, so not measured at the start
[[nodes]]
name = "conductor-0"
role = "conductor"
[[nodes]]
name = "cache-a"
role = "cache-node"
[[nodes]]
name = "gateway-0"
role = "gateway"
"""


class SmallCluster(ToyCluster):
    """A cluster of these settings: a conductor, a cache-node, a gateway, and engines (name -> further lines of its node). It is
    complete once its gateway is in conversation with all that place and compute."""

    def __init__(self, directory: Path, settings: str, engines: Mapping[str, str]) -> None:
        nodes = [f'[[nodes]]\nname = "{name}"\nrole = "{name.split("-")[0]}"\n{more}\n' for name, more in engines.items()]
        config = directory / "cluster.toml"
        config.write_text(settings + SMALL_NODES + "".join(nodes))
        self.nodes = tuple(node["name"] for node in tomllib.loads(config.read_text())["nodes"])
        super().__init__(directory / "run", config=str(config))

    def complete(self) -> bool:
        detail, roles = self.health(), ("conductor", "prefill", "decode")
        wanted = {role: [node for node in self.nodes if node.startswith(f"{role}-")] for role in roles}
        return detail is not None and {role: detail["peers"][role] for role in roles} == wanted


@contextlib.contextmanager
def small_cluster(settings: str, engines: Mapping[str, str], kind: type[SmallCluster] = SmallCluster) -> Iterator[Any]:
    """Run a small cluster in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="mz-") as path:
        cluster = kind(Path(path), settings, engines)
        with cluster.unbroken():
            yield cluster


def _tells_of_an_error(line: str) -> bool:
    try:
        return json.loads(line).get("level") in ("critical", "error")
    except ValueError:  # a bare traceback, say
        return True


def greedy(**body: Any) -> dict[str, Any]:
    return {"model": "toy", "temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}


class Stream:
    """One streamed completion, read as slowly as the test wants."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.tokens: list[int] = []
        self.usage: dict[str, Any] = {}
        self.served: dict[str, Any] = {}
        self.errors: list[Any] = []
        self.done = False
        self._stack = contextlib.ExitStack()
        self._client = self._stack.enter_context(web.Client(timeout=60))
        self._body = body
        self._url = url
        self._lines: Iterator[str] | None = None

    def __enter__(self) -> "Stream":
        response = self._stack.enter_context(self._client.stream("POST", f"{self._url}/v1/completions", json=self._body))
        assert response.status_code == 200, response.read()
        self._lines = response.iter_lines()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, tokens: int | None = None) -> list[int]:
        """Read on until `tokens` have come in all, or to the end; fail if the stream ends before it has so many."""
        assert self._lines is not None
        for line in self._lines:
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                self.done = True
                break
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                self.errors.append(chunk["error"])
                continue
            for choice in chunk["choices"]:
                self.tokens += choice.get("token_ids") or []
            if chunk.get("usage"):
                self.usage, self.served = chunk["usage"], chunk.get("mooncake", self.served)
            if tokens is not None and len(self.tokens) >= tokens:
                break
        assert tokens is None or len(self.tokens) >= tokens, f"the stream ended after {len(self.tokens)}: {self.errors}"
        return self.tokens
