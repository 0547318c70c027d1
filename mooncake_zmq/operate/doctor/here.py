"""Finds the nodes of a deployment that belong to this machine, and those of them that run."""

import errno
import socket

from mooncake_zmq.config.load import Loaded
from mooncake_zmq.config.records import NodeSettings
from mooncake_zmq.operate.doctor.finding import Finding, Here
from mooncake_zmq.transfer.process_lock import holder

AREA = "nodes"


def find(loaded: Loaded, host: str | None) -> Here:
    """Find the nodes of `host`; without it, those of every host that this machine has an address of."""
    hosts = {host} if host is not None else {node.host for node in loaded.config.nodes if is_here(loaded, node)}
    nodes = tuple(node for node in loaded.config.nodes if node.host in hosts)
    return Here(loaded, nodes, _running(loaded, nodes))


def is_here(loaded: Loaded, node: NodeSettings) -> bool:
    """Return whether a node listens on this machine. Nodes with ipc endpoints do: they are all on one machine."""
    address = tcp_address(loaded.config.endpoint(node))
    return address is None or is_own(address[0])


def tcp_address(endpoint: str) -> tuple[str, int] | None:
    """Return address and port of a TCP endpoint, None for any other; "*" is every address of this machine."""
    if not endpoint.startswith("tcp://"):
        return None
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return ("0.0.0.0" if address == "*" else address.strip("[]")), int(port)


def is_own(address: str) -> bool:
    """Return whether this machine has the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def _running(loaded: Loaded, nodes: tuple[NodeSettings, ...]) -> dict[str, int]:
    holders = {node.name: holder(loaded.config.cluster.runtime_dir, node.name) for node in nodes}
    return {name: pid for name, pid in holders.items() if pid}


def examine(here: Here) -> list[Finding]:
    """Report the nodes of this machine, or that there are none."""
    if not here.nodes:
        hosts = ", ".join(sorted({node.host for node in here.config.nodes})) or "none"
        advice = f"name this machine's host (there are {hosts}): mooncake-zmq doctor --config {here.loaded.path} --host HOST"
        return [Finding(AREA, "problem", f"this machine has no address of a node of {here.loaded.path}", advice)]
    names = ", ".join(f"{node.name}{' (runs)' if node.name in here.running else ''}" for node in here.nodes)
    return [Finding(AREA, "ok", f"here: {names}")]
