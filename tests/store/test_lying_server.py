"""A store server that names what is not there ends no client: calls fail, and touch nothing outside of the segment."""

import pytest
from msgspec import structs
from store_harness import SLAB_BYTES, Memory

from mooncake_zmq.store import protocol
from mooncake_zmq.store.client.client import UNREACHED
from mooncake_zmq.store.client.peer import Call

SIZE = 300_000
FAR = (4 * SLAB_BYTES - SIZE + 1, 1 << 40, 1 << 48)
"""Offsets at which a value of this size ends beyond a segment of four slabs."""


@pytest.fixture
def lie(monkeypatch):
    """Has every reply of a kind send_note something else."""
    ask = Call.ask

    def replies(kind, **told):
        def lying(self, request, expected):
            reply = ask(self, request, expected)
            return structs.replace(reply, **told) if isinstance(reply, kind) else reply

        monkeypatch.setattr(Call, "ask", lying)

    return replies


def shared(server, connect):
    store = connect(server, share_memory=True)
    assert store.put_batch(["a", "b"], [b"x" * SIZE, b"y" * SIZE]) == 0
    return store


LIES = [
    *({"offsets": [far, far]} for far in FAR),
    {"entries": [1 << 20, 1 << 20]},
    {"entries": [1 << 62, 1 << 62]},
    {"sizes": [1 << 48, 1 << 48]},
    {"sizes": [SIZE]},
    {"generations": []},
    {"entries": [1] * 3},
]


@pytest.mark.parametrize("told", LIES, ids=str)
def test_a_lease_of_what_is_not_there(make_server, connect, lie, told):
    store = shared(make_server(), connect)
    lie(protocol.Leased, **told)
    place = Memory(2 * SIZE)
    sizes = store.batch_get_into(["a", "b"], [place.address, place.address + SIZE], [SIZE, SIZE])
    assert sizes == [UNREACHED, UNREACHED]
    assert store.get_batch(["a", "b"]) == [b"", b""]
    assert place.bytes() == bytes(2 * SIZE)


@pytest.mark.parametrize("told", [*({"offsets": [far, far]} for far in FAR), {"offsets": []}, {"codes": [0]}], ids=str)
def test_a_grant_of_what_is_not_there(make_server, connect, lie, told):
    store = connect(make_server(), share_memory=True)
    lie(protocol.Reserved, **told)
    source = Memory(b"z" * 2 * SIZE)
    codes = store.batch_put_from(["c", "d"], [source.address, source.address + SIZE], [SIZE, SIZE])
    assert codes == [UNREACHED, UNREACHED]


@pytest.mark.parametrize("numbers", [[0], [0, 0, 0]], ids=str)
def test_a_commit_of_another_put(make_server, connect, lie, numbers):
    store = connect(make_server(), share_memory=True)
    lie(protocol.Numbers, numbers=numbers)
    assert store.put_batch(["c", "d"], [b"z" * SIZE] * 2) == 0, "asked again, it has both"
