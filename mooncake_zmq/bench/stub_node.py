"""Tools of a benchmark that talks to one role's process over ZeroMQ: that process, and stub nodes as its peers."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mooncake_zmq.config.load import load
from mooncake_zmq.config.records import Config
from mooncake_zmq.core.actor import Actor
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import PROTOCOL_VERSION, Hello
from mooncake_zmq.core.node import Node
from mooncake_zmq.core.roles import Role
from mooncake_zmq.core.routes import Member
from mooncake_zmq.core.session import Session
from mooncake_zmq.runtime.model import prepared
from mooncake_zmq.runtime.zmq_runtime import ZmqRuntime


class StubNode:
    """A stub actor without gauges or state to dump; the benchmark defines how it handles events."""

    def __init__(self) -> None:
        self.counts = Tally()

    def check(self, now: float) -> None:
        """See `core.actor`."""

    def gauges(self, now: float) -> dict[str, float]:
        return {}

    def dump(self, now: float) -> dict[str, Any]:
        return {}


@contextmanager
def role_process(role: Role, name: str, settings: str) -> Iterator[tuple[Config, "subprocess.Popen[bytes]", Path]]:
    """Run the process of node `name` of a configuration in TOML, in a runtime directory of its own, until the context ends;
    yield the configuration, the process and the file of its output."""
    with tempfile.TemporaryDirectory(prefix="mczmq-") as directory:
        path, words = Path(directory) / "nodes.toml", Path(directory) / f"{role}.out"
        path.write_text(settings)
        overrides = {"cluster.runtime_dir": directory, "cluster.name": path.parent.name}
        command = [sys.executable, "-m", "mooncake_zmq", role, "--config", str(path), "--node", name]
        command += [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
        with words.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield load(path, overrides).config, process, words
        finally:
            process.terminate()
            process.wait()


def runtime_of(actor: Actor, config: Config, name: str, *, peer: str) -> ZmqRuntime:
    """Return a runtime of `actor` as node `name` of the deployment, whose only peer is `peer`. The caller runs and closes
    it."""
    node, model = config.node(name), prepared(config)
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        role=node.role,
        host=node.host,
        model=model.identity,
        tokenizer=model.tokenizer,
        layout=model.layout(config.model.block_tokens).fingerprint,
    )
    members = {peer: Member(config.node(peer).roles, config.node(peer).host)}
    session = Session(me=name, incarnation=1, hello=hello, peers=members, settings=config.session, now=time.monotonic())
    peers = {peer: config.endpoint(config.node(peer))}
    return ZmqRuntime(Node(actor, session), endpoint=config.endpoint(node), peers=peers)
