"""Options that several `bench` commands have, and their progress output."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import click

from mooncake_zmq.config.examples import located
from mooncake_zmq.engine.cpu import Backend

Option = Callable[[Callable[..., None]], Callable[..., None]]

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
model_option = click.option(
    "--model", default="default", show_default=True, metavar="MODEL", help="As in the setting model.path."
)
cache_dir_option = click.option("--cache-dir", default="", metavar="DIRECTORY", help="As in the setting model.cache_dir.")
backend_option = click.option(
    "--backend", type=click.Choice(get_args(Backend)), default="auto", show_default=True, help="Of our engine."
)

threads_option = click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of the engine.")
cpu_time_option = click.option("--cpu-time", is_flag=True, help="Seconds of CPU, on a busy machine; with --threads 1.")


def config_option(default: str, what: str) -> Option:
    """Return the option for the configuration file of the cluster that is measured; `default` comes with the project."""
    return click.option(
        "--config", default=default, show_default=True, metavar="FILE", help=what, callback=lambda *of: Path(located(of[2]))
    )


def rounds_option(default: int) -> Option:
    """Return the option for how often each row is measured."""
    what = "Rounds per row; medians are shown."
    return click.option("--rounds", type=click.IntRange(min=1), default=default, show_default=True, help=what)


def plot_option(what: str) -> Option:
    """Return the option for a file to draw `what` to."""
    return click.option("--plot", type=click.Path(path_type=Path), help=f"Draw {what} to this file.")


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
