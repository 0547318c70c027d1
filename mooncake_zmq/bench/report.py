"""The one form of every benchmark's result: a table, one JSON object, a plot."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from mooncake_zmq.bench.memory import Footprint
from mooncake_zmq.laboratory import tables
from mooncake_zmq.laboratory.drawing import new_figure, save
from mooncake_zmq.laboratory.reports import commit, machine

Progress = Callable[[str], None]
"""Takes a line that says how far a run is."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside its reference, both medians of one run. `higher`: more is better; `ratio` above 1: it is better."""

    name: str
    unit: str
    value: float
    reference: float
    higher: bool = False

    @property
    def ratio(self) -> float:
        """The factor by which the value is better than the reference. A difference may be 0 or less: nothing is infinitely
        better than something, and something never better than nothing."""
        better, worse = (self.value, self.reference) if self.higher else (self.reference, self.value)
        return max(0.0, better / worse) if worse > 0 else float("inf")


@dataclass(slots=True)
class Report:
    """All rows of one benchmark run, its processes' memory, and notes that a reader must know beside them."""

    bench: str
    rows: list[Row] = field(default_factory=list)
    memory: list[Footprint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def row(self, name: str, unit: str, value: float, reference: float, *, higher: bool = False) -> None:
        """Add a row."""
        self.rows.append(Row(name, unit, value, reference, higher))

    def as_json(self) -> dict[str, Any]:
        """Return `{"bench", "commit", "machine", "rows": [{"name", "unit", "value", "reference", "ratio"}], "memory",
        "notes"}`.

        `memory`: [{"name", and Footprint's fields in bytes}]; `notes`: texts.
        """
        rows = [
            {"name": r.name, "unit": r.unit, "value": r.value, "reference": r.reference, "ratio": r.ratio} for r in self.rows
        ]
        memory = [asdict(footprint) for footprint in self.memory]
        stamp = {"bench": self.bench, "commit": commit(), "machine": machine()}
        return stamp | {"rows": rows, "memory": memory, "notes": self.notes}

    def show(self, *, as_json: bool, plot: Path | None = None) -> None:
        """Print to standard output, and draw to a file if asked."""
        if as_json:
            click.echo(json.dumps(self.as_json()))
        else:
            tables.show(self._tables(), (f"  {note}" for note in self.notes))
        if plot is not None:
            self._draw(plot)

    def _tables(self) -> Iterator[Table]:
        """Yield the table of the rows, and that of the memory if it was measured."""
        columns = ("name", "unit", "value", "reference", "ratio")
        table = tables.empty(f"bench {self.bench}  ({commit()}, {machine()})", columns, text=columns[:2])
        for row in self.rows:
            table.add_row(row.name, row.unit, f"{row.value:.4g}", f"{row.reference:.4g}", f"{row.ratio:.3f}")
        yield table
        if self.memory:
            columns = ("process", "peak", "private", "mapped files", "shared")
            table = tables.empty("memory, MiB", columns, text=columns[:1])
            for each in self.memory:
                sizes = (each.peak_bytes, each.private_bytes, each.file_bytes, each.shared_bytes)
                table.add_row(each.name, *(f"{size / (1 << 20):,.0f}" for size in sizes))
            yield table

    def _draw(self, path: Path) -> None:
        figure = new_figure(9, 0.3 * len(self.rows) + 1.2)
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

        axes = figure.add_subplot()
        names = [f"{row.name} [{row.unit}]" for row in self.rows]
        ratios = [row.ratio for row in self.rows]
        axes.set_xscale("log")  # twice as slow is as far from 1 as twice as fast
        axes.xaxis.set_major_locator(LogLocator(base=2))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.axvline(1.0, color="black", linewidth=1)
        bars = axes.barh(names, [ratio - 1 for ratio in ratios], left=1.0, color="#4477aa")
        axes.bar_label(bars, labels=[f"{ratio:.2f}" for ratio in ratios], padding=3)
        axes.margins(x=0.15, y=0.01)
        axes.invert_yaxis()
        axes.set_xlabel("ratio to the reference (above 1 is better)")
        axes.set_title(f"bench {self.bench}, {commit()}")
        save(figure, path)
