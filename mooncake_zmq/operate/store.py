"""`mooncake-zmq store`: one store of values, for engines that are no part of a deployment, from the command line alone."""

import sys
from typing import Any

import click

from mooncake_zmq.engine.cpu import limit_blas
from mooncake_zmq.native import mypyc_code
from mooncake_zmq.operate.options import STORE_PORT, overrides_of, refuse_aside, set_option

SHOWN = "store"
"""The name in messages, where other commands have that of a file."""


@click.command()
@click.option("--listen", default=f"127.0.0.1:{STORE_PORT}", show_default=True, metavar="ADDRESS:PORT", help="For clients.")
@click.option("--bytes", "memory", metavar="SIZE", help="Memory of values, as 4GiB.  [default: a quarter of what is free]")
@click.option("--ssd", metavar="DIR", help="Values span memory and files there, and outlive the process. Needs --ssd-bytes.")
@click.option("--ssd-bytes", metavar="SIZE", help="The most that those files take.")
@click.option("--keys", metavar="DIR", help="The keys that `keys make` wrote: beyond loopback clients need one.")
@click.option("--allow-plain-tcp", is_flag=True, help="Serve beyond loopback without keys: no one else is on the network.")
@click.option("--stream-port", type=int, metavar="PORT", help="For the bytes of values.  [default: any free one]")
@click.option("--metrics", metavar="ADDRESS:PORT", help="Serve /metrics there.")
@click.option("--name", default="store", show_default=True, help="Of the node, and of its key.")
@set_option
@click.option("--dry-run", is_flag=True, help="Print the deployment as a TOML file and start nothing.")
def store(assignments: tuple[str, ...], *, name: str, dry_run: bool, **options: Any) -> None:
    """Serve a store of values to other engines: Mooncake's Python store, vLLM's MooncakeStoreConnector, or our connector.

    Clients on this host copy through shared memory, others over TCP. Several stores share the keys of a client that names them
    all. It needs no configuration, no model and no other node, and serves until Ctrl-C or SIGTERM. The exit status is 2 for a
    wrong option or an address that cannot be used.

    \b
    Examples:
      mooncake-zmq store
      mooncake-zmq store --bytes 64GiB --ssd /var/lib/mooncake --ssd-bytes 500GiB
      mooncake-zmq store --listen 10.0.0.1:7301 --keys ~/keys --metrics 127.0.0.1:9100
      mooncake-zmq store --bytes 64GiB --dry-run > store.toml      # for `cache-node --config store.toml --node store`
    """
    limit_blas()
    mypyc_code.use(mypyc_code.NODES)  # before any of it is imported, or the store runs as Python
    from mooncake_zmq.config.load import load_text
    from mooncake_zmq.operate.store_file import toml

    text = toml(name, **options)
    loaded = load_text(text, SHOWN, overrides_of(assignments))
    if dry_run:
        refuse_aside(assignments)
        click.echo(text, nl=False)
        return
    node = loaded.config.nodes[0]
    gib = loaded.section(node).objects.object_bytes / (1 << 30)
    click.echo(
        f"mooncake-zmq: {gib:.1f} GiB of values at {node.store_endpoint.removeprefix('tcp://')}; Ctrl-C ends it", err=True
    )
    from mooncake_zmq.runtime.process import main as run_process

    sys.exit(run_process(loaded, name))
