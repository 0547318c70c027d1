"""Runs the checks of all areas in order, and prints the findings for people or programs."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mooncake_zmq.config.load import Loaded
from mooncake_zmq.operate.doctor import access, clock, compute, here, limits, memory, packages, peers, places, storage
from mooncake_zmq.operate.doctor.finding import LEVELS, Finding, Here

AREAS: tuple[Callable[[Here], Iterable[Finding]], ...] = (
    here.examine,
    packages.examine,
    limits.examine,
    memory.examine,
    storage.examine,
    clock.examine,
    places.examine,
    access.examine,
    compute.examine,
    peers.examine,
)
"""The areas; another one is a module with its own `examine`, and a line here."""
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def examine(loaded: Loaded, host: str | None = None) -> Iterator[Finding]:
    """Yield the findings of all areas. `host`: the host whose nodes this machine runs; by default those of the addresses that
    it has."""
    found = here.find(loaded, host)
    for area in AREAS:
        yield from area(found)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 if all is well, 1 if there are warnings, 2 if there are problems."""
    return max((LEVELS.index(each.level) for each in findings), default=0)


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print one table and a summary line."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("level", "area"):
        table.add_column(column, no_wrap=True)
    table.add_column("found", overflow="fold")
    for each in findings:
        text = Text(each.found)
        if each.advice:
            text.append(f"\n-> {each.advice}", style=STYLES[each.level])
        table.add_row(Text(each.level, style=STYLES[each.level]), each.area, text)
    console.print(table)
    counts = [sum(each.level == level for each in findings) for level in LEVELS]
    console.print(f"{counts[2]} problems, {counts[1]} warnings, {counts[0]} ok")


def as_json(findings: Iterable[Finding]) -> str:
    """Return one JSON object with the findings in order and the exit code."""
    findings = list(findings)
    rows = [asdict(each) for each in findings]
    return json.dumps({"exit_code": exit_code(findings), "findings": rows}, indent=1)
