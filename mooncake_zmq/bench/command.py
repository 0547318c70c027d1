"""The `bench` commands: progress on standard error, the result on standard output."""

import os
from pathlib import Path

import click

from mooncake_zmq.kv.eviction import POLICIES

PARTS = ("cold", "warm", "decode")
POOL_PARTS = ("local", "remote", "exist", "lease", "ssd", "index")

EXAMPLES = """\b
Examples:
  mooncake-zmq bench serve
  mooncake-zmq bench serve --rounds 5 --json > serve.json
  mooncake-zmq bench serve --plot serve.png
  mooncake-zmq bench pool --only local --only remote
  mooncake-zmq bench pool --mooncake-python ~/mooncake-venv/bin/python --json > pool.json
  mooncake-zmq bench eviction --trace conversation_trace.jsonl --plot hits.png
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


@bench.command()
@click.option("--trace", type=click.Path(path_type=Path), help="Requests as JSON lines with hash_ids; else generated chats.")
@click.option("--capacity", "capacities", multiple=True, type=click.IntRange(min=1), help="Blocks; may be repeated.")
@click.option(
    "--policy", "policies", multiple=True, type=click.Choice(tuple(POLICIES)), help="All by default; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the hit ratios over the capacities to this file.")
def eviction(
    trace: Path | None, capacities: tuple[int, ...], policies: tuple[str, ...], as_json: bool, plot: Path | None
) -> None:
    """Hit ratio of each eviction policy and capacity, against a pool that never evicts. Takes about a minute."""
    from mooncake_zmq.bench.eviction import CAPACITIES, bench_eviction

    report = bench_eviction(
        trace, capacities or CAPACITIES, policies or tuple(POLICIES), progress=lambda text: click.echo(text, err=True)
    )
    report.show(as_json=as_json, plot=plot)


@bench.command()
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds per row; medians are shown.")
@click.option("--only", "parts", multiple=True, type=click.Choice(POOL_PARTS), help="Rows of this kind alone; may be repeated.")
@click.option(
    "--working-set-mib",
    type=click.IntRange(min=64),
    default=512,
    show_default=True,
    help="Bytes put and got per round; several times the CPU's cache, or the figures are the cache's.",
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path("/var/tmp"),
    show_default=True,
    help="Where the SSD rows write: on the disk in question, twice the working set.",
)
@click.option(
    "--mooncake-python",
    envvar="MOONCAKE_PYTHON",
    metavar="PYTHON",
    help="Python that has mooncake-transfer-engine-non-cuda: rows against Mooncake's own store.",
)
@click.option(
    "--redis-python",
    envvar="REDIS_PYTHON",
    metavar="PYTHON",
    help="Python that has redis: rows against a redis-server, which must be in PATH.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the ratios to this file.")
def pool(
    rounds: int,
    parts: tuple[str, ...],
    working_set_mib: int,
    directory: Path,
    mooncake_python: str | None,
    redis_python: str | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    """The KV pool against memory, transport and disk, and against other stores over the same values. Takes several minutes.

    Needs free memory of about ten times the working set when the other stores take part.
    """
    from mooncake_zmq.bench.pool import PoolBench, bench_pool
    from mooncake_zmq.runtime import log

    log.configure(node="bench", role="bench", form="console", level="warning")
    settings = PoolBench(
        rounds=rounds,
        working_set_bytes=working_set_mib << 20,
        disk_directory=directory,
        mooncake_python=mooncake_python,
        redis_python=redis_python,
    )
    report = bench_pool(settings, parts=parts or POOL_PARTS, progress=lambda text: click.echo(text, err=True))
    report.show(as_json=as_json, plot=plot)
