"""Hostile inputs for every socket of a running cluster: mutated fuzzing samples over admitted connections, and noise over
others. Their effect shows in the cluster's clients, logs and memory."""

import asyncio
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from random import Random
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from mooncake_zmq.chaos import hostile_streams
from mooncake_zmq.chaos.cluster import Cluster
from mooncake_zmq.chaos.keys import OUTSIDER, SUBSCRIBER
from mooncake_zmq.core.keys import Plane
from mooncake_zmq.core.messages import PROTOCOL_VERSION, Envelope, decode, encode
from mooncake_zmq.fuzz.decoders import DECODERS
from mooncake_zmq.fuzz.examination import mutations
from mooncake_zmq.transfer.sockets import Limits, Sockets

DRAWN = 20_000
"""The number of different inputs for a socket, after which they repeat."""
STALL_S = 5.0
"""The time after which a socket that takes nothing gets no more inputs; those that it took are counted."""
TIMEOUT_S = 2.0
HTTP_SHARE, CALLS_AT_ONCE = 50, 16
"""One HTTP call for every so many inputs of another socket, since each is parsed, prepared and answered; and how many at
once."""
ANSWER_TIMEOUT_S = 15.0
"""The timeout of an HTTP call: some mutated bodies are still valid and ask for as many tokens as the model may make."""
STREAM_SHARE = 20
"""One stream for every so many inputs of another socket, since each is a connection, a handshake and a thread."""
NOISE_SHARE = 1000
"""One connection of noise for every so many inputs of another socket."""
MIN_TAKEN_SHARE = 0.9
"""The share of a socket's inputs that it must take; with less it counts as not attacked."""
AT_ONCE = 4
PER_CONNECTION = 1000
"""The number of inputs that one connection sends before the next one opens."""
SENDERS, INPUTS_OF_EACH = 40, 200
"""The number of connections that come to a socket together after each of these and leave without a close, and the inputs that
each sends."""
SENDERS_S, PING_MS = 0.5, 5
BURST_INPUTS, BURST_S = (1, 40, INPUTS_OF_EACH), 0.05
"""The number of inputs that each connection sends with `--bursts`, by turns, and the longest time that it stays: fewer than a
socket takes in at once, as many, and more, so that some close while their input is stopped."""
COUNTED = ("dropped", "garbage", "refused", "cut", "strangers")
_IN, _OUT = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED
_LIMITS = Limits(max_message_bytes=1 << 20, send_hwm=200, receive_hwm=200)


@dataclass(frozen=True, slots=True)
class Target:
    """A listening socket of a node. `decoder`: the decoder of its inputs; `kind`: the type of the ZeroMQ socket that
    connects."""

    node: str
    what: str
    endpoint: str
    """The address to connect to; of streams, the endpoint that issues their tickets."""
    decoder: str = ""
    plane: Plane = "control"
    kind: int = zmq.DEALER
    prefix: tuple[bytes, ...] = ()
    """The frames of each message before the input."""
    admit: hostile_streams.Admit | None = None
    """The admission of a client to a stream; None for ZeroMQ sockets."""
    counters: tuple[tuple[str, str, float], ...] = ()
    """The node's counters of these inputs: the component, the prefix of the counters' names, and the least share of the inputs
    that they must count (0: a single one)."""

    @property
    def name(self) -> str:
        return f"{self.node} {self.what}"

    def wanted(self, count: int) -> int:
        """Return the number of inputs that this socket gets when others get `count`."""
        return count // (HTTP_SHARE if self.what == "http" else STREAM_SHARE if self.admit else 1)


@dataclass(slots=True)
class Assault:
    """The result of an assault. `taken`: the number of inputs by socket."""

    taken: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def targets_of(cluster: Cluster) -> Iterator[Target]:
    """Return every listening socket of the cluster's nodes."""
    for node in cluster.config.nodes:
        yield Target(node.name, "control", node.endpoint, "session", counters=(("session", "dropped", 0),))
        if node.role in ("prefill", "cache-node"):
            at, garbage = node.data_endpoint, (("data_server", "garbage", 0),)
            yield Target(node.name, "data", at, "stream-wanted", "data", counters=garbage)
            counted = (
                ("data_server", "streams", 0.1),
                ("data_server", "without_ticket", 0.1),
                ("data_server", "garbage", 0.1),
            )
            yield Target(node.name, "data streams", at, plane="data", admit=hostile_streams.of_blocks, counters=counted)
        if node.store_endpoint:
            at, garbage = node.store_endpoint, (("store", "garbage", 0),)
            yield Target(node.name, "store", at, "store-request", "store", counters=garbage)
            counted = (("store", "streams", 0.1), ("store", "without_ticket", 0.1), ("store", "stream_garbage", 0.1))
            yield Target(node.name, "store streams", at, plane="store", admit=hostile_streams.of_values, counters=counted)
        if node.role == "cache-node" and (events := node.settings.get("kv_events")):
            cut, garbage = (("kv_events", "subscribers_cut", 0),), (("kv_events", "replay_garbage", 0),)
            yield Target(node.name, "events", events["endpoint"], "envelope", "events", zmq.XSUB, counters=cut)
            at = events["replay_endpoint"]
            yield Target(node.name, "replay", at, "segment-head", "events", prefix=(b"",), counters=garbage)
    for name, url in cluster.urls().items():
        yield Target(name, "http", url.replace("http://", "tcp://"), "completions")


def burst_targets(cluster: Cluster) -> list[Target]:
    """Return one socket of every kind, except HTTP's and streams', which are no sockets of ZeroMQ."""
    by_kind = {target.what: target for target in targets_of(cluster) if target.what != "http" and target.admit is None}
    return list(by_kind.values())


async def assault(cluster: Cluster, count: int, seed: int, say: Callable[[str], None]) -> Assault:
    """Send `count` inputs to every socket, a few sockets at a time. A socket that took too few or counted none is a problem,
    since the run then shows nothing of it."""
    made, targets = Assault(), list(targets_of(cluster))
    before = await cluster.dumps()
    made.taken = await _attack(targets, partial(_send, cluster), "inputs", count, seed, say)
    after = await cluster.dumps()
    counted, counted_before = refusals(after), refusals(before)
    say("counted: " + ", ".join(f"{name} {number - counted_before[name]:,}" for name, number in sorted(counted.items())))
    for target in targets:
        made.problems += spared(
            target, target.wanted(count), made.taken[target.name], before.get(target.node), after.get(target.node)
        )
    return made


async def burst(cluster: Cluster, count: int, seed: int, say: Callable[[str], None]) -> Assault:
    """Send `count` bursts of connections to one socket of every kind; each connection sends some inputs and closes at any
    stage, even of its handshake. A socket that admitted too few bursts is a problem."""
    targets = burst_targets(cluster)
    taken = await _attack(targets, partial(_send_bursts, cluster, say), f"bursts of {SENDERS}", count, seed, say)
    few = [target for target in targets if taken[target.name] < MIN_TAKEN_SHARE * count]
    return Assault(taken, [f"{target.name} admitted {taken[target.name]:,} of {count:,} bursts" for target in few])


async def _attack(
    targets: Iterable[Target],
    send: Callable[[Target, int, Random], int],
    what: str,
    count: int,
    seed: int,
    say: Callable[[str], None],
) -> dict[str, int]:
    """Run `send` for every target, a few at a time, and return how many each took."""
    slots, taken = asyncio.Semaphore(AT_ONCE), dict[str, int]()

    async def one(target: Target) -> None:
        async with slots:
            began = time.monotonic()
            taken[target.name] = await asyncio.to_thread(send, target, count, Random(f"{seed} {target.name}"))
            say(f"{taken[target.name]:,} {what} to {target.name} in {time.monotonic() - began:.0f} s")

    async with asyncio.TaskGroup() as group:
        for target in targets:
            group.create_task(one(target))
    return taken


def spared(
    target: Target, wanted: int, taken: int, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> list[str]:
    """Return why a socket counts as not attacked. `before`, `after`: dumps of its node; None: it did not answer."""
    found = []
    if taken < MIN_TAKEN_SHARE * wanted or not taken:
        found.append(f"{target.name} took {taken:,} of {wanted:,} hostile inputs")
    if before is None or after is None:
        return [*found, f"{target.node} did not report its counts of them"]
    for part, prefix, share in target.counters:
        counted = _counted(after, part, prefix) - _counted(before, part, prefix)
        if counted < max(1.0, share * wanted):
            found.append(f"{target.name} took {taken:,} hostile inputs, and {part}_{prefix} rose by {counted:,}")
    return found


def _counted(dump: Mapping[str, Any], part: str, prefix: str) -> int:
    return sum(int(count) for name, count in _parts(dump).get(part, {}).items() if name.startswith(prefix))


def _parts(dump: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return a node's counters by component."""
    parts = {**dump["parts"], "session": dump["session"]["counts"], "zmq": dump["runtime"]["counts"]}
    return parts | {part: dump[part]["counts"] for part in ("edge", "store") if part in dump}


def refusals(dumps: Mapping[str, Any]) -> Counter[str]:
    """Return the nodes' counters of refused inputs, summed over all nodes."""
    found: Counter[str] = Counter()
    for dump in dumps.values():
        for part, counts in _parts(dump).items():
            for name, count in counts.items():
                if any(word in name for word in COUNTED):
                    found[f"{part}_{name}"] += int(count)
    return found


def _send(cluster: Cluster, target: Target, count: int, random: Random) -> int:
    address, _, port = target.endpoint.removeprefix("tcp://").rpartition(":")
    wanted, thief = target.wanted(count), _thief(cluster, target)
    sockets = _thief_sockets(cluster, target)
    if target.admit is not None:
        return hostile_streams.pour(sockets, target.endpoint, target.node, target.admit, wanted, random)
    for _ in range(count // NOISE_SHARE):
        with suppress(OSError), socket.create_connection((address, int(port)), timeout=TIMEOUT_S) as stream:
            stream.sendall(random.randbytes(random.choice((1, 64, 4096))))
    seeds = _samples(target, thief)
    inputs = islice(cycle(mutations(seeds, random, min(count, DRAWN), 8192)), wanted)
    if target.what == "http":
        with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
            return sum(pool.map(partial(_call, address, int(port)), inputs))
    sockets.borrow()
    taken = 0
    while some := list(islice(inputs, PER_CONNECTION)):
        took = _pour(sockets, target, some)
        _send_and_leave(sockets, target, seeds)
        taken += took
        if took < len(some):
            break
    sockets.give_back()
    return taken


def _send_bursts(cluster: Cluster, say: Callable[[str], None], target: Target, count: int, random: Random) -> int:
    """Send bursts one after another, until one is not admitted; return how many were. Each tenth of them is reported."""
    sockets = _thief_sockets(cluster, target).borrow()
    thief = _thief(cluster, target)
    inputs = _samples(target, thief)
    inputs += islice(mutations(inputs, random, len(inputs), 8192), len(inputs))
    taken = 0
    for each in islice(cycle(BURST_INPUTS), count):
        if not _send_and_leave(sockets, target, random.sample(inputs, len(inputs)), each, random.uniform(0, BURST_S)):
            break
        taken += 1
        if taken % math.ceil(count / 10) == 0 and taken < count:
            say(f"{taken:,} of {count:,} bursts to {target.name}")
    sockets.give_back()
    return taken


def _send_and_leave(
    sockets: Sockets, target: Target, seeds: list[bytes], inputs: int = INPUTS_OF_EACH, stay_s: float = SENDERS_S
) -> bool:
    """Open many connections that send much, ping in between, and leave whatever the node has read by then. They stay for
    `stay_s` after the first one was admitted; return whether it was."""
    senders = []
    for _ in range(SENDERS):
        connection, _ = sockets.connecting(target.kind, target.endpoint, target.plane, _LIMITS, server=target.node)
        connection.heartbeat_ivl = PING_MS
        senders.append(connection)
    monitor: zmq.Socket[bytes] = senders[0].get_monitor_socket(_IN)
    for connection in senders:
        connection.connect(target.endpoint)
    for raw in islice(cycle(seeds), inputs):
        for connection in senders:
            with suppress(zmq.Again):
                connection.send_multipart([*target.prefix, raw], zmq.NOBLOCK)
    admitted = bool(monitor.poll(int(STALL_S * 1000)))
    time.sleep(stay_s)
    senders[0].disable_monitor()
    monitor.close(linger=0)
    for connection in senders:
        connection.close(linger=0)
    return admitted


def _thief(cluster: Cluster, target: Target) -> str:
    """Return a node other than the target's."""
    return next(name for name in cluster.children if name != target.node)


def _thief_sockets(cluster: Cluster, target: Target) -> Sockets:
    """Return sockets with a key that the target admits and that is not its own."""
    who = {"store": OUTSIDER, "events": SUBSCRIBER}.get(target.plane) or _thief(cluster, target)
    return Sockets(cluster.keys.of(who) if cluster.keys else None, allow_plain_tcp=True, io_threads=1)


def _samples(target: Target, thief: str) -> list[bytes]:
    """Return well-formed inputs of a socket."""
    return list(DECODERS[target.decoder].seeds()) + (_spoken_by(thief) if target.decoder == "session" else [])


def _spoken_by(name: str) -> list[bytes]:
    """Return every message in envelopes of an admitted member, from an incarnation that is over and from a future one."""
    bodies = tuple(DECODERS["message"].seeds())
    for raw in bodies:
        decode(raw)
    common = {"version": PROTOCOL_VERSION, "sender": name, "floor": 1, "to_incarnation": 1, "ack_epoch": 0, "ack": 0}
    incarnations = ((1, 0), (1 << 47, 1))
    return [
        encode(Envelope(incarnation=incarnation, epoch=1, sequence=sequence, bodies=(body,), **common))  # type: ignore[arg-type]
        for body in bodies
        for incarnation, sequence in incarnations
    ]


def _pour(sockets: Sockets, target: Target, inputs: Iterable[bytes]) -> int:
    """Send inputs by a ZeroMQ socket that reconnects when it is cut. Inputs sent while it is disconnected do not count."""
    connection, _ = sockets.borrow().connecting(target.kind, target.endpoint, target.plane, _LIMITS, server=target.node)
    connection.immediate = True
    connection.sndtimeo = int(STALL_S * 1000)
    monitor: zmq.Socket[bytes] = connection.get_monitor_socket(_IN | _OUT)
    connection.connect(target.endpoint)
    sent, is_in = 0, False
    with suppress(zmq.Again):
        for raw in inputs:
            is_in = _is_in(monitor, is_in)
            connection.send_multipart([*target.prefix, raw])
            sent += 1
            if not sent % 100:
                _drop_answers(connection)
    connection.disable_monitor()
    monitor.close(linger=0)
    connection.close(linger=int(STALL_S * 1000))
    sockets.give_back()
    return sent


def _is_in(monitor: "zmq.Socket[bytes]", was_in: bool) -> bool:
    """Wait until the connection is admitted. Raises zmq.Again where it is not within `STALL_S`."""
    until = time.monotonic() + STALL_S
    while monitor.poll(0 if was_in else max(0, int((until - time.monotonic()) * 1000))):
        was_in = bool(recv_monitor_message(monitor)["event"] & _IN)
    if not was_in:
        raise zmq.Again
    return was_in


def _drop_answers(connection: "zmq.Socket[bytes]") -> None:
    """Read and discard the answers, so that they fill no queue."""
    with suppress(zmq.Again):
        while True:
            connection.recv(zmq.DONTWAIT)


def _call(address: str, port: int, raw: bytes) -> bool:
    """Make one call, and close the connection once the answer begins."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw)
    with suppress(OSError), socket.create_connection((address, port), timeout=TIMEOUT_S) as stream:
        stream.settimeout(ANSWER_TIMEOUT_S)
        stream.sendall(head + raw)
        return bool(stream.recv(16))
    return False
