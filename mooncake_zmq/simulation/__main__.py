"""A worker: runs the seeds given and prints one JSON line for each. `mooncake-zmq simtest` starts these."""

import sys

import click

from mooncake_zmq.native import mypyc_code


@click.command()
@click.argument("seeds", type=int, nargs=-1, required=True)
@click.option("--planted", default=None)
@click.option("--only", default=None)
@click.option("--compiled", is_flag=True)
def worker(seeds: tuple[int, ...], planted: str | None, only: str | None, compiled: bool) -> None:
    """Run `seeds` one after the other."""
    if compiled:
        mypyc_code.use(mypyc_code.NODES)  # before anything of it is imported
    from mooncake_zmq.simulation.run import as_line, run_seed

    if compiled and not mypyc_code.in_use():
        sys.exit(mypyc_code.NOT_COMPILED)
    for seed in seeds:
        click.echo(as_line(run_seed(seed, planted=planted, only=only)))
        sys.stdout.flush()


if __name__ == "__main__":
    worker()
