"""`mooncake-zmq reproduce`: one figure of the paper, ours beside theirs; or the systems of its neighbourhood."""

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
import msgspec

from mooncake_zmq.laboratory.command import runs_display
from mooncake_zmq.laboratory.drawing import new_figure
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.generated import parse_spec
from mooncake_zmq.laboratory.jobs import Job, Source, load, run_jobs, run_on_dask
from mooncake_zmq.laboratory.reports import measured
from mooncake_zmq.laboratory.reproduce import modelled, systems
from mooncake_zmq.laboratory.reproduce.figure import Figure, Measured, Plan
from mooncake_zmq.laboratory.reproduce.made import MADE, REQUESTS
from mooncake_zmq.laboratory.reproduce.plans import PLANS
from mooncake_zmq.laboratory.reproduce.replayed import measure
from mooncake_zmq.laboratory.reproduce.replayed import reproduce as replay
from mooncake_zmq.laboratory.reproduce.show import as_json as as_object
from mooncake_zmq.laboratory.reproduce.show import plot as draw
from mooncake_zmq.laboratory.reproduce.show import show
from mooncake_zmq.laboratory.rows import check_writable, kept, rows_option, write_runs
from mooncake_zmq.laboratory.traces import PUBLIC, read_trace

FIGURES = ("fig1", "fig5", "fig8", "fig9", "fig10", "fig11", "fig13", "fig14", "fig15", "rejections", "cpp", "roles", "cake")
OWN_TRACE = {"fig13": "synthetic"}
"""Figures on another trace than the public one, and the look-alike that stands in for it."""

EXAMPLES = """\b
Examples:
  mooncake-zmq reproduce fig14
  mooncake-zmq reproduce fig1 --trace conversation_trace.jsonl --plot plots
  mooncake-zmq reproduce fig5 --trace conversation_trace.jsonl --jobs 8 --json > fig5.json
  mooncake-zmq reproduce fig13 --quick 500
  mooncake-zmq reproduce cpp
  mooncake-zmq reproduce systems --only ThinK --only Cake --results systems.json
"""


@click.command(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("name", metavar="FIGURE", type=click.Choice((*FIGURES, "systems")))
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="Mooncake's public conversation trace.")
@click.option(
    "--quick",
    type=click.IntRange(1),
    metavar="N",
    help="Only the first N requests, or systems at toy size: to see that it runs.",
)
@click.option("--jobs", type=click.IntRange(1), show_default="cores", help="Processes at a time.")
@click.option("--dask", metavar="ADDRESS", help="Run on this Dask cluster's workers instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--plot", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Draw FIGURE.png there.")
@click.option("--only", multiple=True, metavar="NAME", help="Of systems: this one alone; may be repeated.")
@click.option(
    "--results",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Of systems: take what was measured before from this file, and add what is measured now.",
)
@rows_option
def reproduce(
    name: str,
    trace: Path | None,
    quick: int | None,
    jobs: int | None,
    dask: str | None,
    as_json: bool,
    plot: Path | None,
    only: tuple[str, ...],
    results: Path | None,
    rows_file: Path | None,
) -> None:
    """Print FIGURE of the Mooncake papers, ours beside theirs: fig1 to fig15 of FAST'25, rejections of arXiv's section 7.
    And two that the papers lack: cpp, long prompts over several prefills, and roles, nodes that change their role. And one of
    another paper: cake, prompts that are computed from the head while they are fetched from the tail.

    And systems: a row for each system of the neighbourhood, measured by a command of ours, with a verdict. Most of an hour;
    with --quick at toy size, without verdicts.

    Every setting is listed as from the paper, measured or assumed. What is assumed is run with two values on two kinds of
    hardware; a conclusion is kept only if it holds in all of these.
    """
    if name == "systems":
        if trace or jobs or dask or plot or rows_file:
            raise StudyError("systems has no --trace, --jobs, --dask, --plot or --rows: its commands are run as they are")
        run = partial(measured, timeout_s=systems.TIMEOUT_S)
        judged = systems.reproduce_systems(only, results, small=quick is not None, run=run)
        if as_json:
            click.echo(msgspec.json.encode(systems.as_json(judged)).decode())
        else:
            systems.show(judged)
        sys.exit(1 if any(each.error for each in judged) else 0)
    if only or results:
        raise StudyError("--only and --results are for systems")
    if plot is not None:
        new_figure(1, 1)  # fails at once if there is no matplotlib
    if rows_file is not None and name not in PLANS:
        raise StudyError(f"{name} is not of requests that are replayed: --rows is for {', '.join(sorted(PLANS))}")
    check_writable(rows_file, "--rows", trace)
    if name in MADE:
        figure = MADE[name](1.0 if quick is None else min(1.0, quick / REQUESTS))
    else:
        figure = _figure(name, _source(name, trace, quick), jobs or os.cpu_count() or 1, dask, rows_file)
    if quick is not None:
        figure.notes.append(f"Only the first {quick:,} requests: not the figure.")
    if plot is not None:
        click.echo(f"drew {draw(figure, plot)}", err=True)
    if as_json:
        click.echo(msgspec.json.encode(as_object(figure)).decode())
    else:
        show(figure)


def _source(name: str, trace: Path | None, quick: int | None) -> Source:
    if trace is not None:
        read_trace(trace, 1)
        return Source(path=str(trace.resolve()), first=quick)
    if name not in OWN_TRACE and name not in modelled.FITTED:
        raise StudyError(f"{name} needs --trace FILE: {PUBLIC}")
    return Source(shape=parse_spec(OWN_TRACE.get(name, "uniform")), first=quick)


def _figure(name: str, source: Source, jobs: int, dask: str | None, rows_file: Path | None) -> Figure:
    if name in modelled.FITTED:
        return modelled.FITTED[name]()
    if name == "fig9":
        return modelled.fig9(load(source))
    plan = PLANS[name]
    return replay(plan, source, partial(_run, plan, jobs, dask, rows_file))


def _run(plan: Plan, processes: int, dask: str | None, rows_file: Path | None, jobs: Sequence[Job]) -> list[Measured]:
    keep = kept(partial(measure, plan), rows_file)
    with runs_display(plan.name, len(jobs)) as progress:
        found = run_on_dask(dask, jobs, keep, progress) if dask else run_jobs(jobs, processes, keep, progress)
    write_runs(rows_file, [(job.setup, rows) for job, (_, rows) in zip(jobs, found, strict=True)])
    return [measured for measured, _ in found]
