"""Checks the runtime directory and every address that nodes here listen on: whether it is free or held by its node."""

import errno
import os
import pwd
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from mooncake_zmq.config.records import NodeSettings
from mooncake_zmq.operate.doctor.finding import Finding, Here
from mooncake_zmq.operate.doctor.here import tcp_address
from mooncake_zmq.roles import PARTS

AREA = "places"
UNIT_DIRECTORIES = ("/usr/local/lib/systemd/system", "/etc/systemd/system", "/usr/lib/systemd/system")
UNITS_RUNTIME_DIR = "/run/mooncake-zmq"
MIGRATE_REQ = Path("/proc/sys/net/ipv4/tcp_migrate_req")


def examine(here: Here) -> Iterator[Finding]:
    """Yield findings on the runtime directory, then on each address of each node here: only a user who may read the directory
    can find out which process has a port."""
    directory = runtime_directory(Path(here.config.cluster.runtime_dir), units_installed())
    yield directory
    if directory.level == "problem":
        return
    for node in here.nodes:
        for what, address, port in addresses(here, node):
            shared = what == "http_port" and here.section(node).reuse_port
            yield listening(node.name, what, address, port, here.running.get(node.name), shared=shared)
    if any(here.section(node).reuse_port for node in here.of_role("gateway")):
        yield migrating(MIGRATE_REQ)


def migrating(setting: Path) -> Finding:
    """Check what happens to connections that wait at a gateway when it stops listening on a shared address. The sysctl exists
    since Linux 5.14."""
    try:
        migrates = int(setting.read_text()) == 1
    except (OSError, ValueError):
        migrates = False
    if migrates:
        return Finding(AREA, "ok", "gateways that leave a shared address hand over who waits there")
    found = "connections in the midst of their handshake with a gateway that leaves a shared address, or dies, are reset"
    return Finding(AREA, "warning", found, "sysctl -w net.ipv4.tcp_migrate_req=1, and a line of it in /etc/sysctl.d")


def units_installed() -> bool:
    """Return whether systemd has the project's units."""
    return any(Path(directory, "mooncake.target").exists() for directory in UNIT_DIRECTORIES)


def runtime_directory(path: Path, units: bool) -> Finding:
    """Check that other users cannot write to the runtime directory and that all nodes of this machine use the same one."""
    if units and str(path) != UNITS_RUNTIME_DIR:
        advice = (
            f'runtime_dir = "{UNITS_RUNTIME_DIR}" in [cluster]: units are given that one, and this command looks in the file\'s'
        )
        return Finding(AREA, "problem", f"cluster.runtime_dir is {path}", advice)
    try:
        state = path.lstat()
    except FileNotFoundError:
        return Finding(AREA, "ok", f"{path} will be made by the first node")
    except OSError as error:
        return Finding(
            AREA, "problem", f"{path}: {error.strerror}", "set cluster.runtime_dir to a directory of the nodes' user"
        )
    if not stat.S_ISDIR(state.st_mode):
        return Finding(AREA, "problem", f"{path} is no directory", f"rm {path}; somebody else may have put it there")
    if state.st_mode & 0o022:
        return Finding(AREA, "problem", f"{path} can be written by others", f"chmod 700 {path}")
    if state.st_uid != os.geteuid():
        advice = f"run this as that user: runuser -u {_user(state.st_uid)} -- mooncake-zmq doctor"
        return Finding(AREA, "problem", f"{path} is another user's: what runs cannot be seen", advice)
    return Finding(AREA, "ok", f"{path} is private to its user (uid {state.st_uid})")


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def addresses(here: Here, node: NodeSettings) -> Iterator[tuple[str, str, int]]:
    """Yield (setting, address, port) of each TCP address that a node listens on."""
    section = here.section(node)
    named = {"endpoint": here.config.endpoint(node), "store_endpoint": node.store_endpoint}
    if PARTS[node.role].segment_setting:  # nodes with blocks serve them
        named["data_endpoint"] = here.config.data_endpoint(node)
    if node.role == "cache-node":
        named["kv_events.endpoint"] = section.kv_events.endpoint
        named["kv_events.replay_endpoint"] = section.kv_events.replay_endpoint
    for what, endpoint in named.items():
        if found := tcp_address(endpoint):
            yield what, *found
    if node.data_stream_port and (blocks := tcp_address(node.data_endpoint)):
        yield "data_stream_port", blocks[0], node.data_stream_port
    if node.store_stream_port and (store := tcp_address(node.store_endpoint)):
        yield "store_stream_port", store[0], node.store_stream_port
    if node.metrics_port:
        yield "metrics_port", node.metrics_host, node.metrics_port
    if node.role == "gateway":
        yield "http_port", section.http_host, section.http_port


def listening(node: str, what: str, address: str, port: int, pid: int | None, *, shared: bool = False) -> Finding:
    """Check an address; `pid` is that of the node if it runs, which then has the port itself. `shared`: other processes of
    this user may have it too."""
    where = f"{what} {address}:{port} of {node}"
    error = bind_error(address, port, share=shared)
    if error is None and shared:
        return Finding(AREA, "ok", f"{where} is free, or shared by gateways of this user alone")
    if error is None and pid:
        return Finding(AREA, "warning", f"{where} is free, though {node} runs (pid {pid})", f"restart {node}: its file changed")
    if error is None:
        return Finding(AREA, "ok", f"{where} is free")
    if error == errno.EADDRINUSE and pid:
        return Finding(AREA, "ok", f"{where} is in use, and {node} runs (pid {pid})")
    if error == errno.EADDRINUSE:
        advice = f"stop what listens there (ss -ltnp 'sport = :{port}'), or choose another port"
        return Finding(AREA, "problem", f"{where} is in use by somebody else", advice)
    if error == errno.EACCES:
        advice = f"a port above 1023, or: sysctl -w net.ipv4.ip_unprivileged_port_start={port}"
        return Finding(AREA, "problem", f"{where} is not for this user", advice)
    advice = "write an address of this machine (ip -brief address)"
    return Finding(AREA, "problem", f"{where}: {os.strerror(error).lower()}", advice)


def bind_error(address: str, port: int, *, share: bool = False) -> int | None:
    """Return the error of binding an address, None if it can be bound. A shared address is bound without listening, since
    clients might connect."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if share:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind((address, port))
            if not share:
                probe.listen()
        except socket.gaierror:
            return errno.EADDRNOTAVAIL
        except OSError as error:
            return error.errno
    return None
