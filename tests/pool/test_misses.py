"""Why a lease went without: one reason for each block."""

import pytest
from test_cache_node import CAPACITY, Pool, key

from mooncake_zmq.core.messages import BlocksLeased, LeaseBlocks, ReportCorrupt
from mooncake_zmq.kv.events import Medium
from mooncake_zmq.pool.node import misses
from mooncake_zmq.pool.node.disk_tier import DiskContents
from mooncake_zmq.pool.node.misses import Misses
from mooncake_zmq.pool.node.settings import SsdSettings


@pytest.fixture
def pool() -> Pool:
    return Pool()


def why(pool: Pool) -> dict[str, int]:
    head = "lookup_misses[reason="
    return {name[len(head) : -1]: count for name, count in pool.actor.counts.items() if name.startswith(head)}


def test_what_was_never_there_and_what_was_there_once_differ(pool: Pool) -> None:
    pool.store(1)
    pool.store(*range(10, 10 + CAPACITY))
    pool.leased(1)
    pool.leased(99)
    assert why(pool) == {"evicted": 1, "never_stored": 1}


def test_what_stands_behind_a_miss_is_there_and_of_no_use(pool: Pool) -> None:
    pool.store(1, 3, 4)
    pool.leased(1, 2, 3, 4)
    assert why(pool) == {"never_stored": 1, "behind_another": 2}


def test_what_did_not_verify_is_gone_for_that(pool: Pool) -> None:
    pool.store(1)
    _, refs = pool.leased(1)
    pool.say("p0", ReportCorrupt(slots=refs))
    pool.leased(1)
    assert why(pool) == {"corrupt": 1}


def test_a_source_may_lack_it_or_be_gone_or_bring_it_damaged_or_not_at_all(pool: Pool) -> None:
    pool.lease(1, 2, 3, sources=("c1",))
    pool.answer(pool.one(LeaseBlocks, "c1"), 1)
    pool.copied()
    assert why(pool) == {"source_lacks": 2}
    pool.lease(4, sources=("c1",))
    pool.answer(pool.one(LeaseBlocks, "c1"), 4)
    pool.copied(corrupt=(0,))
    assert why(pool) == {"source_lacks": 2, "corrupt": 1}
    pool.lease(5, sources=("c1",))
    pool.answer(pool.one(LeaseBlocks, "c1"), 5)
    pool.copied(fail=(0,))
    assert why(pool)["fetch_failed"] == 1
    pool.lease(6, 7, sources=("c1",))
    pool.down("c1")
    assert why(pool)["fetch_failed"] == 3


def test_what_comes_from_another_source_after_all_is_no_miss(pool: Pool) -> None:
    pool.lease(1, 2, sources=("c1", "c2"))
    pool.answer(pool.one(LeaseBlocks, "c1"), 1)
    pool.copied()
    pool.answer(pool.one(LeaseBlocks, "c2"), 2, source="c2")
    pool.copied()
    assert why(pool) == {}


def test_what_is_on_its_way_at_the_deadline_is_too_late_whoever_asked_for_it(pool: Pool) -> None:
    pool.lease(1, 2, sources=("c1",), fetch_s=5.0)
    ask = pool.one(LeaseBlocks, "c1")
    pool.advance(2.0)
    pool.answer(ask, 1, 2)
    pool.up("p1", host="h0")
    pool.lease(2, client="p1", fetch_s=3.0)
    pool.advance(3.1)
    assert [each.slots for each in pool.take(BlocksLeased)] == [(), ()]
    assert why(pool) == {"too_late": 3}


def test_what_would_take_longer_than_computing_is_left(pool: Pool) -> None:
    pool.lease(1, sources=("c1",), compute_s=0.5)
    ask = pool.one(LeaseBlocks, "c1")
    pool.advance(1.0)
    pool.answer(ask, 1)
    pool.copied()
    pool.lease(2, 3, sources=("c1",), compute_s=0.5)
    assert why(pool) == {"slower_than_computing": 2}


def test_a_full_pool_has_no_room_for_it(pool: Pool) -> None:
    pool.store(*range(10, 10 + CAPACITY))
    pool.leased(*range(10, 10 + CAPACITY))
    pool.up("p1", host="h0")
    pool.lease(1, client="p1", sources=("c1",))
    pool.answer(pool.one(LeaseBlocks, "c1"), 1)
    assert why(pool) == {"no_room": 1}


def test_who_rests_denies(pool: Pool) -> None:
    pool.store(1)
    pool.set_cordon()
    pool.leased(1, 2)
    assert why(pool) == {"denied": 2}


def test_an_ssd_that_failed_is_why_what_it_alone_had_is_gone() -> None:
    pool = Pool(disk=DiskContents(20), ssd=SsdSettings(ahead=1.0, batch_blocks=3))
    pool.store(1, 2)
    while pool.works:
        pool.written()
    pool.store(*range(10, 10 + CAPACITY))
    while pool.works:
        pool.written()
    assert not {1, 2} & pool.held()
    pool.lease(1, 2)
    pool.copied(fail=(0, 1), fault="gone")
    assert why(pool) == {"fetch_failed": 2}
    pool.lease(1, 2)
    assert why(pool) == {"fetch_failed": 2, "disk_failed": 2}


def test_what_went_last_is_remembered_and_no_more_than_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "MAX_GONE", 3)
    gone = Misses()
    gone.going((key(1),), "corrupt")
    gone.left((key(0), key(1), key(2)))
    gone.left((key(1), key(3), key(4)))
    assert len(gone) == 3
    asked = tuple(map(key, range(5)))
    told = gone.count(asked, [None] * 5, coming=(), lost={key(3): "fetch_failed"})
    assert told == {"never_stored": 2, "evicted": 2, "fetch_failed": 1}, "gone once more, it is so for the last reason"
    assert gone.count(asked[:1], [None], coming=(), lost={key(0): "source_lacks"}) == {"source_lacks": 1}
    assert gone.count(asked[1:2], [None], coming=(), lost={key(1): "source_lacks"}) == {"evicted": 1}
    assert gone.count(asked[:2], [Medium.CPU] * 2, coming=(), lost={}) == {"no_room": 1, "behind_another": 1}


@pytest.mark.parametrize("asker", ["c1", "d0"])
def test_hits_and_misses_are_of_what_a_prefill_asks_for(pool: Pool, asker: str) -> None:
    """What another pool asks for is counted there; a decode asks for what a prefill reuses, from wherever."""
    pool.store(1)
    pool.lease(1, 2, 3, client=asker)
    assert [name for name in pool.actor.counts if name.startswith("lookup_")] == []
    pool.lease(1, 2, 3)
    assert pool.actor.counts["lookup_blocks[result=local]"] == 1
    assert pool.actor.counts["lookup_blocks[result=miss]"] == 2
    assert why(pool) == {"never_stored": 2}


def test_what_a_decode_is_denied_is_no_miss(pool: Pool) -> None:
    pool.set_cordon()
    pool.lease(1, 2, client="d0")
    assert why(pool) == {}
