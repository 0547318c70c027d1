"""`mooncake-zmq simtest`: runs seeds, prints what they covered, and for a failing one the command that repeats it."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console
from rich.table import Table

from mooncake_zmq.core.messages import Goodbye, Hello, Message
from mooncake_zmq.core.node import WATCHING
from mooncake_zmq.core.routes import SAYS
from mooncake_zmq.core.work import BorrowParts, LendSequence, StoreWork, TakeBack, WatchEngine, Work
from mooncake_zmq.decode import request as decode_request
from mooncake_zmq.gateway.requests import request as gateway_request
from mooncake_zmq.kv import slot_table
from mooncake_zmq.native import mypyc_code
from mooncake_zmq.prefill import job, stages
from mooncake_zmq.simulation.faults import FaultKind
from mooncake_zmq.simulation.planted import PLANTED
from mooncake_zmq.simulation.run import SeedResult, failing_line, run_seed, run_seeds
from mooncake_zmq.telemetry.progress import progress_display
from mooncake_zmq.vllm_node import job as vllm_job

LAST_LINES = 60
RAREST = 3
LENDING: frozenset[type] = SAYS["decode", "decode"] | {LendSequence, TakeBack, BorrowParts}
"""Messages and works of decodes that lend, which only seeds of these have, as `FaultKind.STOP_LENDER` is."""
TABLES: tuple[tuple[str, Mapping[Any, Any]], ...] = (
    ("gateway request", gateway_request.NEXT_STATE),
    ("prefill job", job.NEXT_STATE),
    ("prefill stage", stages.NEXT_STATE),
    ("decode request", decode_request.NEXT_STATE),
    ("vllm job", vllm_job.NEXT_STATE),
    ("slot", slot_table.NEXT_STATE),
)


def possible() -> dict[str, set[str]]:
    """Return everything that can be covered, by kind."""
    return {
        "faults": {kind.value for kind in set(FaultKind) - {FaultKind.STOP_LENDER}},
        "transitions": {f"{what} {a.value} -> {b.value}" for what, table in TABLES for a, b in _transitions(table)},
        "messages": {
            message.__name__ for message in set(get_args(Message)) - WATCHING - LENDING - {Hello, Goodbye}
        },  # the last two are no actor's
        "works": {
            work.__name__ for work in set(get_args(Work)) - LENDING - {WatchEngine, *get_args(StoreWork)}
        },  # a simulated vLLM publishes nothing
        "store works": {work.__name__ for work in get_args(StoreWork)},
    }


def _transitions(table: Mapping[tuple[Enum, str], Enum]) -> Iterable[tuple[Enum, Enum]]:
    return ((before, after) for (before, _), after in table.items())


def totals(results: Iterable[SeedResult]) -> dict[str, Counter[str]]:
    """Return the coverage of all seeds together."""
    total: dict[str, Counter[str]] = {}
    for result in results:
        for kind, counts in result.coverage.items():
            total.setdefault(kind, Counter()).update(counts)
    return total


def coverage_table(total: Mapping[str, Counter[str]]) -> Table:
    """Return a table with a row for each kind of thing: how much of it was seen, how often in all, what hardly and what
    never."""
    table = Table(title="coverage", title_justify="left")
    table.add_column("what")
    table.add_column("seen", justify="right")
    table.add_column("times", justify="right")
    table.add_column("rarest")
    table.add_column("never", style="yellow")
    rows = possible() | {kind: set(total.get(kind, ())) for kind in ("garbage", "outcomes", "loads")}
    for kind, names in rows.items():
        counts = Counter({name: count for name, count in total.get(kind, Counter()).items() if name in names})
        rarest = ", ".join(f"{name} {count}" for name, count in counts.most_common()[: -RAREST - 1 : -1])
        never = ", ".join(sorted(names - counts.keys()))
        table.add_row(kind, f"{len(counts)} of {len(names)}", f"{counts.total():,}", rarest, never)
    return table


def _check_compiled(planted: str | None, trace: Path | None) -> None:
    """Refuse options that machine code does not support, and machine code that was not built."""
    if planted is not None:
        raise click.UsageError("--planted replaces parts of actors, which machine code does not allow: leave out --compiled")
    if trace is not None:
        raise click.UsageError("--trace writes down a run of the sources: leave out --compiled, which decides the same")
    if not mypyc_code.usable(mypyc_code.NODES):
        raise click.ClickException(mypyc_code.NOT_COMPILED)


def _commit() -> str:
    here = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _replay(seed: int, planted: str | None, output: Path | None, console: Console, only: str | None) -> SeedResult:
    result = run_seed(seed, planted=planted, trace=True, only=only)
    if output is not None:
        output.write_text("\n".join(result.log) + "\n", encoding="utf-8")
    elif result.failure is not None:
        for line in result.log[-LAST_LINES:]:
            console.out(line, style="dim", highlight=False)
        console.out(result.where, highlight=False)
    return result


@contextmanager
def _watched(seeds: int) -> Iterator[Callable[[SeedResult], None]]:
    """Yield a function that shows each result as it comes: a failed seed by its line, the others by how many have ended."""
    ended = failed = 0
    with progress_display("simtest") as display:

        def show(result: SeedResult) -> None:
            nonlocal ended, failed
            ended += 1
            if result.failure is not None:
                failed += 1
                display.say(failing_line(result, _commit()))
            display.show(ended / seeds, f"{ended} of {seeds} seeds, {failed} failed")

        yield show


@click.command()
@click.option("--seeds", type=click.IntRange(1), default=20, show_default=True, help="How many seeds to run.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="The first of them.")
@click.option("--seed", type=click.IntRange(0), default=None, help="Run this seed alone and show how it failed.")
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), help="With --seed: write every event there.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="Processes; one for each core by default.")
@click.option("--planted", type=click.Choice(sorted(PLANTED)), default=None, help="Plant a bug; a checker must then fail.")
@click.option("--stores", "only", flag_value="stores", help="Nothing but the stores, in a fraction of the time.")
@click.option("--lending", "only", flag_value="lending", help="Decodes with little KV, which lend it, in half of the time.")
@click.option("--models", "only", flag_value="models", help="Three models with 20 adapters alone, in a fraction of the time.")
@click.option("--compiled", is_flag=True, help="On the machine code that nodes run; see mooncake-zmq compile.")
@click.option("--json", "as_json", is_flag=True, help="Print the coverage as one JSON object instead of a table.")
def simtest(
    seeds: int,
    first: int,
    seed: int | None,
    trace: Path | None,
    jobs: int,
    planted: str | None,
    only: str | None,
    compiled: bool,
    as_json: bool,
) -> None:
    """Run the cluster under virtual time and seeded faults; every invariant is checked in every run.

    \b
    Examples:
      mooncake-zmq simtest --seeds 200
      mooncake-zmq simtest --seed 1234
      mooncake-zmq simtest --seed 1234 --trace /tmp/1234.txt
      mooncake-zmq simtest --seeds 5 --planted late_writer
      mooncake-zmq simtest --seeds 1000 --stores
      mooncake-zmq simtest --seeds 1000 --models
      mooncake-zmq simtest --seeds 20 --compiled
    """
    errors = Console(stderr=True)
    if compiled:
        _check_compiled(planted, trace)
    if seed is not None and compiled:
        results = run_seeds(seed, 1, 1, lambda _: None, only=only, compiled=True)
        errors.out(results[0].where, highlight=False)
    elif seed is not None:
        results = [_replay(seed, planted, trace, errors, only)]
    else:
        with _watched(seeds) as ended:
            results = run_seeds(first, seeds, jobs, ended, planted=planted, only=only, compiled=compiled)
    failed = [result for result in results if result.failure is not None]
    total = totals(results)
    if as_json:
        click.echo(json.dumps({"seeds": len(results), "failed": len(failed), **{k: dict(v) for k, v in total.items()}}))
    else:
        Console().print(coverage_table(total))
    for result in failed:
        click.echo(failing_line(result, _commit()))
        how = f" --planted {planted}" if planted else ""
        how += (f" --{only}" if only else "") + " --compiled" * compiled
        click.echo(f"  again: mooncake-zmq simtest --seed {result.seed}{how}")
    cpu_s = sum(result.cpu_s for result in results) / len(results)
    virtual_s = sum(result.virtual_s for result in results) / len(results)
    click.echo(
        f"{len(results)} seeds, {len(failed)} failed; {cpu_s:.2f} s of CPU and {virtual_s:.1f} virtual s each", err=as_json
    )
    sys.exit(1 if failed else 0)
