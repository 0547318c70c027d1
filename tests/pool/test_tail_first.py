"""Leases that are gathered from their last block on: they begin at once, grow, and end whichever way. `check` runs after every
event."""

import pytest
from actor_harness import LAYOUT
from test_cache_node import Pool, keys

from mooncake_zmq.core.messages import BlocksArrived, BlocksLeased, LeaseBlocks, ReleaseLease, ShortenFetch
from mooncake_zmq.core.work import CopyBlocks

DOC = tuple(range(1, 7))


@pytest.fixture
def pool():
    return Pool()


def begin(pool, *numbers, first=None, sources=("c1",), **options):
    """A lease of `numbers`, of which the first few are wanted from the last on; its answer."""
    lease_id = pool.lease(*numbers, sources=sources, tail_first=first or len(numbers), **options)
    return lease_id, pool.one(BlocksLeased, "p0")


def batches(pool, source="c1"):
    return [tuple(int.from_bytes(key, "big") for key in ask.keys) for ask in pool.take(LeaseBlocks, source)]


def give(pool, *numbers, source="c1", ask=None):
    """The source's answer to its oldest request, and the copy."""
    pool.answer(ask or pool.take(LeaseBlocks, source)[0], *numbers, source=source)
    if numbers:
        pool.copied()


def came(pool):
    """(index, number) of the blocks that arrived, and whether the last message came."""
    arrived = pool.take(BlocksArrived, "p0")
    found = [(block, ref.checksum - 1000) for each in arrived for block, ref in zip(each.blocks, each.sources, strict=True)]
    return found, any(each.last for each in arrived)


def test_a_lease_from_the_tail_begins_at_once_and_its_blocks_come_from_the_last_on(pool):
    pool.store(1)
    lease_id, answer = begin(pool, *DOC)
    assert (len(answer.slots), answer.more, answer.remote) == (1, True, 0)
    asks = pool.take(LeaseBlocks, "c1")
    assert [ask.keys for ask in asks] == [keys(6), keys(5)], "two at a time"
    assert came(pool) == ([], False)
    for number in (6, 5, 4, 3, 2):
        ask = asks.pop(0)
        give(pool, number, ask=ask)
        assert came(pool) == ([(number - 1, number)], number == 2)
        asks += pool.take(LeaseBlocks, "c1")
    assert not asks
    assert pool.actor.gauges(pool.now)["leased_blocks"] == 6
    assert pool.actor.counts["lookup_blocks[result=remote]"] == 5
    pool.say("p0", ReleaseLease(lease_id=lease_id))
    assert pool.actor.gauges(pool.now)["leased_blocks"] == 0


@pytest.mark.parametrize(("took_s", "blocks"), [(0.00001, 25), (0.008, 15), (0.032, 3), (1.0, 1)])
def test_a_batch_is_an_eighth_of_what_no_source_was_asked_for_but_of_a_good_length_for_its_source(took_s, blocks):
    """Four blocks took so long."""
    pool = Pool(pool_bytes=40 * LAYOUT.slot_bytes)
    begin(pool, *range(1, 33))
    first, second = pool.take(LeaseBlocks, "c1")
    assert (first.keys, second.keys) == (keys(29, 30, 31, 32), keys(26, 27, 28))
    pool.answer(first, 29, 30, 31, 32)
    pool.now += took_s
    pool.copied()
    (batch,) = batches(pool)
    assert batch == tuple(range(26 - blocks, 26))


def test_what_the_holder_computes_is_not_fetched_and_the_end_is_said(pool):
    lease_id, _ = begin(pool, *DOC)
    asks = pool.take(LeaseBlocks, "c1")
    pool.say("p0", ShortenFetch(lease_id=lease_id, first=4))
    give(pool, 6, ask=asks[0])
    assert came(pool) == ([(5, 6)], False)
    assert pool.take(LeaseBlocks, "c1") == [], "5 is on its way, and 4 is not needed"
    give(pool, 5, ask=asks[1])
    assert came(pool) == ([(4, 5)], True)
    assert pool.actor.counts["lookup_misses[reason=computed_meanwhile]"] == 4


def test_a_holder_that_needs_nothing_more_gets_the_end_and_what_still_comes_is_kept(pool):
    lease_id, _ = begin(pool, *DOC)
    ask = pool.take(LeaseBlocks, "c1")[0]
    pool.answer(ask, 6)
    pool.say("p0", ShortenFetch(lease_id=lease_id, first=6))
    assert came(pool) == ([], True)
    pool.copied()
    assert came(pool) == ([], False)
    assert pool.held() == {6}
    pool.say("p0", ReleaseLease(lease_id=lease_id))
    assert pool.actor.gauges(pool.now)["leases"] == 0


def test_a_block_that_does_not_verify_is_missing_between_others_and_reported(pool):
    begin(pool, *DOC[:3])
    asks = pool.take(LeaseBlocks, "c1")
    pool.answer(asks[0], 3)
    pool.copied()
    pool.answer(asks[1], 2)
    pool.copied(corrupt=(0,))
    give(pool, 1)
    assert came(pool) == ([(2, 3), (0, 1)], True)
    assert pool.actor.counts["fetched_blocks_corrupt"] == 1


def test_a_source_that_lacks_the_tail_is_asked_for_what_is_before(pool):
    begin(pool, *DOC[:4])
    last, before = pool.take(LeaseBlocks, "c1")
    give(pool, ask=last)
    assert batches(pool) == [(2,)]
    give(pool, ask=before)
    assert batches(pool) == [(1,)]


def test_two_sources_share_a_fetch_from_the_tail(pool):
    begin(pool, *DOC, sources=("c1", "c2"))
    assert batches(pool) == [(6,), (4,)]
    assert batches(pool, "c2") == [(5,), (3,)]


def test_blocks_here_behind_one_that_is_missing_are_handed_over_at_once(pool):
    pool.store(4, 5)
    _, answer = begin(pool, *DOC[:5])
    assert not answer.slots
    assert came(pool) == ([(3, 4), (4, 5)], False)
    begin(pool, *DOC[:5], sources=())
    assert came(pool) == ([(3, 4), (4, 5)], True)


@pytest.mark.parametrize("first", [3, 2])
def test_what_is_all_here_is_leased_as_ever(pool, first):
    pool.store(1, 2, 3)
    lease_id, answer = begin(pool, 1, 2, 3, first=first)
    assert (len(answer.slots), answer.more) == (3, False)
    _, nothing = begin(pool, 8, 9, sources=())
    assert (nothing.slots, nothing.more) == ((), False)
    pool.say("p0", ReleaseLease(lease_id=lease_id))
    assert pool.actor.gauges(pool.now)["leases"] == 0


def test_at_the_deadline_a_lease_keeps_what_it_has_and_grows_no_more(pool):
    begin(pool, *DOC[:3], fetch_s=2.0)
    asks = pool.take(LeaseBlocks, "c1")
    give(pool, 3, ask=asks[0])
    pool.advance(2.5)
    assert came(pool) == ([(2, 3)], True)
    assert pool.actor.gauges(pool.now)["leased_blocks"] == 1


@pytest.mark.parametrize("end", ["release", "expiry", "death", "down"])
def test_a_lease_that_ends_while_it_grows_pins_nothing(pool, end):
    lease_id, _ = begin(pool, *DOC[:3], fetch_s=30.0, ttl_s=4.0)
    asks = pool.take(LeaseBlocks, "c1")
    give(pool, 3, ask=asks[0])
    pool.answer(asks[1], 2)
    match end:
        case "release":
            pool.say("p0", ReleaseLease(lease_id=lease_id))
        case "expiry":
            pool.advance(5.0)
        case "death":
            pool.down("p0")
            pool.up("p0", 2)
        case "down":
            pool.down("p0")
            pool.advance(5.0)
    pool.take(BlocksArrived)
    if any(isinstance(work, CopyBlocks) for work in pool.works.values()):
        pool.copied()
    assert came(pool) == ([], False)
    gauges = pool.actor.gauges(pool.now)
    assert (gauges["leases"], gauges["leased_blocks"], gauges["pending_leases"]) == (0, 0, 0)


def test_the_rate_that_was_measured_lately_is_said(pool):
    begin(pool, 1)
    ask = pool.take(LeaseBlocks, "c1")[0]
    pool.now += 0.5
    give(pool, 1, ask=ask)
    _, answer = begin(pool, 2, 3)
    assert answer.block_s == pytest.approx(0.5)
    _, unknown = begin(pool, 4, 5, sources=("c1", "c2"))
    assert unknown.block_s == 0.0, "of one of both nothing is known"
