"""A store whose values live in memory and on SSD: what a client sees is one store, whatever is where, and after a restart."""

import errno
import itertools
import os
import random
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep

import pytest
from store_harness import SLAB_BYTES, Memory, idle, wait_for

from mooncake_zmq.pool.ssd.object_disk import ObjectDisk
from mooncake_zmq.pool.ssd.object_index import ObjectIndex
from mooncake_zmq.store import MooncakeDistributedStore, ReplicateConfig
from mooncake_zmq.store.client import shared_copy

SIZES = [1, 63, 4096, 65_535, 65_536, 70_001, 1 << 20, SLAB_BYTES]
_incarnations = itertools.count(1)


def value(name: object, size: int) -> bytes:
    return random.Random(repr(name)).randbytes(size)


def drain(server):
    """A graceful stop."""
    server.close(monotonic() + 30)


def all_saved(server):
    gauges = server.gauges()
    return gauges["ssd_unsaved_bytes"] == 0 and idle(server)


@pytest.fixture
def make(make_server, tmp_path):
    def make_one(**changes):
        ssd = {"ahead": 1.0, **changes.pop("ssd", {})}
        endpoint = f"ipc://{tmp_path}/store.sock"
        return make_server(endpoint=endpoint, incarnation=next(_incarnations), ssd=ssd, **changes)

    return make_one


@pytest.fixture(params=["shared", "streamed"])
def client(request, connect):
    return lambda server: connect(server, share_memory=request.param == "shared", timeout_s=5.0)


def test_values_come_back_from_disk_after_a_restart(make, client):
    first = make(slabs=8)
    store = client(first)
    keys = [f"k{size}" for size in SIZES]
    for key, size in zip(keys, SIZES, strict=True):
        assert store.put(key, value(key, size)) == 0
    drain(first)
    second = make()
    store = client(second)
    assert second.gauges()["objects"] == 0
    assert store.batch_is_exist([*keys, "no"]) == [1] * len(keys) + [0]
    assert [store.get_size(key) for key in keys] == SIZES
    for key, size in zip(keys, SIZES, strict=True):
        assert store.get(key) == value(key, size)
    assert second.counts["promoted"] == len(SIZES)
    assert second.counts["ssd_read"] == len(SIZES)
    wait_for(lambda: idle(second), "the last release")


def test_what_memory_evicted_is_got_from_disk(make, client):
    server = make()
    store = client(server)
    for number in range(8):  # twice the memory
        assert store.put(f"{number}", value(number, SLAB_BYTES)) == 0
        wait_for(lambda: all_saved(server), "the value on disk")
    assert server.gauges()["objects"] <= 4
    for number in range(8):
        assert store.get(f"{number}") == value(number, SLAB_BYTES)
    assert server.counts["evicted"] > 4
    assert server.counts["evicted_unsaved"] == 0
    wait_for(lambda: idle(server), "the last release")


def test_one_batch_may_want_more_from_disk_than_memory_holds(make, client):
    server = make()
    store = client(server)
    names = [f"{number}" for number in range(8)]
    for name in names:
        assert store.put(name, value(name, SLAB_BYTES)) == 0
        wait_for(lambda: all_saved(server), "the value on disk")
    assert store.get_batch(["no", *names]) == [b"", *(value(name, SLAB_BYTES) for name in names)]


def test_how_long_a_client_takes_to_copy_is_not_the_stores_silence(make, connect, monkeypatch):
    """Each value takes longer than the store may be silent, and something is asked after it."""
    copies = {name: getattr(shared_copy, name) for name in ("gather", "scatter")}

    def slow(name):
        def copy(*arguments, **more):
            sleep(0.4)
            return copies[name](*arguments, **more)

        return copy

    first = make()
    values = [value(name, 100_000) for name in "abc"]
    for name in copies:
        monkeypatch.setattr(shared_copy, name, slow(name))
    assert connect(first, timeout_s=0.3).put_batch(["a", "b"], values[:2]) == 0
    drain(first)
    store = connect(make(), timeout_s=0.3)
    assert store.put_batch(["c", "d"], [values[2]] * 2) == 0
    assert store.get_batch(["c", "a", "b"]) == [values[2], *values[:2]], "of which two are on disk"


def test_one_store_is_seen_whatever_lies_where(make, client):
    """Ten values in memory of four: most are on disk only."""
    server = make(ssd={"ahead": 1.0})
    store = client(server)
    names = [f"{number}" for number in range(10)]
    for name in names:
        assert store.put(name, value(name, SLAB_BYTES - 1)) == 0
        wait_for(lambda: all_saved(server), "the value on disk")
    assert server.gauges()["objects"] <= 4
    assert store.batch_is_exist(["x", *names]) == [0] + [1] * 10
    assert {store.get_size(name) for name in names} == {SLAB_BYTES - 1}
    assert all(store.get_replica_desc(name) for name in names)
    target = Memory(SLAB_BYTES - 2)
    assert store.batch_get_into(["0"], [target.address], [target.size]) == [-600]
    dedup = server.counts["dedup_hits"]
    assert store.put("0", b"another") == 0
    assert server.counts["dedup_hits"] == dedup + 1
    assert store.get("0") == value("0", SLAB_BYTES - 1)
    assert store.upsert("1", b"another") == 0
    assert store.get("1") == b"another"
    assert store.batch_remove(["2", "2", "none"]) == [0, -704, -704]
    assert store.is_exist("2") == 0
    assert store.get("2") == b""
    assert store.remove_by_regex("^[345]$") == 3
    assert sorted(key for key in names if store.is_exist(key)) == ["0", "1", "6", "7", "8", "9"]
    assert store.remove_all() == 6
    assert store.batch_is_exist(names) == [0] * 10
    wait_for(lambda: idle(server), "the last release")
    assert server.gauges()["ssd_objects"] == 0


def test_what_was_replaced_or_removed_stays_so_when_the_server_dies_at_once(make, client):
    first = make()
    store = client(first)
    sizes = {"stays": 100, "replaced": 70_000, "removed": 70_000, "replaced by a batch": 200_000}
    for key, size in sizes.items():
        assert store.put(key, value(key, size)) == 0
    wait_for(lambda: all_saved(first), "all on disk")
    assert store.upsert("replaced", b"new") == 0
    assert store.upsert_batch(["replaced by a batch", "x"], [bytes(200_000)] * 2) == 0
    assert store.remove("removed") == 0
    first.close(0.0)  # nothing more is written
    second = make()
    store = client(second)
    assert store.get("stays") == value("stays", 100)
    for key in ("replaced", "replaced by a batch", "removed"):
        assert store.get(key) in ((b"",) if key == "removed" else (b"", b"new", bytes(200_000)))
    assert store.is_exist("removed") == 0


def test_pins_outlive_a_restart(make, client):
    first = make()
    assert client(first).put("hard", b"h" * 1000, ReplicateConfig(with_hard_pin=True)) == 0
    drain(first)
    second = make()
    store = client(second)
    assert store.get("hard") == b"h" * 1000
    for number in range(8):
        assert store.put(f"{number}", bytes(SLAB_BYTES)) == 0
    assert store.get("hard") == b"h" * 1000
    assert second.counts["promoted"] == 1, "it never left memory again"


def test_many_readers_of_one_value_on_disk_read_it_once(make, connect, monkeypatch):
    first = make()
    assert connect(first).put("k", value("k", SLAB_BYTES)) == 0
    drain(first)
    server = make()
    clients = [connect(server, share_memory=number % 2 == 0) for number in range(6)]
    begun, go_on = threading.Event(), threading.Event()
    read = ObjectDisk.read

    def slowly(*arguments, **named):
        begun.set()
        assert go_on.wait(20)
        return read(*arguments, **named)

    monkeypatch.setattr(ObjectDisk, "read", slowly)
    with ThreadPoolExecutor(6) as pool:
        got = [pool.submit(store.get, "k") for store in clients]
        assert begun.wait(20)
        assert server.gauges()["ssd_promoting"] == 1
        go_on.set()
        assert [each.result() for each in got] == [value("k", SLAB_BYTES)] * 6
    assert server.counts["ssd_read"] == server.counts["promoted"] == 1
    wait_for(lambda: idle(server), "the last release")


@pytest.mark.parametrize("change", ["upsert", "remove"])
def test_a_value_that_is_replaced_while_it_is_promoted_is_not_seen_again(make, connect, monkeypatch, change):
    first = make()
    assert connect(first).put("k", value("k", 70_000)) == 0
    drain(first)
    server = make()
    store, other = connect(server, share_memory=False), connect(server)
    read = ObjectDisk.read

    def changed_amid(self, key, record, cell, **named):
        good = read(self, key, record, cell, **named)
        assert (other.upsert("k", b"new" * 50_000) if change == "upsert" else other.remove("k")) == 0
        return good

    monkeypatch.setattr(ObjectDisk, "read", changed_amid)
    assert store.get("k") == (b"new" * 50_000 if change == "upsert" else b"")
    assert other.get("k") == (b"new" * 50_000 if change == "upsert" else b"")
    wait_for(lambda: idle(server), "the last release")


def test_a_value_that_went_bad_on_disk_is_a_miss_and_gone(make, client, tmp_path):
    first = make()
    store = client(first)
    assert store.put_batch(["a", "b"], [value("a", 70_000), value("b", 70_000)]) == 0
    drain(first)
    (segment,) = (tmp_path / "ssd").glob("segment-*")
    content = segment.read_bytes()
    at = content.index(value("a", 70_000)[:64])
    with segment.open("r+b") as file:
        file.seek(at)
        file.write(b"x")
    second = make()
    store = client(second)
    assert store.get_batch(["a", "b"]) == [b"", value("b", 70_000)]
    assert second.counts["ssd_corrupt"] == 1
    wait_for(lambda: store.is_exist("a") == 0, "its row to go")
    assert store.put("a", b"again") == 0
    assert store.get("a") == b"again"


def test_a_second_try_forgets_what_the_first_one_found(make, connect, monkeypatch):
    first = make()
    assert connect(first).put("on disk", value("on disk", 70_000)) == 0
    drain(first)
    server = make()
    store = connect(server)
    assert store.put("damaged", value("damaged", 70_000)) == 0
    read = shared_copy._read

    def interrupted(call, *arguments):
        found = read(call, *arguments)
        monkeypatch.setattr(shared_copy, "_read", read)
        with server._turns as node:
            server._turns.view(node.objects.entries.find("damaged").offset, 1)[0] ^= 1
        call.link.shut()
        return found

    monkeypatch.setattr(shared_copy, "_read", interrupted)
    assert store.get_batch(["damaged", "on disk"]) == [b"", value("on disk", 70_000)]


def test_a_value_too_large_for_the_memory_of_now_is_a_miss_and_gone(make, client):
    first = make()
    assert client(first).put_batch(["large", "small"], [bytes(SLAB_BYTES - 5000), b"x"]) == 0
    drain(first)
    store = client(make(slab_bytes=SLAB_BYTES - 4096))  # which is less in whole cells
    assert store.get_batch(["large", "small"]) == [b"", b"x"]
    assert store.batch_is_exist(["large", "small"]) == [0, 1]


def restarted_with(make, client, *keys):
    """A server, and a client of it, whose former life was given these values and stopped."""
    first = make()
    store = client(first)
    for key in keys:
        assert store.put(key, value(key, 70_000)) == 0
    drain(first)
    server = make()
    return server, client(server)


def fail_with(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_full_disk_is_read_but_not_written_and_what_is_replaced_does_not_come_back(make, client, monkeypatch):
    server, store = restarted_with(make, client, "kept", "replaced")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail_with(errno.ENOSPC))
        assert store.put("more", b"x" * 70_000) == 0
        wait_for(lambda: server.gauges()["ssd_writable"] == 0, "the fault")
    assert store.get("kept") == value("kept", 70_000)
    assert server.counts["ssd_failed"] == 1
    assert server.gauges()["ssd_readable"] == 1
    assert store.upsert("replaced", b"new") == 0
    assert store.get("more") == b"x" * 70_000
    wait_for(lambda: idle(server), "the last release")
    drain(server)
    store = client(make())
    assert store.batch_is_exist(["kept", "replaced", "more"]) == [1, 0, 0]


def test_where_even_the_index_cannot_be_written_whole_files_go_rather_than_old_values_come_back(make, client, monkeypatch):
    server, store = restarted_with(make, client, "kept", "replaced")

    def fail(*_, **__):
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectIndex, "change", fail)
        assert store.upsert("replaced", b"new") == 0
    assert store.get("replaced") == b"new"
    assert store.is_exist("kept") == 0
    wait_for(lambda: idle(server), "the last release")
    drain(server)
    assert client(make()).batch_is_exist(["kept", "replaced"]) == [0, 0]


def test_a_failing_disk_is_off_and_the_store_goes_on(make, client, monkeypatch):
    server, store = restarted_with(make, client, "read", "replaced", "put", "kept")
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail_with(errno.EIO))
        assert store.get("read") == b""
    gauges = server.gauges()
    assert gauges["ssd_readable"] == gauges["ssd_writable"] == 0
    assert store.batch_is_exist(["read", "kept"]) == [0, 0]
    assert store.upsert("replaced", b"new") == 0
    assert store.put("put", b"another") == 0
    assert store.get_batch(["replaced", "put"]) == [b"new", b"another"]
    wait_for(lambda: idle(server), "the last release")
    drain(server)
    store = client(make())
    assert store.batch_is_exist(["kept", "read", "replaced", "put"]) == [1, 1, 0, 0], "no old value of what has another since"


def test_a_value_damaged_in_memory_is_not_written(make, connect):
    server = make(ssd={"ahead": 0.0})
    store = connect(server)
    assert store.put_batch(["a", "b"], [value("a", 70_000), value("b", 70_000)]) == 0
    with server._turns as node:
        server._turns.view(node.objects.entries.find("a").offset, 1)[0] ^= 1
    drain(server)
    assert server.counts["corrupt"] == 1
    assert server.counts["demoted"] == 1
    assert connect(make()).batch_is_exist(["a", "b"]) == [0, 1]


def test_only_the_cold_share_is_written(make, connect):
    server = make(ssd={"ahead": 0.5}, slabs=8)
    store = connect(server)
    for number in range(4):
        assert store.put(f"{number}", value(number, SLAB_BYTES)) == 0
    assert store.put("5", value(5, SLAB_BYTES)) == 0  # from here on more than half of the memory is in use
    wait_for(lambda: server.counts["demoted"] == 1, "the coldest on disk")
    assert store.remove("0") == 0
    assert server.gauges()["ssd_objects"] == 0
    wait_for(lambda: idle(server), "the end of writing")


SERVER = """
import sys, time
sys.path += {here!r}
from pathlib import Path
from store_harness import SLAB_BYTES
from store_servers import store_server
home = Path(sys.argv[1])
server = store_server(home, slabs=4, slab_bytes=SLAB_BYTES, ssd={{"ahead": 1.0}}, endpoint=f"ipc://{{home}}/killed.sock")
print("ready", flush=True)
time.sleep(600)
"""


def test_after_kill_9_amid_puts_only_right_values_are_served(make, connect, tmp_path):
    code = SERVER.format(here=[str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")])
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        while "ready" not in process.stdout.readline():
            assert process.poll() is None
        store = MooncakeDistributedStore()
        address = f"ipc://{tmp_path}/killed.sock"
        assert store.setup({"local_hostname": "me", "master_server_addr": address, "timeout_s": 2.0}) == 0
        written = {}
        for number in range(400):
            name, size = f"{number % 40}", SIZES[number % (len(SIZES) - 1)]
            if number == 399:
                process.kill()
            wanted = value(number, size)
            if store.upsert(name, wanted) == 0:
                written[name] = wanted
            else:
                written.setdefault("doubtful", name)
        doubtful = written.pop("doubtful", None)
        store.close()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    for left in tmp_path.glob("mooncake=*"):
        left.unlink()
    server = make()
    store = connect(server, share_memory=False)
    assert server.gauges()["ssd_objects"] > 0
    for name, wanted in written.items():
        assert name == doubtful or store.get(name) in (b"", wanted)
    assert server.counts["promoted"] > 0
    assert server.counts["ssd_corrupt"] == server.counts["ssd_stale"] == server.counts["ssd_short"] == 0


def test_many_clients_at_once_see_their_own_values_or_misses(make, connect):
    """Memory of 16 MiB and a disk of 34, so that values come, go and move all the time."""
    server = make(ssd={"bytes": 34 << 20, "ahead": 1.0})

    def work(number):
        store = connect(server, share_memory=number % 2 == 0)
        choose = random.Random(number)
        allowed = {}

        def read(key):
            got = store.get(key)
            assert not got or got in allowed.get(key, ())
            if got:
                allowed[key] = {got}

        for turn in range(150):
            key, size = f"{number}-{choose.randrange(12)}", choose.choice(SIZES[2:])
            do = choose.choice(["upsert", "upsert", "put", "remove", "get", "get", "get"])
            if do == "remove":
                store.remove(key)
                allowed[key] = set()
                assert store.is_exist(key) == 0
            elif do == "get":
                read(key)
            else:
                content = value((number, turn), size)
                code = store.upsert(key, content) if do == "upsert" else store.put(key, content)
                assert code in (0, -200)
                if code == 0:  # of a put: stored, or there was one
                    allowed[key] = {content, *(allowed.get(key, ()) if do == "put" else ())}
                    read(key)

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(work, number) for number in range(4)]:
            each.result()
    wait_for(lambda: idle(server), "the end of all work")
    counts = server.counts
    assert counts["demoted"] > 0
    assert counts["ssd_segments_dropped"] > 0
    assert not any(
        counts[name] for name in ("ssd_corrupt", "ssd_stale", "ssd_short", "ssd_failed", "corrupt", "corrupt_writes")
    )


def test_a_bug_in_the_writer_is_told_of_and_calls_that_need_no_disk_go_on(make_server, connect, monkeypatch, tmp_path):
    crashes = []

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(ObjectDisk, "write", fail)
    server = make_server(ssd={"ahead": 1.0}, on_crash=crashes.append)
    store = connect(server, timeout_s=1.0)
    assert store.put("k", b"x" * 70_000) == 0
    wait_for(lambda: bool(crashes), "the crash to be told")
    assert isinstance(crashes[0], ZeroDivisionError)
    assert store.get("k") == b"x" * 70_000
    assert store.put("other", b"y" * 70_000) == 0
