"""`bench all` and `bench compare`: all that this machine can measure, in one file, and what became slower since another one."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from mooncake_zmq.bench.options import count_option, show_progress
from mooncake_zmq.laboratory import tables
from mooncake_zmq.laboratory.reports import Found, measured, run_all, write
from mooncake_zmq.refused import Refused

COMMANDS = (
    "gateway --rounds 2",
    "schedule --hosts 16,256 --requests 4000",
    "pool --rounds 3 --working-set-mib 128",
    "answers --seeds 3",
    "codecs --rounds 2",
    "engine --rounds 2 --threads 1",
    "zoo --small --only quiet,bursts",
    "overload --seconds 15",
    "serve --rounds 1",
)
"""The benchmarks that need neither a GPU nor another engine, at a size of minutes."""
TIMEOUT_S = 900.0
LEAST_NOISE = 0.05
"""The share by which a ratio may fall without being called slower, however little the turns differ."""


@dataclass(frozen=True, slots=True)
class Change:
    """One row of two files: the medians of its ratios, and the share by which they may differ by chance."""

    bench: str
    row: str
    before: float
    after: float
    noise: float

    @property
    def is_slower(self) -> bool:
        return self.after < self.before * (1 - self.noise)


def ratios(whole: Found) -> dict[tuple[str, str], list[float]]:
    """Return the ratios of each row in all turns, by bench and row."""
    found: dict[tuple[str, str], list[float]] = {}
    for bench in whole["benches"]:
        for report in bench["reports"]:
            for row in report["rows"]:
                found.setdefault((report["bench"], row["name"]), []).append(row["ratio"])
    return found


def compared(before: Found, after: Found) -> list[Change]:
    """Return the rows that both have. Noise is the largest share by which the turns of one side differ."""
    old, new = ratios(before), ratios(after)
    return [
        Change(*key, median(old[key]), median(new[key]), max(LEAST_NOISE, _spread(old[key]), _spread(new[key])))
        for key in old
        if key in new
    ]


def missing(before: Found, after: Found) -> list[str]:
    """Return the rows that only the first has."""
    return [f"{bench}: {row}" for bench, row in ratios(before).keys() - ratios(after).keys()]


def failures(whole: Found) -> list[str]:
    """Return the benchmarks that failed, each with its error."""
    return [f"{bench['command']}: {error}" for bench in whole["benches"] for error in bench["errors"]]


def _spread(values: Sequence[float]) -> float:
    return 1 - min(values) / max(values) if max(values) > 0 else 0.0


@click.command(name="all")
@click.option("--json", "out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Write to this file.")
@count_option("--turns", 1, 1, "More than one show what noise is.")
@click.option("--only", multiple=True, metavar="NAME", help="This benchmark alone, as gateway; may be repeated.")
def all_(out: Path, turns: int, only: tuple[str, ...]) -> None:
    """Measure all that this machine can without a GPU and without another engine. A turn takes up to half an hour.

    One that fails is named in the file, which has all rows that were measured so far at any time.

    \b
    Examples:
      mooncake-zmq bench all --json today.json
      mooncake-zmq bench all --json today.json --turns 3 --only gateway --only schedule
    """
    commands = [f"bench {command}" for command in COMMANDS if not only or command.split()[0] in only]
    if unknown := set(only) - {command.split()[0] for command in COMMANDS}:
        raise click.BadParameter(f"--only {', '.join(sorted(unknown))}: choose of {', '.join(map(_name, COMMANDS))}")
    whole = run_all(commands, turns, _measured, lambda found: write(out, found, "--json"))
    if failed := failures(whole):
        raise click.ClickException("; ".join(failed))


@click.command()
@click.argument("before", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("after", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def compare(before: Path, after: Path) -> None:
    """Print what became slower between two files of `bench all` by more than noise, and what failed in the second: then the
    exit status is 1.

    The ratios to references of the same run are compared, so that a machine that was busier does not count.

    \b
    Example:
      mooncake-zmq bench compare yesterday.json today.json
    """
    old, new = _read(before), _read(after)
    changes, failed = compared(old, new), failures(new)
    notes = [f"  only before: {name}" for name in missing(old, new)] + [f"  failed: {each}" for each in failed]
    tables.show(_tables(changes), notes)
    sys.exit(1 if failed or any(change.is_slower for change in changes) else 0)


def _tables(changes: Sequence[Change]) -> Iterator[Any]:
    columns = ("bench", "row", "before", "after", "noise", "")
    table = tables.empty("ratios to the reference, above 1 is better", columns, text=("bench", "row", ""))
    for each in sorted(changes, key=lambda change: change.after / change.before if change.before else 1.0):
        word = "slower" if each.is_slower else ""
        table.add_row(each.bench, each.row, f"{each.before:.3f}", f"{each.after:.3f}", f"{each.noise:.0%}", word)
    yield table


def _name(command: str) -> str:
    return command.split()[0]


def _measured(command: str) -> Found:
    show_progress(command)
    return measured(command, TIMEOUT_S)


def _read(path: Path) -> Found:
    try:
        found = json.loads(path.read_text())
        ratios(found), failures(found)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Refused(f"{path} is no file of `mooncake-zmq bench all --json`") from None
    read: Found = found
    return read
