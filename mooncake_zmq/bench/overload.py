"""`bench overload`: a live cluster of modelled engines at a multiple of what its prefills can compute, over HTTP, streaming.

Its promises are compared with its clients' records: an admitted request gets its first token and its later ones in time, any
other is refused at once, with a time to retry.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.bench.client import Client, replay
from mooncake_zmq.bench.client_stream import Seen
from mooncake_zmq.bench.cluster import REQUEST_TIMEOUT_S, BenchCluster, bench_cluster
from mooncake_zmq.bench.report import Progress, Report
from mooncake_zmq.config.load import costs_of, load
from mooncake_zmq.config.records import Config
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.kv.layout import div_ceil
from mooncake_zmq.laboratory.study import TRACE_BLOCK_TOKENS, Arrival
from mooncake_zmq.refused import Refused

SPREAD = 0.8
"""Standard deviation of the logarithm of prompt lengths."""
SHORTEST_TOKENS = 256
ERROR_PROMISE, SLO_PROMISE, REFUSAL_MS = 0.15, 0.99, 50.0
"""Goals of the figures: predicted TTFT's mean error over its mean, the share of the admitted in time, and the time of a
refusal, which takes a decision but no queue, on a machine whose cores are all in use."""

LATE_MS = 30.0
"""A client that sends later than this has waited for a core, and so have all other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`multiple` of the capacity for `duration_s`; prompts of `prompt_tokens` in the mean, each with `output_tokens`."""

    multiple: float
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    seed: int


def bench_overload(path: Path, wanted: Load, progress: Progress) -> Report:
    """Start the cluster of `path`, drive it, stop it. Raises click.ClickException."""
    config = load(path).config
    costs = modelled_costs(config)
    lengths = draw_lengths(wanted, config.model.max_model_len - wanted.output_tokens)
    capacity_per_s = len(config.of_role("prefill")) / mean(costs.compute_s(length, 0) for length in lengths.tolist())
    arrivals = draw_arrivals(wanted, capacity_per_s)
    progress(f"starting {len(config.nodes)} processes")
    with bench_cluster(path) as cluster:
        progress(f"{len(arrivals)} requests in {wanted.duration_s:g} s, {wanted.multiple:g} times the capacity")
        client = Client(url=cluster.url, model=cluster.model, max_open=len(arrivals) + 1, timeout_s=REQUEST_TIMEOUT_S)
        seen = asyncio.run(replay(client, requests(arrivals, lengths, wanted), progress)).seen
        predictions = predictions_of(cluster, config)
    return as_report(seen, config, wanted, costs, capacity_per_s, predictions)


def modelled_costs(config: Config) -> Costs:
    """Return the costs of the cluster's prefills, which all model the same. Raises click.ClickException and
    ConfigError."""
    profiles = {node.modelled for node in config.of_role("prefill", "decode")}
    if len(profiles) != 1 or "" in profiles:
        raise Refused("bench overload needs prefills and decodes of one backend modelled:PROFILE")
    return costs_of(profiles.pop(), "backend")


def draw_lengths(wanted: Load, longest: int) -> NDArray[np.int64]:
    """Return prompt lengths, to be used in turn: a long tail, as in the traces of conversations."""
    random = np.random.default_rng(wanted.seed)
    drawn = random.lognormal(np.log(wanted.prompt_tokens) - SPREAD**2 / 2, SPREAD, size=4096)
    return np.clip(drawn, SHORTEST_TOKENS, longest).astype(np.int64)


def draw_arrivals(wanted: Load, capacity_per_s: float) -> list[float]:
    """Return Poisson arrivals, in seconds from the start."""
    random = np.random.default_rng(wanted.seed + 1)
    rate = wanted.multiple * capacity_per_s
    times = np.cumsum(random.exponential(1 / rate, size=int(2 * rate * wanted.duration_s) + 16))
    return [float(at) for at in times if at < wanted.duration_s]


def requests(arrivals: Sequence[float], lengths: NDArray[np.int64], wanted: Load) -> list[Arrival]:
    """Return requests with a prompt of its own each: no block of it was computed before."""
    random = np.random.default_rng(wanted.seed + 2)
    sized = zip(arrivals, cycle(lengths.tolist()), strict=False)
    return [Arrival(at, tokens, wanted.output_tokens, _hash_ids(random, tokens)) for at, tokens in sized]


def _hash_ids(random: np.random.Generator, tokens: int) -> tuple[int, ...]:
    return tuple(random.integers(0, 1 << 60, div_ceil(tokens, TRACE_BLOCK_TOKENS)).tolist())


def predictions_of(cluster: BenchCluster, config: Config) -> dict[str, float]:
    """Return the predictions of TTFT as the gateways count them: how many, the mean, and the mean error in seconds. Empty if
    they keep none."""
    dumps = cluster.dumps([node.name for node in config.of_role("gateway")])
    predictions = [dump["actor"].get("predictions", {}).get("ttft", {}) for dump in dumps.values()]
    made = sum(each.get("count", 0) for each in predictions)
    if not made:
        return {}
    return {
        "count": made,
        "actual_s": sum(each["count"] * each["actual_s"] for each in predictions if each) / made,
        "error_s": sum(each["count"] * each["absolute_error_s"] for each in predictions if each) / made,
    }


def as_report(
    seen: Sequence[Seen],
    config: Config,
    wanted: Load,
    costs: Costs,
    capacity_per_s: float,
    predictions: dict[str, float],
) -> Report:
    """Return each figure beside its goal."""
    conductor = config.conductor
    admitted = [each for each in seen if each.status == 200]
    refused = [each for each in seen if each.status == 429]
    ended = [each for each in admitted if each.outcome == "finished" and len(each.token_s) == each.output_tokens]
    within = [each for each in ended if each.ttft_s <= conductor.ttft_slo_s and each.tbt_s <= conductor.tbt_slo_s]
    report = Report("overload")
    lower, higher = report.row, partial(report.row, higher=True)
    # Requests that came in the time, and those that may still be waiting at its end, one TTFT long.
    served_s = wanted.duration_s + conductor.ttft_slo_s
    higher("admitted", "share", len(admitted) / max(1, len(seen)), min(1.0, capacity_per_s * served_s / max(1, len(seen))))
    higher("of these, to their end", "share", len(ended) / max(1, len(admitted)), 1.0)
    higher("of these, in both SLOs", "share", len(within) / max(1, len(admitted)), SLO_PROMISE)
    higher("goodput", "requests/s", len(within) / served_s, min(1.0, wanted.multiple) * capacity_per_s)
    useful_s = sum(costs.compute_s(each.input_tokens, 0) for each in within)
    prefills_s = len(config.of_role("prefill")) * served_s
    higher("prefill time for these", "share", useful_s / prefills_s, min(1.0, wanted.multiple))
    if ended:
        lower("TTFT, p99", "s", _p(99, [each.ttft_s for each in ended]), conductor.ttft_slo_s)
        lower("TBT, p99", "ms", 1e3 * _p(99, [each.tbt_s for each in ended]), 1e3 * conductor.tbt_slo_s)
    if refused:
        lower("refused after, p50", "ms", 1e3 * _p(50, [each.answered_s for each in refused]), REFUSAL_MS)
        lower("refused after, p99", "ms", 1e3 * _p(99, [each.answered_s for each in refused]), REFUSAL_MS)
        higher("refused with Retry-After", "share", mean(bool(each.retry_after) for each in refused), 1.0)
    if predictions:
        error = predictions["error_s"] / max(1e-9, predictions["actual_s"])
        lower("TTFT predicted off by", "of its mean", error, ERROR_PROMISE)
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
    errors = sorted({f"{each.error} {each.said}" for each in seen if each.error and each.status in (0, 200)})
    shorter = "goodput: of a longer queue the shorter prompts fit into the SLO, so it may pass the mean capacity"
    late_ms = 1e3 * _p(99, [each.late_s for each in seen]) if seen else 0.0
    late = f"sent late by {late_ms:.0f} ms (p99)"
    if late_ms > LATE_MS:
        late += ": the machine's cores were all taken, so times are its own rather than the cluster's"
    return [slos, load_line, shorter, late, *(f"error: {error}" for error in errors[:3])]


def _p(percent: float, values: Sequence[float]) -> float:
    return float(np.percentile(values, percent))
