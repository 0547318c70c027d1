"""`bench overload`: a live cluster of modelled engines at a multiple of what its prefills can compute, over HTTP, streaming.

What it promises is held against what its clients saw: who is admitted gets its first token and its pace in time, everybody
else is told at once, and when to come back.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import click
import httpx
import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.bench.cluster import REQUEST_TIMEOUT_S, BenchCluster, bench_cluster
from mooncake_zmq.bench.report import Report, Row
from mooncake_zmq.config import Config, ConfigError, costs_of, load
from mooncake_zmq.core.costs import Costs

Progress = Callable[[str], None]

MODELLED = Path(__file__).parent.parent.parent / "configs/modelled.toml"
SPREAD = 0.8
"""Of the logarithm of prompt lengths."""
SHORTEST_TOKENS = 256
ERROR_PROMISE, SLO_PROMISE, REFUSAL_MS = 0.15, 0.99, 50.0
"""What the figures are held against: predicted TTFT's mean error over its mean, the share of the admitted in time, and the time
of a refusal: no queue, just a decision, on a machine whose cores are all in use."""

LATE_MS = 30.0
"""A client that sends later than this has waited for a core, and so has everybody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`multiple` of the capacity for `duration_s`; prompts of `prompt_tokens` in the mean, each with `output_tokens`."""

    multiple: float
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    seed: int


@dataclass(slots=True)
class Seen:
    """What one client saw; times in seconds since it sent its request."""

    status: int = 0
    answered_s: float = 0.0
    """When the answer's status came: a refusal's end."""
    retry_after: str = ""
    token_times: list[float] = field(default_factory=list)
    error: str = ""
    prompt_tokens: int = 0
    tokens_wanted: int = 0
    late_s: float = 0.0
    """How long after its time it was sent: this machine's cores were taken."""

    @property
    def ended(self) -> bool:
        """With all its tokens?"""
        return self.status == 200 and not self.error and len(self.token_times) == self.tokens_wanted

    @property
    def tbt_s(self) -> float:
        """Mean of the longest tenth of the gaps between its tokens."""
        gaps = sorted(np.diff(self.token_times).tolist(), reverse=True)
        return mean(gaps[: max(1, len(gaps) // 10)]) if gaps else 0.0


def bench_overload(path: Path, wanted: Load, progress: Progress) -> Report:
    """Start the cluster of `path`, drive it, stop it. Raises click.ClickException."""
    config = load(path).config
    costs = modelled_costs(config)
    lengths = draw_lengths(wanted, config.model.max_model_len - wanted.output_tokens)
    capacity_per_s = len(config.of_role("prefill")) / mean(costs.compute_s(length, 0) for length in lengths.tolist())
    arrivals = draw_arrivals(wanted, capacity_per_s)
    progress(f"starting {len(config.nodes)} processes")
    with bench_cluster(path, config, {}) as cluster:
        progress(f"{len(arrivals)} requests in {wanted.duration_s:g} s, {wanted.multiple:g} times the capacity")
        seen = asyncio.run(drive(cluster.url, arrivals, lengths, wanted))
        predictions = predictions_of(cluster, config)
    return as_report(seen, config, wanted, costs, capacity_per_s, predictions)


def modelled_costs(config: Config) -> Costs:
    """What a prompt takes the cluster's prefills, which all model the same. Raises click.ClickException."""
    profiles = {node.modelled for node in config.of_role("prefill", "decode")}
    if len(profiles) != 1 or "" in profiles:
        raise click.ClickException("bench overload needs prefills and decodes of one backend modelled:PROFILE")
    try:
        return costs_of(profiles.pop(), "backend")
    except ConfigError as error:
        raise click.ClickException(str(error)) from None


def draw_lengths(wanted: Load, longest: int) -> NDArray[np.int64]:
    """Prompt lengths to be taken in turn: a long tail, as in the traces of conversations."""
    random = np.random.default_rng(wanted.seed)
    drawn = random.lognormal(np.log(wanted.prompt_tokens) - SPREAD**2 / 2, SPREAD, size=4096)
    return np.clip(drawn, SHORTEST_TOKENS, longest).astype(np.int64)


def draw_arrivals(wanted: Load, capacity_per_s: float) -> list[float]:
    """Poisson arrivals, in seconds from the start."""
    random = np.random.default_rng(wanted.seed + 1)
    rate = wanted.multiple * capacity_per_s
    times = np.cumsum(random.exponential(1 / rate, size=int(2 * rate * wanted.duration_s) + 16))
    return [float(at) for at in times if at < wanted.duration_s]


async def drive(url: str, arrivals: Sequence[float], lengths: NDArray[np.int64], wanted: Load) -> list[Seen]:
    """Send each request at its time, whatever became of the others: clients of a busy service do not take turns."""
    random = np.random.default_rng(wanted.seed + 2)
    prompts = [random.integers(0, 256, size=int(lengths[number % len(lengths)])) for number in range(len(arrivals))]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits) as client:
        model = str((await client.get("/v1/models")).json()["data"][0]["id"])
        began = time.perf_counter()
        tasks = []
        for at, prompt in zip(arrivals, prompts, strict=True):
            body = _body(model, prompt, wanted.output_tokens)
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            late_s = max(0.0, time.perf_counter() - began - at)
            seen = Seen(prompt_tokens=len(prompt), tokens_wanted=wanted.output_tokens, late_s=late_s)
            tasks.append(asyncio.create_task(ask(client, body, seen)))
        return await asyncio.gather(*tasks)


def _body(model: str, prompt: NDArray[np.int64], output_tokens: int) -> bytes:
    wanted = {"max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    return json.dumps({"model": model, "prompt": prompt.tolist(), **wanted}).encode()


async def ask(client: httpx.AsyncClient, body: bytes, seen: Seen) -> Seen:
    """One request, to its end; what becomes of it goes into `seen`."""
    began = time.perf_counter()
    headers = {"content-type": "application/json"}
    try:
        async with client.stream("POST", "/v1/completions", content=body, headers=headers) as response:
            seen.status, seen.answered_s = response.status_code, time.perf_counter() - began
            seen.retry_after = response.headers.get("retry-after", "")
            async for line in response.aiter_lines():
                if seen.status == 200 and line.startswith("data: {"):
                    _take(seen, json.loads(line.removeprefix("data: ")), time.perf_counter() - began)
    except httpx.HTTPError as error:
        seen.error = seen.error or repr(error)
    return seen


def _take(seen: Seen, chunk: dict[str, Any], now: float) -> None:
    if "error" in chunk:
        seen.error = str(chunk["error"]["message"])
        return
    for choice in chunk["choices"]:
        seen.token_times += [now] * len(choice.get("token_ids") or [])


def predictions_of(cluster: BenchCluster, config: Config) -> dict[str, float]:
    """Of TTFT, by the gateways' own books: how many, the mean, and the mean error in seconds. Empty if they keep none."""
    dumps = cluster.dumps([node.name for node in config.of_role("gateway")])
    told = [dump["actor"].get("predictions", {}).get("ttft", {}) for dump in dumps.values()]
    made = sum(each.get("count", 0) for each in told)
    if not made:
        return {}
    return {
        "count": made,
        "actual_s": sum(each["count"] * each["actual_s"] for each in told if each) / made,
        "error_s": sum(each["count"] * each["absolute_error_s"] for each in told if each) / made,
    }


def as_report(
    seen: Sequence[Seen],
    config: Config,
    wanted: Load,
    costs: Costs,
    capacity_per_s: float,
    predictions: dict[str, float],
) -> Report:
    """Each figure beside what was promised."""
    conductor = config.conductor
    admitted = [each for each in seen if each.status == 200]
    refused = [each for each in seen if each.status == 429]
    ended = [each for each in admitted if each.ended]
    within = [e for e in ended if e.token_times[0] <= conductor.ttft_slo_s and e.tbt_s <= conductor.tbt_slo_s]
    report = Report("overload")

    def row(name: str, unit: str, value: float, reference: float, *, higher: bool = True) -> None:
        report.rows.append(Row(name=name, unit=unit, value=value, reference=reference, higher_is_better=higher))

    # What came in the time, and what may still be waiting at its end, one TTFT long.
    served_s = wanted.duration_s + conductor.ttft_slo_s
    row("admitted", "share", len(admitted) / max(1, len(seen)), min(1.0, capacity_per_s * served_s / max(1, len(seen))))
    row("of these, to their end", "share", len(ended) / max(1, len(admitted)), 1.0)
    row("of these, in both SLOs", "share", len(within) / max(1, len(admitted)), SLO_PROMISE)
    row("goodput", "requests/s", len(within) / served_s, min(1.0, wanted.multiple) * capacity_per_s)
    useful_s = sum(costs.compute_s(each.prompt_tokens, 0) for each in within)
    prefills_s = len(config.of_role("prefill")) * served_s
    row("prefill time for these", "share", useful_s / prefills_s, min(1.0, wanted.multiple))
    if ended:
        row("TTFT, p99", "s", _p(99, [each.token_times[0] for each in ended]), conductor.ttft_slo_s, higher=False)
        row("TBT, p99", "ms", 1e3 * _p(99, [each.tbt_s for each in ended]), 1e3 * conductor.tbt_slo_s, higher=False)
    if refused:
        row("refused after, p50", "ms", 1e3 * _p(50, [each.answered_s for each in refused]), REFUSAL_MS, higher=False)
        row("refused after, p99", "ms", 1e3 * _p(99, [each.answered_s for each in refused]), REFUSAL_MS, higher=False)
        row("refused with Retry-After", "share", mean(bool(each.retry_after) for each in refused), 1.0)
    if predictions:
        error = predictions["error_s"] / max(1e-9, predictions["actual_s"])
        row("TTFT predicted off by", "of its mean", error, ERROR_PROMISE, higher=False)
    report.notes += _notes(seen, config, wanted, capacity_per_s)
    return report


def _notes(seen: Sequence[Seen], config: Config, wanted: Load, capacity_per_s: float) -> list[str]:
    conductor = config.conductor
    slos = f"SLO: TTFT {conductor.ttft_slo_s:g} s, TBT {1e3 * conductor.tbt_slo_s:g} ms (mean of the longest tenth of the gaps)"
    counts: dict[int, int] = {}
    for each in seen:
        counts[each.status] = counts.get(each.status, 0) + 1
    answers = ", ".join(f"{number} x {status or 'no answer'}" for status, number in sorted(counts.items()))
    load_line = f"{len(seen)} requests in {wanted.duration_s:g} s, {wanted.multiple:g} times the {capacity_per_s:.2f}/s that "
    load_line += f"{len(config.of_role('prefill'))} prefills can compute: {answers}"
    errors = sorted({each.error for each in seen if each.error})
    shorter = "goodput: of a longer queue the shorter prompts fit into the SLO, so it may pass the mean capacity"
    late_ms = 1e3 * _p(99, [each.late_s for each in seen]) if seen else 0.0
    late = f"sent late by {late_ms:.0f} ms (p99)"
    if late_ms > LATE_MS:
        late += ": the machine's cores were all taken, so times are its own rather than the cluster's"
    return [slos, load_line, shorter, late, *(f"error: {error}" for error in errors[:3])]


def _p(percent: float, values: Sequence[float]) -> float:
    return float(np.percentile(values, percent))
