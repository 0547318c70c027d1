"""Inputs without end for every socket of a running cluster: those that fuzzing begins with, spoilt, by whoever is let in, and
noise by whoever is not. What the cluster makes of them is seen by its clients, its logs and its memory."""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from random import Random
from typing import Any

import zmq

from mooncake_zmq.chaos.cluster import Cluster
from mooncake_zmq.chaos.keys import OUTSIDER, SUBSCRIBER
from mooncake_zmq.core.keys import Plane
from mooncake_zmq.core.messages import PROTOCOL_VERSION, Envelope, decode, encode
from mooncake_zmq.fuzz.decoders import DECODERS
from mooncake_zmq.fuzz.examination import mutations
from mooncake_zmq.transfer.sockets import Limits, Sockets

DRAWN = 20_000
"""Different inputs for a socket; then they come again."""
STALL_S = 5.0
"""A socket that takes nothing for so long gets no more: counted is what it took."""
TIMEOUT_S = 2.0
HTTP_SHARE, CALLS_AT_ONCE = 50, 16
"""Of the inputs of another socket, one goes to HTTP, in a call of its own: it is parsed, prepared and answered."""
NOISE_SHARE = 1000
"""Likewise a connection of noise."""
AT_ONCE = 4
COUNTED = ("dropped", "garbage", "refused", "cut", "strangers")
_LIMITS = Limits(max_message_bytes=1 << 20, send_hwm=200, receive_hwm=200)


@dataclass(frozen=True, slots=True)
class Door:
    """A listening socket of a node. `decoder`: which reads what comes there; `kind`: what connects."""

    node: str
    what: str
    endpoint: str
    decoder: str
    plane: Plane = "control"
    kind: int = zmq.DEALER
    prefix: tuple[bytes, ...] = ()
    """Parts of each message before the input."""


def doors(cluster: Cluster) -> Iterator[Door]:
    """All of them."""
    for node in cluster.config.nodes:
        yield Door(node.name, "control", node.endpoint, "session")
        if node.role in ("prefill", "cache-node"):
            yield Door(node.name, "data", node.data_endpoint, "stream-wanted", "data")
        if node.store_endpoint:
            yield Door(node.name, "store", node.store_endpoint, "store-request", "store")
        if node.role == "cache-node" and (events := node.settings.get("kv_events")):
            yield Door(node.name, "events", events["endpoint"], "envelope", "events", zmq.XSUB)
            yield Door(node.name, "replay", events["replay_endpoint"], "segment-header", "events", prefix=(b"",))
    for name, url in cluster.urls().items():
        yield Door(name, "http", url.replace("http://", "tcp://"), "completions")


async def assault(cluster: Cluster, count: int, seed: int, say: Callable[[str], None]) -> dict[str, int]:
    """Send `count` inputs to every socket, a few sockets at a time; returns how many each took, and `refusals` the nodes
    counted."""
    taken: dict[str, int] = {}
    slots = asyncio.Semaphore(AT_ONCE)
    before = refusals(await cluster.dumps())

    async def one(door: Door) -> None:
        async with slots:
            began = time.monotonic()
            name = f"{door.node} {door.what}"
            taken[name] = await asyncio.to_thread(_send, cluster, door, count, Random(f"{seed} {name}"))
            say(f"{taken[name]:,} inputs to {name} in {time.monotonic() - began:.0f} s")

    async with asyncio.TaskGroup() as group:
        for door in doors(cluster):
            group.create_task(one(door))
    after = refusals(await cluster.dumps())
    say("counted: " + ", ".join(f"{name} {count - before.get(name, 0):,}" for name, count in sorted(after.items())))
    return taken


def refusals(dumps: Mapping[str, Any]) -> Counter[str]:
    """What nodes counted of inputs that were none, by counter, all nodes together."""
    found: Counter[str] = Counter()
    for dump in dumps.values():
        parts = {**dump["parts"], "session": dump["session"]["counts"], "zmq": dump["runtime"]["counts"]}
        parts |= {part: dump[part]["counts"] for part in ("edge", "store") if part in dump}
        for part, counts in parts.items():
            for name, count in counts.items():
                if any(word in name for word in COUNTED):
                    found[f"{part}_{name}"] += int(count)
    return found


def _send(cluster: Cluster, door: Door, count: int, random: Random) -> int:
    address, _, port = door.endpoint.removeprefix("tcp://").rpartition(":")
    for _ in range(count // NOISE_SHARE):
        with suppress(OSError), socket.create_connection((address, int(port)), timeout=TIMEOUT_S) as stream:
            stream.sendall(random.randbytes(random.choice((1, 64, 4096))))
    seeds = list(DECODERS[door.decoder].seeds())
    thief = next(name for name in cluster.children if name != door.node)
    if door.decoder == "session":
        seeds += _spoken_by(thief)
    drawn = list(mutations(seeds, random, min(count, DRAWN), 8192))
    inputs = islice(cycle(drawn), count)
    if door.what == "http":
        with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
            return sum(pool.map(partial(_call, address, int(port)), islice(inputs, count // HTTP_SHARE)))
    return _pour(cluster, door, {"store": OUTSIDER, "events": SUBSCRIBER}.get(door.plane, thief), inputs)


def _spoken_by(name: str) -> list[bytes]:
    """Every message, in envelopes of a member that may speak: from a life that is over, and from one to come."""
    bodies = tuple(DECODERS["message"].seeds())
    for raw in bodies:
        decode(raw)
    common = {"version": PROTOCOL_VERSION, "sender": name, "floor": 1, "to_incarnation": 1, "ack_epoch": 0, "ack": 0}
    lives = ((1, 0), (1 << 47, 1))
    return [
        encode(Envelope(incarnation=life, epoch=1, sequence=sequence, bodies=(body,), **common))  # type: ignore[arg-type]
        for body in bodies
        for life, sequence in lives
    ]


def _pour(cluster: Cluster, door: Door, who: str, inputs: Iterator[bytes]) -> int:
    """By a ZeroMQ of ours, which connects again when it is cut."""
    sockets = Sockets(cluster.keys.of(who) if cluster.keys else None, allow_plain_tcp=True, io_threads=1).borrow()
    connection, _ = sockets.connecting(door.kind, door.endpoint, door.plane, _LIMITS, server=door.node)
    connection.connect(door.endpoint)
    connection.sndtimeo = int(STALL_S * 1000)
    sent = 0
    with suppress(zmq.Again):
        for raw in inputs:
            connection.send_multipart([*door.prefix, raw])
            sent += 1
            if not sent % 100:
                _hear(connection)
    connection.close(linger=int(STALL_S * 1000))
    sockets.give_back()
    return sent


def _hear(connection: "zmq.Socket[bytes]") -> None:
    """What was answered, so that nobody has to keep it."""
    with suppress(zmq.Again):
        while True:
            connection.recv(zmq.DONTWAIT)


def _call(address: str, port: int, raw: bytes) -> bool:
    """One call, hung up on once it begins to be answered."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw)
    with suppress(OSError), socket.create_connection((address, port), timeout=TIMEOUT_S) as stream:
        stream.sendall(head + raw)
        return bool(stream.recv(16))
    return False
