"""The `bench` commands: progress on standard error, the result on standard output."""

import os
from pathlib import Path

import click

PARTS = ("cold", "warm", "decode")

EXAMPLES = """\b
Examples:
  mooncake-zmq bench serve
  mooncake-zmq bench serve --rounds 5 --json > serve.json
  mooncake-zmq bench serve --plot serve.png
"""


@click.group(epilog=EXAMPLES)
def bench() -> None:
    """Measure; each row stands beside its reference from the same run, and a ratio above 1 is better than it."""


@bench.command()
@click.option("--config", type=click.Path(path_type=Path), default=Path("configs/local.toml"), show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Rounds per row; medians are shown.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="BLAS threads of the bare engine.")
@click.option("--only", "parts", multiple=True, type=click.Choice(PARTS), help="Rows of this kind alone; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the ratios to this file.")
def serve(config: Path, rounds: int, threads: int, parts: tuple[str, ...], as_json: bool, plot: Path | None) -> None:
    """The cluster against the bare engine: cold and warm TTFT, decode throughput. Takes about 5 minutes on 2 cores."""
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)  # before NumPy loads
    from mooncake_zmq.bench.serve import bench_serve

    report = bench_serve(config, rounds=rounds, parts=parts or PARTS, progress=lambda text: click.echo(text, err=True))
    report.show(as_json=as_json, plot=plot)
