"""Two tenants of one cluster: bob asks small questions all the time while alice floods it in each way in turn. Bob must be
answered, and rightly; his latency is measured beside each flood and alone, and so is the CPU time that the cluster uses between
his question and his answer, in which other programs' time does not count."""

import asyncio
import json
import math
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mooncake_zmq.chaos import floods
from mooncake_zmq.chaos.clients import Truth
from mooncake_zmq.chaos.cluster import START_TIMEOUT_S, Cluster, addresses
from mooncake_zmq.chaos.floods import Target
from mooncake_zmq.chaos.keys import OUTSIDER
from mooncake_zmq.chaos.network import Network, open_network
from mooncake_zmq.config.load import Loaded, load
from mooncake_zmq.engine.toy import EOS_ID
from mooncake_zmq.gateway.requests.tenants import Tenant, digest_of

SHARE = 0.25
"""The share of a gateway's slots that each of the two may have."""
PROMPT_TOKENS, ANSWER_TOKENS = 64, 8
BOBS = 4
"""The number of requests that bob has open at a time."""
ANSWER_TIMEOUT_S = 60.0
RAMP_S = 1.0
"""The time between a flood's start and its measurement."""
HELD_WHEN_IDLE = ("edge_listening",)
QUIET_TIMEOUT_S = 60.0
FLOOD_END_S = 60.0
"""The time after its end within which a flood's process must have exited."""
WANTED_RATIO = 1.5
DETAILS_KEPT = 3
POLL_S = 0.2

Say = Callable[[str], None]

STORE_TENANT = f"""
[[cache_node.objects.tenants]]
name = "alice"
namespaces = ["alice/"]
clients = ["{OUTSIDER}"]
"""


@dataclass(slots=True)
class Served:
    """The answers that a tenant got within a time."""

    latencies_s: list[float] = field(default_factory=list)
    """The latencies of right answers."""
    gateway_s: list[float] = field(default_factory=list)
    """The CPU time that the gateway used during each of them, and then all nodes together."""
    nodes_s: list[float] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile by nearest rank; NaN where there are no values."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else math.nan


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of flood: bob's answers just before it and beside it, and alice's."""

    kind: str
    alone: Served
    beside: Served
    got: Mapping[str, int]
    cpu_s: float = 0.0
    """The CPU time of the flood itself, of what nothing else used: a flood that got little shows nothing."""

    @property
    def ratio(self) -> float:
        """The ratio of the latencies' p99."""
        return percentile(self.beside.latencies_s, 0.99) / percentile(self.alone.latencies_s, 0.99)

    @property
    def gateway_ratio(self) -> float:
        """The ratio of the p99 of the gateway's CPU time."""
        return percentile(self.beside.gateway_s, 0.99) / percentile(self.alone.gateway_s, 0.99)


@dataclass(slots=True)
class Outcome:
    """The result of a run. Clean: no problems."""

    directory: Path
    network: str = ""
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Bob:
    """A client of one gateway that asks small questions, some at a time, each on a connection of its own."""

    def __init__(
        self, host: str, port: int, key: str, *, gateway: str = "", cpu_s: Callable[[], dict[str, float]] = dict
    ) -> None:
        """`cpu_s` returns the CPU time that each process of the cluster has used so far, of which one is the `gateway`."""
        self._host, self._port, self._key = host, port, key
        self._gateway, self._cpu_s = gateway, cpu_s
        self._random = Random("bob")
        self._truth = Truth()

    async def ask_for(self, duration_s: float) -> Served:
        """Ask without a pause for so long, and judge every token afterwards."""
        ends_at = time.monotonic() + duration_s
        served, answers = Served(), list[tuple[list[int], list[float], Any]]()

        async def one() -> None:
            while time.monotonic() < ends_at:
                prompt = [self._random.randrange(EOS_ID) for _ in range(PROMPT_TOKENS)]
                began = self._clocks()
                try:
                    got = await self._ask(prompt)
                except (OSError, TimeoutError, ValueError, LookupError) as error:
                    served.problems[f"no answer: {type(error).__name__} {error}"] += 1
                    await asyncio.sleep(POLL_S)
                else:
                    took = [after - before for before, after in zip(began, self._clocks(), strict=True)]
                    answers.append((prompt, took, got))

        await asyncio.gather(*[one() for _ in range(BOBS)])
        for prompt, took, got in answers:
            if not isinstance(got, list):
                served.problems[f"status {got}"] += 1
            elif got != await asyncio.to_thread(self._truth.tokens, prompt, ANSWER_TOKENS):
                served.problems["wrong tokens"] += 1
            else:
                for values, value in zip((served.latencies_s, served.gateway_s, served.nodes_s), took, strict=True):
                    values.append(value)
        return served

    def _clocks(self) -> tuple[float, float, float]:
        """Return the time, and the CPU time that the gateway and all nodes have used."""
        used = self._cpu_s()
        return time.monotonic(), used.get(self._gateway, 0.0), sum(used.values())

    async def _ask(self, prompt: list[int]) -> list[int] | str:
        """Return the tokens of an answer, or the status of a refusal."""
        said = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body = json.dumps({"model": "toy"} | said).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._key}\r\nconnection: close\r\n"
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
                answer = await reader.read()
            finally:
                writer.transport.abort()
        start, _, payload = answer.partition(b"\r\n\r\n")
        if (status := start[9:12].decode("latin-1")) != "200":
            return status or "cut"
        tokens = json.loads(payload)["choices"][0]["token_ids"]
        assert isinstance(tokens, list)
        return tokens


class TenantsRun:
    """Drives one run: a cluster with two tenants, and each kind of flood in turn."""

    def __init__(self, loaded: Loaded, kinds: Sequence[str], seconds: float, step_s: float, say: Say) -> None:
        """`seconds`: the length of each flood, and of bob's time alone before it. `step_s`: the time of a decode's step."""
        self._loaded, self._kinds, self._say = loaded, kinds, say
        self._seconds, self._step_s = seconds, step_s
        self._secrets = {name: secrets.token_urlsafe(24) for name in ("alice", "bob", "operator")}
        self.outcome = Outcome(Path(tempfile.mkdtemp(prefix="mz-chaos-")))

    async def run(self) -> Outcome:
        """Drive the whole run; in every case no process is left."""
        network = open_network(addresses(self._loaded.config))
        self.outcome.network = network.name
        try:
            cluster = Cluster(
                self._with_tenant(),
                self.outcome.directory,
                network,
                more={"gateway.api_keys": str(self._api_keys())},
                operators_key=self._secrets["operator"],
                step_s=self._step_s,
            )
            try:
                await self._with(cluster, network)
            finally:
                cluster.destroy()
        finally:
            network.close()
        return self.outcome

    def _with_tenant(self) -> Loaded:
        """Return the deployment with alice's namespace in its stores."""
        path = self.outcome.directory / "tenants.toml"
        path.write_text(Path(self._loaded.path).read_text(encoding="utf-8") + STORE_TENANT, encoding="utf-8")
        return load(str(path), {})

    def _api_keys(self) -> Path:
        def line(name: str, **more: Any) -> str:
            return Tenant(name=name, digest=digest_of(self._secrets[name]), **more).line()

        path = self.outcome.directory / "api_keys"
        lines = (line("alice", share=SHARE), line("bob", share=SHARE), line("operator", role="admin"))
        path.write_text("".join(f"{each}\n" for each in lines), encoding="utf-8")
        path.chmod(0o600)
        return path

    async def _with(self, cluster: Cluster, network: Network) -> None:
        self._say(f"{len(cluster.children)} processes; {network.name}; logs in {self.outcome.directory}")
        supervising = asyncio.create_task(cluster.supervise())
        try:
            if not await cluster.until_whole(START_TIMEOUT_S):
                self.outcome.problems.append(f"not whole after {START_TIMEOUT_S:.0f} s")
                return
            gateway, where = next(iter(cluster.urls().items()))
            host, _, port = where.removeprefix("http://").partition(":")
            bob = Bob(host, int(port), self._secrets["bob"], gateway=gateway, cpu_s=cluster.cpu_s)
            node = next(node for node in cluster.config.nodes if node.store_endpoint)
            store = node.store_endpoint.replace("://", f"://{node.name}@")
            keys = str(self.outcome.directory / "keys") if cluster.keys else ""
            alice = Target(host, int(port), self._secrets["alice"], network.sources, store, keys, OUTSIDER, "alice/")
            await bob.ask_for(self._seconds)  # all that is opened at its first use is open
            for kind in self._kinds:
                await self._flood(kind, cluster, gateway, bob, alice)
            self.outcome.problems += await cluster.stop()
        finally:
            cluster.stopping = True
            await supervising
        self.outcome.problems += cluster.unexpected

    async def _flood(self, kind: str, cluster: Cluster, gateway: str, bob: Bob, alice: Target) -> None:
        alone = await bob.ask_for(self._seconds)
        process = await floods.begin(kind, alice, self._seconds + RAMP_S)
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(self._seconds + FLOOD_END_S):
                await process.stdout.readline()
                await asyncio.sleep(RAMP_S)
                beside = await bob.ask_for(self._seconds)
                said, complaint = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            self.outcome.problems.append(f"{kind}: the flood itself failed: {complaint.decode(errors='replace')[-500:]}")
            return
        row = Row(kind, alone, beside, **json.loads(said.splitlines()[-1]))
        self.outcome.rows.append(row)
        self._say(f"{kind}: {' '.join(_cells(row)[1:])}")
        if not floods.reached(kind, row.got):
            self.outcome.problems.append(f"{kind}: the flood reached nothing: {dict(row.got)}")
        for when, served in (("alone before", alone), ("beside", beside)):
            for what, count in served.problems.most_common(DETAILS_KEPT):
                self.outcome.problems.append(f"bob, {when} {kind}: {what}, {count} times")
        if not served_at_all(row):
            self.outcome.problems.append(f"bob, beside {kind}: not one answer")
        if (left := await _left(cluster, gateway)) is not None:
            self.outcome.problems.append(f"{kind}: {left}, {QUIET_TIMEOUT_S:.0f} s after its end")


def served_at_all(row: Row) -> bool:
    """Return whether bob was answered, before and beside the flood."""
    return bool(row.alone.latencies_s and row.beside.latencies_s)


async def _left(cluster: Cluster, gateway: str) -> str | None:
    """Return what a gateway still holds once no client uses it; None: nothing, after a while."""
    deadline = time.monotonic() + QUIET_TIMEOUT_S
    while True:
        dump = await cluster.dump(gateway)
        gauges = dump["edge"]["gauges"] if dump else {}
        held = {name: value for name, value in gauges.items() if value and name not in HELD_WHEN_IDLE}
        if dump and not held:
            return None
        if time.monotonic() > deadline:
            return f"{gateway} holds {held}" if dump else f"{gateway} does not answer"
        await asyncio.sleep(POLL_S)


def _cells(row: Row) -> list[str]:
    def both(values: Sequence[float]) -> str:
        return f"{percentile(values, 0.5) * 1000:.0f} / {percentile(values, 0.99) * 1000:.0f}"

    got = ", ".join(f"{what} {count:,}" for what, count in sorted(row.got.items(), key=lambda each: -each[1]))
    alone, beside = row.alone, row.beside
    times = [both(alone.latencies_s), both(beside.latencies_s), f"{row.ratio:.2f}"]
    gateways = [both(alone.gateway_s), both(beside.gateway_s), f"{row.gateway_ratio:.2f}"]
    return [row.kind, *times, *gateways, both(alone.nodes_s), both(beside.nodes_s), f"{row.cpu_s:.1f}", got]


HEADS = (
    *("flood", "alone, ms, p50 / p99", "beside it", "ratio of p99"),
    *("gateway's CPU alone, ms, p50 / p99", "beside it", "ratio of p99"),
    *("all nodes' CPU alone, ms, p50 / p99", "beside it", "alice's CPU, s", "what alice got"),
)


def print_report(outcome: Outcome, console: Console) -> None:
    """Print the table, and what was wrong."""
    table = Table(title=f"bob beside alice's floods, {outcome.network}", title_justify="left", box=None)
    for head in HEADS:
        table.add_column(head, overflow="fold")
    for row in outcome.rows:
        style = "yellow" if not row.ratio <= WANTED_RATIO else "default"
        table.add_row(*(f"[{style}]{escape(cell)}[/]" for cell in _cells(row)))
    console.print(table)
    console.print(
        "Alice's clients get only the CPU that nothing else uses: where that is little, a row shows little. The CPU columns "
        "count what the cluster does between bob's question and his answer; other programs' time is not in them."
    )
    for problem in outcome.problems:
        console.print(f"[red]{escape(problem)}[/]", soft_wrap=True)
    if above := [row.kind for row in outcome.rows if not row.ratio <= WANTED_RATIO]:
        console.print(f"[yellow]above {WANTED_RATIO}[/]: {', '.join(above)}", soft_wrap=True)
    if not outcome.problems:
        console.print("[green]clean[/]: bob was answered, and rightly, every time")


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the same as one JSON object."""
    return {
        "clean": not outcome.problems,
        "network": outcome.network,
        "floods": [
            {
                "kind": row.kind,
                "alone_ms": {"count": len(row.alone.latencies_s)} | _percentiles(row.alone),
                "beside_ms": {"count": len(row.beside.latencies_s)} | _percentiles(row.beside),
                "ratio": round(row.ratio, 3) if served_at_all(row) else None,
                "gateway_cpu_ratio": round(row.gateway_ratio, 3) if served_at_all(row) else None,
                "alice": dict(row.got),
                "alice_cpu_s": round(row.cpu_s, 2),
            }
            for row in outcome.rows
        ],
        "problems": outcome.problems,
        "directory": str(outcome.directory),
    }


def _percentiles(served: Served) -> dict[str, float | None]:
    measured = {"": served.latencies_s, "gateway_cpu_": served.gateway_s, "nodes_cpu_": served.nodes_s}
    return {
        f"{what}{name}": round(percentile(values, share) * 1000, 2) if values else None
        for what, values in measured.items()
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }
