"""`mooncake-zmq compile`: compiles a part of the project's own modules, as `bin/up` and `bin/install` do by themselves."""

import signal

import click

from mooncake_zmq.native.mypyc_build import compile_part
from mooncake_zmq.native.mypyc_code import LABORATORY, NODES


@click.command()
@click.option("--laboratory", is_flag=True, help="Compile what `sim` replays a trace through instead; this takes minutes.")
def compile(*, laboratory: bool) -> None:
    """Compile what every node runs at each message and token to machine code; nodes that start afterwards use it.

    Needs the extra "mypyc", a C compiler and Python's headers, and takes about two minutes. `bin/up` and `bin/install` do it
    by themselves. The result is beside the sources; changed sources run as Python until this is called again, and
    MOONCAKE_ZMQ_MYPYC=0 runs all of them as Python.

    \b
    Example:
      mooncake-zmq compile
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was written so far is removed
    click.echo(f"compiled: {compile_part(LABORATORY if laboratory else NODES)}")
