"""Figures that the laboratory and the benchmarks draw, where matplotlib is installed."""

from pathlib import Path
from typing import Any

from mooncake_zmq.extras import installing
from mooncake_zmq.refused import Refused


def new_figure(width: float, height: float) -> Any:
    """Make an empty figure of matplotlib, its size in inches. Raises click.ClickException where that is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Refused(f"--plot needs matplotlib: {installing('lab')}") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> Path:
    """Write a figure to a file, whose directory is made if it is not there. Raises click.ClickException."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise Refused(str(error)) from None
    return path
