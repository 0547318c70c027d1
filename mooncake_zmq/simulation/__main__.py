"""A worker: runs the seeds given and prints one JSON line for each. `mooncake-zmq simtest` starts these."""

import sys

import click

from mooncake_zmq.simulation.run import as_line, run_seed


@click.command()
@click.argument("seeds", type=int, nargs=-1, required=True)
@click.option("--planted", default=None)
@click.option("--stores", is_flag=True, default=None)
def worker(seeds: tuple[int, ...], planted: str | None, stores: bool | None) -> None:
    """Run `seeds` one after the other."""
    for seed in seeds:
        click.echo(as_line(run_seed(seed, planted=planted, stores=stores)))
        sys.stdout.flush()


if __name__ == "__main__":
    worker()
