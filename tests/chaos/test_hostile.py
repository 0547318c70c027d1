"""Hostile inputs: they reach what they are for, and a run that attacked nothing is not clean."""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from store_servers import store_server

from mooncake_zmq.chaos import hostile, hostile_streams
from mooncake_zmq.chaos.hostile import Target, assault, spared
from mooncake_zmq.chaos.hostile_streams import Admission, of_blocks, of_values, pour
from mooncake_zmq.config.examples import CHAOS, located
from mooncake_zmq.config.load import load as load_config
from mooncake_zmq.fuzz.decoders import LAYOUT
from mooncake_zmq.transfer.data_server import DataServer
from mooncake_zmq.transfer.key_files import load, make
from mooncake_zmq.transfer.shared_memory import Segment
from mooncake_zmq.transfer.sockets import Limits, Sockets
from mooncake_zmq.transfer.tickets import Tickets

INPUTS = 120


@pytest.fixture(params=["by keys", "in clear"])
def keyed(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Sockets]:
    """What `server` and `client` connect by."""
    if request.param == "in clear":
        return lambda name: Sockets(io_threads=1)
    make(tmp_path / "keys", [("server", ("node",)), ("client", ("node", "store"))])
    return lambda name: Sockets(load(tmp_path / "keys", name), io_threads=1)


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An endpoint at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "STALL_S", 0.3)


def test_spoilt_inputs_reach_a_data_server_s_streams_and_are_counted(keyed, tmp_path: Path) -> None:
    crashes: list[BaseException] = []
    segment = Segment.create(tmp_path, "test", "server", LAYOUT, 4, 7)
    server = DataServer(segment, "tcp://127.0.0.1:*", on_crash=crashes.append, sockets=keyed("server"))
    assert pour(keyed("client"), server.endpoint, "server", of_blocks, INPUTS, Random(1)) == INPUTS
    server.close()
    segment.close()
    assert not crashes
    assert min(server.counts[name] for name in ("streams", "without_ticket", "garbage")) > INPUTS / 10


def test_spoilt_inputs_reach_a_store_s_streams_and_are_counted(keyed, tmp_path: Path) -> None:
    crashes: list[BaseException] = []
    server = store_server(
        tmp_path, node="server", slabs=4, slab_bytes=1 << 18, on_crash=crashes.append, sockets=keyed("server")
    )
    assert pour(keyed("client"), server.endpoint, "server", of_values, INPUTS, Random(1)) == INPUTS
    server.close()
    assert not crashes
    counts = server.counts
    assert min(counts[name] for name in ("streams", "without_ticket", "stream_garbage")) > INPUTS / 10


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.XSUB])
def test_what_nobody_listens_for_is_not_taken(nowhere: str, kind: int) -> None:
    target = Target("cache-a", "control", nowhere, kind=kind)
    assert hostile._pour(Sockets(io_threads=1), target, iter([b"x"] * 50)) == 0


def test_a_burst_comes_by_many_connections_each_of_which_says_much(keyed) -> None:
    sockets, target = keyed("server").borrow(), Target("server", "data", "", plane="data")
    limits = Limits(max_message_bytes=1 << 20, send_hwm=8, receive_hwm=0)
    with sockets.listening(zmq.ROUTER, "tcp://127.0.0.1:*", "data", limits) as listening:
        listening.bind("tcp://127.0.0.1:*")
        target = replace(target, endpoint=listening.get_string(zmq.LAST_ENDPOINT))
        theirs = keyed("client").borrow()
        hostile._send_and_leave(theirs, target, [b"x"])
        theirs.give_back()
        came = Counter(peer for peer, _ in iter(lambda: listening.poll(200) and listening.recv_multipart(), 0))
    sockets.give_back()
    assert len(came) > hostile.SENDERS / 2
    assert max(came.values()) > hostile.INPUTS_OF_EACH / 2


def test_inputs_come_by_many_connections_and_a_burst_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "PER_CONNECTION", 100)
    bursts = []
    monkeypatch.setattr(hostile, "_send_and_leave", lambda sockets, target, seeds: bursts.append(target))
    sockets = Sockets(io_threads=1).borrow()
    limits = Limits(max_message_bytes=1 << 20, send_hwm=8, receive_hwm=0)
    with sockets.listening(zmq.ROUTER, "tcp://127.0.0.1:*", "control", limits) as listening:
        listening.bind("tcp://127.0.0.1:*")
        target = Target("server", "control", listening.get_string(zmq.LAST_ENDPOINT), "session")
        cluster: Any = SimpleNamespace(children=("server", "client"), keys=None)
        assert hostile._send(cluster, target, 300, Random(1)) == 300
        came = Counter(peer for peer, _ in iter(lambda: listening.poll(200) and listening.recv_multipart(), 0))
    sockets.give_back()
    assert list(came.values()) == [100, 100, 100]
    assert bursts == [target] * 3


def test_bursts_go_to_a_socket_of_every_kind_until_one_is_not_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[tuple[str, int]] = []

    def leave(_sockets: Any, target: Target, _seeds: list[bytes], inputs: int, _stay_s: float) -> bool:
        left.append((target.what, inputs))
        return target.what != "store" or len([what for what, _ in left if what == "store"]) < 4

    monkeypatch.setattr(hostile, "_send_and_leave", leave)
    cluster: Any = SimpleNamespace(children=("cache-a", "other"), keys=None, config=load_config(located(CHAOS)).config)
    cluster.urls = dict
    made = asyncio.run(hostile.burst(cluster, 9, 1, lambda _: None))
    assert {what for what, _ in left} == {"control", "data", "store", "events", "replay"}
    assert sorted(inputs for what, inputs in left if what == "data") == sorted(hostile.BURST_INPUTS * 3)
    assert [count for name, count in made.taken.items() if not name.endswith(" store")] == [9] * 4
    (problem,) = made.problems
    assert problem.endswith(" store admitted 3 of 9 bursts")


@pytest.mark.parametrize("admit", [of_blocks, of_values])
def test_streams_without_a_listener_take_nothing(nowhere: str, admit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile_streams, "TIMEOUT_S", 0.2)
    assert pour(Sockets(io_threads=1), nowhere, "cache-a", admit, 10, Random(1)) == 0
    admission = Admission(nowhere, Tickets(sealed=True).make())
    assert not hostile_streams._tried(admission, nowhere, b"x", Random(1))


class Silent:
    """A cluster whose nodes say what they counted, and count nothing."""

    children, keys = ("cache-a", "cache-b"), None

    async def dumps(self) -> dict[str, Any]:
        return {"cache-a": dump()}


def test_an_assault_on_what_is_not_there_is_a_problem(nowhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("cache-a", "data", nowhere, "stream-wanted", "data", counters=(("data_server", "garbage", 0),))
    monkeypatch.setattr(hostile, "targets_of", lambda cluster: [target])
    made = asyncio.run(assault(Silent(), 1000, 1, lambda text: None))  # type: ignore[arg-type]
    assert made.problems == [
        "cache-a data took 0 of 1,000 hostile inputs",
        "cache-a data took 0 hostile inputs, and data_server_garbage rose by 0",
    ]


def dump(**counts: int) -> dict[str, Any]:
    return {"parts": {"data_server": counts}, "session": {"counts": {}}, "runtime": {"counts": {}}}


TARGET = Target("cache-a", "data", "", counters=(("data_server", "garbage", 0), ("data_server", "streams", 0.1)))


def test_a_socket_that_was_attacked_is_no_problem() -> None:
    assert spared(TARGET, 1000, 900, dump(garbage=5), dump(garbage=6, streams=100, streams_refused=0)) == []


@pytest.mark.parametrize(
    ("taken", "after", "problem"),
    [
        (899, dump(garbage=6, streams=100), "cache-a data took 899 of 1,000 hostile inputs"),
        (1000, dump(garbage=5, streams=100), "cache-a data took 1,000 hostile inputs, and data_server_garbage rose by 0"),
        (1000, dump(garbage=6, streams=99), "cache-a data took 1,000 hostile inputs, and data_server_streams rose by 99"),
        (1000, None, "cache-a did not report its counts of them"),
    ],
)
def test_a_socket_that_took_little_or_counted_little_is_named(taken: int, after: dict[str, Any] | None, problem: str) -> None:
    assert spared(TARGET, 1000, taken, dump(garbage=5), after) == [problem]
