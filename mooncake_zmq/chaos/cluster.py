"""The processes of a run: starts them on their hosts, restarts them as systemd would, and reads what they hold."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from mooncake_zmq.chaos.checks import Footprint, Growth
from mooncake_zmq.chaos.keys import RunKeys
from mooncake_zmq.chaos.network import Network
from mooncake_zmq.chaos.node import DIALS_VARIABLE, PLANTED_VARIABLE, STEP_VARIABLE, TOKEN_VARIABLE, Dials
from mooncake_zmq.config.load import Loaded, load
from mooncake_zmq.config.records import Config, NodeSettings
from mooncake_zmq.core.roles import Role
from mooncake_zmq.operate.local_nodes import collect_dumps
from mooncake_zmq.transfer.process_lock import holder

SHM_BYTES, SSD_BYTES = 64 << 20, 48 << 20
"""The sizes of the file systems that stand for a host's shared memory and SSD."""
POLL_S = 0.05
RESTART_S = 0.5
"""The delay before a node that ended by itself starts again, as systemd's RestartSec."""
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 40.0
TOKEN_S = 0.005
HEALTH_TIMEOUT_S = 2.0
CPU_CLOCK = 2
"""Linux's number of the clock of a whole process's CPU time, CPUCLOCK_SCHED; above these three bits stands the process."""


@dataclass(slots=True)
class Child:
    """One node and its current process."""

    node: NodeSettings
    process: subprocess.Popen[bytes] | None = None
    start_at: float = 0.0
    """The monotonic time before which it is not started."""
    expected: bool = False
    """Whether the run itself ended this process."""
    starts: int = 0
    started_at: float = 0.0


class Cluster:
    """All nodes of a deployment, each on its host, in directories of the run's own. Used from one asyncio loop."""

    def __init__(
        self,
        loaded: Loaded,
        directory: Path,
        network: Network,
        *,
        planted: str = "",
        with_keys: bool = True,
        more: Mapping[str, str] | None = None,
        operators_key: str = "",
        step_s: float = 0.0,
    ) -> None:
        """`more`: settings for all nodes. `operators_key`: the API key for operators' pages; empty: gateways have none.
        `step_s`: the time of a decode's step, however large; 0: `TOKEN_S` for each row."""
        self.directory = directory
        self.network = network
        self.config = _moved(loaded, directory, network)
        self.children = {node.name: Child(node) for node in self.config.nodes}
        self.unexpected: list[str] = []
        """The processes that ended without a command to do so."""
        self.stopping = False
        self.releases: dict[str, Path] = {}
        """The directory whose release a node runs from its next start on; by default this one's."""
        self.peaks: dict[str, Footprint] = {}
        """The largest footprint that each process had at any time."""
        self.growths = {name: Growth() for name in self.children}
        self.own_file_systems = self._make_hosts()
        self.keys = self._make_keys() if with_keys else None
        """The run's keys; None: TCP in clear."""
        self._more = dict(more or {})
        self._operator = {"authorization": f"Bearer {operators_key}"} if operators_key else {}
        self._environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            TOKEN_VARIABLE: str(TOKEN_S),
            STEP_VARIABLE: str(step_s),
            PLANTED_VARIABLE: planted,
        }
        (directory / "logs").mkdir()

    # --- addresses

    @property
    def hosts(self) -> list[str]:
        return list(dict.fromkeys(node.host for node in self.config.nodes))

    def host(self, name: str) -> str:
        return self.children[name].node.host

    def roles(self) -> dict[str, Role]:
        """Return the role of each node."""
        return {name: child.node.role for name, child in self.children.items()}

    def of_host(self, host: str) -> list[str]:
        return [name for name in self.children if self.host(name) == host]

    def run_dir(self, host: str) -> Path:
        return self.directory / host / "run"

    def shm_dir(self, host: str) -> Path:
        return self.directory / host / "shm"

    def ssd_dir(self, host: str) -> Path:
        return self.directory / host / "ssd"

    def keys_dir(self, host: str) -> Path:
        return self.directory / host / "keys"

    def log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def dials(self, host: str) -> Dials:
        return Dials(self.directory / host / "dials")

    def urls(self) -> dict[str, str]:
        """Return the URL of each gateway."""
        found = {}
        for node in self.config.of_role("gateway"):
            address, _ = self.control(node.name)
            found[node.name] = f"http://{address}:{self.config.gateway.http_port}"
        return found

    def control(self, name: str) -> tuple[str, int]:
        """Return the address and port of a node's control socket."""
        address, _, port = self.children[name].node.endpoint.removeprefix("tcp://").partition(":")
        return address, int(port)

    # --- start and stop

    def start(self, name: str) -> None:
        child = self.children[name]
        host = child.node.host
        command = [*self.network.command(host), sys.executable, "-m", "mooncake_zmq.chaos.node", child.node.role]
        command += ["--config", str(self.directory / "chaos.toml"), "--node", name]
        for key, where in (
            ("cluster.runtime_dir", self.run_dir(host)),
            ("cluster.shm_dir", self.shm_dir(host)),
            ("cache_node.ssd.directory", self.ssd_dir(host)),
            ("security.keys", self.keys_dir(host) if self.keys else ""),
            ("security.allow_plain_tcp", str(self.keys is None).lower()),
            *self._more.items(),
        ):
            command += ["--set", f"{key}={where}"]
        environment = {**self._environment, DIALS_VARIABLE: str(self.directory / host / "dials")}
        if release := self.releases.get(name):
            environment["PYTHONPATH"] = str(release)
        with self.log(name).open("ab") as log:
            child.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=release,  # where `python -m` looks first
                start_new_session=True,
            )
        child.expected = False
        child.started_at = time.monotonic()
        child.starts += 1

    async def supervise(self) -> None:
        """Start nodes that should run and do not, until `stopping`."""
        sampled_at = 0.0
        while not self.stopping:
            now = time.monotonic()
            for name, child in self.children.items():
                if child.process is not None and (code := child.process.poll()) is not None:
                    self._ended(name, child, code, now)
                if child.process is None and now >= child.start_at:
                    self.start(name)
            if now > sampled_at + 1.0:
                sampled_at = now
                self._sample()
            await asyncio.sleep(POLL_S)

    def _ended(self, name: str, child: Child, code: int, now: float) -> None:
        child.process = None
        if not child.expected or code > 0:
            self.unexpected.append(f"{name} ended with code {code} in its run {child.starts}; see {self.log(name)}")
        child.start_at = max(child.start_at, now + RESTART_S * (not child.expected))

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a node a signal, if it runs."""
        child = self.children[name]
        if child.process is None or child.process.poll() is not None:
            return
        if number in (signal.SIGKILL, signal.SIGTERM):
            child.expected = True
        child.process.send_signal(number)

    def kill(self, name: str, away_s: float) -> None:
        """Kill a node by SIGKILL, and start it no sooner than `away_s` from now."""
        self.children[name].start_at = time.monotonic() + away_s
        self.signal(name, signal.SIGKILL)

    def forget(self, host: str) -> None:
        """Empty the directories that a reboot empties, before any of the host's killed nodes starts again."""
        for name in self.of_host(host):
            if (process := self.children[name].process) is not None:
                process.wait()
        for directory in (self.run_dir(host), self.shm_dir(host)):
            for path in directory.iterdir():
                path.unlink()

    async def drain(self, name: str) -> None:
        """Drain a node by SIGTERM, and wait until its next incarnation runs."""
        child = self.children[name]
        before, deadline = child.starts, time.monotonic() + STOP_TIMEOUT_S
        self.signal(name, signal.SIGTERM)
        while child.starts == before and not self.stopping:
            if time.monotonic() > deadline:
                self.unexpected.append(f"{name} had not ended {STOP_TIMEOUT_S:.0f} s after SIGTERM")
                self.kill(name, 0.0)
                deadline = float("inf")
            await asyncio.sleep(POLL_S)

    async def stop(self) -> list[str]:
        """Stop all nodes in order, gateways first; return what went wrong."""
        self.stopping = True
        wrong: list[str] = []
        gateways = [name for name, child in self.children.items() if child.node.role == "gateway"]
        for group in (gateways, [name for name in self.children if name not in gateways]):
            for name in group:
                self.signal(name, signal.SIGCONT)
                self.signal(name, signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for name in group:
                wrong += await self._await_end(name, deadline)
        return wrong

    async def _await_end(self, name: str, deadline: float) -> list[str]:
        process = self.children[name].process
        if process is None:
            return [f"{name} did not run when everything was stopped"]
        while (code := process.poll()) is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        self.children[name].process = None
        if code is None:
            process.kill()
            process.wait()
            return [f"{name} did not end within {STOP_TIMEOUT_S:.0f} s"]
        return [f"{name} ended with code {code} when it was stopped"] if code else []

    def destroy(self) -> None:
        """Kill every process that still runs."""
        self.stopping = True
        for child in self.children.values():
            if child.process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()
                child.process = None

    # --- state

    async def dumps(self) -> dict[str, Any]:
        """Return the dumps of the nodes that answer."""
        found: dict[str, Any] = {}
        for host in self.hosts:
            found |= await asyncio.to_thread(collect_dumps, self.run_dir(host), self.of_host(host))
        return found

    async def dump(self, name: str) -> dict[str, Any] | None:
        """Return the dump of one node, if it answers."""
        found = await asyncio.to_thread(collect_dumps, self.run_dir(self.host(name)), [name])
        return found.get(name)

    async def is_whole(self) -> bool:
        """Return whether every gateway sees every conductor, prefill and decode."""
        wanted = {node.name for node in self.config.of_role("conductor", "prefill", "decode")}
        running = all(holder(self.run_dir(child.node.host), name) for name, child in self.children.items())
        return running and all([wanted <= await _seen(url, self._operator) for url in self.urls().values()])

    async def until_whole(self, timeout_s: float) -> bool:
        """Wait until the cluster is whole; return False after the timeout."""
        deadline = time.monotonic() + timeout_s
        while not await self.is_whole():
            if time.monotonic() > deadline or self.stopping:
                return False
            await asyncio.sleep(4 * POLL_S)
        return True

    def footprints(self) -> dict[str, Footprint]:
        """Return the footprint of each process."""
        found = {}
        for name, child in self.children.items():
            if child.process is not None:
                with suppress(psutil.Error):
                    process = psutil.Process(child.process.pid)
                    found[name] = Footprint(process.num_fds(), process.memory_info().rss)
        return found

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU time that each process has used so far."""
        used = {}
        for name, child in self.children.items():
            if child.process is not None:
                with suppress(OSError):  # it has ended
                    used[name] = time.clock_gettime((~child.process.pid << 3) | CPU_CLOCK)
        return used

    def segments(self, host: str) -> list[str]:
        """Return the names of the files in a host's shared memory."""
        return sorted(path.name for path in self.shm_dir(host).iterdir())

    def leftovers(self) -> list[str]:
        """Return the sockets and segments that are left after all nodes have ended. Lock files stay, as they name the last
        incarnation."""
        files = [path for host in self.hosts for path in (*self.run_dir(host).iterdir(), *self.shm_dir(host).iterdir())]
        return [f"{path} was left behind" for path in files if path.suffix not in (".lock", ".json")]

    def lines(self) -> Iterator[tuple[str, list[str]]]:
        """Return the log lines of each node."""
        for name in self.children:
            with suppress(FileNotFoundError):
                yield name, self.log(name).read_text(encoding="utf-8", errors="replace").splitlines()

    def _sample(self) -> None:
        for name, now in self.footprints().items():
            most = self.peaks.get(name, now)
            self.peaks[name] = Footprint(max(most.descriptors, now.descriptors), max(most.rss_bytes, now.rss_bytes))
            child = self.children[name]
            self.growths[name].saw(child.starts, time.monotonic() - child.started_at, now.rss_bytes)

    def _make_keys(self) -> RunKeys:
        nodes = {name: child.node.host for name, child in self.children.items()}
        return RunKeys(self.directory / "keys", nodes, {host: self.keys_dir(host) for host in self.hosts})

    def _make_hosts(self) -> bool:
        """Make directories for each host. True: shared memory and SSD are file systems of their own, so that they can be
        full."""
        own = True
        for host in self.hosts:
            for path, size in ((self.run_dir(host), 0), (self.shm_dir(host), SHM_BYTES), (self.ssd_dir(host), SSD_BYTES)):
                path.mkdir(mode=0o700, parents=True)
                if size:
                    own = self.network.mount(path, size) and own
            self.dials(host)
        return own


def _moved(loaded: Loaded, directory: Path, network: Network) -> Config:
    """Return the deployment with the addresses of this run, written into the run's directory."""
    text = Path(loaded.path).read_text(encoding="utf-8")
    for address in addresses(loaded.config).values():
        text = re.sub(rf"\b{re.escape(address)}\b", network.address(address), text)
    path = directory / "chaos.toml"
    path.write_text(text, encoding="utf-8")
    return load(str(path), {}).config


def addresses(config: Config) -> dict[str, str]:
    """Return the address of each host, by name: that of its first node."""
    found: dict[str, str] = {}
    for node in config.nodes:
        found.setdefault(node.host, node.endpoint.removeprefix("tcp://").partition(":")[0])
    return found


async def _seen(url: str, headers: Mapping[str, str]) -> set[str]:
    """Return the peers of a gateway; none while it does not answer or is not ready."""
    try:
        async with httpx.AsyncClient(timeout=HEALTH_TIMEOUT_S, verify=False) as client:  # HTTP; a TLS context costs 20 ms
            answer = await client.get(f"{url}/health", headers=headers)
            peers = answer.json()["peers"] if answer.status_code == 200 else {}
    except (httpx.HTTPError, ValueError, KeyError):
        return set()
    return {name for names in peers.values() for name in names}
