"""`bench zoo --live`: the zoo at toy size against a cluster of real processes, over HTTP, by token ids.

Computed tokens are those that each answer reports, over the least that a clairvoyant would have computed. Requests
come at their times, but for the turns of chats: each is sent when its predecessor's answer has ended.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import ClassVar

import click
import numpy as np

from mooncake_zmq.bench.client import Client, replay
from mooncake_zmq.bench.client_prompts import PromptForm
from mooncake_zmq.bench.client_stream import Seen
from mooncake_zmq.bench.cluster import REQUEST_TIMEOUT_S, BenchCluster, bench_cluster
from mooncake_zmq.bench.report import Progress
from mooncake_zmq.bench.zoo_report import ZooLine, ZooReport
from mooncake_zmq.config.load import load
from mooncake_zmq.config.records import Config
from mooncake_zmq.laboratory import zoo
from mooncake_zmq.laboratory.clairvoyant import foresee
from mooncake_zmq.laboratory.study import TRACE_BLOCK_TOKENS, Arrival, RequestRecord

SMALL_BLOCK = 64
"""Tokens that a hash id stands for, except in bursts: prompts are an eighth as long as in the laboratory."""
BURSTS = 3
"""Bursts, one after the other, each when the cluster is idle."""
CHATS = 10
TOY_SPEED = 0.05
"""Factor of estimated ends of requests, where engines are not modelled: they are not an A800's, and their prompts are
shorter."""
IDS_PER_GROUP = 1 << 32
"""Distance between the hash ids of two groups of chats, which are to share nothing."""
SPECS: dict[str, str] = {
    "bursts": "requests=8,size=8,gap=0.05,prefix=1024,own=20,output=8",
    "agents": "requests=60,rate=1,steps=6,every=3,subagents=3,substeps=2,tool=0.05,output=8",
    "system": "requests=60,rate=8,output=8",
    "turns": "rate=2,turns=5,output=8",
    "documents": "requests=40,rate=4,shortest=2048,longest=8192,output=8",
    "lengths": "requests=60,rate=4,longest=30000,output=8",
    "flood": "requests=80,rate=1,flood=10,begin=2,output=8",
    "quiet": "requests=12,rate=0.5,longest=16384,output=8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRow(ZooLine):
    """One workload. Times in seconds; `*_error`: mean absolute error over the mean, -1 where nothing was predicted."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        *("workload", "finished", "computed", "least", "regret", "TTFT", "TTFT p99"),
        *("gap p99", "gaps p50", "TTFT off", "TBT off"),
    )

    workload: str
    requests: int
    finished: int
    computed_tokens: int
    least_tokens: int
    regret: float
    ttft_s: float
    ttft_p99_s: float
    first_gap_p99_s: float
    gap_p50_s: float
    ttft_error: float
    tbt_error: float

    def cells(self) -> Iterable[str]:
        return (
            self.workload,
            f"{self.finished} of {self.requests}",
            f"{self.computed_tokens:,}",
            f"{self.least_tokens:,}",
            f"{self.regret:.3f}",
            f"{self.ttft_s:.4g}",
            f"{self.ttft_p99_s:.4g}",
            f"{1000 * self.first_gap_p99_s:.4g}",
            f"{1000 * self.gap_p50_s:.4g}",
            *(f"{100 * each:.1f} %" if each >= 0 else "-" for each in (self.ttft_error, self.tbt_error)),
        )


def bench_zoo_live(path: Path, *, kinds: Sequence[str], seed: int, progress: Progress) -> ZooReport:
    """Start the cluster of `path` so that it refuses no request, send it each of `kinds`, stop it. Raises
    click.ClickException."""
    config = load(path).config
    block_tokens = config.model.block_tokens
    if TRACE_BLOCK_TOKENS % block_tokens:
        raise click.ClickException(f"model.block_tokens must divide {TRACE_BLOCK_TOKENS}, and is {block_tokens}")
    progress(f"starting {len(config.nodes)} processes")
    with bench_cluster(path, {"conductor.admission": '"none"'}) as cluster:
        run = _Run(cluster, config, seed, progress)
        lines = [run.row(kind) for kind in kinds]
    report = ZooReport("zoo", title=f"live, {path}, seed {seed}", lines=lines)
    report.notes.append("computed, least: prompt tokens; TTFT: mean and p99 in s; gap after the first token, all gaps: ms")
    return report


class _Run:
    def __init__(self, cluster: BenchCluster, config: Config, seed: int, progress: Progress) -> None:
        self._cluster = cluster
        self._config = config
        self._seed = seed
        self._progress = progress
        self._speed = 1.0 if any(node.modelled for node in config.nodes) else TOY_SPEED

    def row(self, kind: str) -> LiveRow:
        """Send a workload and return its figures."""
        form = PromptForm(block_tokens=self._id_tokens(kind))
        before = self._books()
        pairs: list[tuple[Arrival, Seen]] = []
        for part in parts_of(kind, self._seed, self._speed):
            self._cluster.settle()
            self._progress(f"{kind}: {sum(map(len, part))} requests")
            pairs += zip(chain(*part), asyncio.run(self._send(part, form)), strict=True)
        self._cluster.settle()
        arrivals, seen = [each for each, _ in pairs], [each for _, each in pairs]
        errors = errors_between(before, self._books())
        return row_of(kind, seen, least_tokens(arrivals, seen, form, self._config.model.block_tokens), errors)

    def _id_tokens(self, kind: str) -> int:
        fits = SMALL_BLOCK % self._config.model.block_tokens == 0
        return SMALL_BLOCK if fits and kind != "bursts" else TRACE_BLOCK_TOKENS

    async def _send(self, chats: Sequence[Sequence[Arrival]], form: PromptForm) -> list[Seen]:
        """Run the chats side by side, each request of one when the one before has ended."""
        client = Client(url=self._cluster.url, model=self._cluster.model, form=form, timeout_s=REQUEST_TIMEOUT_S)

        async def send(chat: Sequence[Arrival]) -> list[Seen]:
            seen: list[Seen] = []
            for each in chat:
                due = each if not seen else replace(each, at_s=0.0)
                seen += (await replay(client, [due], lambda text: None)).seen
            return seen

        return list(chain(*await asyncio.gather(*map(send, chats))))

    def _books(self) -> dict[str, tuple[float, float]]:
        """Return, by the kind of prediction, the sums of errors and of actual values so far, as the gateways count them."""
        dumps = self._cluster.dumps([node.name for node in self._config.of_role("gateway")])
        sums: dict[str, tuple[float, float]] = {}
        for predictions in (dump["actor"].get("predictions", {}) for dump in dumps.values()):
            for name, each in predictions.items():
                count, (error_s, actual_s) = each.get("count", 0), sums.get(name, (0.0, 0.0))
                if count:
                    sums[name] = (error_s + count * each["absolute_error_s"], actual_s + count * each["actual_s"])
        return sums


def parts_of(kind: str, seed: int, speed: float) -> list[list[list[Arrival]]]:
    """Return groups of chats, sent one group after the other; most chats are of one request. No prompt of a group begins like
    one of another group, of this kind or another."""
    count = BURSTS if kind == "bursts" else 1
    spec = f"{kind}:{SPECS[kind]}" + (f",speed={speed}" if "speed" in zoo.KINDS[kind].defaults else "")
    workloads = [zoo.parse_workload(f"{spec},seed={seed + at}") for at in range(count)]
    if kind == "turns":
        parts = [list(islice(zoo.sessions_of(workloads[0]), CHATS))]
    else:
        parts = [[[each] for each in zoo.arrivals_of(workload)] for workload in workloads]
    first = BURSTS * list(SPECS).index(kind)
    return [[[_in_own_range(each, first + at) for each in chat] for chat in part] for at, part in enumerate(parts)]


def _in_own_range(arrival: Arrival, part: int) -> Arrival:
    return replace(arrival, hash_ids=tuple(IDS_PER_GROUP * part + each for each in arrival.hash_ids))


def least_tokens(arrivals: Sequence[Arrival], seen: Sequence[Seen], form: PromptForm, block_tokens: int) -> int:
    """Return the least prompt tokens to compute for those that finished, by blocks of the model's."""
    scale = TRACE_BLOCK_TOKENS // form.block_tokens
    scaled = [replace(each, input_tokens=scale * form.length(each)) for each in arrivals]
    records = [RequestRecord(0.0, each.input_tokens, each.output_tokens) for each in scaled]
    for record, each in zip(records, seen, strict=True):
        record.prefill = "admitted" if each.status == 200 else ""
    foresee(scaled, records, scale * block_tokens)
    pairs = zip(records, seen, strict=True)
    return sum((record.input_tokens - record.possible) // scale for record, each in pairs if each.outcome == "finished")


def row_of(kind: str, seen: Sequence[Seen], least: int, errors: Mapping[str, float]) -> LiveRow:
    """Return the figures of the clients' records. Raises click.ClickException."""
    finished = [each for each in seen if each.outcome == "finished"]
    if unsaid := sum(1 for each in finished if min(each.prompt_tokens, each.cached_tokens) < 0):
        raise click.ClickException(f"{kind}: {unsaid} of {len(finished)} answers do not report their tokens, or those cached")
    computed = sum(each.prompt_tokens - each.cached_tokens for each in finished)
    gaps = [np.diff(each.token_s) for each in finished if len(each.token_s) > 1]
    ttft = [each.ttft_s for each in finished]
    return LiveRow(
        workload=kind,
        requests=len(seen),
        finished=len(finished),
        computed_tokens=computed,
        least_tokens=least,
        regret=computed / least if least else 0.0,
        ttft_s=sum(ttft) / max(1, len(ttft)),
        ttft_p99_s=_percentile(ttft, 99),
        first_gap_p99_s=_percentile([float(each[0]) for each in gaps], 99),
        gap_p50_s=_percentile([float(gap) for each in gaps for gap in each], 50),
        ttft_error=errors.get("ttft", -1.0),
        tbt_error=errors.get("tbt", -1.0),
    )


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


def errors_between(before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return, by the kind of prediction, the mean error over the mean of the predictions between two readings of the
    counters."""
    found: dict[str, float] = {}
    for name, (error_s, actual_s) in after.items():
        error_before_s, actual_before_s = before.get(name, (0.0, 0.0))
        if actual_s > actual_before_s:
            found[name] = (error_s - error_before_s) / (actual_s - actual_before_s)
    return found
