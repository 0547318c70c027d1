"""Lists the TCP ports of a deployment, for a firewall."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import click
from rich.console import Console
from rich.table import Table

from mooncake_zmq.config.load import Loaded
from mooncake_zmq.config.records import NodeSettings

ANY_FREE = "any free port"


@dataclass(frozen=True, slots=True)
class Port:
    """A TCP port on which a node listens, and who connects to it. `setting`: what sets the port, where none is set."""

    host: str
    node: str
    address: str
    what: str
    callers: str
    setting: str = ""


def ports(loaded: Loaded) -> Iterator[Port]:
    """Yield every TCP port of the deployment, in the order of its nodes. Sockets on this machine only (`ipc://`) have none."""
    for node in loaded.config.nodes:
        for address, what, callers, setting in _of(loaded, node):
            if not address.startswith("ipc://"):
                yield Port(node.host, node.name, address.removeprefix("tcp://"), what, callers, setting)


def print_ports(loaded: Loaded, host: str | None, *, as_json: bool) -> None:
    """Print the ports of all hosts, or of one, and what to set where a node takes any free port."""
    found = [port for port in ports(loaded) if host in (None, port.host)]
    if as_json:
        click.echo(json.dumps([asdict(port) for port in found], indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("host", "node", "address", "for", "connects"):
        table.add_column(column, no_wrap=True)
    for port in found:
        table.add_row(port.host, port.node, port.address, port.what, port.callers)
    Console(width=120).print(table)
    for port in found:
        if port.address.endswith(ANY_FREE):
            click.echo(f"set {port.setting} of {port.node}, so that a firewall can admit it")


def _of(loaded: Loaded, node: NodeSettings) -> Iterator[tuple[str, str, str, str]]:
    section = loaded.section(node)
    if node.role == "gateway":
        yield f"{section.http_host}:{section.http_port}", "HTTP, metrics", "clients, Prometheus", ""
    yield loaded.config.endpoint(node), "messages", "nodes", ""
    if node.data_endpoint:
        yield node.data_endpoint, "tickets for blocks", "nodes", ""
        yield _stream(node.data_endpoint, node.data_stream_port), "blocks", "nodes", "data_stream_port"
    if node.store_endpoint:
        yield node.store_endpoint, "store", "store clients", ""
        yield _stream(node.store_endpoint, node.store_stream_port), "values", "store clients", "store_stream_port"
    if node.role == "cache-node" and section.kv_events.endpoint:
        yield section.kv_events.endpoint, "KV events", "subscribers", ""
        if section.kv_events.replay_endpoint:
            yield section.kv_events.replay_endpoint, "KV events, replayed", "subscribers", ""
    if node.role == "vllm":
        yield section.kv_events, "KV events of vLLM", "this machine's node", ""
    if node.metrics_port:
        yield f"{node.metrics_host}:{node.metrics_port}", "metrics", "Prometheus", ""


def _stream(endpoint: str, port: int) -> str:
    """Return the address of the TCP streams beside an endpoint; `ipc://` if they do not leave the machine."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    return f"{endpoint.rpartition(':')[0]}:{port or ANY_FREE}"
