"""One run: a cluster, its clients, the faults of its plan, and the checks once they are over."""

import asyncio
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from mooncake_zmq.chaos.checks import (
    MORE_FOR_STRANGERS_BYTES,
    MORE_RSS_BYTES,
    Footprint,
    Growth,
    bad_lines,
    busy,
    growing,
    grown,
    strangers_in_memory,
    swollen,
    unreached,
    warned,
)
from mooncake_zmq.chaos.clients import Clients, Score
from mooncake_zmq.chaos.cluster import START_TIMEOUT_S, Cluster, addresses
from mooncake_zmq.chaos.faults import Saboteur
from mooncake_zmq.chaos.history import Done, History
from mooncake_zmq.chaos.hostile import assault, burst
from mooncake_zmq.chaos.network import open_network
from mooncake_zmq.chaos.plan import Fault, Kind, draw_plan
from mooncake_zmq.chaos.streams import open_api
from mooncake_zmq.chaos.upgrade import Upgraded, release, upgrade
from mooncake_zmq.config.load import Loaded

QUIET_TIMEOUT_S = 120.0
"""The time until every lease has ended: the longest one lasts a minute."""
REPORT_EVERY_S = 10.0
POLL_S = 0.2
LINES_KEPT = 20

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The settings of a run."""

    loaded: Loaded
    seed: int
    duration_s: float
    clients: int = 8
    kinds: Sequence[Kind] = tuple(Kind)
    planted: str = ""
    """The bug to plant; empty: none."""
    with_keys: bool = True
    """Whether TCP is encrypted by CURVE."""
    hostile: int = 0
    """The number of hostile inputs to every socket, instead of faults; no node may die or grow of them."""
    bursts: int = 0
    """The number of bursts of connections to a socket of every kind, instead of faults; the same must hold."""

    upgrade_from: str = ""
    """The former release, a directory or a commit, from which and back to which the nodes are rolled, instead of faults."""

    @property
    def attacks(self) -> bool:
        """Whether the cluster is attacked instead of broken."""
        return bool(self.hostile or self.bursts)


@dataclass(slots=True)
class Outcome:
    """The result of a run. Clean: no problems."""

    directory: Path
    network: str = ""
    api: str = ""
    took_s: float = 0.0
    began_at: float = 0.0
    score: Score = field(default_factory=Score)
    done: list[Done] = field(default_factory=list)
    not_reached: int = 0
    impossible: dict[Kind, str] = field(default_factory=dict)
    before: dict[str, Footprint] = field(default_factory=dict)
    after: dict[str, Footprint] = field(default_factory=dict)
    peaks: dict[str, Footprint] = field(default_factory=dict)
    growths: dict[str, Growth] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    """The number of hostile inputs, or of bursts, that each socket took."""
    upgraded: Upgraded | None = None
    strangers_refused: int = 0
    """The number of refused connections by keys that are not admitted."""
    warnings: Counter[str] = field(default_factory=Counter)
    """The number of warnings in nodes' logs, by event."""
    problems: list[str] = field(default_factory=list)


class NotStarted(Exception):
    """The cluster did not start."""


class Run:
    """Drives one run from start to verdict."""

    def __init__(self, wanted: Wanted, say: Say) -> None:
        self._wanted = wanted
        self._say = say
        self._over = asyncio.Event()
        """Set when the time is up or the operator ends the run."""
        self.outcome = Outcome(Path(tempfile.mkdtemp(prefix="mz-chaos-")))

    async def run(self) -> Outcome:
        """Drive the whole run; in every case no process is left."""
        wanted, outcome = self._wanted, self.outcome
        network = open_network(addresses(wanted.loaded.config))
        outcome.network, outcome.impossible = network.name, dict(network.impossible)
        if not wanted.with_keys:
            outcome.impossible[Kind.ROTATE] = "there are no keys"
        try:
            cluster = Cluster(wanted.loaded, outcome.directory, network, planted=wanted.planted, with_keys=wanted.with_keys)
            try:
                with release(wanted.upgrade_from, outcome.directory) if wanted.upgrade_from else nullcontext() as former:
                    cluster.releases = dict.fromkeys(cluster.children, former) if former else {}
                    await self._with(cluster, former)
            finally:
                cluster.destroy()
        finally:
            network.close()
        return outcome

    async def _with(self, cluster: Cluster, former: Path | None) -> None:
        wanted, outcome = self._wanted, self.outcome
        history, api = History(), open_api()
        outcome.api, outcome.done = api.name, history.done
        outcome.peaks, outcome.growths = cluster.peaks, cluster.growths
        clients = Clients(api, cluster.urls(), history, seed=wanted.seed, count=wanted.clients)
        outcome.score = clients.score
        self._mind_signals()
        supervising = asyncio.create_task(cluster.supervise())
        try:
            await self._begin(cluster, clients)
            await self._break(cluster, clients, history, former)
            await self._settle(cluster, clients)
            outcome.problems += await cluster.stop()
        finally:
            cluster.stopping = True
            await supervising
            await api.close()
        self._look_back(cluster)

    def _mind_signals(self) -> None:
        """Handle signals: the first one ends the faults and has the run judged, the second one ends everything."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def on_signal() -> None:
            if self._over.is_set():
                task.cancel()
            self._over.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)

    async def _begin(self, cluster: Cluster, clients: Clients) -> None:
        outcome = self.outcome
        guarded = "by keys" if cluster.keys else "in clear"
        self._say(
            f"{len(cluster.children)} processes on {len(cluster.hosts)} hosts, {guarded}; {outcome.network}; "
            f"logs in {outcome.directory}"
        )
        if not await cluster.until_whole(START_TIMEOUT_S):
            raise NotStarted(f"not whole after {START_TIMEOUT_S:.0f} s; see {outcome.directory}/logs")
        await clients.warm_up()
        await self._until_idle(cluster, "before anything was done")
        outcome.before = outcome.after

    async def _break(self, cluster: Cluster, clients: Clients, history: History, former: Path | None) -> None:
        wanted, outcome = self._wanted, self.outcome
        drawn = [] if wanted.attacks or former else draw_plan(wanted.seed, wanted.duration_s, cluster.roles(), wanted.kinds)
        plan = [fault for fault in drawn if fault.kind not in outcome.impossible]
        saboteur = Saboteur(cluster, history, wanted.seed)
        outcome.began_at = time.monotonic()
        if not (wanted.attacks or former):
            asyncio.get_running_loop().call_later(wanted.duration_s, self._over.set)
        within = f"upgrade from {former} and back" if former else f"{len(plan)} faults within {wanted.duration_s:.0f} s"
        self._say(f"{wanted.clients} clients by {outcome.api}, {within}")
        async with asyncio.TaskGroup() as group:
            group.create_task(clients.run())
            reporting = group.create_task(self._report(clients))
            if wanted.attacks:
                attack, count = (assault, wanted.hostile) if wanted.hostile else (burst, wanted.bursts)
                made = await attack(cluster, count, wanted.seed, self._say)
                outcome.inputs = made.taken
                outcome.problems += made.problems
            elif former:
                outcome.upgraded = await upgrade(cluster, saboteur, former)
                outcome.problems += outcome.upgraded.problems
            else:
                await self._commit(plan, saboteur)
            clients.stopping = True
            self._say(f"no more faults; {clients.open} answers still to come")
            reporting.cancel()
        outcome.took_s = time.monotonic() - outcome.began_at
        outcome.problems += saboteur.problems
        outcome.strangers_refused = saboteur.strangers_refused

    async def _commit(self, plan: Sequence[Fault], saboteur: Saboteur) -> None:
        """Commit other faults at their times, and outages at theirs or once those before are over, until the time is up."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._in_turn([fault for fault in plan if fault.kind.is_outage], saboteur))
            for fault in plan:
                await self._until(self.outcome.began_at + fault.at_s)
                if not fault.kind.is_outage:
                    group.create_task(self._begin_fault(fault, saboteur))
            await self._over.wait()

    async def _in_turn(self, outages: Sequence[Fault], saboteur: Saboteur) -> None:
        """Commit outages one after another; all later ones are delayed by as much as one had to wait."""
        running: set[asyncio.Task[None]] = set()
        late_s = 0.0
        async with asyncio.TaskGroup() as group:
            for fault in outages:
                due = self.outcome.began_at + fault.at_s + late_s
                await self._until(due)
                if not fault.beside and running:
                    await asyncio.wait(running)
                    running.clear()
                late_s += max(0.0, time.monotonic() - due)
                running.add(group.create_task(self._begin_fault(fault, saboteur)))

    async def _begin_fault(self, fault: Fault, saboteur: Saboteur) -> None:
        if self._over.is_set():
            self.outcome.not_reached += 1
            return
        self._say(str(fault))
        await saboteur.commit(fault)

    async def _until(self, at: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, at - time.monotonic())):
                await self._over.wait()
        except TimeoutError:
            return

    async def _report(self, clients: Clients) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            score = clients.score
            ill = ", ".join(f"{count} {verdict}" for verdict, count in score.verdicts.items()) or "all right"
            worst = max((pause.seconds for pause in (*score.pauses, *score.pauses_amid_several)), default=0.0)
            self._say(
                f"{score.answered} answers, {score.tokens:,} tokens, {score.resumed} resumed, {score.cut} cut, "
                f"{score.refused} refused, {ill}, longest pause {worst:.1f} s"
            )

    # --- checks afterwards

    async def _settle(self, cluster: Cluster, clients: Clients) -> None:
        """Check that an idle cluster holds nothing, and that every node serves."""
        problems = self.outcome.problems
        if not await cluster.until_whole(QUIET_TIMEOUT_S):
            problems.append("the cluster is not whole after all faults ended")
        await clients.probe()
        await self._until_idle(cluster, "after all faults ended")
        dumps = await cluster.dumps()
        for host in cluster.hosts:
            incarnations = {name: dump["incarnation"] for name, dump in dumps.items() if cluster.host(name) == host}
            problems += strangers_in_memory(cluster.segments(host), incarnations)

    async def _unrest(self, cluster: Cluster) -> list[str]:
        """Return what an idle cluster still holds; also connections to ended incarnations, which are closed after a while."""
        dumps = await cluster.dumps()
        self.outcome.after = cluster.footprints()
        more_rss_bytes = MORE_FOR_STRANGERS_BYTES if self._wanted.attacks else MORE_RSS_BYTES
        kept = grown(self.outcome.before, self.outcome.after, more_rss_bytes)
        return [*unreached(dumps, list(cluster.children)), *busy(dumps), *kept]

    async def _until_idle(self, cluster: Cluster, when: str) -> None:
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        while left := await self._unrest(cluster):
            if time.monotonic() > deadline:
                self.outcome.problems += [f"{each}, {when}" for each in left[:LINES_KEPT]]
                return
            await asyncio.sleep(POLL_S)

    def _look_back(self, cluster: Cluster) -> None:
        outcome = self.outcome
        kinds = {entry.fault.kind for entry in outcome.done}
        if self._wanted.attacks:
            outcome.problems += swollen(outcome.before, outcome.peaks)
        else:  # hostile inputs come to one node after the other, and a slope over such phases means nothing
            outcome.problems += growing(outcome.growths)
        if not (self._wanted.attacks or outcome.done):
            outcome.problems.append("nothing was broken")
        if not outcome.score.reuses:
            outcome.problems.append("no token of any prompt came from the cache")
        outcome.problems += [*cluster.unexpected, *cluster.leftovers()]
        for name, lines in cluster.lines():
            outcome.warnings += warned(lines)
            bad = bad_lines(lines, kinds)
            outcome.problems += [f"{name} logged: {line[:500]}" for line in bad[:LINES_KEPT]]
        outcome.problems += [f"{what}: {count}" for what, count in outcome.score.verdicts.items()] + outcome.score.problems
