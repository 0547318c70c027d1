"""Checks the nodes of other machines: whether they answer at their addresses, and what nodes that run here report of them."""

import os
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mooncake_zmq.core.messages import OLDEST_PROTOCOL, PROTOCOL_VERSION
from mooncake_zmq.operate.doctor.finding import Finding, Here
from mooncake_zmq.operate.doctor.here import tcp_address
from mooncake_zmq.operate.local_nodes import collect_dumps
from mooncake_zmq.transfer import zmtp

AREA = "peers"
ANSWER_S = 2.0
AT_ONCE = 32


def examine(here: Here) -> Iterator[Finding]:
    """Yield a finding on every node elsewhere that has an address, then on peers that running nodes have refused or never
    connected to."""
    elsewhere = [node for node in here.config.nodes if node not in here.nodes]
    known = [(node.name, address) for node in elsewhere if (address := tcp_address(here.config.endpoint(node)))]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(lambda each: reached(each[0], *each[1]), known)
    askable = [name for name, pid in here.running.items() if _may_signal(pid)]
    dumps = collect_dumps(Path(here.config.cluster.runtime_dir), askable)
    yield from unreached_peers({name: dump["session"] for name, dump in dumps.items()})


def reached(name: str, address: str, port: int) -> Finding:
    """Check whether ZeroMQ answers at an address."""
    where = f"{name} at {address}:{port}"
    try:
        with socket.create_connection((address, port), timeout=ANSWER_S) as stream:
            stream.settimeout(ANSWER_S)
            greeting = _greeting(stream)
    except OSError as error:
        advice = f"start it, or let {address}:{port} through the firewalls between: nc -vz {address} {port}"
        return Finding(AREA, "warning", f"{where} does not answer: {error.strerror or error}", advice)
    if greeting[:1] != zmtp.SIGNATURE[:1] or greeting[9:10] != zmtp.SIGNATURE[9:]:
        return Finding(
            AREA, "problem", f"{where} is no ZeroMQ socket", f"see what listens at {address}:{port}; it is none of ours"
        )
    guard = greeting[zmtp.MECHANISM].rstrip(b"\0").decode("ascii", "replace")
    return Finding(AREA, "ok", f"{where} answers (ZMTP {greeting[10]}.{greeting[11]}, {guard})")


def _greeting(stream: socket.socket) -> bytes:
    """Exchange ZMTP greetings and return the peer's: both sides send at once, and the second half comes only after our
    signature and version."""
    stream.sendall(zmtp.GREETING)
    got = b""
    while len(got) < zmtp.MECHANISM.stop and (more := stream.recv(zmtp.MECHANISM.stop - len(got))):
        got += more
    return got.ljust(zmtp.GREETING_BYTES, b"\0")


def unreached_peers(sessions: Mapping[str, dict[str, Any]]) -> Iterator[Finding]:
    """Yield findings on the peers of running nodes, by name of the node."""
    silent: dict[str, list[str]] = {}
    for name, session in sessions.items():
        for peer, why in session["refusals"].items():
            advice = f"give {peer} the same release, model and cluster.toml as {name}, then restart it"
            yield Finding(AREA, "problem", f"{name} refuses {peer}: {why}", advice)
        missing = [peer for peer, state in session["peers"].items() if not state["up"] and peer not in session["refusals"]]
        for peer in missing:
            silent.setdefault(peer, []).append(name)
        spoken = {peer: state.get("protocol", PROTOCOL_VERSION) for peer, state in session["peers"].items() if state["up"]}
        older = [peer for peer, protocol in spoken.items() if protocol < PROTOCOL_VERSION]
        if older:
            found = f"{name} speaks an older protocol than {PROTOCOL_VERSION} with {', '.join(older)}"
            advice = "finish the upgrade: install this release there, then mooncake-zmq restart --rolling"
            yield Finding(AREA, "warning", found, advice)
        others = session["counts"].get("dropped[reason=version]", 0)
        if others and missing:
            found = (
                f"{name} was sent {others:,.0f} frames of other protocols than its own, {OLDEST_PROTOCOL} to {PROTOCOL_VERSION}"
            )
            yield Finding(AREA, "problem", found, f"upgrade what does not come up: {', '.join(missing)}")
    for peer, names in silent.items():
        advice = f"start it, or look on its machine: journalctl -u 'mooncake-*@{peer}'"
        yield Finding(AREA, "warning", f"{peer} is not received by {', '.join(names)}", advice)
    if sessions and not silent:
        yield Finding(AREA, "ok", f"{', '.join(sessions)}: each receives from its peers")


def _may_signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
