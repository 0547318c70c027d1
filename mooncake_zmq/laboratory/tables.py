"""The form of all tables that studies and benches print: text on the left, figures on the right."""

import sys
from collections.abc import Collection, Iterable

from rich.console import Console
from rich.table import Table

WIDTH = 140
"""The width of what is printed to no terminal."""


def empty(title: str, columns: Iterable[str], *, text: Collection[str]) -> Table:
    """Return a table without rows; the columns in `text` hold text, all others figures."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in text else "right", no_wrap=True)
    return table


def pairs(title: str, lines: Iterable[tuple[str, str]]) -> Table:
    """Return a table with a row for each figure and its name."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right", no_wrap=True)
    for what, value in lines:
        table.add_row(what, value)
    return table


def console() -> Console:
    """Return standard output, which has a fixed width where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def show(tables: Iterable[Table], notes: Iterable[str] = ()) -> None:
    """Print tables, then notes, on standard output."""
    output = console()
    for table in tables:
        output.print(table)
    for note in notes:
        output.print(note, markup=False, highlight=False)
