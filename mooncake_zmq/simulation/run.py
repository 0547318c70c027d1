"""Runs one seed, or many: a phase with faults, then a healed cluster in which everything must end and new requests succeed."""

import json
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

from mooncake_zmq.simulation.checkers import Checkers
from mooncake_zmq.simulation.clients import Clients
from mooncake_zmq.simulation.cluster import CHANGEABLE, ClusterSettings, processes, shares_of
from mooncake_zmq.simulation.drains import DrainTrial
from mooncake_zmq.simulation.faults import (
    AMID_LATENESS,
    OF_READERS,
    STORE_FAULTS,
    USUAL,
    Fault,
    FaultKind,
    draw_cordons,
    draw_crash_of_sender,
    draw_faults,
    draw_halts,
    draw_lates,
    draw_stops_of_lenders,
    draw_tangle,
)
from mooncake_zmq.simulation.injection import Injection
from mooncake_zmq.simulation.machine import Hardware
from mooncake_zmq.simulation.planted import PLANTED, planting
from mooncake_zmq.simulation.releases import THIS, has_two, protocols_of
from mooncake_zmq.simulation.share_checker import ShareChecker
from mooncake_zmq.simulation.simulator import CHECK_EVERY, Simulator
from mooncake_zmq.simulation.store_clients import clients_of
from mooncake_zmq.simulation.stores import Stores
from mooncake_zmq.simulation.traces import Chat, Workload, generate
from mooncake_zmq.simulation.violation import Violation
from mooncake_zmq.simulation.world import ProcessSpec

LONG: Mapping[str, Any] = {
    "max_turns": 1,
    "burst_share": 0.0,
    "window_s": 0.2,
    "min_answer": 100,
    "max_answer": 140,
    "starts_at": 0.0,
}
"""Differences of the requests in the middle of whose answers a node is drained."""
SETTLE_S = 3.0
"""The time from healing to the requests that must all succeed."""
LIVENESS_S = 45.0
"""The time from healing within which everything must have ended."""
LONGEST_STOP_S = 6.0
"""The lateness of a stopped gateway at most, beside the time for which its host is suspended."""
EVICTING = (1, 2)
"""The remainders by five of the seeds in which some requests have KV dropped; with vLLMs, or a release that does not, none
has."""
OUR_BUGS = (AssertionError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How much of a cluster a seed runs, and for how long."""

    stores: bool = True
    """Whether clients use the stores."""
    chats: bool = True
    """Whether clients ask the gateways. If not, there are only the stores."""
    of_models: bool = False
    """Whether there are always several models."""
    lending: bool = False
    """Whether decodes have little KV, and lend it, which they do only while all nodes are of this release."""
    safety_s: float = 9.0
    workload: Workload = Workload()
    probes: int = 4
    """The number of requests to the healed cluster, which must all succeed."""


SCOPES = {
    "": Scope(),
    "lending": Scope(
        stores=False,
        lending=True,
        safety_s=5.0,
        workload=Workload(requests=24, window_s=3.0, max_system=100, max_question=64, max_answer=16, burst_share=0.05),
    ),
    "stores": Scope(chats=False),
    "models": Scope(
        stores=False,
        of_models=True,
        safety_s=3.5,
        workload=Workload(requests=24, window_s=2.5, max_turns=3, system_prompts=1, max_answer=10, tenants=("", "red")),
    ),
}
"""Whole seeds, and the parts that can run alone in a fraction of the time."""


@dataclass(slots=True)
class SeedResult:
    """The result of one seed. `failure`: the violated invariant in a line, None if all held."""

    seed: int
    failure: str | None = None
    invariant: str | None = None
    where: str = ""
    digest: str = ""
    faults: list[str] = field(default_factory=list)
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    events: int = 0
    coverage: dict[str, dict[str, int]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)


def run_seed(
    seed: int,
    *,
    planted: str | None = None,
    stress: Sequence[FaultKind] | None = None,
    trace: bool = False,
    only: str | None = None,
) -> SeedResult:
    """Run one seed to its end or first violation. `stress`: kinds of additional faults, by default the planted bug's. `only`:
    see `SCOPES`; by default the part that the bug is in."""
    result = SeedResult(seed)
    began = time.process_time()
    if stress is None:
        stress = PLANTED[planted].stress if planted else ()
    if only is None:
        only = PLANTED[planted].only if planted else ""
    with planting(planted):
        _run(result, SCOPES[only], stress, trace=trace)
    result.cpu_s = time.process_time() - began
    return result


def _run(result: SeedResult, scope: Scope, stress: Sequence[FaultKind], *, trace: bool) -> None:
    random = Random(result.seed)
    settings = ClusterSettings.of_seed(result.seed, of_models=scope.of_models, lending=scope.lending)
    workload = replace(
        scope.workload,
        plain=bool(settings.vllm_parts),
        computes=settings.computes,
        repeats=settings.prefill.blend,
        evicts=not settings.vllm_parts and result.seed % 5 in EVICTING and (scope.lending or not has_two(result.seed)),
    )
    specs = processes(settings)
    if not scope.chats:
        specs = [replace(spec, peers=()) for spec in specs if spec.role == "cache-node"]
    work = generate(random, workload, settings.layout)
    healed = replace(workload, requests=scope.probes, cancel_share=0.0, starts_at=scope.safety_s + SETTLE_S)
    more = replace(healed, max_turns=2, window_s=1.0)
    probes = generate(random, more, settings.layout, work.blocks)
    drained = generate(Random(f"drain of {result.seed}"), replace(more, **LONG), settings.layout, work.blocks)
    faults = _draw_faults(result.seed, random, specs, settings, stress, scope)
    result.faults = [str(fault) for fault in faults]
    checkers = Checkers(
        blocks=work.blocks,
        roots=workload.roots(settings.layout),
        block_tokens=settings.layout.block_tokens,
        max_lease_s=settings.cache_node.max_lease_s,
        shares=ShareChecker(work.owners | probes.owners | drained.owners, shares_of(settings.cache_node)),
        all_live=all(fault.kind in (*AMID_LATENESS, FaultKind.LATE, FaultKind.CORDON) for fault in faults),
    )
    simulator = Simulator(
        random=random,
        specs=specs,
        layout=settings.layout,
        hardware=Hardware(),
        session=settings.session,
        checkers=checkers,
        keyed=result.seed % 2 == 1,
        check_every=1 if trace else CHECK_EVERY,
        protocols=lambda process: (
            THIS
            if scope.lending
            else protocols_of(result.seed, process.name, process.starts, read_by_vllms=bool(settings.vllm_parts))
        ),
    )
    if trace:
        simulator.log = result.log
    gateways = [spec.name for spec in specs if spec.role == "gateway"]
    slept_s = sum(fault.duration_s for fault in faults if fault.kind is FaultKind.SUSPEND)
    clients = Clients(simulator, gateways, limit_s=settings.gateway.deadline_s + LONGEST_STOP_S + slept_s)
    simulator.stores = stores = Stores(simulator, result.seed)
    stores.clients = clients_of(stores) if scope.stores else []
    injection = Injection(simulator)
    trial = Trial(simulator, injection, checkers, clients, stores, scope.safety_s)
    chats = (work.chats, probes.chats) if scope.chats else ((), ())
    watched = gateways if settings.watched and scope.chats else []
    with _noted(result):
        trial.run(faults, *chats, watched=watched, must_finish=more.requests if scope.chats else 0)
        if watched:
            trial.drain(drained.chats)
    result.digest, result.virtual_s, result.events = simulator.digest, simulator.now, simulator.events
    result.coverage = trial.coverage()


def _draw_faults(
    seed: int,
    random: Random,
    specs: Sequence[ProcessSpec],
    settings: ClusterSettings,
    stress: Sequence[FaultKind],
    scope: Scope,
) -> tuple[Fault, ...]:
    names = list(dict.fromkeys(spec.name for spec in specs))
    segments = list(dict.fromkeys(spec.name for spec in specs if spec.slots))
    window_s = scope.safety_s
    kinds = STORE_FAULTS if not scope.chats else AMID_LATENESS if settings.starved else USUAL
    if settings.vllms_alone:
        kinds, stress = (tuple(kind for kind in each if kind not in OF_READERS) for each in (kinds, stress))
    faults = draw_faults(random, processes=names, segments=segments, window_s=window_s, stress=stress, kinds=kinds)
    if settings.watched and scope.chats:
        faults += draw_cordons(Random(f"rests of {seed}"), processes=names, window_s=window_s)
        if not (settings.starved or settings.vllms_alone):
            faults += draw_tangle(Random(f"tangle of {seed}"), processes=CHANGEABLE, window_s=window_s)
    if settings.starved and scope.chats:
        faults += draw_lates(Random(f"lateness of {seed}"), processes=names, window_s=window_s)
    if seed % 3 == 0 and not settings.starved:
        faults += draw_crash_of_sender(Random(f"sender of {seed}"), segments=segments, window_s=window_s)
    if scope.lending and not settings.starved:
        faults += draw_stops_of_lenders(Random(f"lenders of {seed}"), processes=names, window_s=window_s)
    if settings.suspended:
        faults += draw_halts(Random(f"halts of {seed}"), processes=names, window_s=window_s)
    return faults


@contextmanager
def _noted(result: SeedResult) -> Iterator[None]:
    """Note in the result what ended a seed early."""
    try:
        yield
    except Violation as violation:
        result.failure, result.invariant = str(violation), violation.invariant
        result.where = "".join(traceback.format_tb(violation.__traceback__)[-3:])
    except OUR_BUGS as error:
        result.failure, result.invariant = f"{type(error).__name__}: {error}", type(error).__name__
        result.where = traceback.format_exc()


@dataclass(slots=True)
class Trial:
    """A simulated cluster with all that works on it in one seed, and what came of the requests."""

    simulator: Simulator
    injection: Injection
    checkers: Checkers
    clients: Clients
    stores: Stores
    safety_s: float
    """The duration of the phase with faults."""
    outcomes: Counter[str] = field(default_factory=Counter)

    def run(
        self,
        faults: Sequence[Fault],
        chats: Sequence[Chat],
        probes: Sequence[Chat],
        *,
        watched: Sequence[str],
        must_finish: int,
    ) -> None:
        """Run the phase with faults, heal, and wait for the end of everything. `watched`: the gateways by which an operator
        looks at the cluster; `must_finish`: so many requests of `probes` must succeed."""
        simulator = self.simulator
        asked = self.clients.add(chats)
        for fault in faults:
            self.injection.schedule(fault)
        if watched:
            self.injection.operator.look_on(watched, self.safety_s + SETTLE_S)
        simulator.run_until(self.safety_s)
        self.injection.heal()
        self.stores.heal()
        probed = self.clients.add(probes)
        self._live()
        self.outcomes = asked + probed
        if must_finish and probed["finished"] != must_finish:
            raise Violation("I4", f"requests to the healed cluster did not all succeed: {dict(probed)}")

    def drain(self, chats: Sequence[Chat]) -> None:
        """Drain a node of the healed cluster in the middle of long answers, all of which must succeed."""
        drain = DrainTrial(self.simulator, self.injection.operator)
        drain.begin()
        asked = self.clients.add(chats)
        self._live()
        self.outcomes += asked
        if asked["finished"] != len(chats):
            raise Violation("I4", f"requests did not all succeed while a node drained: {dict(asked)}")

    def _live(self) -> None:
        """Wait until everything has ended and the index is true, or the bound has passed."""
        simulator, checkers, stores = self.simulator, self.checkers, self.stores
        bound = simulator.now + LIVENESS_S
        while True:
            simulator.run_until(simulator.now + 0.25)
            waiting = self.clients.waiting
            problem = Violation("I4", f"no end of {waiting[0]}") if waiting else None
            problem = problem or checkers.busy() or checkers.stale_index() or stores.busy()
            if problem is None:
                checkers.at_end()
                return stores.at_end()
            if simulator.now >= bound:
                raise problem

    def coverage(self) -> dict[str, dict[str, int]]:
        """Return the number of times that each thing was seen, for the report."""
        checkers = self.checkers
        checkers.finish()
        return {
            "faults": dict(self.injection.begun),
            "garbage": dict(self.injection.garbage.counts),
            "transitions": dict(checkers.transitions),
            "messages": dict(checkers.messages),
            "works": dict(checkers.works),
            "outcomes": dict(self.outcomes),
            "counts": dict(checkers.counts),
            "store works": dict(self.stores.checker.works),
            "stores": dict(self.stores.checker.covered),
            "loads": dict(checkers.cross_hits.loads),
        }


def failing_line(result: SeedResult, commit: str) -> str:
    """Return the line that a failing seed prints."""
    return f"seed={result.seed} commit={commit} faults={' '.join(result.faults)}\n  {result.failure}"


def run_seeds(
    first: int,
    count: int,
    jobs: int,
    progress: Callable[[SeedResult], None],
    *,
    planted: str | None = None,
    only: str | None = None,
    compiled: bool = False,
) -> list[SeedResult]:
    """Run seeds in `jobs` worker processes; `progress` gets each result as it comes. `compiled`: on the nodes' machine code."""
    shares = [range(first + index, first + count, jobs) for index in range(min(jobs, count))]
    workers = [_spawn(seeds, planted, only, compiled) for seeds in shares]
    results: list[SeedResult] = []
    # Workers take equal turns, so reading them round robin keeps all pipes short.
    pending = {index: iter(seeds) for index, seeds in enumerate(shares)}
    while pending:
        for index in list(pending):
            seed = next(pending[index], None)
            if seed is None:
                del pending[index]
                continue
            stdout = workers[index].stdout
            assert stdout is not None
            line = stdout.readline()
            if not line:
                results.append(SeedResult(seed, failure="the worker process died", invariant="worker"))
                del pending[index]
            else:
                results.append(SeedResult(**json.loads(line)))
            progress(results[-1])
    for worker in workers:
        worker.wait()
    return results


def _spawn(seeds: Iterable[int], planted: str | None, only: str | None, compiled: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mooncake_zmq.simulation", *map(str, seeds)]
    if planted:
        command += ["--planted", planted]
    if only:
        command += ["--only", only]
    if compiled:
        command += ["--compiled"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def as_line(result: SeedResult) -> str:
    """Return the result as one JSON line, without the log."""
    return json.dumps(asdict(replace(result, log=[])))
