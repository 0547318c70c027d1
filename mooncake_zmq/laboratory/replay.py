"""Replay of a trace through the live conductor, prefills, decodes and cache-nodes on modelled hardware, in virtual time.

This module makes no decision: it builds a world, advances time until every request has ended, and samples the state.
"""

import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import Any

from mooncake_zmq.core.actor import Actor
from mooncake_zmq.core.messages import PROTOCOL_VERSION, Hello, Placed
from mooncake_zmq.core.roles import ENGINE_ROLES
from mooncake_zmq.core.session import SessionSettings
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.laboratory.arrivals import Arrivals
from mooncake_zmq.laboratory.cluster import GATEWAY, Cluster, cluster_of, specs
from mooncake_zmq.laboratory.keys import block_keys
from mooncake_zmq.laboratory.machine import ModelledMachine
from mooncake_zmq.laboratory.recorder import Recorder
from mooncake_zmq.laboratory.resources import Host
from mooncake_zmq.laboratory.study import TRACE_BLOCK_TOKENS, Arrival, NodeProfile, RequestRecord, RunResult, Setup
from mooncake_zmq.laboratory.tape import Tape
from mooncake_zmq.pool.node.disk_tier import DiskContents
from mooncake_zmq.simulation.links import Direct, HelloOf, Sessions, Wires
from mooncake_zmq.simulation.world import Link, Process, ProcessSpec, World

BEGIN_S = 1.0
"""Virtual time at which the trace begins: by then all nodes have connected and reported their loads."""
SAMPLE_S = 10.0
COPIES_EVERY = 3
"""Samples of loads for one of copies: Figure 11 has one every 30 s."""
RANKS = (10, 100, 1000, 10_000)
TIMEOUT_S = 86_400.0
"""Virtual time without an arrival or an end of a request, after which all open ones have failed."""


def run(
    setup: Setup,
    arrivals: Sequence[Arrival],
    progress: Callable[[float], None] = lambda share: None,
    write: Callable[[bytes], None] | None = None,
) -> RunResult:
    """Replay `arrivals`, which come in order of time, on the cluster of `setup`; `progress` is called with the share that has
    ended, and `write`, if given, with the recording that `tape` made."""
    began_wall_s, began_cpu_s = time.perf_counter(), time.process_time()
    replay = Replay(setup, arrivals, taped=write is not None)
    result = replay.run(progress)
    if write is not None and replay.tape is not None:
        write(replay.tape.written())
    result.wall_s, result.cpu_s = time.perf_counter() - began_wall_s, time.process_time() - began_cpu_s
    result.peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return result


class Replay:
    """One run. `link`: "direct", or "sessions" to have every message encoded, sent and acknowledged as in the live cluster.
    `taped`: the run is recorded."""

    def __init__(self, setup: Setup, arrivals: Sequence[Arrival], *, link: str = "direct", taped: bool = False) -> None:
        self.placed: list[Placed] | None = None
        """Every placement, if a caller needs them: it sets this to a list."""
        self.cluster = cluster_of(setup, arrivals)
        self._setup = setup
        self._arrivals = arrivals
        self._result = RunResult(setup, [])
        self._records: dict[int, RequestRecord] = {}
        self._ended_at = 0.0
        self.recorder = Recorder(
            ttft_slo_s=setup.ttft_slo_s,
            tbt_slo_s=setup.tbt_slo_s,
            with_disk=self.cluster.disk_blocks > 0,
            delay_s=self.cluster.lab.message_s,
        )
        self._engines: list[tuple[str, str, ModelledMachine]] = []
        """Name, role and machine of every incarnation with an engine."""
        self._last_s = arrivals[-1].at_s / setup.speed if arrivals else 0.0
        self.tape = Tape(setup, self.cluster.layout, last_s=self._last_s, own=self.recorder.watch) if taped else None
        self.gateway = self._gateway(encoded=link != "direct")
        processes = specs(setup, self.cluster, lambda: self.gateway)
        self._hosts = {spec.host: _host(setup.hardware) for spec in processes}
        self._host_of = {spec.name: spec.host for spec in processes}
        self.world: World[ModelledMachine] = World(
            specs=processes,
            link=self._link(link),
            build=self._embody,
            watch=self.recorder.watch if self.tape is None else self.tape.watch,
            anew_s=self.cluster.lab.change_s,
        )
        if self.tape is not None:
            self.tape.attach(self.world, self.gateway, _hello_of(self.cluster))
        for name in self.world.processes:
            self.world.restart(name)
        self._pools: list[Any] = [actor for actor in self._actors("cache-node")]
        self._ranked = _ranked_keys(arrivals, setup.block_tokens)

    def run(self, progress: Callable[[float], None]) -> RunResult:
        """Run to the end of every request."""
        gateway, world, samples = self.gateway, self.world, 0
        self._let_pass(BEGIN_S)
        while gateway.open or not gateway.exhausted:
            self._sample(samples)
            samples += 1
            self._let_pass(world.now + SAMPLE_S)
            progress(len(self._records) / max(1, len(self._arrivals)))
            if world.now - max(self._ended_at, BEGIN_S + self._last_s) > TIMEOUT_S:
                break
        self._give_up()
        if self.tape is not None:
            self.tape.look()
        return self._finish()

    def _let_pass(self, until: float) -> None:
        tape = self.tape
        while tape is not None and tape.due_at < until:
            self.world.run_until(tape.due_at)
            tape.look()
        self.world.run_until(until)

    # --- the world

    def _gateway(self, *, encoded: bool) -> Arrivals:
        gateway = Arrivals(
            name=GATEWAY,
            settings=self.cluster.gateway,
            arrivals=iter(self._arrivals),
            begin_s=BEGIN_S,
            speed=self._setup.speed,
            block_tokens=self._setup.block_tokens,
            recorder=self.recorder,
            encoded=encoded,
            ended=self._on_ended,
        )
        gateway.placed = lambda placed: None if self.placed is None else self.placed.append(placed)
        return gateway

    def _link(self, kind: str) -> Link:
        delay_s, hello = self.cluster.lab.message_s, _hello_of(self.cluster)
        if kind == "direct":
            return Direct(delay_s=delay_s, hello=hello)
        return Sessions(settings=SessionSettings(), hello=hello, wires=Wires(delay_s), random=Random(self._setup.seed))

    def _embody(self, process: Process[ModelledMachine]) -> tuple[ModelledMachine, Actor]:
        spec, world = process.spec, self.world
        machine = ModelledMachine(
            world,
            name=process.name,
            costs=self._setup.hardware.costs,
            layout=self.cluster.layout,
            hosts=self._hosts,
            host_of=self._host_of.__getitem__,
            done=partial(world.work_done, process),
            progressed=partial(world.progressed, process),
            later=partial(world.in_incarnation, process),
        )
        if spec.role in ENGINE_ROLES:
            self._engines.append((process.name, spec.role, machine))
        return machine, spec.make(process.starts, DiskContents(spec.disk_slots))

    def _actors(self, role: str) -> Iterable[Actor]:
        for process in self.world.processes.values():
            if process.spec.role == role and process.current is not None:
                yield process.current.actor

    # --- the result

    def _on_ended(self, number: int, record: RequestRecord) -> None:
        self._records[number] = record
        self._ended_at = self.world.now
        if self.tape is not None:
            self.tape.on_ended(number, record)

    def _sample(self, number: int) -> None:
        at, recorder = self.world.now - BEGIN_S, self.recorder
        self._result.loads.append((at, recorder.mean_load("prefill"), recorder.mean_load("decode")))
        if number % COPIES_EVERY == 0:
            copies = {rank: sum(pool.holds(key) for pool in self._pools) for rank, key in self._ranked.items()}
            self._result.copies.append((at, copies))

    def _give_up(self) -> None:
        for request in self.gateway.open.values():
            request.record.outcome, request.record.reason = "failed", "no end"
            self._records[request.number] = request.record

    def _finish(self) -> RunResult:
        result = self._result
        assert len(self._records) == len(self._arrivals), "every arrival ends in one record"
        result.requests = [self._records[number] for number in sorted(self._records)]
        for name, role, machine in self._engines:
            busy_s = result.prefill_busy_s if role == "prefill" else result.decode_busy_s
            busy_s[name] = busy_s.get(name, 0.0) + machine.busy_s
        result.errors = {
            "ttft_s": _errors((r.predicted_ttft_s, r.ttft_s) for r in result.requests),
            "tbt_s": _errors((r.predicted_tbt_s, r.tbt_s) for r in result.requests if r.output_tokens > 1),
        }
        result.virtual_s = self.world.now - BEGIN_S
        result.events = self.world.events
        return result


def _errors(pairs: Iterable[tuple[float, float]]) -> tuple[int, float, float]:
    """Return how many values were predicted and have an actual value, the mean absolute error, the mean of the actual
    values."""
    true = [(predicted, actual) for predicted, actual in pairs if predicted >= 0 and actual >= 0]
    count = max(1, len(true))
    return len(true), sum(abs(p - a) for p, a in true) / count, sum(a for _, a in true) / count


def _host(node: NodeProfile) -> Host:
    return Host(
        network_bytes_per_s=node.network_bytes_per_s,
        bus_bytes_per_s=node.bus_bytes_per_s,
        disk_bytes_per_s=node.disk_bytes_per_s,
    )


def _hello_of(cluster: Cluster) -> HelloOf:
    def hello(process: Process[Any]) -> Hello:
        spec: ProcessSpec = process.spec
        return Hello(
            protocol=PROTOCOL_VERSION,
            role=spec.role,
            host=spec.host,
            model="modelled",
            tokenizer="modelled",
            layout=cluster.layout.fingerprint,
            may_become=spec.may_become,
        )

    return hello


def _ranked_keys(arrivals: Sequence[Arrival], block_tokens: int) -> dict[str, Key]:
    """Return the keys ranked 10th, 100th, ... by how many requests have them; of equals the one that comes first."""
    counts: Counter[int] = Counter()
    for arrival in arrivals:
        counts.update(arrival.hash_ids)
    order = sorted(counts, key=lambda each: -counts[each])  # stable: in order of their first request
    wanted = {order[rank - 1]: str(rank) for rank in RANKS if rank <= len(order)}
    found: dict[str, Key] = {}
    for arrival in arrivals:
        for place, each in enumerate(arrival.hash_ids):
            if wanted.get(each, "") and wanted[each] not in found:
                last = (place + 1) * TRACE_BLOCK_TOKENS
                if last <= arrival.input_tokens:
                    found[wanted[each]] = block_keys(arrival.hash_ids[: place + 1], last, block_tokens)[-1]
    return found
