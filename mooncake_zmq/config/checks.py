"""Checks of a node on its own machine, before it starts."""

from collections.abc import Iterable

from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.config.load import Loaded
from mooncake_zmq.config.records import NodeSettings
from mooncake_zmq.core.roles import ENGINE_ROLES
from mooncake_zmq.gateway.http.exposure import unasked
from mooncake_zmq.transfer.shared_memory import needs_checksums
from mooncake_zmq.transfer.sockets import is_loopback


def check_local_reads(loaded: Loaded, nodes: Iterable[NodeSettings]) -> None:
    """Raise ConfigError if a node leaves out checksums that reads of shared memory need on this machine."""
    for node in nodes:
        for role in node.roles:
            if role not in ENGINE_ROLES or loaded.section(node.in_role(role)).pool.verify_local:
                continue
            if why := needs_checksums(f"{role}.pool.verify_local = false"):
                raise ConfigError(f"{loaded.path}: {node.name}: {why}")


def check_open(loaded: Loaded, nodes: Iterable[NodeSettings]) -> None:
    """Raise ConfigError if a node would serve any caller without authentication, a gateway its answers or a node its metrics,
    and no setting allows it."""
    for node in nodes:
        if has_far_metrics(node) and not loaded.config.security.allow_open_metrics:
            raise ConfigError(
                f"{loaded.path}: {node.name}: metrics_host {node.metrics_host} is not loopback, and readers are not "
                "authenticated there: leave it out, and run Prometheus, or a proxy that authenticates, on that machine; or, "
                "where every client that reaches it may read its metrics, set security.allow_open_metrics = true"
            )
        if node.role == "gateway":
            section = loaded.section(node)
            why = unasked(http_host=section.http_host, api_keys=section.api_keys, allow_open=section.allow_open)
            if why:
                raise ConfigError(f"{loaded.path}: {node.name}: {why}")


def has_far_metrics(node: NodeSettings) -> bool:
    """Return whether a node serves its metrics beyond loopback."""
    return bool(node.metrics_port) and not is_loopback(f"tcp://{node.metrics_host}:0")
