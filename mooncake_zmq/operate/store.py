"""`mooncake-zmq store`: one store of values, for engines that are no part of a deployment, from the command line alone."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.config.hints import size
from mooncake_zmq.config.load import load_text
from mooncake_zmq.engine.cpu import limit_blas
from mooncake_zmq.native import mypyc_code
from mooncake_zmq.operate.attach.place import STORE_PORT, store_bytes
from mooncake_zmq.operate.options import overrides_of, set_option
from mooncake_zmq.transfer.sockets import BadEndpoint, check_endpoint, is_loopback

SHM_DIR = "/dev/shm"
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
    text = toml(name, **options)
    if dry_run:
        load_text(text, SHOWN, overrides_of(assignments))
        click.echo(text, nl=False)
        return
    mypyc_code.use(mypyc_code.NODES)
    loaded = load_text(text, SHOWN, overrides_of(assignments))
    node = loaded.config.nodes[0]
    gib = loaded.section(node).objects.object_bytes / (1 << 30)
    click.echo(
        f"mooncake-zmq: {gib:.1f} GiB of values at {node.store_endpoint.removeprefix('tcp://')}; Ctrl-C ends it", err=True
    )
    from mooncake_zmq.runtime.process import main as run_process

    sys.exit(run_process(loaded, name))


def toml(
    name: str,
    *,
    listen: str,
    memory: str | None,
    ssd: str | None,
    ssd_bytes: str | None,
    keys: str | None,
    allow_plain_tcp: bool,
    stream_port: int | None,
    metrics: str | None,
) -> str:
    """Return the text of a deployment of one store. Raises ConfigError for options that do not go together."""
    endpoint = listen if "://" in listen else f"tcp://{listen}"
    if (ssd is None) != (ssd_bytes is None):
        raise ConfigError("--ssd and --ssd-bytes go together")
    try:
        check_endpoint(endpoint)
    except BadEndpoint:
        raise ConfigError(f"--listen {listen}: write ADDRESS:PORT with an IPv4 address of this machine, no wildcard") from None
    if endpoint.startswith("tcp://") and not (is_loopback(endpoint) or keys or allow_plain_tcp):
        raise ConfigError(
            f"--listen {listen} can be reached from other machines: give --keys DIR, which `mooncake-zmq keys make` writes, or "
            "--allow-plain-tcp where no one else is on the network"
        )
    try:
        free = store_bytes(SHM_DIR)
    except OSError as error:
        raise ConfigError(f"{SHM_DIR}: {error.strerror}") from None
    node: dict[str, Any] = {"name": name, "role": "cache-node", "store_endpoint": endpoint}
    if stream_port is not None:
        node["store_stream_port"] = stream_port
    if metrics is not None:
        node["metrics_host"], node["metrics_port"] = _address(metrics)
    sections: dict[str, dict[str, Any]] = {
        "cluster": {"name": name},
        "model": {"engine": "none"},
        "cache_node.objects": {"object_bytes": _size("--bytes", memory) if memory else free},
    }
    if ssd is not None and ssd_bytes is not None:
        sections["cache_node.objects.ssd"] = {
            "directory": str(Path(ssd).expanduser().resolve()),
            "bytes": _size("--ssd-bytes", ssd_bytes),
        }
    if keys is not None:
        sections["security"] = {"keys": str(Path(keys).expanduser().resolve())}
    if allow_plain_tcp:
        sections.setdefault("security", {})["allow_plain_tcp"] = True
    lines = ["# Written by `mooncake-zmq store --dry-run`"]
    for title, values in [*((f"[{title}]", values) for title, values in sections.items()), ("[[nodes]]", node)]:
        lines += [title, *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def _size(option: str, text: str) -> int:
    found = int(text) if text.isascii() and text.isdecimal() else size(text)
    if found is None:
        raise ConfigError(f"{option} {text}: write a size such as 4GiB")
    return found


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()):
        raise ConfigError(f"--metrics {text}: write ADDRESS:PORT")
    return host, int(port)
