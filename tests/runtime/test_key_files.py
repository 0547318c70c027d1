"""Keys at real sockets: who has none, a foreign one or another kind's is not heard and hears nothing, on any kind of socket."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import waiting
import zmq
import zmq.utils.monitor
from store_servers import store_server
from test_zmq_runtime import HELLO, SETTINGS, Echo, running

from mooncake_zmq.core.keys import KeysError
from mooncake_zmq.core.node import Node
from mooncake_zmq.core.records import encode
from mooncake_zmq.core.routes import Member
from mooncake_zmq.core.session import Session
from mooncake_zmq.kv.events import AllBlocksCleared
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.node import streaming
from mooncake_zmq.pool.rules.tenants import StoreTenant
from mooncake_zmq.runtime import kv_events
from mooncake_zmq.runtime.kv_events import END, KvEventPublisher
from mooncake_zmq.runtime.zmq_runtime import ZmqRuntime
from mooncake_zmq.store import MooncakeDistributedStore
from mooncake_zmq.store.client.peer import Call
from mooncake_zmq.store.stream_messages import Get, decode_values
from mooncake_zmq.transfer import data_server, key_files
from mooncake_zmq.transfer.block_messages import PROTOCOL_VERSION, StreamOffered, StreamWanted, decode_offer
from mooncake_zmq.transfer.data_server import DataServer
from mooncake_zmq.transfer.shared_memory import Segment
from mooncake_zmq.transfer.sockets import BadEndpoint, Sockets, connect_beside, is_loopback
from mooncake_zmq.transfer.stream import Stream, StreamError
from mooncake_zmq.transfer.tickets import Ticket

PATIENCE_S = 20.0
OVER = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
OVER |= zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
SOON = replace(SETTINGS, peer_timeout_s=1.0)
SLOWLY_READ_BYTES = 32 << 20
"""More than sockets take up."""
FAR = "tcp://10.11.12.13:7000"
SMALL = {"slabs": 2, "slab_bytes": 4 << 20}


eventually = partial(waiting.eventually, timeout_s=PATIENCE_S)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    nodes = [(name, ("node",)) for name in ("a", "b", "c")]
    key_files.make(directory, [*nodes, ("reader", ("store",)), ("watcher", ("events",))])
    return directory


def revoke(directory: Path, name: str) -> None:
    book = directory / key_files.PUBLIC_KEYS
    book.write_text("".join(line for line in book.read_text().splitlines(True) if not line.startswith(f"{name} ")))


@pytest.fixture
def sockets(directory: Path) -> Iterator[Callable[[str], Sockets]]:
    """Those of a process that has the keys of a name."""
    with ExitStack() as stack:

        def make(name: str) -> Sockets:
            made = Sockets(key_files.load(directory, name), on_crash=pytest.fail).borrow()
            stack.callback(made.give_back)
            return made

        yield make


def free_endpoint() -> str:
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    context.term()
    return f"tcp://127.0.0.1:{port}"


@dataclass
class Served:
    """A server of one kind: where, what to ask it with, and how often it was asked."""

    endpoint: str
    kind: int
    ask: tuple[bytes, ...]
    heard: Callable[[], int]
    welcome: str
    """Whose key it takes."""
    not_welcome: str


def session(me: str, peers: dict[str, str]) -> Session:
    members = dict.fromkeys(peers, Member(("cache-node",), "here"))
    return Session(me=me, incarnation=1, hello=HELLO, peers=members, settings=SOON, now=time.monotonic())


def runtime(me: str, endpoint: str, peers: dict[str, str], sockets: Sockets, actor: Echo | None = None) -> ZmqRuntime:
    return ZmqRuntime(Node(actor or Echo(), session(me, peers)), endpoint=endpoint, peers=peers, sockets=sockets)


@pytest.fixture(params=["control", "data", "store", "events"])
def served(request: pytest.FixtureRequest, tmp_path: Path, sockets: Callable[[str], Sockets]) -> Iterator[Served]:
    ours, plane = sockets("a"), request.param
    with ExitStack() as stack:
        match plane:
            case "control":
                made = stack.enter_context(running(runtime("a", free_endpoint(), {}, ours)))
                heard = lambda: made.counts.get("frames_received", 0)  # noqa: E731
                yield Served(made.endpoint, zmq.DEALER, (b"x",), heard, "b", "reader")
            case "data":
                layout = BlockLayout(layers=2, block_tokens=4, kv_heads=1, head_dim=8)
                segment = Segment.create(tmp_path, "test", "a", layout, 4, 1)
                stack.callback(segment.close)
                data = DataServer(segment, "tcp://127.0.0.1:*", on_crash=pytest.fail, sockets=ours)
                stack.callback(data.close)
                yield Served(data.endpoint, zmq.DEALER, (b"x",), lambda: data.counts["garbage"], "b", "reader")
            case "store":
                store = store_server(tmp_path, **SMALL, sockets=ours)
                stack.callback(store.close)
                yield Served(store.endpoint, zmq.DEALER, (b"x",), lambda: int(store.counts["garbage"]), "reader", "b")
            case _:
                publisher = KvEventPublisher("tcp://127.0.0.1:*", block_tokens=4, on_crash=pytest.fail, sockets=ours)
                stack.callback(publisher.close)
                subscribed = lambda: publisher.counts["subscribers_cut"]  # noqa: E731
                foreign = tuple(b"foreign%d" % number for number in range(80))
                yield Served(publisher.endpoint, zmq.SUB, foreign, subscribed, "watcher", "b")


def attempt(served: Served, directory: Path, *, key: str | None) -> tuple[int, list[bytes]]:
    """Connect by the key of a name, a foreign one ("") or none, and ask: how the handshake ended, and what was answered."""
    context = zmq.Context()
    socket = context.socket(served.kind)
    socket.linger = 0
    if key is not None:
        secret = (directory / f"{key}.secret").read_bytes().strip() if key else zmq.curve_keypair()[1]
        socket.curve_secretkey, socket.curve_publickey = secret, zmq.curve_public(secret)
        socket.curve_serverkey = key_files.read_book(directory).of("a")[0].encode()
    monitor = socket.get_monitor_socket(OVER)
    socket.connect(served.endpoint)
    for message in served.ask:
        socket.subscribe(message) if served.kind == zmq.SUB else socket.send(message)
    try:
        assert monitor.poll(PATIENCE_S * 1000), "the handshake has no end"
        event = zmq.utils.monitor.recv_monitor_message(monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            eventually(served.heard)
        return event, [socket.recv(zmq.NOBLOCK)] if socket.poll(0) else []
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close()
        context.term()


def test_who_has_no_key_that_fits_is_not_heard_and_hears_nothing(served: Served, directory: Path) -> None:
    for key in (None, "", served.not_welcome):
        event, told = attempt(served, directory, key=key)
        assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
        assert told == []
        assert served.heard() == 0


def test_who_has_a_key_that_fits_is_heard(served: Served, directory: Path) -> None:
    event, _ = attempt(served, directory, key=served.welcome)
    assert event == zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_a_node_that_speaks_as_another_is_dropped_and_counted(sockets: Callable[[str], Sockets]) -> None:
    where = {name: free_endpoint() for name in "abc"}
    hears = {name: Echo() for name in "ab"}
    with (
        running(runtime("a", where["a"], {"b": where["b"]}, sockets("a"), hears["a"])) as a,
        running(runtime("b", where["b"], {"a": where["a"]}, sockets("b"), hears["b"])) as b,
    ):
        eventually(lambda: a.node.session.up_peers and b.node.session.up_peers)
        liar = runtime("b", free_endpoint(), {"a": where["a"]}, sockets("c"))
        liar.node.session.incarnation = 2
        with running(liar):
            eventually(lambda: a.node.session.counts.get("dropped[reason=not_its_key]", 0) > 3)
        assert list(a.node.session.up_peers) == ["b"]
    assert not liar.node.session.up_peers


def test_a_key_is_rotated_and_dropped_while_the_others_run(directory: Path, sockets: Callable[[str], Sockets]) -> None:
    where = {name: free_endpoint() for name in "ab"}
    with running(runtime("a", where["a"], {"b": where["b"]}, sockets("a"))) as a:
        with running(runtime("b", where["b"], {"a": where["a"]}, sockets("b"))):
            eventually(lambda: a.node.session.up_peers)
            key_files.rotate(directory, "b")
        eventually(lambda: not a.node.session.up_peers)
        again = runtime("b", where["b"], {"a": where["a"]}, sockets("b"))
        again.node.session.incarnation = 2
        with running(again):
            eventually(lambda: a.node.session.up_peers and again.node.session.up_peers)
            assert key_files.drop(directory, "b") == 1


def test_a_data_server_knows_whose_its_streams_are(tmp_path: Path, sockets: Callable[[str], Sockets]) -> None:
    layout = BlockLayout(layers=2, block_tokens=4, kv_heads=1, head_dim=8)
    segment = Segment.create(tmp_path, "test", "a", layout, 4, 1)
    server = DataServer(segment, "tcp://127.0.0.1:*", on_crash=pytest.fail, sockets=sockets("a"))
    reader, _ = sockets("b").connecting(zmq.DEALER, server.endpoint, "data", data_server.LIMITS, server="a")
    reader.connect(server.endpoint)
    try:
        reader.send(encode(StreamWanted(PROTOCOL_VERSION, 1)))
        assert reader.poll(PATIENCE_S * 1000)
        offered = decode_offer(reader.recv())
        assert isinstance(offered, StreamOffered)
        with closing(Stream(connect_beside(offered.where, server.endpoint, PATIENCE_S), lambda _: None, slice_s=1.0)) as stream:
            stream.attach(Ticket(offered.token, offered.secret, offered.sealed))
            eventually(lambda: [each.holder for each in server._host._open.values()] == ["b"])
    finally:
        reader.close()
        server.close()
        segment.close()


@pytest.mark.parametrize("shares", [False, True])
def test_a_store_client_reads_and_writes_by_its_key(
    shares: bool, directory: Path, tmp_path: Path, sockets: Callable[[str], Sockets]
) -> None:
    server = store_server(tmp_path, **SMALL, sockets=sockets("a"))
    port = server.endpoint.rpartition(":")[2]
    store = MooncakeDistributedStore()
    common = {"keys": str(directory), "key_name": "reader", "share_memory": shares, "setup_timeout_s": 1.0}
    try:
        for address in (f"127.0.0.1:{port}", f"b@127.0.0.1:{port}"):  # no name to expect, and another's
            assert store.setup({"master_server_addr": address, **common}) == -900
        assert store.setup({"master_server_addr": f"a@127.0.0.1:{port}", **common}) == 0
        assert store.put("key", b"value") == 0
        assert store.get("key") == b"value"
    finally:
        store.close()
        server.close()


@pytest.mark.parametrize("how", ["rotated", "revoked"])
def test_a_dropped_key_ends_what_its_holder_has_at_a_store(
    how: str, directory: Path, tmp_path: Path, sockets: Callable[[str], Sockets]
) -> None:
    """Connection, ticket and streams, though the store runs on: whoever stole the key has nothing of them."""
    server = store_server(tmp_path, **SMALL, sockets=sockets("a"))
    stores = {name: MooncakeDistributedStore() for name in ("reader", "watcher-too")}
    key_files.make(directory, [("watcher-too", ("store",))])
    address = {"master_server_addr": f"a@{server.endpoint.removeprefix('tcp://')}"}
    try:
        for name, store in stores.items():
            config = {**address, "keys": str(directory), "key_name": name, "share_memory": False, "timeout_s": 1.0}
            eventually(lambda store=store, config=config: store.setup(config) == 0)
            assert store.put(name, b"value") == 0
            assert store.get(name) == b"value"
        assert len(server._streams._host._open) == 2
        if how == "rotated":
            key_files.rotate(directory, "reader")
            assert stores["reader"].get("reader") == b"value", "both keys are good"
            key_files.drop(directory, "reader")
        else:
            revoke(directory, "reader")
        eventually(lambda: [each.holder for each in server._streams._host._open.values()] == ["watcher-too"])
        assert stores["reader"].get("reader") == b""
        assert stores["watcher-too"].get("watcher-too") == b"value"
        assert [each.holder for each in server._streams._host._open.values()] == ["watcher-too"]
    finally:
        for store in stores.values():
            store.close()
        server.close()


def test_what_comes_over_a_connection_whose_key_was_dropped_counts_no_more(
    directory: Path, sockets: Callable[[str], Sockets]
) -> None:
    where = {name: free_endpoint() for name in "ab"}
    with (
        running(runtime("a", where["a"], {"b": where["b"]}, sockets("a"))) as a,
        running(runtime("b", where["b"], {"a": where["a"]}, sockets("b"))) as b,
    ):
        eventually(lambda: a.node.session.up_peers and b.node.session.up_peers)
        revoke(directory, "b")
        eventually(lambda: not a.node.session.up_peers)
        assert a.node.session.counts["dropped[reason=not_its_key]"] > 0


def test_who_hears_kv_events_by_a_dropped_key_hears_no_more(directory: Path, sockets: Callable[[str], Sockets]) -> None:
    key_files.make(directory, [("watcher-too", ("events",))])
    publisher = KvEventPublisher(
        "tcp://127.0.0.1:*",
        replay_endpoint="tcp://127.0.0.1:*",
        block_tokens=4,
        on_crash=pytest.fail,
        sockets=sockets("a"),
    )
    with ExitStack() as stack:
        stack.callback(publisher.close)
        heard, replays = {}, {}
        for name in ("watcher", "watcher-too"):
            for kind, endpoint, into in (
                (zmq.SUB, publisher.endpoint, heard),
                (zmq.DEALER, publisher.replay_endpoint, replays),
            ):
                into[name], _ = sockets(name).connecting(kind, endpoint, "events", data_server.LIMITS, server="a")
                stack.callback(into[name].close)
                into[name].connect(endpoint)
            heard[name].subscribe(b"")
            eventually(lambda name=name: publisher.publish((AllBlocksCleared(),)) or heard[name].poll(20))
            assert replayed(replays[name]) > 0
        revoke(directory, "watcher")
        eventually(lambda: publisher.counts["subscribers_cut"] == 1)
        eventually(lambda: not heard["watcher"].poll(0) or not heard["watcher"].recv_multipart())  # what had come before
        refused = publisher.counts["replays_refused"]
        eventually(lambda: ask(replays["watcher"]) or publisher.counts["replays_refused"] > refused)
        for _ in range(10):
            publisher.publish((AllBlocksCleared(),))
        eventually(lambda: publisher.counts["batches"] == publisher._next_number)
        assert replayed(replays["watcher-too"]) == publisher.counts["batches"]
        while len(last := heard["watcher-too"].recv_multipart()) == 3:
            if int.from_bytes(last[1], "big") == publisher.counts["batches"] - 1:
                break
        assert not heard["watcher"].poll(0)


def test_one_key_does_not_take_all_places_of_subscribers(
    sockets: Callable[[str], Sockets], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_SUBSCRIBERS_PER_KEY", 1)
    key_files.make(directory, [("watcher-too", ("events",))])
    with ExitStack() as stack:
        publisher = KvEventPublisher("tcp://127.0.0.1:*", block_tokens=4, on_crash=pytest.fail, sockets=sockets("a"))
        stack.callback(publisher.close)

        def subscribed(name: str) -> "zmq.Socket[bytes]":
            socket, _ = sockets(name).connecting(zmq.SUB, publisher.endpoint, "events", data_server.LIMITS, server="a")
            stack.callback(socket.close)
            socket.connect(publisher.endpoint)
            socket.subscribe(b"")
            return socket

        first = subscribed("watcher")
        eventually(lambda: publisher.publish((AllBlocksCleared(),)) or first.poll(20))
        subscribed("watcher")
        eventually(lambda: publisher.counts["subscribers_cut"])
        other = subscribed("watcher-too")
        eventually(lambda: publisher.publish((AllBlocksCleared(),)) or other.poll(20))


def ask(replays: "zmq.Socket[bytes]") -> None:
    replays.send_multipart([b"", (0).to_bytes(8, "big")])


def replayed(replays: "zmq.Socket[bytes]") -> int:
    """How many batches a replay of all has."""
    ask(replays)
    batches = 0
    while replays.recv_multipart()[1] != END:
        batches += 1
    return batches


def test_what_a_store_client_may_use_the_name_of_its_key_tells(
    directory: Path, tmp_path: Path, sockets: Callable[[str], Sockets]
) -> None:
    key_files.make(directory, [(name, ("store",)) for name in ("ruby", "sky")])
    red = StoreTenant(name="red", namespaces=("red/",), clients=("ruby",), readers=("reader",), dram_bytes=4 << 20)
    blue = StoreTenant(name="blue", namespaces=("blue/",), clients=("sky",))
    server = store_server(tmp_path, slabs=4, slab_bytes=4 << 20, sockets=sockets("a"), tenants=(red, blue))
    port = server.endpoint.rpartition(":")[2]
    stores = {name: MooncakeDistributedStore() for name in ("ruby", "sky", "reader")}
    try:
        for name, store in stores.items():
            # It would map the memory, and is not told where that is.
            config = {"master_server_addr": f"a@127.0.0.1:{port}", "keys": str(directory), "key_name": name}
            assert store.setup(config) == 0
        ruby, sky, reader = stores.values()
        assert ruby.put("red/1", b"r" * 1000) == sky.put("blue/1", b"b" * 1000) == 0
        assert {each.holder for each in server._streams._host._open.values()} == {"ruby", "sky"}
        assert (ruby.get("red/1"), ruby.get("blue/1"), reader.get("red/1"), reader.get("blue/1")) == (b"r" * 1000, b"") * 2
        assert sky.put("red/2", b"x") == sky.upsert("red/1", b"x") == sky.remove("red/1") == reader.remove("red/1") == -600
        assert reader.put("red/2", b"x") == ruby.put("else", b"x") == -600
        assert (sky.is_exist("red/1"), sky.is_exist("blue/1"), sky.get_size("red/1")) == (0, 1, -704)
        assert sky.remove_by_regex(".*") == 1
        assert sky.remove_all() == reader.remove_all() == 0
        assert reader.get("red/1") == b"r" * 1000
        for number in range(10):
            assert ruby.put(f"red/large {number}", b"v" * (1 << 20)) == 0
        assert 0 < server.gauges()["tenant_bytes[tenant=red]"] <= 4 << 20
        assert ruby.put("red/too large", b"v" * (4 << 20)) == 0
        assert server.gauges()["objects"] == 1
    finally:
        for store in stores.values():
            store.close()
        server.close()


@pytest.mark.parametrize("encrypt_bulk", [True, False])
def test_who_reads_slowly_gets_what_was_his_and_no_byte_of_anothers(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypt_bulk: bool
) -> None:
    monkeypatch.setattr(streaming, "LEAST_BYTES_PER_S", 8 * SLOWLY_READ_BYTES)  # it loses its stream in an eighth of a second
    key_files.make(directory, [(name, ("store",)) for name in ("ruby", "sky")])
    tenants = tuple(StoreTenant(name=of, namespaces=(f"{of}/",), clients=(of,)) for of in ("ruby", "sky"))
    ours = Sockets(key_files.load(directory, "a"), encrypt_bulk=encrypt_bulk)
    large = {"slabs": 2, "slab_bytes": SLOWLY_READ_BYTES}
    server = store_server(tmp_path, **large, sockets=ours, tenants=tenants)
    stores = {name: MooncakeDistributedStore() for name in ("ruby", "sky", "sky again")}
    came = bytearray(SLOWLY_READ_BYTES)

    def read_slowly(call: Call) -> None:
        stream = call.stream()
        stream.send(Get(["sky/bait"], [], 0.0))
        assert stream.receive(decode_values).sizes == [SLOWLY_READ_BYTES]
        assert sky_again.remove("sky/bait") == 0
        assert [ruby.put(f"ruby/{number}", b"r" * SLOWLY_READ_BYTES) for number in range(3)].count(0) >= 1
        eventually(lambda: server.gauges()["leases"] == 0)
        with suppress(StreamError):
            stream.receive_views([memoryview(came)])

    try:
        for name, store in stores.items():
            address = f"a@127.0.0.1:{server.endpoint.rpartition(':')[2]}"
            key_name = name.partition(" ")[0]
            assert store.setup({"master_server_addr": address, "keys": str(directory), "key_name": key_name}) == 0
        ruby, sky, sky_again = stores.values()
        assert sky.put("sky/bait", b"s" * SLOWLY_READ_BYTES) == 0
        assert sky._client is not None
        sky._client._peers[0].call(read_slowly)
        assert came.count(b"r") == 0
        assert 0 < came.count(b"s") < SLOWLY_READ_BYTES
        assert [ruby.put(f"ruby/more {number}", b"r" * SLOWLY_READ_BYTES) for number in range(2)] == [0, 0]
        assert server.gauges()["objects"] == 2, "the cell of what was read slowly is free again"
    finally:
        for store in stores.values():
            store.close()
        server.close()


@pytest.mark.parametrize("encrypt_bulk", [True, False])
def test_bytes_in_bulk_are_encrypted_unless_told_and_tickets_asked_for_always(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypt_bulk: bool
) -> None:
    heard = bytearray()
    receive = Stream._received

    def listen_in(stream: Stream, call: Any, place: Any) -> int:
        count = receive(stream, call, place)
        heard.extend(b"".join(place) if isinstance(place, list | tuple) else place[:count])
        return count

    monkeypatch.setattr(Stream, "_received", listen_in)
    ours = Sockets(key_files.load(directory, "a"), encrypt_bulk=encrypt_bulk)
    server = store_server(tmp_path, **SMALL, sockets=ours)
    store = MooncakeDistributedStore()
    address = f"a@127.0.0.1:{server.endpoint.rpartition(':')[2]}"
    config = {"keys": str(directory), "key_name": "reader", "share_memory": False, "master_server_addr": address}
    try:
        assert store.setup(config) == 0
        assert store.put("key", b"nobody's business" * 10_000) == 0
        assert store.get("key") == b"nobody's business" * 10_000
        stranger = Stream(connect_beside(server._streams.endpoint, server.endpoint, 5.0), lambda _: None, slice_s=1.0)
        with closing(stranger), pytest.raises(StreamError):
            stranger.attach(Ticket(bytes(40), b"", encrypt_bulk))
    finally:
        store.close()
        server.close()
    assert (b"nobody's business" not in heard) is encrypt_bulk


# --- what is refused before a socket is made


def test_tcp_beyond_loopback_needs_keys_or_a_word_that_it_does_not(directory: Path) -> None:
    plain, trusting = Sockets(io_threads=1).borrow(), Sockets(io_threads=1, allow_plain_tcp=True).borrow()
    try:
        with pytest.raises(BadEndpoint, match="needs keys: `mooncake-zmq keys make`"):
            runtime("a", FAR, {}, plain)
        with pytest.raises(BadEndpoint, match="needs keys"):
            runtime("a", free_endpoint(), {"b": FAR}, plain)
        with pytest.raises(BadEndpoint, match="needs keys"):
            KvEventPublisher("tcp://*:5557", block_tokens=4, on_crash=pytest.fail, sockets=plain)
        with running(runtime("a", free_endpoint(), {"b": FAR}, trusting)):
            pass
    finally:
        plain.give_back()
        trusting.give_back()


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.8.0.1:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://*:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://eth0:1", False),
    ],
)
def test_what_loopback_is(endpoint: str, local: bool) -> None:
    assert is_loopback(endpoint) == local


def test_secrets_are_for_their_owner_alone(directory: Path) -> None:
    secret = directory / "a.secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    secret.chmod(0o640)
    with pytest.raises(KeysError, match="others can read it"):
        key_files.load(directory, "a")


@pytest.mark.parametrize("name", ["public_keys", "a.secret"])
@pytest.mark.parametrize("harm", ["gone", "loose", "a directory", "another user's"])
def test_a_file_that_cannot_be_believed_is_named_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, harm: str
) -> None:
    path = directory / name
    match harm:
        case "gone":
            path.unlink()
        case "loose":
            path.chmod(0o666)
        case "a directory":
            path.unlink()
            path.mkdir()
        case _:
            monkeypatch.setattr(os, "geteuid", lambda: 4242)
            if os.getuid() == 0:
                os.chown(path, 4243, -1)
    with pytest.raises(KeysError) as told:
        key_files.load(directory, "a")
    assert str(told.value).startswith(f"{path}: ")
    assert str(told.value).count(str(path)) == 1


def test_a_book_without_ones_own_key_is_an_old_one(directory: Path) -> None:
    before = (directory / "public_keys").read_bytes()
    key_files.rotate(directory, "a")
    (directory / "public_keys").write_bytes(before)
    with pytest.raises(KeysError, match="does not have the public key of a's secret"):
        key_files.load(directory, "a")


def test_a_damaged_book_leaves_what_was_known(directory: Path) -> None:
    keys = key_files.load(directory, "a")
    known = keys.book
    others = [line for line in (directory / "public_keys").read_text().splitlines(keepends=True) if keys.public not in line]
    for content in ("a node 2026-01-01\n", "\xff", "", "".join(others)):
        (directory / "public_keys").write_text(content, encoding="latin-1")
        keys.refresh()
        assert keys.book == known


def without(directory: Path, *names: str) -> str:
    lines = (directory / "public_keys").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.partition(" ")[0] not in names)


@pytest.mark.parametrize("own", [(), ("a",)], ids=["a bad line", "without our own key"])
def test_who_is_taken_away_is_out_whatever_else_is_wrong_with_the_file(directory: Path, own: tuple[str, ...]) -> None:
    """And nobody is let in by such a file."""
    key_files.make(directory, [("thief", ("node",)), ("b", ("node",))])
    keys, now = key_files.load(directory, "a"), 0.0
    keys.clock = lambda: now
    thief = keys.book.of("thief")[0]
    kept = without(directory, "thief", *own)
    key_files.make(directory, [("new", ("node",))])
    line = (directory / "public_keys").read_text().splitlines()[-1]
    (directory / "public_keys").write_text(f"{kept}{line}\n" + ("" if own else "half of a li"))
    keys.refresh()
    assert keys.not_followed
    assert keys.book.admitted("control", thief) == "thief", "it may be on its way yet"
    now = key_files.SETTLED_S
    keys.refresh()
    assert keys.book.admitted("control", thief) is None
    assert keys.book.of("b")
    assert keys.book.of("a")
    assert keys.book.of("new") == ()
    (directory / "public_keys").write_text(without(directory, "half"))
    if not own:
        keys.refresh()
        assert (keys.not_followed, bool(keys.book.of("new"))) == ("", True)


def test_a_node_whose_own_key_stays_away_is_dropped_and_one_whose_file_is_copied_is_not(directory: Path) -> None:
    keys, now = key_files.load(directory, "a"), 0.0
    keys.clock = lambda: now
    whole = (directory / "public_keys").read_text()
    for content, dropped in ((without(directory, "a"), True), (whole, False)):
        (directory / "public_keys").write_text(content)
        keys.refresh()
        assert not keys.own_is_dropped
        now += key_files.DROPPED_S
        keys.refresh()
        assert keys.own_is_dropped == dropped


@pytest.mark.parametrize("content", [None, "half of a li"], ids=["no file", "a bad line"])
def test_a_node_is_not_dropped_by_a_file_that_does_not_show_whether_its_key_is_there(
    directory: Path, content: str | None
) -> None:
    keys, now = key_files.load(directory, "a"), 0.0
    keys.clock = lambda: now
    whole, file = (directory / "public_keys").read_text(), directory / "public_keys"
    file.write_text(without(directory, "a"))
    keys.refresh()
    file.unlink() if content is None else file.write_text(whole + content)
    for now in (1.0, 2 * key_files.DROPPED_S):  # noqa: B007 (keys.clock returns it)
        keys.refresh()
        assert not keys.own_is_dropped
    file.write_text("".join(line for line in whole.splitlines(keepends=True) if not line.startswith("a ")))
    keys.refresh()
    assert not keys.own_is_dropped, "it is gone for 60 s from now on"


def test_a_unit_has_its_secret_as_a_credential(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = key_files.load(directory, "a").public
    assert key_files.directory_of("") is None
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "node.key").write_bytes((directory / "a.secret").read_bytes())
    (credentials / "node.key").chmod(0o440)
    (directory / "a.secret").unlink()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    assert key_files.directory_of("") is None
    assert key_files.load(directory, "a").public == public
    (credentials / "public_keys").write_bytes((directory / "public_keys").read_bytes())
    assert key_files.directory_of("") == credentials
    assert key_files.load(credentials, "a").public == public


def test_keys_made_at_once_are_all_kept(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    names = [f"node-{number}" for number in range(8)]
    key_files.make(directory, [(name, ("node",)) for name in names])
    with ThreadPoolExecutor(len(names)) as pool:
        made = list(pool.map(lambda name: key_files.rotate(directory, name), names))
    book = key_files.read_book(directory)
    assert {each.key for each in made} <= {each.key for each in book.keys}
    assert all(key_files.load(directory, name) for name in names)
