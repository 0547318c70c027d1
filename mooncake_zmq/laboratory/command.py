"""`mooncake-zmq sim` and `mooncake-zmq reproduce`: options in, tables or one JSON object out, progress on standard error."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from mooncake_zmq.laboratory import report, tables, zoo
from mooncake_zmq.laboratory.drawing import new_figure
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.generated import KINDS, LIKE, fit, parse_spec
from mooncake_zmq.laboratory.jobs import Job, Progress, Source, run_jobs, run_on_dask
from mooncake_zmq.laboratory.profiles import PROFILES, find_profile
from mooncake_zmq.laboratory.rows import check_writable, kept, rows_option, write_runs
from mooncake_zmq.laboratory.runs import ADMISSIONS, ORDERS, POLICIES
from mooncake_zmq.laboratory.settings import assigned, axes_of, split_assignment, sweep
from mooncake_zmq.laboratory.study import Setup
from mooncake_zmq.laboratory.traces import PUBLIC, read_trace
from mooncake_zmq.telemetry.progress import progress_display

EXAMPLES = """\b
Examples:
  mooncake-zmq sim conversation_trace.jsonl --prefill 8 --decode 8
  mooncake-zmq sim conversation_trace.jsonl --sweep policy=global,local,load,random --plot plots
  mooncake-zmq sim --generate conversation:requests=2000,rate=3.3,seed=1 --policy vllm-prefix
  mooncake-zmq sim --generate uniform:input=8192,output=256,rate=2 --sweep speed=1,2,4 --json
  mooncake-zmq sim --generate bursts:size=8,gap=0.1,prefix=8192,own=1024 --sweep policy=global,load
  mooncake-zmq sim --like BurstGPT_1.csv --generate like:rate=5 --hardware h800-llama3-70b
  mooncake-zmq sim trace.jsonl --speed 3 --admission prediction --tbt-slo 0.06 --prefill 12 --decode 4
  mooncake-zmq sim trace.jsonl --sweep conductor.kvcache_balancing_threshold=1.05,2,4 --jobs 4
  mooncake-zmq sim trace.jsonl --speed 3 --admission prediction --page replay.html
  mooncake-zmq sim conversation_trace.jsonl --sweep policy=coming,global --rows rows.npz
  mooncake-zmq sim trace.jsonl --sweep prefill=6,8,10 --dask tcp://head:8786
"""


@contextmanager
def runs_display(name: str, count: int) -> Iterator[Progress]:
    """Show on standard error how far so many runs are, all together."""
    text = name if count == 1 else f"{name}, {count} runs"
    done: dict[int, float] = {}
    with progress_display(text) as display:

        def advance(number: int, share: float) -> None:
            done[number] = share
            display.show(sum(list(done.values())) / count, text)

        yield advance


@click.command(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option(
    "--generate",
    metavar="SPEC",
    help=f"Make a trace: KIND:key=value,...; KIND {', '.join(KINDS)}, like, or one of the zoo: {', '.join(zoo.KINDS)}.",
)
@click.option("--like", type=click.Path(path_type=Path), metavar="FILE", help="Make a trace by the statistics of FILE.")
@click.option("--limit", "first", type=click.IntRange(1), metavar="N", help="Only the first N requests.")
@click.option("--prefill", default=8, show_default=True, help="Prefill nodes; with vllm policies, coupled ones.")
@click.option("--decode", default=8, show_default=True, help="Decode nodes; with vllm policies, coupled ones too.")
@click.option(
    "--hardware", default="a800-llama3-70b", show_default=True, metavar="NAME", help=f"{', '.join(PROFILES)}, measured:FILE."
)
@click.option("--policy", default="coming", show_default=True, metavar="POLICY", help=f"{', '.join(POLICIES)}.")
@click.option("--admission", default="none", show_default=True, metavar="RULE", help=f"{', '.join(ADMISSIONS)}.")
@click.option("--order", default="fcfs", show_default=True, metavar="ORDER", help=f"Of a prefill's queue: {', '.join(ORDERS)}.")
@click.option("--ttft-slo", default=30.0, show_default=True, help="Seconds to the first token.")
@click.option("--tbt-slo", default=0.1, show_default=True, help="Seconds between tokens, mean of the longest tenth.")
@click.option("--speed", default=1.0, show_default=True, help="Arrivals come this many times as fast.")
@click.option("--seed", default=0, show_default=True, help="Of the run; a generated trace has its own.")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="A field of the setup or an actor's setting.")
@click.option("--sweep", "sweeps", multiple=True, metavar="KEY=A,B", help="Run each value; more than one: each combination.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, show_default="cores", help="Processes at a time.")
@click.option("--dask", metavar="ADDRESS", help="Run on this Dask cluster's workers instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option("--plot", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Draw PNGs there.")
@rows_option
@click.option("--page", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write it as a page to look at.")
def sim(trace: Path | None, generate: str | None, like: Path | None, **options: Any) -> None:
    """Replay TRACE through the cluster's own actors in virtual time, and print its figures.

    TRACE is Mooncake's JSON lines, an Azure LLM inference CSV or a BurstGPT CSV, plain or .gz. The CSVs name no blocks: none of
    their prompts is taken to begin as another. The vllm policies are a model of coupled instances, on prefill + decode nodes;
    vllm-chunked is the schedule of Sarathi-Serve.
    """
    source = source_of(trace, generate, like, options["first"])
    base = _base(options)
    runs = sweep(base, axes_of(options["sweeps"]))
    if options["plot"] is not None:
        new_figure(1, 1)  # fails at once if there is no matplotlib
    rows_file: Path | None = options["rows_file"]
    check_writable(rows_file, "--rows", trace, like)
    check_writable(options["page"], "--page", trace, like)
    measure = kept(report.outcome_of, rows_file)
    jobs = [Job(source, setup, _page(options, len(runs))) for _, setup in runs]
    with runs_display("sim", len(runs)) as progress:
        if options["dask"]:
            found = run_on_dask(options["dask"], jobs, measure, progress)
        else:
            found = run_jobs(jobs, options["jobs"], measure, progress)
    write_runs(rows_file, [(setup, rows) for (_, setup), (_, rows) in zip(runs, found, strict=True)])
    outcomes = [outcome for outcome, _ in found]
    _show([chosen for chosen, _ in runs], outcomes, as_json=options["as_json"], plot=options["plot"])
    if options["page"] is not None:
        click.echo(f"wrote {options['page']}", err=True)


def _page(options: dict[str, Any], runs: int) -> str:
    """Return the file that the one run is written to; empty: none."""
    page: Path | None = options["page"]
    if page is None:
        return ""
    if runs > 1 or options["dask"]:
        raise StudyError("--page is for one run, on this machine")
    return str(page.resolve())


def source_of(trace: Path | None, generate: str | None, like: Path | None, first: int | None) -> Source:
    """Return the source of the arrivals, as the options say. Raises StudyError."""
    if (trace is None) == (generate is None and like is None):
        raise StudyError(f"give a TRACE, or --generate SPEC, or --like FILE; {PUBLIC}")
    if trace is not None:
        read_trace(trace, 1)
        return Source(path=str(trace.resolve()), first=first)
    shape = fit(read_trace(like)) if like is not None else None
    asked = generate or LIKE
    if asked.partition(":")[0] in zoo.KINDS:
        return Source(workload=zoo.parse_workload(asked), first=first)
    return Source(shape=parse_spec(asked, shape), first=first)


def _base(options: dict[str, Any]) -> Setup:
    setup = Setup(
        prefill=options["prefill"],
        decode=options["decode"],
        hardware=find_profile(options["hardware"]),
        policy=options["policy"],
        admission=options["admission"],
        order=options["order"],
        ttft_slo_s=options["ttft_slo"],
        tbt_slo_s=options["tbt_slo"],
        speed=options["speed"],
        seed=options["seed"],
    )
    for text in options["assignments"]:
        setup = assigned(setup, *split_assignment("--set", text))
    return setup


def _show(chosen: list[dict[str, str]], outcomes: list[report.Outcome], *, as_json: bool, plot: Path | None) -> None:
    drawn = report.plot(plot, chosen, outcomes) if plot is not None else []
    if as_json:
        click.echo(msgspec.json.encode(report.as_json(chosen, outcomes)).decode())
    else:
        tables.show([report.sweep_table(chosen, outcomes) if len(outcomes) > 1 else report.run_table(outcomes[0])])
    for path in drawn:
        click.echo(f"drew {path}", err=True)
