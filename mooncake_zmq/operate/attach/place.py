"""Finds out which servers and stores are on this machine, and chooses addresses by convention where no answer names one."""

import os
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from mooncake_zmq.operate.doctor.here import is_own, tcp_address
from mooncake_zmq.operate.options import STORE_PORT
from mooncake_zmq.runtime.listening import is_deserted
from mooncake_zmq.transfer.process_memory import available_bytes

EVENTS_PORT = 5557
"""vLLM's own default."""
PORT_RANGE = 1000
"""Servers of one host whose ports differ by less publish at different ports."""
GATEWAY_PORTS: tuple[int, ...] = (8000, *range(8080, 8100))
STEP_BYTES = 64 << 20
LEAST_STORE_BYTES, MOST_STORE_BYTES = 2 * STEP_BYTES, 64 << 30
STORE_SHARE = 4
"""A store gets one part of so many of the free memory."""


def host_of(url: str) -> str:
    """Return the host of a server's URL."""
    return urlsplit(url).hostname or "127.0.0.1"


def port_of(url: str) -> int:
    """Return the port of a server's URL."""
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def is_here(url: str) -> bool:
    """Return whether a server is on this machine."""
    return is_own(address_of(host_of(url)))


def address_of(host: str) -> str:
    """Return the IPv4 address of a host; the text itself where it has none."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host


def events_endpoint(url: str) -> str:
    """Return where a server should publish its KV events: on this machine a socket that no other machine reaches, else a port
    that servers of one host have for themselves. The form is that of a subscriber."""
    if is_here(url):
        return f"ipc:///tmp/vllm-{port_of(url)}.events.ipc"
    return f"tcp://{address_of(host_of(url))}:{EVENTS_PORT + port_of(url) % PORT_RANGE}"


def events_endpoints(url: str) -> tuple[str, ...]:
    """Return where a server may publish its KV events: where it should, and at the default port."""
    return tuple(dict.fromkeys((events_endpoint(url), f"tcp://{address_of(host_of(url))}:{EVENTS_PORT}")))


def published_at(endpoint: str) -> str:
    """Return an endpoint of KV events in the form of vLLM, which listens at tcp://* only."""
    return f"tcp://*:{endpoint.rpartition(':')[2]}" if endpoint.startswith("tcp://") else endpoint


def conventional_store(urls: Sequence[str]) -> str:
    """Return the endpoint of the store for servers whose connectors name none: at loopback, or at the address by which this
    machine reaches the first server that is elsewhere."""
    elsewhere = next((url for url in urls if not is_here(url)), None)
    return f"tcp://{_address_towards(host_of(elsewhere)) if elsewhere else '127.0.0.1'}:{STORE_PORT}"


def own_store(stores: Sequence[str]) -> str:
    """Return the first of these endpoints that is on this machine, in the form of a setting; empty if none is."""
    for endpoint in stores:
        place = tcp_address(endpoint)
        if place is None:
            return endpoint
        address = address_of(place[0])
        if is_own(address):
            return f"tcp://{address}:{place[1]}"
    return ""


def gateway_port(urls: Sequence[str]) -> int:
    """Return the first of the usual ports of loopback that neither a server nor another process has."""
    taken = {port_of(url) for url in urls if is_here(url)}
    free = [port for port in GATEWAY_PORTS if port not in taken and is_deserted("127.0.0.1", port)]
    return free[0] if free else GATEWAY_PORTS[0]


def store_bytes(shm_dir: str) -> int:
    """Return the size of a store by what is free in memory and in the directory of shared memory."""
    state = os.statvfs(shm_dir)
    free = min(state.f_bavail * state.f_frsize, available_bytes())
    return max(LEAST_STORE_BYTES, min(MOST_STORE_BYTES, free // STORE_SHARE // STEP_BYTES * STEP_BYTES))


def _address_towards(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
