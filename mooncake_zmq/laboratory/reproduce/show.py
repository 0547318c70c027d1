"""The output of a reproduced figure: tables, JSON, a plot."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from mooncake_zmq.laboratory import tables
from mooncake_zmq.laboratory.drawing import new_figure, save
from mooncake_zmq.laboratory.reproduce.figure import Conclusion, Figure

MOST_BREAKS = 6


def as_json(figure: Figure) -> dict[str, Any]:
    """Return `{"name", "title", "settings", "rows", "conclusions", "notes", "curves", "axes"}`."""
    found = asdict(figure)
    found["conclusions"] = [asdict(each) | {"kept": each.kept} for each in figure.conclusions]
    return found


def show(figure: Figure) -> None:
    """Print the figure."""
    tables.show([_rows(figure)], [*map(sentence, figure.conclusions), *(f"  {note}" for note in figure.notes)])
    tables.show([_settings(figure)])


def sentence(conclusion: Conclusion) -> str:
    """Return `kept (of 8): ...`, or the variants in which it does not hold."""
    if conclusion.kept:
        return f"kept, in all {conclusion.tried}: {conclusion.text}"
    breaks = conclusion.breaks[:MOST_BREAKS]
    more = len(conclusion.breaks) - len(breaks)
    where = "; ".join(breaks) + (f"; and {more} more" if more else "")
    return f"NOT kept: {conclusion.text}: does not hold when {where} ({len(conclusion.breaks)} of {conclusion.tried})"


def _rows(figure: Figure) -> Table:
    columns = ("what", "unit", "ours", "paper", "ours / paper")
    table = tables.empty(figure.title, columns, text=columns[:2])
    for row in figure.rows:
        paper = "shape only" if row.paper is None else f"{row.paper:.4g}"
        ratio = f"{row.ours / row.paper:.2f}" if row.paper else ""
        table.add_row(row.name, row.unit, "-" if math.isnan(row.ours) else f"{row.ours:.4g}", paper, ratio)
    return table


def _settings(figure: Figure) -> Table:
    table = Table(title="settings", title_justify="left")
    for column in ("setting", "value", "source", "why"):
        table.add_column(column)
    for each in figure.settings:
        table.add_row(each.name, each.value, each.source, each.why)
    return table


def plot(figure: Figure, directory: Path) -> Path:
    """Draw NAME.png: its curves, or ours and the paper's as bars. Raises click.ClickException."""
    drawing = new_figure(8, 5) if figure.curves else new_figure(9, 0.35 * len(figure.rows) + 1.5)
    axes = drawing.add_subplot()
    if figure.curves:
        for label, points in figure.curves.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set(xlabel=figure.axes[0], ylabel=figure.axes[1], ylim=(0, None))
    else:
        places = range(len(figure.rows))
        axes.barh([at - 0.2 for at in places], [row.ours for row in figure.rows], height=0.4, label="ours")
        axes.barh([at + 0.2 for at in places], [row.paper or 0.0 for row in figure.rows], height=0.4, label="paper")
        axes.set_yticks(list(places), [f"{row.name} [{row.unit}]" for row in figure.rows])
        axes.invert_yaxis()
    axes.legend(fontsize="small")
    axes.set_title(figure.title, fontsize="medium")
    return save(drawing, directory / f"{figure.name}.png")
