"""The pool's benchmark: it measures what it says, notices wrong bytes, and its processes end with it."""

import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from actor_harness import leased

from mooncake_zmq.bench import pool, pool_keys, pool_load
from mooncake_zmq.bench.block_fetch import BareStream
from mooncake_zmq.bench.others.peers import peer
from mooncake_zmq.bench.others.store_driver import Buffer, StoreClient, WrongBytes
from mooncake_zmq.bench.pool import MIB, PoolBench, bench_pool
from mooncake_zmq.bench.pool_index import index_bytes_per_block
from mooncake_zmq.bench.pool_lease import BLOCKS, CACHE, LeaseClient, lease_times_s
from mooncake_zmq.core.actor import Drained, PeerUp, Received, Send, TimerFired
from mooncake_zmq.core.messages import Hello, LeaseBlocks, ReleaseLease, SlotRef
from mooncake_zmq.engine.kv_cache import SequenceKV

WORKING_SET = 4 * MIB


class DictStore:
    """A store without faults; subclasses have one each."""

    def __init__(self, source: Buffer, target: Buffer) -> None:
        self.source, self.target = source, target
        self.values: dict[str, bytes] = {}

    def clear(self) -> None:
        self.values.clear()

    def put(self, keys, offsets, size) -> None:
        self.values |= {key: bytes(self.source.view(at, size)) for key, at in zip(keys, offsets, strict=True)}

    def get(self, keys, offsets, size) -> None:
        for key, at in zip(keys, offsets, strict=True):
            self.target.view(at, size)[:] = self.values[key]

    def exist(self, keys) -> int:
        return sum(key in self.values for key in keys)

    def fill(self, keys) -> None:
        self.values |= dict.fromkeys(keys, b"v")


class FlippedBit(DictStore):
    def get(self, keys, offsets, size) -> None:
        super().get(keys, offsets, size)
        self.target.memory[offsets[-1] + size - 1] ^= 1


class DeliversNothing(DictStore):
    def get(self, keys, offsets, size) -> None: ...


class SaysYesToAll(DictStore):
    def exist(self, keys) -> int:
        return len(keys)


def client(kind: type[DictStore] = DictStore) -> StoreClient:
    source, target = Buffer(WORKING_SET), Buffer(WORKING_SET)
    source.fill(seed=1)
    return StoreClient(kind(source, target), source, target)


def test_every_figure_is_measured():
    store = client()
    assert all(value > 0 for value in store.bytes(MIB).values())
    assert all(value > 0 for value in store.single(65536, 10).values())
    assert store.exist(resident=100, keys_per_call=8, in_flight=2, calls=4)["rate"] > 0


@pytest.mark.parametrize("kind", [FlippedBit, DeliversNothing])
def test_a_store_that_returns_other_bytes_gets_no_figure(kind):
    with pytest.raises(WrongBytes):
        client(kind).bytes(MIB)
    with pytest.raises(WrongBytes):
        client(kind).single(65536, 10)


def test_a_store_that_finds_missing_keys_gets_no_figure():
    with pytest.raises(WrongBytes):
        client(SaysYesToAll).exist(resident=100, keys_per_call=8, in_flight=2, calls=4)


@pytest.mark.parametrize("connections", [1, 2])
def test_the_bare_stream_delivers_the_senders_bytes(connections):
    order = {"store": "stream", "working_set_bytes": WORKING_SET, "seed": 1}
    with (
        peer({**order, "role": "owner", "connections": connections}) as owner,
        peer({**order, "role": "client", "at": owner.ready}) as reader,
    ):
        assert [reader.ask("bytes", size=size)["get"] > 0 for size in (65536, MIB, 3 * MIB // 2)] == [True] * 3


def test_a_driver_that_dies_is_told_with_its_last_words():
    order = {"store": "no such", "role": "client", "working_set_bytes": 4096, "seed": 1}
    with pytest.raises(click.ClickException, match="there is no store 'no such'"), peer(order):
        pass


class Answers:
    """A peer whose figures are its order's number, so that a row shows which side it took from where."""

    FIGURES = {"bytes": ("get", "put", "copy"), "single": ("p50", "p99"), "exist": ("rate",)}

    def __init__(self, store: str, role: str) -> None:
        self.ready = {"endpoints": [store, role]}
        self._value = {pool.OURS: 6.0, pool.MOONCAKE: 3.0, pool.STREAM: 4.0}[store]

    def ask(self, method, **arguments):
        return dict.fromkeys(self.FIGURES[method], self._value)


@pytest.fixture
def answering(monkeypatch):
    @contextmanager
    def answer(order, *, python):
        yield Answers(order["store"], order["role"])

    monkeypatch.setattr(pool, "peer", answer)


def ratios(**settings) -> dict[str, float]:
    bench = PoolBench(rounds=1, sizes=(MIB,), **settings)
    report = bench_pool(bench, parts=("local", "remote", "exist"), progress=lambda _: None)
    return {row.name: row.ratio for row in report.rows}


@pytest.mark.usefixtures("answering")
def test_without_other_stores_the_rows_are_those_against_the_machine():
    rows = ratios()
    assert rows["local get 1 MiB, checksum on / memory copy"] == 1.0
    assert rows["remote put 1 MiB / bare stream"] == 1.5
    assert not any(name.endswith("/ mooncake") for name in rows)


@pytest.mark.usefixtures("answering")
def test_another_store_that_is_named_gets_its_rows():
    rows = ratios(mooncake_python="python-a")
    assert rows["local put 1 MiB, checksum on / mooncake"] == 2.0
    assert rows["remote get 1 MiB / mooncake"] == 2.0
    assert rows["remote get 64 KiB alone, p50 / mooncake"] == 0.5, "a latency: lower is better"
    assert rows["batch_is_exist, 512 keys / mooncake"] == 2.0


def test_loads_of_each_kind_of_sequence_are_a_row_beside_a_plain_copy(monkeypatch):
    monkeypatch.setattr(pool, "LOADED_BLOCKS", 2)
    (row, *rows) = bench_pool(PoolBench(rounds=2), parts=("load",), progress=lambda _: None).rows
    assert row.name == "load of 64 tokens, NumPy / memory copy"
    assert [each.name for each in rows] in ([], ["load of 64 tokens, machine code / memory copy"])
    assert all(each.value > 0 for each in (row, *rows))


def test_a_loaded_block_that_differs_from_the_pools_ends_the_bench(monkeypatch):
    read = SequenceKV.read_part

    def misread(self, layer, start, stop, out):
        read(self, layer, start, stop, out)
        out[0] += layer == 29

    monkeypatch.setattr(SequenceKV, "read_part", misread)
    with pytest.raises(AssertionError, match="differs"):
        pool_load.load_gb_per_s(1, 2, lambda _: None)


def test_index_memory_is_that_of_both_tiers():
    assert 2 * (16 + 8) < index_bytes_per_block(100_000) < 512


HELLO = Hello(protocol=1, role="cache-node", host="h", model="m", tokenizer="t", layout="l")


def granted(blocks: int) -> Received:
    return Received(CACHE, leased(1, [SlotRef(node=CACHE, incarnation=1, slot=0, generation=2, checksum=1)] * blocks))


def test_a_cycle_is_one_lease_and_one_release_and_the_last_ends_the_client():
    lease = LeaseClient(2)
    lease.handle(0.0, PeerUp(CACHE, 1, HELLO))
    assert [type(effect.message) for effect in lease.handle(1.0, granted(BLOCKS))] == [ReleaseLease, LeaseBlocks]
    release, end = lease.handle(3.0, granted(BLOCKS))
    assert isinstance(release, Send)
    assert end == Drained()
    assert lease.took_s[-1] == 2.0
    assert not lease.failure


@pytest.mark.parametrize("event", [granted(BLOCKS - 1), TimerFired(("too late",))])
def test_a_conversation_that_breaks_off_is_a_failure_not_a_figure(event):
    lease = LeaseClient(2)
    assert lease.handle(1.0, event) == [Drained()]
    assert lease.failure
    assert lease.took_s == []


def test_leases_are_measured_at_a_live_cache_node():
    took_s = lease_times_s(5)
    assert len(took_s) == 5
    assert min(took_s) > 0


def test_a_bare_stream_that_ends_early_is_an_error_and_no_endless_wait():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stream = BareStream(listener.getsockname()[1])
        sender = threading.Thread(target=lambda: listener.accept()[0].close())
        sender.start()
        with pytest.raises(ConnectionError):
            stream.fetch_s(memoryview(bytearray(8)))
        sender.join()
        stream.close()


def test_the_cost_of_keys_is_measured_with_and_without_them(monkeypatch):
    monkeypatch.setattr(pool_keys, "ROUND_TRIPS", 10)
    monkeypatch.setattr(pool_keys, "FRAMES", 100)
    before = set(Path("/dev/shm").glob("mczmq-bench-*"))
    report = bench_pool(PoolBench(rounds=1), parts=("keys",), progress=lambda _: None)
    assert set(Path("/dev/shm").glob("mczmq-bench-*")) <= before, "its far sides leave nothing behind"
    assert [row.unit for row in report.rows] == ["us", "frames/s", *["GB/s"] * 7]
    assert all(row.value > 0 and row.reference > 0 for row in report.rows)
