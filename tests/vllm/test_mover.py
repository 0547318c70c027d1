"""The threads of both halves against real stores: what is saved comes back as it was, and what a store does to it is a miss."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import waiting

from mooncake_zmq.pool.server.server import StoreServer
from mooncake_zmq.store.client.client import StoreClient
from mooncake_zmq.store.client.peer import ClientSettings
from mooncake_zmq.store.codes import Code, Pin
from mooncake_zmq.vllm import mover as mover_module
from mooncake_zmq.vllm.ledger import Ledger, Load, Part, Progress, Save
from mooncake_zmq.vllm.lookups import Lookup, Lookups
from mooncake_zmq.vllm.mover import TRIES, HostMemory, Moved, Mover
from mooncake_zmq.vllm.names import chain_root, object_names, token_keys
from mooncake_zmq.vllm.spans import BlockSpans, layer_spans
from mooncake_zmq.vllm.worker import Crew, Worker

BLOCKS = 12
SLAB = 1 << 20
PREFIX = "vllm/digest/0.0/"
TOKENS = list(range(65))
KEYS = tuple(token_keys(chain_root(), TOKENS, 8).upto(8))
QUICK = ClientSettings(timeout_s=0.3, setup_timeout_s=0.3)


class Engine:
    """Two layers of KV as NumPy arrays, and a worker's half beside them."""

    def __init__(
        self,
        stores: Sequence[str],
        settings: ClientSettings = QUICK,
        prefix: str = PREFIX,
        threads: int = 1,
        copies: int = 1,
    ) -> None:
        random = np.random.default_rng(7)
        self.layers = [random.standard_normal((BLOCKS, 2, 8, 16), dtype=np.float32) for _ in range(2)]
        self.was = [layer.copy() for layer in self.layers]
        layers = [layer_spans(each.__array_interface__["data"][0], each.shape, each.strides, 4, BLOCKS) for each in self.layers]
        self.memory = HostMemory(BlockSpans(layers))
        client = StoreClient(stores, settings)
        client.connect()
        self.mover = Mover(client, prefix, [self.memory], [self.memory], threads, copies)
        self.number = 0
        self.loads_took: list[tuple[int, int, float]] = []

    def save(self, *blocks: int) -> None:
        self.number += 1
        self.mover.save(Save(self.number, (Part(KEYS[: len(blocks)], blocks),)))
        assert self.ended(lambda moved: bool(moved.saved)).saved == [self.number]

    def load(self, *blocks: int) -> set[int]:
        """The blocks that did not come."""
        self.number += 1
        self.mover.load(Load(self.number, "r", (Part(KEYS[: len(blocks)], blocks),), 10 * len(blocks)))
        moved = self.ended(lambda moved: bool(moved.loaded))
        assert moved.loaded == {"r"}
        self.loads_took += moved.loads_took
        return moved.failed_blocks

    def ended(self, condition: Callable[[Moved], bool]) -> Moved:
        deadline = time.monotonic() + 20
        while not condition(moved := self.mover.take(0.05)):
            assert time.monotonic() < deadline
        return moved

    def wipe(self) -> None:
        for layer in self.layers:
            layer[:] = np.nan

    def same(self, *blocks: int) -> bool:
        """Do these hold what the first blocks held in the beginning?"""
        return all(
            np.array_equal(layer[block], was[index])
            for layer, was in zip(self.layers, self.was, strict=True)
            for index, block in enumerate(blocks)
        )


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(server: StoreServer | str | list[str], *arguments: object, **more: object) -> Engine:
        address = server if isinstance(server, str | list) else server.endpoint
        made.append(Engine([address] if isinstance(address, str) else address, *arguments, **more))
        return made[-1]

    yield make
    for each in made:
        each.mover.close()


@pytest.fixture
def lookups() -> Iterator[Callable[..., Lookups]]:
    made: list[Lookups] = []

    def make(server: StoreServer | str, **more: object) -> Lookups:
        address = server if isinstance(server, str) else server.endpoint
        client = StoreClient([address], ClientSettings(timeout_s=0.3, setup_timeout_s=0.3, share_memory=False, **more))
        client.connect()
        made.append(Lookups(client))
        return made[-1]

    yield make
    for each in made:
        each.close()


def answer(lookup: Lookup) -> int:
    deadline = time.monotonic() + 20
    while (found := lookup.answer()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


until = waiting.eventually


def in_memory(server: StoreServer, names: list[str]) -> list[bool]:
    with server._turns as node:
        return [name in node.objects.by_key for name in names]


@pytest.mark.parametrize("shared", [True, False])
def test_blocks_come_back_into_other_blocks_as_they_were(make_pool, engine, shared):
    one = engine(make_pool(), ClientSettings(share_memory=shared))
    one.save(0, 1, 2, 3)
    one.wipe()
    assert one.load(9, 8, 7, 6) == set()
    assert one.same(9, 8, 7, 6)
    assert np.isnan(one.layers[0][:6]).all(), "and nowhere else"
    assert +one.mover.take_counts() == {"saved_blocks": 4, "loaded_blocks": 4}


def test_how_long_a_load_took_is_told_if_all_of_it_came(make_pool, engine):
    one = engine(make_pool(), ClientSettings())
    one.save(0, 1, 2, 3)
    one.load(9, 8, 7, 6)
    one.load(9, 8)
    assert [(number, blocks) for number, blocks, _ in one.loads_took] == [(2, 40), (3, 20)], "of the prefix, not of the groups"
    assert all(0 < took_s < math.inf for _, _, took_s in one.loads_took)
    assert one.load(9, 8, 7, 6, 5) == {5}
    assert one.loads_took[2:] == [(4, 50, math.inf)]


def test_blocks_that_are_on_disk_alone_come_too(make_pool, engine, lookups):
    server = make_pool(slabs=1, ssd={"ahead": 1.0})
    one = engine(server, ClientSettings())
    one.save(0, 1, 2, 3)
    until(lambda: server.gauges()["ssd_unsaved_bytes"] == 0)
    filler = StoreClient([server.endpoint])
    filler.connect()
    other = np.zeros(200_000, np.uint8)
    names = object_names([PREFIX], KEYS[:4])
    while set(in_memory(server, names)) != {False}:
        filler.put([f"other-{time.monotonic_ns()}"], [[(other.__array_interface__["data"][0], len(other))]])
    filler.close()
    one.wipe()
    assert answer(lookups(server).ask(names)) == 4
    assert one.load(4, 5, 6, 7) == set()
    assert one.same(4, 5, 6, 7)


def test_a_gap_ends_a_load_and_what_follows_is_told_as_failed(make_pool, engine):
    server = make_pool()
    one = engine(server)
    one.save(0, 1, 2, 3)
    client = StoreClient([server.endpoint])
    client.connect()
    client.remove(object_names([PREFIX], KEYS[1:2]))
    client.close()
    one.wipe()
    assert one.load(4, 5, 6, 7) == {5, 6, 7}
    assert one.same(4)
    assert one.mover.take_counts()["failed_blocks"] == 3


def test_a_flipped_byte_is_a_miss_that_is_counted_and_the_copy_goes(make_pool, engine):
    server = make_pool()
    one = engine(server)
    one.save(0, 1, 2)
    memory = server._turns.segment.memory
    for at in range(0, len(memory), 512):
        memory[at] ^= 1
    one.wipe()
    assert one.load(4, 5, 6) == {4, 5, 6}
    assert one.mover.take_counts()["failed_blocks"] == 3
    assert one.load(4, 5, 6) == {4, 5, 6}, "the store has dropped what did not verify"
    one.layers[0][:] = one.was[0]
    one.layers[1][:] = one.was[1]
    one.save(0, 1, 2)
    one.wipe()
    assert one.load(4, 5, 6) == set()
    assert one.same(4, 5, 6)


def test_another_shelf_or_another_size_has_nothing(make_pool, engine, lookups):
    server = make_pool()
    engine(server).save(0, 1)
    other = engine(server, QUICK, prefix="vllm/other/0.0/")
    assert other.load(0, 1) == {0, 1}
    assert answer(lookups(server).ask(object_names(["vllm/other/0.0/"], KEYS[:2]))) == 0
    smaller = engine(server)
    smaller.memory.value_bytes -= 4
    assert smaller.load(0, 1) == {0, 1}


@pytest.mark.parametrize("shared", [True, False])
def test_a_short_value_under_the_name_of_a_block_is_a_miss_of_that_block_alone(make_pool, engine, shared):
    server = make_pool()
    one = engine(server, replace(QUICK, share_memory=shared))
    one.save(0, 1)
    short = np.ones(100, np.uint8)
    names = object_names([PREFIX], KEYS[2:3])
    assert one.mover._client.put(names, [[(short.__array_interface__["data"][0], short.nbytes)]]) == [0]
    assert one.load(3, 4, 5) == {5}
    assert one.load(6, 7) == set()
    assert one.same(6, 7)
    assert not one.mover.take_counts()["failed_jobs"]


def test_a_pool_that_is_gone_costs_an_end_in_time_and_one_that_came_back_serves(make_pool, engine, lookups, monkeypatch):
    monkeypatch.setattr(mover_module, "RETRY_S", 1e-3)
    server = make_pool()
    one, asks = engine(server), lookups(server)
    one.save(0, 1)
    server.close()
    assert one.load(4, 5) == {4, 5}
    one.save(0, 1)
    assert answer(asks.ask(object_names([PREFIX], KEYS[:2]))) == 0
    server = make_pool(endpoint=server.endpoint, incarnation=2)
    deadline = time.monotonic() + 20
    while answer(asks.ask(object_names([PREFIX], KEYS[:2]))) < 2:  # as soon as it is asked again
        one.save(0, 1)
        assert time.monotonic() < deadline
    one.wipe()
    assert one.load(6, 7) == set()
    assert one.same(6, 7)


def test_what_ranks_save_while_their_store_is_silent_for_a_while_is_saved(make_pool, engine):
    server = make_pool()
    ranks = [engine(server, prefix=f"vllm/digest/0.{rank}/") for rank in range(2)]
    with server._turns:
        for each in ranks:
            each.mover.save(Save(1, (Part(KEYS[:4], (0, 1, 2, 3)),)))
        until(lambda: not any(each.mover._client._peers[0]._session for each in ranks))  # both have given it up
    for each in ranks:
        assert each.ended(lambda moved: bool(moved.saved)).saved == [1]
        assert +each.mover.take_counts() == {"saved_blocks": 4}
        each.wipe()
        assert each.load(9, 8, 7, 6) == set()
        assert each.same(9, 8, 7, 6)


def test_a_store_that_is_gone_is_waited_for_once_and_not_by_every_save(make_pool, engine, monkeypatch):
    monkeypatch.setattr(mover_module, "RETRY_S", 1e-3)
    server = make_pool()
    one = engine(server)
    put, puts = one.mover._client.put, []
    one.mover._client.put = lambda *arguments, **more: puts.append(arguments) or put(*arguments, **more)

    def tries(*blocks: int) -> int:
        puts.clear()
        one.save(*blocks)
        return len(puts)

    assert tries(0, 1) == 1
    server.close()
    assert [tries(2), tries(3), tries(4)] == [1 + TRIES, 1, 1]
    make_pool(endpoint=server.endpoint, incarnation=2)
    until(lambda: tries(5) == 1 and one.mover.take_counts()["saved_blocks"])


def test_why_blocks_are_not_saved_is_counted(make_pool, engine, monkeypatch):
    monkeypatch.setattr(mover_module, "RETRY_S", 1e-3)
    server = make_pool(slabs=1)
    one = engine(server)
    big = np.zeros(SLAB, np.uint8)
    client = StoreClient([server.endpoint])
    client.connect()
    assert client.put(["big"], [[(big.__array_interface__["data"][0], SLAB)]], Pin.HARD) == [0]
    client.close()
    one.save(0, 1, 2)
    assert +one.mover.take_counts() == {"unsaved_blocks": 3, "unsaved_no_room": 3}
    server.close()
    one.save(0, 1)
    assert +one.mover.take_counts() == {"unsaved_blocks": 2, "unsaved_unreached": 2}
    one.mover.close()
    one.save(0)
    assert +one.mover.take_counts() == {"unsaved_blocks": 1, "unsaved_not_tried": 1}


def test_a_pool_that_is_stopped_keeps_nobody_waiting_but_the_threads(make_pool, engine, lookups, monkeypatch):
    monkeypatch.setattr(mover_module, "RETRY_S", 1e-3)
    server = make_pool()
    one, asks = engine(server), lookups(server)
    one.save(0, 1)
    with server._turns:  # it hears, and does not answer
        lookup = asks.ask(object_names([PREFIX], KEYS[:2]))
        asked = Load(1, "r", (Part(KEYS[:2], (4, 5)),), 2)
        one.mover.load(asked)
        assert lookup.answer() is None, "after moments"
        assert one.mover.take() == Moved()
        assert answer(lookup) == 0
        assert one.ended(lambda moved: bool(moved.loaded)).failed_blocks == {4, 5}
        one.save(2, 3)
    until(lambda: one.load(4, 5) == set())


def test_a_pool_that_never_was_costs_no_more(engine, lookups, tmp_path):
    address = f"ipc://{tmp_path}/nobody.sock"
    assert engine(address).load(4, 5) == {4, 5}
    assert answer(lookups(address).ask(["a"])) == 0


def test_what_a_lookup_found_stays_until_it_is_released(make_pool, engine, lookups):
    server = make_pool(slabs=2)
    one, asks = engine(server), lookups(server)
    one.save(0, 1, 2, 3)
    names = object_names([PREFIX], KEYS[:5])
    held = asks.ask(names)
    assert answer(held) == 4
    assert held.until > time.monotonic() + 10
    client = StoreClient([server.endpoint])
    client.connect()
    big = np.zeros(SLAB, np.uint8)
    for number in range(8):
        client.put([f"big-{number}"], [[(big.__array_interface__["data"][0], SLAB)]])
    assert client.exist(names) == [1, 1, 1, 1, 0]
    asks.release(held)
    deadline = time.monotonic() + 20
    while any(client.exist(names)):
        assert time.monotonic() < deadline
        for _ in range(8):
            client.put([f"bigger-{time.monotonic_ns()}"], [[(big.__array_interface__["data"][0], SLAB)]])
    client.close()
    assert server.gauges()["leases"] == 0


def test_a_lookup_released_before_its_answer_holds_nothing(make_pool, engine, lookups):
    server = make_pool()
    engine(server).save(0, 1)
    asks = lookups(server)
    for _ in range(20):
        lookup = asks.ask(object_names([PREFIX], KEYS[:2]))
        asks.release(lookup)
    last = asks.ask(object_names([PREFIX], KEYS[:2]))
    assert answer(last) == 2
    asks.release(last)
    until(lambda: not server.gauges()["leases"])


def test_whoever_waits_for_an_answer_goes_on_with_it(make_pool, lookups):
    asks = lookups(make_pool())
    with asks._answered:  # nothing is answered before somebody waits
        lookup = asks.ask(["a"])
        asks.wait(3000)
    assert lookup.answer() == 0


def test_both_halves_together(make_pool, engine, lookups):
    server = make_pool()
    one, asks = engine(server), lookups(server)

    def plan() -> Ledger:
        return Ledger(8, asks, may_load=True, may_save=True, most_saving=100, prefixes=(PREFIX,))

    def found(request_id: str, own_tokens: int) -> int:
        deadline = time.monotonic() + 20
        while (tokens := ledger.matched(time.monotonic(), request_id, own_tokens, 65)) is None:
            assert time.monotonic() < deadline
        return tokens

    ledger = plan()
    ledger.add("a", token_keys(chain_root(), TOKENS, 8))
    assert found("a", 0) == 0
    (save,) = ledger.step(time.monotonic(), [Progress("a", 65, 65)], lambda _: [range(1, 10)]).saves
    assert save.groups[0].keys == KEYS
    one.mover.save(save)
    assert ledger.saved(one.ended(lambda moved: bool(moved.saved)).saved, 1) == list(range(1, 9))
    ledger = plan()
    ledger.add("b", token_keys(chain_root(), TOKENS, 8))
    assert found("b", 8) == 56
    ledger.allocated("b", 56, [list(range(11, 1, -1))])
    (load,) = ledger.step(time.monotonic(), [], lambda _: [()]).loads
    one.wipe()
    one.mover.load(load)
    moved = one.ended(lambda moved: bool(moved.loaded))
    ledger.loaded(moved.loaded, moved.failed_blocks)
    assert not moved.failed_blocks
    assert np.array_equal(one.layers[1][10], one.was[1][2])
    ledger.finished("b")
    until(lambda: not server.gauges()["leases"])


# --- lanes


def test_a_lane_refuses_what_is_too_much_and_loses_no_job():
    begun, go = threading.Event(), threading.Event()
    done: list[int] = []
    dropped: list[int] = []

    def work(job: int) -> None:
        begun.set()
        go.wait(20)
        done.append(job)

    worker: Worker[int] = Worker("test", work, dropped.append, limit=2)
    assert worker.offer(1)
    assert begun.wait(20)
    assert [worker.offer(job) for job in (2, 3, 4)] == [True, True, False]
    threading.Timer(0.05, go.set).start()
    worker.close()
    assert done == [1]
    assert dropped == [2, 3]
    assert not worker.offer(5)


def test_a_bug_ends_its_load_and_no_later_one(make_pool, engine):
    one = engine(make_pool())
    one.save(0, 1)

    def bug(blocks: object) -> None:
        raise ZeroDivisionError

    one.memory.targets = bug
    assert one.load(2, 3) == {2, 3}
    del one.memory.targets
    assert one.load(2, 3) == set()
    assert one.mover.take_counts()["failed_jobs"] == 1
    assert one.mover.take_counts()["failed_jobs"] == 0


def test_the_store_that_is_named_is_asked_before_those_that_do_not_answer(make_pool, engine, tmp_path):
    home, silent, far = (make_pool(name) for name in ("home", "silent", "far"))
    writer = engine(far)
    writer.save(0, 1)
    names = object_names([PREFIX], KEYS[:2])
    client = StoreClient([home.endpoint, silent.endpoint, far.endpoint], QUICK)
    assert client.connect() is None
    with silent._turns:  # it hears, and does not answer
        hold = client.hold(names, ["nobody", "far"])
        assert (hold.count, hold.holders) == (2, ("far",))
        assert client._peers[1]._session is not None, "the silent one was not asked, or it would be taken for lost"
        assert client.hold(names, ["silent"]).count == 2, "a name that is wrong costs time, no more"
        client.release(hold)
    client.close()


def objects(*servers: StoreServer) -> list[float]:
    return [server.gauges()["objects"] for server in servers]


def counts(of: Engine, *names: str) -> list[int]:
    counted = of.mover.take_counts()
    return [counted[name] for name in names]


def test_blocks_with_two_copies_outlive_the_store_at_home(make_pool, engine):
    home, far, other = (make_pool(name, host=name) for name in ("a", "b", "c"))
    stores = [home.endpoint, other.endpoint, far.endpoint]
    writer = engine(stores, copies=2)
    writer.save(0, 1, 2)
    assert objects(home, far, other) == [3, 3, 0], "the second copy is in the store whose name comes next"
    home.close()
    reader = engine([far.endpoint])
    reader.wipe()
    assert reader.load(3, 4, 5) == set()
    writer.save(0, 1, 2)
    assert objects(other) == [3], "the next store takes its place"
    assert counts(writer, "short") == [0]
    far.close()
    writer.save(0, 1, 2)
    assert counts(writer, "short", "short_no_room") == [3, 0]


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_the_second_copy_is_on_another_host_whatever_the_addresses_are(make_pool, engine, scheme):
    """Over TCP all addresses are loopback, so that only what a store says of its host tells them apart."""
    places = {"home": "x", "near": "x", "zone": "y"}
    made = {name: make_pool(name, host=host, endpoint="tcp://127.0.0.1:*" * (scheme == "tcp")) for name, host in places.items()}
    home, near, far = made.values()
    writer = engine([home.endpoint, near.endpoint, far.endpoint], copies=2)
    writer.save(0, 1, 2)
    assert objects(home, near, far) == [3, 0, 3]
    far.close()
    writer.save(0, 1, 2)
    assert objects(home, near) == [3, 0], "while the other host is away there is one copy"
    assert counts(writer, "short") == [3]


def test_where_there_is_no_other_host_there_is_one_copy_and_one_warning(make_pool, engine, capsys):
    home, near = make_pool("a", host="x"), make_pool("b", host="x")
    writer = engine([home.endpoint, near.endpoint], copies=2)
    for _ in range(3):
        writer.save(0, 1, 2)
    assert objects(home, near) == [3, 0]
    assert counts(writer, "short") == [9]
    assert capsys.readouterr().out.count("store_one_host") == 1


def test_a_store_without_room_is_replaced_by_the_next_one_and_counted(make_pool, engine):
    home, full, other = (make_pool(name, host=name) for name in ("a", "b", "c"))
    small = StoreClient([full.endpoint], QUICK)
    small.connect()
    filling = np.zeros(SLAB, dtype=np.uint8)
    value = [(filling.__array_interface__["data"][0], filling.nbytes)]
    codes = [small.put([f"{number}"], [value], Pin.HARD)[0] for number in range(40)]
    small.close()
    assert codes == [0] * 32 + [Code.NO_ROOM] * 8
    held = objects(full)[0]
    writer = engine([server.endpoint for server in (home, full, other)], copies=2)
    writer.save(0, 1, 2)
    assert objects(home, full, other) == [3, held, 3]
    assert counts(writer, "short") == [0]
    other.close()
    writer.save(0, 1, 2)
    assert counts(writer, "short", "short_no_room") == [3, 3]


def test_a_copy_that_a_store_lost_is_made_again_when_the_blocks_are_offered_again(make_pool, engine):
    home, far = make_pool("a", host="a"), make_pool("b", host="b")
    writer = engine([home.endpoint, far.endpoint], copies=2)
    writer.save(0, 1, 2)
    emptied = StoreClient([far.endpoint], QUICK)
    emptied.connect()
    assert emptied.remove_all() == 3
    emptied.close()
    writer.save(0, 1, 2)
    assert objects(home, far) == [3, 3]


def test_counts_of_copies_are_right_with_several_threads(make_pool, engine):
    home, near = make_pool("a", host="x"), make_pool("b", host="x")
    writer = engine([home.endpoint, near.endpoint], copies=2, threads=4)
    for _ in range(40):
        writer.save(0, 1, 2, 3, 4, 5, 6, 7)
    assert counts(writer, "short") == [320]


# --- several threads for one copy


def test_each_gets_the_answer_for_its_own_place():
    crew = Crew("t", 3)
    for count in (0, 1, 2, 3, 8):
        assert crew.share(count, lambda start, stop: [10 * index for index in range(start, stop)], -1) == [
            10 * index for index in range(count)
        ]
    crew.close()


def test_shares_are_worked_on_side_by_side():
    together = threading.Barrier(3, timeout=20)

    def work(start: int, stop: int) -> list[int]:
        together.wait()
        return [0] * (stop - start)

    crew = Crew("t", 3)
    assert crew.share(3, work, -1) == [0, 0, 0]
    crew.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_a_thread_that_ended_had_to_do_is_lost_once_and_then_the_callers():
    class End(BaseException): ...

    caller = threading.get_ident()

    def work(start: int, stop: int) -> list[int]:
        if threading.get_ident() != caller:
            raise End
        return [0] * (stop - start)

    crew = Crew("t", 2)
    assert crew.share(2, work, -1) == [0, -1]
    eventually_refused = [crew.share(2, work, -1) for _ in range(50)]
    assert eventually_refused[-1] == [0, 0]
    crew.close()


def test_nobody_is_at_work_any_more_when_the_callers_own_share_fails():
    caller, ended = threading.get_ident(), []

    def work(start: int, stop: int) -> list[int]:
        if threading.get_ident() == caller:
            raise OSError("its end")
        time.sleep(0.05)
        ended.append(start)
        return [0] * (stop - start)

    crew = Crew("t", 3)
    with pytest.raises(OSError, match="its end"):
        crew.share(3, work, -1)
    assert sorted(ended) == [1, 2]
    crew.close()


def test_blocks_come_back_as_they_were_by_several_threads_and_a_gap_ends_what_came(make_pool, engine):
    pool = make_pool()
    one = engine(pool, threads=3)
    one.save(*range(8))
    one.wipe()
    assert one.load(*range(8)) == set()
    assert one.same(*range(8))
    client = StoreClient([pool.endpoint], QUICK)
    client.connect()
    client.remove(object_names([PREFIX], KEYS[4:5]))
    client.close()
    assert one.load(*range(8)) == {4, 5, 6, 7}
