"""`bench schedule`: how fast the conductor decides, alone on one core, on clusters of several sizes that serve one trace.

Timed is `handle`, from a decoded message to its effects, as CPU time of the thread. Decisions per second are those of the
`Schedule`s alone, the collector's pauses in them included; announcements, load reports and ends of requests happen
in between and are shown separately, and so are the collector's pauses. Hashing prompts is the gateway's work.
"""

import gc
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import click
import msgspec
import numpy as np
from rich.table import Table

from mooncake_zmq.bench.report import Progress, Report
from mooncake_zmq.bench.schedule_load import POOL_BLOCKS, Asked, ClusterLoad, generated_trace, of_models
from mooncake_zmq.bench.schedule_zmq import times_over_zmq
from mooncake_zmq.conductor.conductor import Conductor
from mooncake_zmq.conductor.prefix_index import PrefixIndex
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.actor import Effect, Event, Received, Send, SetTimer, TimerFired, TimerKey
from mooncake_zmq.core.hardware import HARDWARE
from mooncake_zmq.core.messages import MAX_TOKENS, BlocksAnnounced, Placed, Schedule
from mooncake_zmq.kv.block_hash import KEY_BYTES, extend_keys
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.laboratory import tables
from mooncake_zmq.laboratory.drawing import new_figure, save
from mooncake_zmq.laboratory.reports import commit
from mooncake_zmq.native import mypyc_code
from mooncake_zmq.refused import Refused

BLOCK_TOKENS = 512
COSTS = HARDWARE["a800-llama3-70b"]
LAYOUT = BlockLayout(layers=80, kv_heads=8, head_dim=128, block_tokens=BLOCK_TOKENS)
GENERATED_REQUESTS = 6_000
GOALS = ((16, 20_000.0), (1 << 30, 12_000.0))
"""Goals: decisions per second, up to so many hosts."""
GOAL_UPDATES_PER_S = 2e6
GOAL_ZMQ_PER_S, GOAL_ZMQ_MS = 3_000.0, 10.0
MODELS, ADAPTERS = 3, 20
MODEL_ROUNDS = 3
UPDATE_NODES = 256
UPDATE_BATCHES = (64, 1024)
UPDATED_KEYS = 1 << 17
DRIVER = Path(__file__).parent / "others/router_driver.py"


class _Line(msgspec.Struct, frozen=True):
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)], ...]


@dataclass(slots=True)
class Timings:
    """CPU seconds of each event, by kind, at one number of hosts; `updated`: keys announced as stored or removed."""

    by_kind: dict[str, list[float]] = field(default_factory=dict)
    updated: int = 0
    collecting_s: dict[str, float] = field(default_factory=dict)
    """Time of the garbage collector during events of a kind; not in `by_kind`."""

    def add(self, kind: str, seconds: float) -> None:
        """Add one event."""
        self.by_kind.setdefault(kind, []).append(seconds)

    @property
    def decisions_per_s(self) -> float:
        """Decisions per second of the `Schedule`s alone."""
        each = self.by_kind["Schedule"]
        return len(each) / (sum(each) + self.collecting_s.get("Schedule", 0.0))

    @property
    def updates_per_s(self) -> float:
        """Keys of announcements per second of handling them."""
        seconds = sum(self.by_kind.get("BlocksAnnounced", [float("inf")]))
        return self.updated / (seconds + self.collecting_s.get("BlocksAnnounced", 0.0))

    def rows(self) -> list[tuple[str, int, float, float, float, float]]:
        """Return (kind, events, mean, median, 99th percentile, longest), in microseconds."""
        table: list[tuple[str, int, float, float, float, float]] = []
        for kind, each in sorted(self.by_kind.items()):
            us = 1e6 * np.array(each)
            p50, p99 = np.percentile(us, (50, 99)).tolist()
            table.append((kind, len(each), float(us.mean()), p50, p99, float(us.max())))
        return table


class Collector:
    """Measures the garbage collector's time between two calls."""

    def __init__(self) -> None:
        self._begun = 0.0
        self._lately_s = 0.0

    def __call__(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.thread_time()
        else:
            self._lately_s += time.thread_time() - self._begun

    def lately_s(self) -> float:
        """Return the collector's pauses since the last call."""
        lately_s, self._lately_s = self._lately_s, 0.0
        return lately_s


@dataclass(slots=True)
class ScheduleReport(Report):
    """A report that also has the time of each kind of event, by number of hosts."""

    timings: dict[int, Timings] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the report with `events`: {hosts: [{kind, events, and microseconds}]}."""
        columns = ("kind", "events", "mean_us", "p50_us", "p99_us", "max_us")
        events = {str(h): [dict(zip(columns, row, strict=True)) for row in t.rows()] for h, t in self.timings.items()}
        return Report.as_json(self) | {"events": events}

    def _tables(self) -> Iterator[Table]:
        yield from Report._tables(self)
        columns = ("hosts", "event", "events", "mean", "p50", "p99", "max")
        table = tables.empty("microseconds of CPU per event", columns, text=("event",))
        for hosts, timings in self.timings.items():
            for kind, count, *figures in timings.rows():
                table.add_row(str(hosts), kind, f"{count:,}", *(f"{each:,.1f}" for each in figures))
        yield table

    def _draw(self, path: Path) -> None:
        figure = new_figure(8, 5)
        axes = figure.add_subplot()
        for name, quantile in (("median", 50), ("99th percentile", 99)):
            points = [1e6 * float(np.percentile(t.by_kind["Schedule"], quantile)) for t in self.timings.values()]
            axes.plot(list(self.timings), points, marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("hosts, each with a prefill, a decode and a cache-node")
        axes.set_ylabel("microseconds per decision")
        axes.legend()
        axes.set_title(f"bench {self.bench}, {commit()}")
        save(figure, path)


def bench_schedule(
    trace: Path | None,
    hosts: Sequence[int],
    progress: Progress,
    *,
    router_python: str | None = None,
    requests: int = 0,
    zmq_per_s: float | None = None,
) -> ScheduleReport:
    """Replay `trace`, or a generated one, on each number of hosts; only its first `requests` if not 0. `zmq_per_s`: also send a
    conductor process so many requests. Raises click.ClickException for a trace that cannot be read."""
    asked = read_trace(trace) if trace is not None else generated(GENERATED_REQUESTS)
    asked = asked[:requests] if requests else asked
    report = ScheduleReport("schedule")
    for count in hosts:
        progress(f"{count} hosts, {len(asked):,} requests")
        timings = report.timings[count] = replay(asked, count)
        goal = next(per_s for most, per_s in GOALS if count <= most)
        report.row(f"decisions, {count} hosts", "1/s", timings.decisions_per_s, goal, higher=True)
        report.row(f"index updates, {count} hosts", "blocks/s", timings.updates_per_s, GOAL_UPDATES_PER_S, higher=True)
        if router_python:
            _against_router(report, asked, count, router_python)
    _beside_one_model(report, asked, hosts[0], progress)
    if zmq_per_s:
        progress(f"over ZeroMQ, {zmq_per_s:,.0f} requests per second")
        _over_zmq(report, asked, zmq_per_s)
    for batch in UPDATE_BATCHES:
        name = f"index alone, {UPDATE_NODES} nodes, {batch:,} keys at a time"
        report.row(name, "blocks/s", updates_per_s(batch), GOAL_UPDATES_PER_S, higher=True)
    report.row("hashing a prompt", "blocks/s", hashed_per_s(), GOAL_UPDATES_PER_S / 10, higher=True)
    what = "machine code" if mypyc_code.in_use() else "Python, see mooncake-zmq compile"
    report.notes.append(f"{what}; CPU time of one thread, in rows over ZeroMQ wall-clock time")
    report.notes.append("references are goals, but in rows against RadixTree and beside one model the rates of these")
    return report


def replay(asked: Sequence[Asked], hosts: int, *, vllms: bool = False) -> Timings:
    """Run one conductor through the trace."""
    load = ClusterLoad(asked, hosts=hosts, costs=COSTS, vllms=vllms)
    settings = ConductorSettings(tbt_slo_s=0.1)
    conductor = Conductor(name="k", host="h", incarnation=1, settings=settings, layout=LAYOUT, costs=COSTS)
    for event in load.joins():
        conductor.handle(0.0, event)
    timings = Timings()
    collector = Collector()
    gc.collect()
    gc.freeze()  # The trace does not belong to the conductor.
    gc.callbacks.append(collector)
    try:
        _live(conductor, load, timings, collector)
    finally:
        gc.callbacks.remove(collector)
        gc.unfreeze()
    return timings


def _live(conductor: Conductor, load: ClusterLoad, timings: Timings, collector: Collector) -> None:
    timers: dict[TimerKey, float] = {}
    for now, event in load.events():
        for key in [key for key, at in timers.items() if at <= now]:
            at = timers.pop(key)
            _arm(timers, at, timed(conductor, timings, collector, at, TimerFired(key), f"timer {key[0]}"))
        assert isinstance(event, Received)
        effects = timed(conductor, timings, collector, now, event, type(event.message).__name__)
        _arm(timers, now, effects)
        if isinstance(event.message, Schedule):
            for effect in effects:
                if isinstance(effect, Send) and isinstance(effect.message, Placed):
                    load.answer(now, int(effect.message.request_id[1:]), effect.message)
        elif isinstance(event.message, BlocksAnnounced):
            timings.updated += len(event.message.stored) + len(event.message.removed)


def read_trace(path: Path) -> list[Asked]:
    """Return the requests of a JSONL file in Mooncake's format."""
    decoder = msgspec.json.Decoder(_Line)
    asked: list[Asked] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    read = decoder.decode(line)
                except msgspec.MsgspecError as error:
                    raise Refused(f"{path}, line {number}: {error}") from None
                whole = read.hash_ids[: read.input_length // BLOCK_TOKENS]
                asked.append(_asked(tuple(each.to_bytes(KEY_BYTES, "little") for each in whole), read))
    except OSError as error:
        raise Refused(f"cannot read the trace: {error}") from None
    if not asked:
        raise Refused(f"{path} asks for nothing")
    return asked


def generated(requests: int) -> list[Asked]:
    """Return chats that share system prompts, with outputs of 343 tokens in the mean, as in the public trace."""
    random = Random(0)
    return [
        Asked(keys, len(keys) * BLOCK_TOKENS + random.randrange(1, BLOCK_TOKENS), 1 + int(random.expovariate(1 / 342)))
        for keys in generated_trace(random, requests)
    ]


def updates_per_s(batch: int) -> float:
    """Return the keys stored and removed per second in an index of many nodes: each chain is held by two of them for a
    while."""
    random, index = Random(0), PrefixIndex(max_keys=2_000_000)
    nodes = [f"c{number:04}" for number in range(UPDATE_NODES)]
    chains = [tuple([random.randbytes(KEY_BYTES) for _ in range(batch)]) for _ in range(UPDATED_KEYS // batch)]
    for node in nodes:
        index.join(node)
    holders = [random.sample(nodes, 2) for _ in chains]
    begun = time.thread_time()
    for change in (index.stored, index.removed):
        for chain, (first, second) in zip(chains, holders, strict=True):
            change(first, chain)
            change(second, chain)
    return 4 * batch * len(chains) / (time.thread_time() - begun)


def hashed_per_s() -> float:
    """Return the blocks of a prompt that one core hashes per second."""
    tokens = np.arange(128 * BLOCK_TOKENS, dtype=np.int32).tobytes()
    root = bytes(KEY_BYTES)
    begun = time.thread_time()
    for _ in range(10):
        extend_keys(root, tokens, BLOCK_TOKENS)
    return 1280 / (time.thread_time() - begun)


def router_choices(asked: Sequence[Asked], hosts: int, python: str) -> dict[str, Any]:
    """Return the times of ai-dynamo-runtime's RadixTree for the same requests, in the Python that has it."""
    order = {
        "workers": hosts,
        "pool_blocks": POOL_BLOCKS,
        "requests": [[int.from_bytes(key[:8], "little") & ((1 << 63) - 1) for key in each.keys] for each in asked],
    }
    run = subprocess.run([python, str(DRIVER)], input=json.dumps(order), capture_output=True, text=True)
    if run.returncode:
        raise click.ClickException(f"the router failed:\n{run.stderr}")
    answer: dict[str, Any] = json.loads(run.stdout)
    return answer


def _against_router(report: ScheduleReport, asked: Sequence[Asked], hosts: int, python: str) -> None:
    answer = router_choices(asked, hosts, python)
    timings = report.timings[hosts]
    theirs = 1 / float(np.mean(answer["choices_s"]))
    report.row(f"decisions, {hosts} hosts, against RadixTree", "1/s", timings.decisions_per_s, theirs, higher=True)
    theirs = answer["updated"] / answer["updates_s"]
    report.row(f"index updates, {hosts} hosts, against RadixTree", "blocks/s", timings.updates_per_s, theirs, higher=True)


def _beside_one_model(report: ScheduleReport, asked: Sequence[Asked], hosts: int, progress: Progress) -> None:
    """Add the decisions of a conductor whose index holds the keys of several models' stores, and whose requests ask for
    adapters, beside those for one model: both by turns, and each the median of its rounds."""
    sides = (asked, of_models(asked, MODELS, ADAPTERS))
    rates: tuple[list[float], list[float]] = ([], [])
    for number in range(MODEL_ROUNDS):
        progress(f"{hosts} hosts of vLLMs, one model and {MODELS} by turns, round {number + 1} of {MODEL_ROUNDS}")
        for side, each in zip(sides, rates, strict=True):
            each.append(replay(side, hosts, vllms=True).decisions_per_s)
    one, several = (float(np.median(each)) for each in rates)
    name = f"decisions, {hosts} hosts of vLLMs, {MODELS} models with {ADAPTERS} adapters beside one model"
    report.row(name, "1/s", several, one, higher=True)


def _over_zmq(report: ScheduleReport, asked: Sequence[Asked], per_s: float) -> None:
    took_s, answered_per_s = times_over_zmq(asked, per_s)
    p50_s, p99_s = np.percentile(took_s, (50, 99)).tolist()
    report.row("answers over ZeroMQ, 4 gateways", "1/s", answered_per_s, min(per_s, GOAL_ZMQ_PER_S), higher=True)
    for name, seconds in (("median", p50_s), ("99th percentile", p99_s)):
        report.row(f"over ZeroMQ, {name}", "ms", 1e3 * seconds, GOAL_ZMQ_MS)


def _asked(keys: tuple[bytes, ...], read: _Line) -> Asked:
    return Asked(keys, read.input_length, max(1, read.output_length))


def timed(conductor: Conductor, timings: Timings, collector: Collector, now: float, event: Event, kind: str) -> list[Effect]:
    collector.lately_s()
    begun = time.thread_time()
    effects = conductor.handle(now, event)
    ended = time.thread_time()
    pause_s = collector.lately_s()
    if pause_s:
        timings.add("collector", pause_s)
        timings.collecting_s[kind] = timings.collecting_s.get(kind, 0.0) + pause_s
    timings.add(kind, ended - begun - pause_s)
    return effects


def _arm(timers: dict[TimerKey, float], now: float, effects: Sequence[Effect]) -> None:
    for effect in effects:
        if isinstance(effect, SetTimer):
            timers[effect.key] = now + effect.delay_s
