"""Options that several `bench` commands have, the form in which these show reports, and their progress output."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from mooncake_zmq.config.examples import located
from mooncake_zmq.engine.cpu import Backend, limit_blas

if TYPE_CHECKING:
    from mooncake_zmq.bench.report import Report

Option = Callable[[Callable[..., None]], Callable[..., None]]

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
model_option = click.option(
    "--model", default="default", show_default=True, metavar="MODEL", help="As in the setting model.path."
)
cache_dir_option = click.option("--cache-dir", default="", metavar="DIRECTORY", help="As in the setting model.cache_dir.")
backend_option = click.option(
    "--backend", type=click.Choice(get_args(Backend)), default="auto", show_default=True, help="Of our engine."
)


def count_option(name: str, least: int, default: int, help: str, most: int | None = None) -> Option:
    """Return an option of a whole number."""
    return click.option(name, type=click.IntRange(least, most), default=default, show_default=True, help=help)


threads_option = count_option("--threads", 1, 1, "Of the engine.")
cpu_time_option = click.option("--cpu-time", is_flag=True, help="Seconds of CPU, on a busy machine; with --threads 1.")


def config_option(default: str, what: str) -> Option:
    """Return the option for the configuration file of the cluster that is measured; `default` comes with the project."""
    return click.option(
        "--config", default=default, show_default=True, metavar="FILE", help=what, callback=lambda *of: Path(located(of[2]))
    )


def rounds_option(default: int) -> Option:
    """Return the option for how often each row is measured."""
    return count_option("--rounds", 1, default, "Rounds per row; medians are shown.")


def parts_option(parts: Sequence[str]) -> Option:
    """Return the option for some of a report's rows; given none of them, the command has all `parts`."""
    what = "Rows of this kind alone; may be repeated."
    kind = click.Choice(parts)
    return click.option("--only", "parts", multiple=True, type=kind, help=what, callback=lambda *of: of[2] or tuple(parts))


def plot_option(what: str) -> Option:
    """Return the option for a file to draw `what` to."""
    return click.option("--plot", type=click.Path(path_type=Path), help=f"Draw {what} to this file.")


def reported(drawn: str = "the ratios") -> Callable[[Callable[..., "Report"]], Callable[..., None]]:
    """Return what makes a command of a function that returns its report: options say how it is shown, and whether `drawn` is
    drawn to a file. NumPy must not be loaded before the function runs."""

    def command(measure: Callable[..., "Report"]) -> Callable[..., None]:
        @json_option
        @plot_option(drawn)
        @functools.wraps(measure)
        def run(as_json: bool, plot: Path | None, **parameters: Any) -> None:
            limit_blas()
            measure(**parameters).show(as_json=as_json, plot=plot)

        return run

    return command


def numbers_option(name: str, least: int, default: str, help: str) -> Option:
    """Return an option of whole numbers with commas between them: a tuple, sorted, none twice."""

    def parse(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, ...]:
        try:
            numbers = tuple(sorted({int(each) for each in value.split(",")}))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a list like 1,2,4") from None
        if numbers[0] < least:
            raise click.BadParameter(f"{numbers[0]} is below {least}")
        return numbers

    return click.option(name, default=default, show_default=True, metavar="N,N,..", help=help, callback=parse)


def show_progress(text: str) -> None:
    """Print progress."""
    click.echo(text, err=True)
