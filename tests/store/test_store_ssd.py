"""A store whose values live in memory and on SSD: what a client sees is one store, whatever is where, and after a restart."""

import itertools
import random
from time import monotonic

import pytest
from conftest import SLAB_BYTES, idle, wait_for

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
