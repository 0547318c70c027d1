"""The output of runs for a user: tables, one JSON object, plots."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from mooncake_zmq.laboratory import tables
from mooncake_zmq.laboratory.drawing import new_figure, save
from mooncake_zmq.laboratory.metrics import Spread, Summary, summarize
from mooncake_zmq.laboratory.study import RunResult, Setup

CURVE_POINTS = 201


@dataclass(frozen=True, slots=True)
class Outcome:
    """The kept results of a run: its figures, the curves that are drawn, not its requests. `ttft_s`: quantiles."""

    setup: Setup
    summary: Summary
    ttft_s: tuple[float, ...]
    loads: tuple[tuple[float, float, float], ...]
    copies: tuple[tuple[float, dict[str, int]], ...]


def outcome_of(result: RunResult) -> Outcome:
    """Return the figures and curves of a run."""
    started = [each.ttft_s for each in result.requests if each.ttft_s >= 0]
    curve = np.quantile(np.array(started), np.linspace(0, 1, CURVE_POINTS)).tolist() if started else []
    return Outcome(result.setup, summarize(result), tuple(curve), tuple(result.loads), tuple(result.copies))


def as_json(chosen: Sequence[Mapping[str, str]], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return `{"runs": [{"swept", "setup", "summary", "ttft_quantiles_s", "loads", "copies"}]}`, in the order of the sweep."""
    runs = [
        {
            "swept": dict(swept),
            "setup": asdict(outcome.setup),
            "summary": asdict(outcome.summary),
            "ttft_quantiles_s": outcome.ttft_s,
            "loads": outcome.loads,
            "copies": outcome.copies,
        }
        for swept, outcome in zip(chosen, outcomes, strict=True)
    ]
    return {"runs": runs}


def run_table(outcome: Outcome) -> Table:
    """Return the table of one run, a row for each figure."""
    setup, summary = outcome.setup, outcome.summary
    title = f"{setup.policy}, {setup.prefill}P+{setup.decode}D of {setup.hardware.name}, {setup.speed:g}x"
    return tables.pairs(title, _lines(setup, summary))


def _lines(setup: Setup, summary: Summary) -> list[tuple[str, str]]:
    bounds = f"TTFT <= {setup.ttft_slo_s:g} s, TBT <= {setup.tbt_slo_s * 1000:g} ms"
    lines = [
        ("requests (finished, rejected, failed)", f"{_counts(summary)}"),
        (f"within {bounds}, of all that arrived", percent(summary.within_slo)),
        ("within TTFT alone, within TBT alone", f"{percent(summary.within_ttft)}, {percent(summary.within_tbt)}"),
        ("within both, of those not rejected", percent(summary.admitted_within_slo)),
        (f"goodput, requests/s (target {percent(summary.target)}: {_met(summary)})", f"{summary.goodput_per_s:.3f}"),
        ("TTFT mean, p50, p90, p99, s", written(summary.ttft_s, 1)),
        ("TBT (longest tenth) mean, p50, p90, p99, ms", written(summary.tbt_s, 1000)),
        ("first gap (to the second token) mean, p50, p90, p99, ms", written(summary.first_gap_s, 1000)),
        ("TTFT mean of a clairvoyant on an idle machine, s", f"{summary.least_ttft_s:.4g}"),
        ("prompt tokens reused", percent(summary.hit_ratio)),
        *((f"  from {TIER_NAMES[tier]}", percent(share)) for tier, share in summary.hits.items() if share),
        (f"  of the {percent(summary.possible_ratio)} that were possible", percent(summary.hits_of_possible)),
        ("regret: tokens computed / the least", f"{summary.regret:.3f}"),
        ("prefill engine time, s a request", f"{summary.prefill_gpu_s:.3f}"),
        ("decode engine time, s", f"{summary.decode_gpu_s:,.0f}"),
        *((f"  not served: {reason}", f"{count:,}") for reason, count in summary.reasons.items()),
        ("prefills wasted (their engine time, s)", f"{summary.wasted_prefills:,} ({summary.wasted_prefill_s:.1f})"),
    ]
    for name, error in summary.errors.items():
        lines.append((f"error of predicted {name}, of its mean ({error.count:,})", f"{error.percent:.1f} %"))
    ran = f"{summary.virtual_s:,.0f}, {summary.wall_s:.1f}, {summary.cpu_s:.1f}"
    return [
        *lines,
        ("time: virtual, wall, CPU, s", ran),
        ("memory, MiB; events", f"{summary.peak_mib:.0f}; {summary.events:,}"),
    ]


TIER_NAMES = {"own": "the engine's own memory", "dram": "the host's pool", "disk": "the host's SSD", "remote": "other hosts"}


def percent(share: float) -> str:
    """Return a percentage with one decimal."""
    return f"{100 * share:.1f} %"


def _counts(summary: Summary) -> str:
    return f"{summary.requests:,} ({summary.finished:,}, {summary.rejected:,}, {summary.failed:,})"


def _met(summary: Summary) -> str:
    return "met" if summary.attained else "missed"


def written(found: Spread, scale: float) -> str:
    """Return mean and percentiles as text, times `scale`."""
    return ", ".join(f"{scale * each:.4g}" for each in (found.mean, found.p50, found.p90, found.p99))


def sweep_table(chosen: Sequence[Mapping[str, str]], outcomes: Sequence[Outcome]) -> Table:
    """Return a table with a row for each run."""
    times, others = ("TTFT", "p50", "p90", "p99", "TBT", "p99"), ("reused", "regret", "prefill", "rejected", "wasted")
    columns = (*chosen[0], "in SLO", "goodput/s", *times, *others)
    table = tables.empty(f"{len(outcomes)} runs; times in seconds, TBT in ms", columns, text=chosen[0])
    for swept, outcome in zip(chosen, outcomes, strict=True):
        s = outcome.summary
        ttft_s = (s.ttft_s.mean, s.ttft_s.p50, s.ttft_s.p90, s.ttft_s.p99)
        tbt_ms = (1000 * s.tbt_s.mean, 1000 * s.tbt_s.p99)
        table.add_row(
            *swept.values(),
            percent(s.within_slo),
            f"{s.goodput_per_s:.3f}",
            *(f"{each:.3g}" for each in (*ttft_s, *tbt_ms)),
            percent(s.hit_ratio),
            f"{s.regret:.2f}",
            f"{s.prefill_gpu_s:.3f}",
            f"{s.rejected:,}",
            f"{s.wasted_prefills:,}",
        )
    return table


def plot(directory: Path, chosen: Sequence[Mapping[str, str]], outcomes: Sequence[Outcome]) -> list[Path]:
    """Draw the available curves: ttft.png, load.png, copies.png, sweep.png. Raises click.ClickException without matplotlib."""
    names = [", ".join(f"{key} {value}" for key, value in each.items()) or outcomes[0].setup.policy for each in chosen]
    drawn = [_plot_ttft(directory, names, outcomes), _plot_loads(directory, names, outcomes)]
    if any(each.copies for each in outcomes):
        drawn.append(_plot_copies(directory, names, outcomes))
    if len(outcomes) > 1:
        drawn.append(_plot_sweep(directory, chosen, outcomes))
    return drawn


def _plot_ttft(directory: Path, names: Sequence[str], outcomes: Sequence[Outcome]) -> Path:
    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    for name, outcome in zip(names, outcomes, strict=True):
        # Those without a first token keep the curve below 1.
        reached = outcome.summary.requests and _started(outcome.summary) / outcome.summary.requests
        axes.plot(outcome.ttft_s, np.linspace(0, reached, len(outcome.ttft_s)), label=name)
    axes.axvline(outcomes[0].setup.ttft_slo_s, color="black", linewidth=1)
    axes.set(xlabel="TTFT, s", ylabel="share of the requests", ylim=(0, 1), xscale="symlog", xlim=(0, None))
    axes.legend(fontsize="small")
    return save(figure, directory / "ttft.png")


def _started(summary: Summary) -> int:
    return summary.requests - summary.rejected - summary.failed


def _plot_loads(directory: Path, names: Sequence[str], outcomes: Sequence[Outcome]) -> Path:
    figure = new_figure(8, 5)
    above, below = figure.subplots(2, 1, sharex=True)
    for name, outcome in zip(names, outcomes, strict=True):
        if outcome.loads:
            at_s, prefills, decodes = zip(*outcome.loads, strict=True)
            above.plot(at_s, prefills, label=name)
            below.plot(at_s, decodes, label=name)
    above.set(ylabel="prefill load, of its SLO")
    below.set(ylabel="decode load, of its SLO", xlabel="virtual time, s")
    above.legend(fontsize="small")
    return save(figure, directory / "load.png")


def _plot_copies(directory: Path, names: Sequence[str], outcomes: Sequence[Outcome]) -> Path:
    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    for name, outcome in zip(names, outcomes, strict=True):
        ranks = outcome.copies[-1][1] if outcome.copies else {}
        for rank in ranks:
            points = [(at_s, copies.get(rank, 0)) for at_s, copies in outcome.copies]
            axes.plot(*zip(*points, strict=True), label=f"{name}: rank {rank}")
    axes.set(xlabel="virtual time, s", ylabel="hosts that hold the key")
    axes.legend(fontsize="small")
    return save(figure, directory / "copies.png")


def _plot_sweep(directory: Path, chosen: Sequence[Mapping[str, str]], outcomes: Sequence[Outcome]) -> Path:
    """Plot the share within the SLOs over the last key, a line for each combination of the others."""
    *others, last = chosen[0]
    lines: dict[str, list[tuple[str, float]]] = {}
    for swept, outcome in zip(chosen, outcomes, strict=True):
        name = ", ".join(f"{key} {swept[key]}" for key in others)
        lines.setdefault(name, []).append((swept[last], outcome.summary.within_slo))
    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name or "all")
    axes.set(xlabel=last, ylabel="share within the SLOs", ylim=(0, 1.02))
    axes.legend(fontsize="small")
    return save(figure, directory / "sweep.png")
