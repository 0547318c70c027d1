"""One host's pool: leases, two-phase puts, fetches, quarantine, announcements. `check` runs after every event."""

import random
from dataclasses import replace

import pytest
from actor_harness import LAYOUT, Harness, leased
from msgspec import structs

from mooncake_zmq.core.actor import Publish, Received, Start, Started
from mooncake_zmq.core.messages import (
    MAX_FETCHED_BLOCKS,
    BlocksAnnounced,
    BlocksLeased,
    CacheLoad,
    ChangeReplica,
    CommitSlots,
    LeaseBlocks,
    LeaseRenewed,
    ReclaimSlots,
    ReleaseLease,
    RenewLease,
    ReportCorrupt,
    ReserveSlots,
    SlotRef,
    SlotsReserved,
)
from mooncake_zmq.core.work import (
    BlocksCopied,
    CopyBlocks,
    DiskBlock,
    DiskWritten,
    ProbeProcess,
    ProcessProbed,
    WorkFailed,
    WriteToDisk,
)
from mooncake_zmq.kv.events import BlocksStored, Medium
from mooncake_zmq.kv.slot_table import SlotState
from mooncake_zmq.pool.node import block_leases
from mooncake_zmq.pool.node.cache_node import CacheNode
from mooncake_zmq.pool.node.client import COPY_MARGIN
from mooncake_zmq.pool.node.disk_tier import DiskContents
from mooncake_zmq.pool.node.settings import CacheNodeSettings, KvEventsSettings, SsdSettings
from mooncake_zmq.pool.rules.holders import EXPIRE
from mooncake_zmq.pool.rules.tenants import PoolTenant

CAPACITY = 8
BASE = CacheNodeSettings(
    pool_bytes=CAPACITY * LAYOUT.slot_bytes, fetch_lease_s=20.0, max_lease_s=60.0, probe_s=1.0, max_put_share=1.0
)


def key(i):
    return i.to_bytes(16, "big")


def keys(*numbers):
    return tuple(key(i) for i in numbers)


def tokens(*numbers):
    """What these blocks hold."""
    return b"".join(bytes([i]) * LAYOUT.block_tokens * 4 for i in numbers)


EVENTS = KvEventsSettings(endpoint="tcp://*:5557")


class Pool(Harness):
    """A cache-node "me" with the local client p0, the remote pools c1 and c2, and the conductor k whose index is kept.

    With KV events, writers and sources tell tokens, and every event of a stored block must have them; `told`: these events.
    """

    def __init__(self, *, disk=DiskContents(), **settings):
        self.index = {}
        self.mediums = {medium: set() for medium in Medium}
        settings = replace(BASE, **settings)
        self.tells = bool(settings.kv_events.endpoint) and settings.kv_events.tokens
        self.told = []
        actor = CacheNode(name="me", host="h0", incarnation=3, settings=settings, layout=LAYOUT, disk=disk)
        super().__init__(actor)
        for name, host in (("p0", "h0"), ("d0", "h0"), ("c1", "h1"), ("c2", "h2"), ("k", "h0")):
            self.up(name, host=host)

    def up(self, name, incarnation=1, **options):
        if name.startswith("k"):
            self.index[name] = {}
        super().up(name, incarnation, **options)
        self.agree()

    def handle(self, event):
        effects = super().handle(event)
        self.agree()
        return effects

    def agree(self):
        for name, index in self.index.items():
            for message in self.take(BlocksAnnounced, name):
                assert sum(map(len, (message.stored, message.on_disk, message.removed))) == len(
                    {*message.stored, *message.on_disk, *message.removed}
                ), "each key is told once"
                index |= dict.fromkeys(message.stored, Medium.CPU) | dict.fromkeys(message.on_disk, Medium.DISK)
                for key in message.removed:
                    index.pop(key, None)
        slots, counts = self.actor.slots, self.actor.counts
        missed = sum(count for name, count in counts.items() if name.startswith("lookup_misses["))
        assert missed == counts.get("lookup_blocks[result=miss]", 0), "each miss has a reason"
        assert {slot: slots.generation[slot] for slot in self.fences} == self.fences, "every change is fenced"
        for event in self.published:
            if isinstance(event, BlocksStored):
                self.told.append(event)
                assert not self.tells or event.tokens == tokens(*[k[-1] for k in event.keys])
                self.mediums[event.medium].update(event.keys)
            else:
                assert self.mediums[event.medium].issuperset(event.keys), "only what was stored is removed"
                self.mediums[event.medium].difference_update(event.keys)
        self.published.clear()
        in_dram, on_disk = set(slots.committed_keys()), set(self.actor.disk.slots.committed_keys())
        assert self.mediums == {Medium.CPU: in_dram, Medium.DISK: on_disk}, "the events tell what is where"
        for name, index in self.index.items():
            if name in self.peers:
                here = dict.fromkeys(on_disk, Medium.DISK) | dict.fromkeys(in_dram, Medium.CPU)
                here = {} if self.cordons else here
                assert index == here, "the index says what is here, and in which tier"

    def put(self, *numbers, client="p0", put_id=None, parent=None, tenant="", spare=False):
        put_id = put_id or self.fresh()
        known = {"parent": parent, "tokens": tokens(*numbers)} if self.tells else {}
        self.say(client, ReserveSlots(put_id=put_id, keys=keys(*numbers), ttl_s=15.0, tenant=tenant, spare=spare, **known))
        return put_id, self.one(SlotsReserved, client)

    def store(self, *numbers, **options):
        put_id, reserved = self.put(*numbers, **options)
        sums = tuple((grant.index, 1000 + numbers[grant.index]) for grant in reserved.grants)
        self.say("p0", CommitSlots(put_id=put_id, checksums=sums))

    serial = 0

    def fresh(self):
        self.serial += 1
        return self.serial

    def lease(self, *numbers, client="p0", sources=(), **options):
        lease_id = self.fresh()
        options = {"fetch_s": 5.0, "ttl_s": 15.0} | options
        self.say(client, LeaseBlocks(lease_id=lease_id, keys=keys(*numbers), sources=sources, **options))
        return lease_id

    def leased(self, *numbers, **options):
        lease_id = self.lease(*numbers, **options)
        return lease_id, self.one(BlocksLeased).sources

    def answer(self, ask, *numbers, source="c1", parent=None):
        """The remote pool leases these blocks to us, which are a chain there."""
        refs = [SlotRef(node=source, incarnation=1, slot=i, generation=2, checksum=1000 + i) for i in numbers]
        answer = leased(ask.lease_id, refs, node=source)
        if ask.contents:
            parents = (parent, *keys(*numbers))[: len(numbers)]
            answer = structs.replace(answer, parents=parents, tokens=tuple(map(tokens, numbers)))
        self.say(source, answer)

    def written(self, *, fail=(), fault=""):
        """The older batch under way is on disk, but for those whose index is in `fail`."""
        work_id, work = self.batches()[0]
        self.done(work_id, DiskWritten(tuple(i not in fail for i in range(len(work.blocks))), fault))
        return tuple(int.from_bytes(block.key, "big") for _, block in work.blocks)

    def rows(self):
        """What is on disk, as a restart would find it."""
        slots, names = self.actor.disk.slots, self.actor._parts.tenants.names
        order = [slot for slot in slots.coldest(slots.capacity) if slots.key_of(slot)]
        return tuple(
            DiskBlock(slot, slots.key_of(slot), slots.checksum[slot], tenant=names[slots.owner_of(slot)]) for slot in order
        )

    def batches(self):
        """The demotions under way, the oldest first: (id, work)."""
        return [(work_id, work) for work_id, work in self.works.items() if isinstance(work, WriteToDisk)]

    def on_disk(self):
        return {int.from_bytes(k, "big") for k in self.actor.disk.slots.committed_keys()}

    def copied(self, *, fail=(), corrupt=(), fault=""):
        work_id, work = self.work(CopyBlocks)
        sums = [source.checksum for source, _ in work.copies]
        for i in fail:
            sums[i] = None
        for i in corrupt:
            sums[i] = None
        self.done(work_id, BlocksCopied(tuple(sums), tuple(corrupt), fault))

    def held(self):
        return {int.from_bytes(k, "big") for k in self.actor.slots.committed_keys()}


@pytest.fixture
def pool():
    return Pool()


# --- leases


def test_a_lease_covers_the_leading_run_and_keeps_it_from_eviction(pool):
    pool.store(1, 2, 3)
    pool.lease(1, 2, 9, 3)
    answer = pool.one(BlocksLeased)
    assert (answer.checksums, answer.remote) == ((1001, 1002), 0)
    pool.store(*range(10, 10 + CAPACITY))
    assert {1, 2} <= pool.held()
    assert 3 not in pool.held()


def test_a_released_lease_ends_at_once_and_only_once(pool):
    pool.store(1)
    lease_id, _ = pool.leased(1)
    assert pool.busy()["leases"] == 1
    pool.say("p0", ReleaseLease(lease_id=lease_id))
    pool.say("p0", ReleaseLease(lease_id=lease_id))
    assert pool.busy() == {}


def test_what_another_pool_keeps_as_well_goes_before_what_was_used_a_little_earlier(pool):
    pool.store(1, 2)
    pool.store(3, spare=True)
    pool.store(4, 5)
    pool.store(10, 11, 12)
    pool.store(13)
    assert pool.held() == {1, 2, 4, 5, 10, 11, 12, 13}, "put as spare"
    lease_id, _ = pool.leased(1, 2)
    pool.say("p0", ReleaseLease(lease_id=lease_id, spare=True))
    lease_id, _ = pool.leased(4, 5, client="c1")
    pool.say("c1", ReleaseLease(lease_id=lease_id))
    pool.store(20)
    pool.store(21)
    assert pool.held() == {4, 5, 10, 11, 12, 13, 20, 21}, "read as spare, and used after all but 4 and 5"
    pool.store(22)
    pool.store(23)
    assert pool.held() == {4, 5, 10, 13, 20, 21, 22, 23}, "a slot's next block is not spare"


def test_a_lease_ends_by_the_granters_clock(pool):
    pool.store(1)
    pool.leased(1, ttl_s=10.0)
    pool.advance(9.99)
    assert pool.busy()["leases"] == 1
    pool.advance(0.02)
    assert pool.busy() == {}
    assert pool.actor.counts["leases_expired"] == 1


def test_a_renewed_lease_counts_from_the_renewal_and_a_gone_one_is_not_confirmed(pool):
    pool.store(1)
    lease_id, _ = pool.leased(1, ttl_s=10.0)
    pool.advance(8.0)
    pool.say("p0", RenewLease(lease_id=lease_id, ttl_s=10.0))
    assert pool.one(LeaseRenewed) == LeaseRenewed(lease_id=lease_id)
    pool.advance(9.0)
    assert pool.busy()["leases"] == 1
    pool.advance(1.1)
    assert pool.busy() == {}
    pool.say("p0", RenewLease(lease_id=lease_id, ttl_s=10.0))
    assert pool.take(LeaseRenewed) == []


def test_no_lease_is_longer_than_the_longest_allowed(pool):
    pool.store(1)
    pool.leased(1, ttl_s=1e6)
    pool.advance(BASE.max_lease_s + 0.1)
    assert pool.busy() == {}


def test_a_committed_put_leaves_no_timer(pool):
    pool.store(1, 2)
    assert len(pool.actor._holders.ends) == 0


def test_a_lease_timer_that_fires_early_does_not_lose_the_lease(pool):
    pool.store(1)
    pool.leased(1, ttl_s=10.0)
    (timer,) = [t for t in pool.timers if t == EXPIRE]
    pool.timers[timer] -= 0.5
    pool.advance(9.7)
    assert pool.busy()["leases"] == 1
    pool.advance(0.4)
    assert pool.busy() == {}


def test_leases_of_one_client_are_limited():
    pool = Pool(max_leases_per_client=2)
    pool.store(1)
    for _ in range(2):
        assert len(pool.leased(1)[1]) == 1
    assert pool.leased(1)[1] == ()
    assert len(pool.leased(1, client="d0")[1]) == 1


def test_a_lease_survives_a_cut_off_holder_until_it_expires_but_not_a_dead_one(pool):
    pool.store(1)
    pool.leased(1, ttl_s=10.0)
    pool.down("p0")
    assert pool.busy()["leases"] == 1
    pool.up("p0", 1)
    assert pool.busy()["leases"] == 1
    pool.down("p0")
    pool.up("p0", 2)
    assert pool.busy() == {}


def test_a_later_life_does_not_inherit_a_lease_of_the_same_number(pool):
    pool.store(1)
    lease_id, _ = pool.leased(1, client="p0")
    pool.say("d0", ReleaseLease(lease_id=lease_id))
    assert pool.busy()["leases"] == 1


def test_an_empty_lease_leaves_nothing_behind(pool):
    assert pool.leased(1, 2)[1] == ()
    assert pool.busy() == {}


# --- fetches


def test_missing_blocks_are_fetched_from_a_source_and_named_remote(pool):
    pool.store(1)
    pool.lease(1, 2, 3, sources=("c1",))
    ask = pool.one(LeaseBlocks, "c1")
    assert ask.keys == keys(2, 3)
    assert ask.sources == (), "a source asks nobody else"
    pool.answer(ask, 2, 3)
    pool.copied()
    assert pool.one(BlocksLeased, "p0").remote == 2
    assert ReleaseLease(lease_id=ask.lease_id) in pool.take(ReleaseLease, "c1")
    assert pool.held() == {1, 2, 3}


def test_what_one_source_lacks_comes_from_the_next(pool):
    pool.lease(1, 2, 3, sources=("c1", "c2"))
    pool.answer(pool.one(LeaseBlocks, "c1"), 1)
    pool.copied()
    second = pool.one(LeaseBlocks, "c2")
    assert second.keys == keys(2, 3)
    pool.answer(second, 2, 3, source="c2")
    pool.copied()
    assert len(pool.one(BlocksLeased, "p0").slots) == 3


def test_a_long_fetch_goes_in_batches_two_at_a_time():
    pool = Pool(fetch_batch_blocks=2)
    pool.lease(1, 2, 3, 4, 5, sources=("c1",))
    first, second = pool.take(LeaseBlocks, "c1")
    assert (first.keys, second.keys) == (keys(1, 2), keys(3, 4))
    pool.answer(first, 1, 2)
    assert pool.take(LeaseBlocks) == []
    pool.copied()
    third = pool.one(LeaseBlocks, "c1")
    assert third.keys == keys(5)
    for ask, batch in ((third, (5,)), (second, (3, 4))):
        pool.answer(ask, *batch)
        pool.copied()
    assert len(pool.one(BlocksLeased, "p0").slots) == 5


def test_several_sources_share_a_fetch():
    pool = Pool(fetch_batch_blocks=2)
    pool.lease(1, 2, 3, 4, 5, 6, sources=("c1", "c2"))
    first, third = pool.take(LeaseBlocks, "c1")
    (second,) = pool.take(LeaseBlocks, "c2")
    assert [ask.keys for ask in (first, second, third)] == [keys(1, 2), keys(3, 4), keys(5, 6)]
    for ask, source, batch in ((first, "c1", (1, 2)), (second, "c2", (3, 4)), (third, "c1", (5, 6))):
        pool.answer(ask, *batch, source=source)
        pool.copied()
    assert pool.one(BlocksLeased, "p0").remote == 6


def test_a_source_slower_than_computing_is_not_asked_again_for_a_while(pool):
    pool.lease(1, sources=("c1",), compute_s=0.5)
    ask = pool.one(LeaseBlocks, "c1")
    pool.advance(1.0)
    pool.answer(ask, 1)
    pool.copied()
    assert len(pool.one(BlocksLeased, "p0").slots) == 1
    assert pool.leased(2, sources=("c1",), compute_s=0.5)[1] == ()
    pool.lease(3, sources=("c1",), compute_s=5.0)
    assert pool.one(LeaseBlocks, "c1").keys == keys(3), "computing would take longer"
    pool.advance(40.0)
    pool.lease(4, sources=("c1",), compute_s=0.5)
    assert pool.one(LeaseBlocks, "c1").keys == keys(4)


def test_the_deadline_answers_with_what_is_here(pool):
    pool.store(1)
    pool.lease(1, 2, sources=("c1",), fetch_s=5.0)
    pool.advance(5.1)
    assert pool.one(BlocksLeased, "p0").checksums == (1001,)
    ask = pool.one(LeaseBlocks, "c1")
    pool.answer(ask, 2)
    assert pool.works == {}, "nobody waits for it any more"
    assert ReleaseLease(lease_id=ask.lease_id) in pool.take(ReleaseLease, "c1")


def test_a_copy_still_flying_at_the_deadline_is_kept_for_later(pool):
    pool.lease(1, sources=("c1",), fetch_s=5.0)
    pool.answer(pool.one(LeaseBlocks, "c1"), 1)
    pool.advance(5.1)
    assert pool.one(BlocksLeased, "p0").slots == ()
    pool.copied()
    assert pool.held() == {1}
    assert pool.busy() == {}


def test_two_leases_of_the_same_blocks_copy_them_once(pool):
    pool.lease(1, 2, sources=("c1",))
    first = pool.one(LeaseBlocks, "c1")
    pool.lease(1, 2, client="d0", sources=("c2",))
    second = pool.one(LeaseBlocks, "c2")
    pool.answer(first, 1, 2)
    pool.answer(second, 1, 2, source="c2")
    assert len(pool.works) == 1
    pool.copied()
    assert len(pool.one(BlocksLeased, "p0").slots) == 2
    assert len(pool.one(BlocksLeased, "d0").slots) == 2


def test_a_waiting_lease_asks_its_own_source_when_the_other_fetch_fails(pool):
    pool.lease(1, sources=("c1",))
    pool.answer(pool.one(LeaseBlocks, "c1"), 1)
    pool.lease(1, client="d0", sources=("c2",))
    assert pool.take(LeaseBlocks) == [], "it is on its way"
    work_id, _ = pool.work(CopyBlocks)
    pool.done(work_id, WorkFailed("test"))
    assert pool.one(BlocksLeased, "p0").slots == ()
    pool.answer(pool.one(LeaseBlocks, "c2"), 1, source="c2")
    pool.copied()
    assert len(pool.one(BlocksLeased, "d0").slots) == 1


def test_a_copy_that_does_not_verify_is_a_miss_and_reported_to_its_source(pool):
    pool.lease(1, 2, sources=("c1",))
    pool.answer(pool.one(LeaseBlocks, "c1"), 1, 2)
    pool.copied(corrupt=(1,))
    assert len(pool.one(BlocksLeased, "p0").slots) == 1
    assert [ref.slot for ref in pool.one(ReportCorrupt, "c1").slots] == [2]
    assert pool.held() == {1}


def test_a_copy_that_did_not_arrive_says_nothing_about_its_source(pool):
    pool.lease(1, 2, sources=("c1",), fetch_s=5.0)
    pool.answer(pool.one(LeaseBlocks, "c1"), 1, 2)
    pool.copied(fail=(1,))
    leased = pool.one(BlocksLeased, "p0")
    assert len(leased.slots) == 1
    pool.say("p0", ReleaseLease(lease_id=leased.lease_id))
    assert pool.take(ReportCorrupt) == []
    assert pool.held() == {1}
    assert pool.busy() == {}


def test_a_source_that_goes_down_is_left_for_the_next(pool):
    pool.lease(1, sources=("c1", "c2"))
    pool.take(LeaseBlocks, "c1")
    pool.down("c1")
    pool.answer(pool.one(LeaseBlocks, "c2"), 1, source="c2")
    pool.copied()
    assert len(pool.one(BlocksLeased, "p0").slots) == 1


def test_a_source_that_is_no_cache_node_is_never_asked(pool):
    assert pool.leased(1, sources=("k", "p0", "me", "nobody"))[1] == ()


def test_a_fetch_into_a_full_pool_is_given_up(pool):
    pool.store(*range(10, 10 + CAPACITY))
    pool.leased(*range(10, 10 + CAPACITY))
    pool.lease(1, client="d0", sources=("c1",))
    pool.answer(pool.one(LeaseBlocks, "c1"), 1)
    assert pool.one(BlocksLeased, "d0").slots == ()
    assert pool.actor.counts["fetches_denied[reason=no_room]"] == 1


def test_a_client_that_goes_down_while_it_waits_pins_nothing(pool):
    pool.store(1)
    pool.lease(1, 2, sources=("c1",))
    ask = pool.one(LeaseBlocks, "c1")
    pool.down("p0")
    assert pool.busy() == {"fetches": 1}
    pool.answer(ask, 2)
    assert pool.busy() == {}


def test_a_release_while_the_fetch_runs_ends_the_wait(pool):
    lease_id = pool.lease(1, sources=("c1",))
    pool.answer(pool.one(LeaseBlocks, "c1"), 1)
    pool.say("p0", ReleaseLease(lease_id=lease_id))
    pool.copied()
    assert pool.take(BlocksLeased, "p0") == []
    assert pool.busy() == {}


@pytest.mark.parametrize("when", ["answered", "copied"])
def test_a_number_used_for_two_lists_gets_what_was_asked_for_last(pool, when):
    options = {"sources": ("c1",), "fetch_s": 5.0, "ttl_s": 15.0}
    pool.say("p0", LeaseBlocks(lease_id=1, keys=keys(1, 2), **options))
    first = pool.one(LeaseBlocks, "c1")
    if when == "copied":
        pool.answer(first, 1, 2)
    pool.say("p0", ReleaseLease(lease_id=1))
    pool.say("p0", LeaseBlocks(lease_id=1, keys=keys(3, 4), **options))
    second = pool.one(LeaseBlocks, "c1")
    if when == "answered":
        pool.answer(first, 1)
    else:
        pool.copied(fail=(0,))
    pool.answer(second, 3, 4)
    pool.copied()
    assert len(pool.one(BlocksLeased, "p0").slots) == 2
    pool.say("p0", ReleaseLease(lease_id=1))
    assert {3, 4} <= pool.held()
    assert pool.busy() == {}


def test_a_copy_from_a_source_ends_well_before_its_lease_there(pool):
    pool.lease(1, sources=("c1",), fetch_s=60.0)
    ask = pool.one(LeaseBlocks, "c1")
    pool.advance(1.0)
    refs = [SlotRef(node="c1", incarnation=1, slot=1, generation=2, checksum=1001)]
    effects = pool.handle(Received("c1", leased(ask.lease_id, refs, node="c1")))
    (start,) = [effect for effect in effects if isinstance(effect, Start)]
    assert start.deadline_s == pytest.approx(ask.ttl_s * (1 - COPY_MARGIN) - 1.0)


# --- what fetching takes


def told(pool):
    pool.take(CacheLoad)
    pool.advance(pool.actor._parts.settings.report_s)
    return {
        rate.source: (rate.block_s, rate.pending_blocks) for load in pool.take(CacheLoad, "k")[-1:] for rate in load.sources
    }


def test_a_report_tells_what_is_under_way_and_what_a_block_took_by_source():
    pool = disk_pool(recovered=(7,), report_s=0.5)
    pool.lease(1, 2, sources=("c1",))
    pool.lease(7, client="d0")
    assert told(pool) == {"c1": (0.0, 2), "": (0.0, 1)}
    work_id, work = pool.work(CopyBlocks)
    pool.done(work_id, BlocksCopied(tuple(source.checksum for source, _ in work.copies)))
    pool.answer(pool.one(LeaseBlocks, "c1"), 1, 2)
    pool.advance(0.5)
    pool.copied()
    assert told(pool) == {"c1": (pytest.approx(0.5), 0), "": (pytest.approx(0.5), 0)}


def test_batches_that_overlap_are_not_each_counted_from_when_they_were_asked_for():
    """Two batches of two are under way at once, and a block takes half a second."""
    pool = Pool(fetch_batch_blocks=2)
    pool.lease(1, 2, 3, 4, sources=("c1",), fetch_s=50.0)
    asked = pool.take(LeaseBlocks, "c1")
    assert [len(ask.keys) for ask in asked] == [2, 2]
    for ask, numbers in zip(asked, ((1, 2), (3, 4)), strict=True):
        pool.advance(1.0)
        pool.answer(ask, *numbers)
        pool.copied()
    assert told(pool) == {"c1": (pytest.approx(0.5), 0)}


def test_a_node_that_fetches_nothing_tells_nothing_and_one_that_did_falls_silent(pool):
    pool.store(1)
    pool.leased(1)
    pool.advance(10.0)
    assert pool.take(CacheLoad) == []
    pool.lease(2, sources=("c1",))
    pool.answer(pool.one(LeaseBlocks, "c1"), 2)
    pool.copied()
    pool.advance(40.0)
    loads = pool.take(CacheLoad, "k")
    assert 50 < len(loads) < 70
    assert loads[-1].sources == ()
    pool.advance(100.0)
    assert pool.take(CacheLoad) == []
    assert not [key for key in pool.timers if key[0] == "report"]


# --- puts


def test_a_put_becomes_visible_at_its_commit_and_not_before(pool):
    put_id, reserved = pool.put(1, 2)
    assert all(grant.generation % 2 for grant in reserved.grants)
    assert pool.leased(1)[1] == ()
    pool.say("p0", CommitSlots(put_id=put_id, checksums=((0, 7),)))
    assert pool.held() == {1}, "a grant without a checksum is given back"
    assert pool.leased(1)[1][0].checksum == 7


def test_keys_held_or_being_written_are_not_granted_again(pool):
    pool.store(1)
    pool.put(2)
    _, reserved = pool.put(1, 2, 3, client="d0")
    assert [grant.index for grant in reserved.grants] == [2]
    assert pool.actor.counts["put_blocks[result=held]"] == 2


def test_a_put_finds_room_by_evicting_and_is_denied_when_all_is_pinned(pool):
    pool.store(*range(CAPACITY))
    _, reserved = pool.put(20)
    assert len(reserved.grants) == 1
    pool.leased(*range(CAPACITY))
    _, reserved = pool.put(*range(30, 30 + CAPACITY))
    denied = pool.actor.counts["put_blocks[result=denied]"]
    assert denied > 0
    assert len(reserved.grants) + denied == CAPACITY


def test_a_lease_that_waits_for_a_copy_gets_it_from_a_commit_too(pool):
    pool.lease(1, sources=("c1",))
    put_id, _ = pool.put(1, client="d0")
    pool.say("d0", CommitSlots(put_id=put_id, checksums=((0, 5),)))
    pool.answer(pool.one(LeaseBlocks, "c1"), 1)
    assert pool.one(BlocksLeased, "p0").checksums[0] == 5
    assert pool.works == {}


def late_put(pool, *numbers):
    put_id, reserved = pool.put(*numbers)
    pool.advance(15.1)
    assert pool.busy() == {"quarantined_blocks": len(numbers)}
    return put_id, reserved


def test_a_late_writers_slots_are_nobodys_until_it_answers(pool):
    put_id, reserved = late_put(pool, 1)
    assert pool.take(ReclaimSlots, "p0")[0] == ReclaimSlots(put_id=put_id)
    granted = {grant.slot for grant in reserved.grants}
    _, others = pool.put(*range(20, 20 + CAPACITY), client="d0")
    assert not granted & {grant.slot for grant in others.grants}
    pool.say("p0", CommitSlots(put_id=put_id, checksums=((0, 1001),)))
    assert 1 not in pool.held(), "too late to count"
    assert pool.actor.slots.available == 1


def test_a_late_writers_key_may_be_put_by_another(pool):
    late_put(pool, 1)
    put_id, reserved = pool.put(1, client="d0")
    assert len(reserved.grants) == 1
    pool.say("d0", CommitSlots(put_id=put_id, checksums=((0, 4),)))
    assert pool.held() == {1}


def test_a_late_writer_known_dead_gives_its_slots_back(pool):
    pool.down("p0")
    pool.up("p0")
    late_put(pool, 1, 2)
    pool.down("p0")
    work_id, work = pool.work(ProbeProcess)
    assert (work.node, work.incarnation) == ("p0", 1)
    pool.done(work_id, ProcessProbed(alive=True))
    pool.advance(1.1)
    assert pool.busy() == {"quarantined_blocks": 2}
    pool.done(pool.work(ProbeProcess)[0], WorkFailed("test"))
    pool.advance(1.1)
    assert pool.busy() == {"quarantined_blocks": 2}, "not knowing is not dead"
    pool.done(pool.work(ProbeProcess)[0], ProcessProbed(alive=False))
    assert pool.busy() == {}


def test_a_late_writers_next_life_frees_its_slots(pool):
    late_put(pool, 1)
    pool.down("p0")
    pool.up("p0", 1)
    assert pool.busy() == {"quarantined_blocks": 1}
    pool.down("p0")
    pool.up("p0", 2)
    assert pool.busy() == {}


def test_a_client_may_reserve_or_leave_in_quarantine_only_its_share():
    pool = Pool(max_put_share=0.25)
    assert len(pool.put(1, 2, 3)[1].grants) == 2, "a quarter of 8"
    pool.advance(15.1)
    assert pool.busy() == {"quarantined_blocks": 2}
    _, reserved = pool.put(4)
    assert reserved.grants == ()
    assert len(pool.put(4, client="d0")[1].grants) == 1


def test_a_commit_of_an_unknown_put_changes_nothing(pool):
    pool.say("p0", CommitSlots(put_id=99, checksums=((0, 1),)))
    assert pool.held() == set()


# --- corrupt copies, announcements, ends


def test_a_reported_copy_is_forgotten_unless_the_slot_has_moved_on(pool):
    pool.store(1)
    _, blocks = pool.leased(1)
    stale = SlotRef(node="me", incarnation=3, slot=blocks[0].slot, generation=0, checksum=1)
    other_incarnation = SlotRef(node="me", incarnation=2, slot=blocks[0].slot, generation=2, checksum=1)
    absurd = SlotRef(node="me", incarnation=3, slot=10_000, generation=2, checksum=1)
    pool.say("d0", ReportCorrupt(slots=(stale, other_incarnation, absurd)))
    assert pool.held() == {1}
    pool.say("d0", ReportCorrupt(slots=(blocks[0],)))
    assert pool.held() == set()
    assert pool.leased(1, client="d0")[1] == ()


def test_conductors_hear_the_whole_set_at_first_and_changes_later(pool):
    pool.store(1, 2)
    pool.up("k2")
    assert pool.index["k2"].keys() == {key(1), key(2)}
    pool.store(*range(10, 10 + CAPACITY - 1))
    assert pool.index["k"] == pool.index["k2"] == dict.fromkeys(pool.actor.slots.committed_keys(), Medium.CPU)
    assert len(pool.index["k"]) == CAPACITY


@pytest.mark.parametrize("held", [0, 3])
def test_a_conductor_is_told_when_it_has_heard_the_whole_set(held):
    said = []

    class Listening(Pool):
        def take(self, kind, to=None):
            taken = super().take(kind, to)
            said.extend(taken if to == "k2" else ())
            return taken

    pool = Listening()
    if held:
        pool.store(*range(1, held + 1))
    pool.up("k2")
    assert [len(message.stored) for message in said if not message.complete] == ([held] if held else [])
    assert [message.complete for message in said][-1:] == [True]
    said.clear()
    pool.store(7)
    assert [message.complete for message in said] == [False], "what changes later is told as it comes"


# --- tenants


ALICE = PoolTenant(name="alice", dram_bytes=3 * LAYOUT.slot_bytes)
BOB = PoolTenant(name="bob", dram_bytes=2 * LAYOUT.slot_bytes)


def of_tenant(pool, tenant, tier="dram"):
    return pool.actor.gauges(pool.now)[f"cached_tenant_blocks[tenant={tenant},tier={tier}]"]


def test_a_tenant_over_its_share_makes_room_among_its_own_blocks():
    pool = Pool(tenants=(ALICE, BOB))
    pool.store(1, 2, tenant="bob")
    pool.store(3, 4, 5, tenant="alice")
    pool.store(6, tenant="alice")
    assert pool.held() == {1, 2, 3, 4, 6}, "its leaf went, though slots are free"
    pool.store(*range(10, 18), tenant="alice")
    assert len(pool.held()) == 5
    assert {1, 2} < pool.held()
    assert (of_tenant(pool, "alice"), of_tenant(pool, "bob")) == (3, 2)
    assert pool.actor.counts["tenant_put_blocks[tenant=alice,result=denied]"] == 5


def test_within_its_share_a_tenant_loses_nothing_to_puts_of_others():
    pool = Pool(tenants=(ALICE, BOB))
    pool.store(1, 2, 3, tenant="alice")
    for number in range(10, 30):
        pool.store(number, tenant="stranger" if number % 2 else "")
    assert {1, 2, 3} < pool.held()
    pool.store(4, 5, tenant="bob")
    assert {1, 2, 3, 4, 5} < pool.held(), "its share comes from those who have none"


def test_what_is_being_read_is_not_the_room_of_its_tenant():
    pool = Pool(tenants=(ALICE,))
    pool.store(1, 2, 3, tenant="alice")
    pool.lease(1, 2)
    pool.store(4, 5, tenant="alice")
    assert pool.held() == {1, 2, 4}


def test_copies_from_another_host_are_whose_they_are_there():
    pool = Pool(tenants=(ALICE, BOB))
    pool.lease(*range(1, 6), sources=("c1",))
    ask = pool.one(LeaseBlocks, "c1")
    refs = [SlotRef(node="c1", incarnation=1, slot=i, generation=2, checksum=1000 + i) for i in range(1, 6)]
    told = ("alice", "alice", "stranger", "alice", "alice")
    pool.say("c1", structs.replace(leased(ask.lease_id, refs, node="c1"), tenants=told))
    pool.copied()
    assert pool.held() == {1, 2, 3, 4}, "all that are asked for are pinned, and there is no room for the last of hers"
    assert of_tenant(pool, "alice") == 3


def test_another_cache_node_is_told_whose_blocks_are_and_nobody_else_is():
    pool = Pool(tenants=(ALICE,))
    pool.store(1, tenant="alice")
    pool.store(2, 3)
    for client, told in (("p0", ()), ("c1", ("alice", "", ""))):
        pool.lease(1, 2, 3, client=client)
        assert pool.one(BlocksLeased, client).tenants == told
    pool.lease(2, 3, client="c1")
    assert pool.take(BlocksLeased, "c1")[-1].tenants == ()


def test_a_tenants_blocks_on_disk_are_its_own_after_a_restart_and_no_more_than_its_share():
    ssd = SsdSettings(ahead=1.0, batch_blocks=3, directory="d", bytes=20)
    tenants = (replace(ALICE, ssd_bytes=4), replace(BOB, ssd_bytes=8))
    pool = Pool(disk=DiskContents(20), ssd=ssd, tenants=tenants)
    for number in range(1, 11):
        pool.store(number, tenant="alice")
        pool.store(100 + number, tenant="bob" if number < 3 else "")
        while pool.batches():
            pool.written()
    assert (of_tenant(pool, "alice", "disk"), of_tenant(pool, "bob", "disk")) == (4, 2)
    assert {101, 102} < pool.on_disk()
    rows = pool.rows()
    again = Pool(disk=DiskContents(20, rows), ssd=ssd, tenants=tenants)
    assert again.on_disk() == pool.on_disk()
    assert (of_tenant(again, "alice", "disk"), of_tenant(again, "bob", "disk")) == (4, 2)
    again.lease(102)
    again.copied()
    assert of_tenant(again, "bob") == 1, "promoted"
    less = Pool(disk=DiskContents(20, rows), ssd=ssd, tenants=(replace(ALICE, ssd_bytes=1),))
    assert of_tenant(less, "alice", "disk") == 1
    assert len(less.on_disk()) == len(rows) - 3


def test_a_tenant_at_its_share_of_a_pool_that_is_empty_otherwise_goes_to_disk_ahead_of_need():
    pool = Pool(disk=DiskContents(20), ssd=SsdSettings(ahead=0.5, batch_blocks=1, directory="d", bytes=20), tenants=(ALICE,))
    pool.store(1, 2, 3, tenant="alice")
    assert pool.written() == (3,)
    pool.store(4, tenant="alice")
    assert pool.on_disk() == {3}
    assert "evicted_unsaved_blocks" not in pool.actor.counts


# --- SSD


def test_conductors_hear_which_tier_a_block_is_in_as_it_moves():
    pool = disk_pool(recovered=(9,))
    assert pool.index["k"] == {key(9): Medium.DISK}
    pool.lease(9)
    pool.copied()
    assert pool.index["k"] == {key(9): Medium.CPU}, "promoted"
    pool.say("p0", ReleaseLease(lease_id=pool.one(BlocksLeased).lease_id))
    while pool.batches():
        pool.written()
    pool.store(*range(20, 20 + CAPACITY))
    assert pool.index["k"][key(9)] is Medium.DISK, "demoted, and gone from DRAM"
    pool.up("k2")
    assert pool.index["k2"] == pool.index["k"]


def disk_pool(slots=20, ahead=1.0, recovered=(), **settings):
    blocks = tuple(DiskBlock(i, key(number), 1000 + number) for i, number in enumerate(recovered))
    return Pool(disk=DiskContents(slots, blocks), ssd=SsdSettings(ahead=ahead, batch_blocks=3), **settings)


def test_the_coldest_blocks_are_written_ahead_of_need_in_batches():
    pool = disk_pool(ahead=0.5)
    pool.store(1, 2, 3)
    assert not pool.works, "half of the pool is free still"
    pool.store(4, 5, 6)
    assert pool.written() == (3, 2), "all but the coldest may stay in DRAM alone, and children are colder than their parents"
    assert not pool.works
    pool.store(7, 8)
    assert pool.written() == (1, 6), "what was written is as cold as before"
    assert pool.on_disk() == {1, 2, 3, 6}
    slots = pool.actor.slots
    assert [int.from_bytes(slots.key_of(slot), "big") for slot in slots.coldest(8)] == [3, 2, 1, 6, 5, 4, 8, 7]


def test_a_second_batch_is_written_beside_the_first_if_it_is_full():
    pool = disk_pool()
    pool.store(*range(1, 9))
    assert [len(work.blocks) for _, work in pool.batches()] == [3, 3]
    assert pool.actor.gauges(pool.now)["demoting_blocks"] == 6
    pool.written()
    assert len(pool.batches()) == 1, "what is left fills no batch"
    pool.written()
    assert [len(work.blocks) for _, work in pool.batches()] == [2]
    pool.written()
    assert pool.on_disk() == set(range(1, 9))
    assert not pool.works


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_batches_a_fault_of_one_takes_nothing_from_the_other(first):
    pool = disk_pool()
    pool.store(*range(1, 9))
    batches = pool.batches()
    kept = {int.from_bytes(block.key, "big") for _, block in batches[1 - first][1].blocks}
    for at in (first, 1 - first):
        work_id, work = batches[at]
        fine = at != first
        pool.done(work_id, DiskWritten((fine,) * len(work.blocks), "" if fine else "no space left"))
    assert pool.on_disk() == kept
    assert not pool.works, "nothing more is written"


def test_a_block_evicted_from_dram_is_promoted_for_a_lease():
    pool = disk_pool()
    pool.store(1, 2)
    pool.written()
    pool.lease(*range(100, 100 + CAPACITY), sources=("c1",))
    pool.answer(pool.one(LeaseBlocks, "c1"), *range(100, 100 + CAPACITY))
    pool.copied()
    pool.say("p0", ReleaseLease(lease_id=pool.one(BlocksLeased, "p0").lease_id))
    while pool.batches():
        pool.written()
    assert 1 not in pool.held()
    assert 1 in pool.on_disk()
    pool.lease(1, 2)
    _, work = pool.work(CopyBlocks)
    assert [(source.key, source.checksum) for source, _ in work.copies] == [(key(1), 1001), (key(2), 1002)]
    pool.copied()
    leased = pool.one(BlocksLeased, "p0")
    assert leased.remote == 0
    assert pool.actor.counts["lookup_blocks[result=disk]"] == 2


def test_a_restart_serves_what_the_recovery_found():
    pool = disk_pool(recovered=(1, 2, 3))
    assert pool.index["k"] == dict.fromkeys(keys(1, 2, 3), Medium.DISK)
    pool.lease(1, 2, 3)
    pool.copied()
    assert len(pool.one(BlocksLeased, "p0").slots) == 3


def test_of_a_chain_promoted_the_leaf_is_the_next_to_leave_the_disk():
    pool = disk_pool(recovered=(3, 1, 4, 2))
    pool.lease(1, 2, 3, 4)
    pool.copied()
    slots = pool.actor.disk.slots
    assert [slots.key_of(slot) for slot in slots.coldest(4)] == list(keys(4, 3, 2, 1))


def test_another_pool_is_served_from_disk_too():
    pool = disk_pool(recovered=(1, 2))
    pool.say("c1", LeaseBlocks(lease_id=1, keys=keys(1, 2), sources=(), fetch_s=5.0, ttl_s=15.0))
    pool.copied()
    assert len(pool.one(BlocksLeased, "c1").slots) == 2


def test_disk_and_other_pools_are_asked_at_once():
    pool = disk_pool(recovered=(1, 2))
    pool.lease(1, 2, 3, sources=("c1",))
    ask = pool.one(LeaseBlocks, "c1")
    assert ask.keys == keys(3)
    pool.copied()
    pool.answer(ask, 3)
    pool.copied()
    assert pool.one(BlocksLeased, "p0").remote == 1


def test_a_disk_copy_that_does_not_verify_is_a_miss_and_its_slot_never_used_again():
    pool = disk_pool(recovered=(1, 2))
    pool.lease(1, 2)
    pool.copied(corrupt=(1,))
    assert len(pool.one(BlocksLeased, "p0").slots) == 1
    assert pool.on_disk() == {1}
    assert pool.actor.counts["corrupt_blocks[tier=disk]"] == 1
    assert pool.actor.disk.slots.state_of(1) is SlotState.RETIRED


def test_a_corrupt_disk_copy_is_had_from_another_pool_instead():
    pool = disk_pool(recovered=(1,))
    pool.lease(1, sources=("c1",))
    pool.copied(corrupt=(0,))
    pool.answer(pool.one(LeaseBlocks, "c1"), 1)
    pool.copied()
    assert pool.one(BlocksLeased, "p0").remote == 1


def test_a_full_disk_is_read_but_not_written_any_more():
    pool = disk_pool(recovered=(9,))
    pool.store(1, 2)
    pool.written(fail=(0, 1), fault="no space left")
    pool.store(3)
    assert not pool.works
    assert pool.actor.gauges(pool.now)["capacity_disk_blocks"] == 0
    assert pool.actor.dump(pool.now)["disk"]["fault"] == "no space left"
    pool.lease(9)
    pool.copied()
    assert len(pool.one(BlocksLeased, "p0").slots) == 1


def degraded(pool):
    gauges = pool.actor.gauges(pool.now)
    return [what for what in ("reads", "writes") if gauges[f"disk_degraded[what={what}]"]]


def test_a_disk_that_was_full_is_written_again_once_there_is_room():
    pool = disk_pool(recovered=(9,))
    pool.store(1, 2)
    pool.written(fail=(0, 1), fault="no space left")
    assert degraded(pool) == ["writes"]
    pool.store(3)
    pool.lease(9)
    pool.copied()
    assert len(pool.one(BlocksLeased, "p0").slots) == 1, "it is read meanwhile"
    pool.advance(1.5)
    assert degraded(pool) == []
    assert set(pool.written()) >= {1, 2}, "what was not written then is, and what came meanwhile"
    while pool.works:
        pool.written()
    assert {1, 2, 3} <= pool.on_disk()
    assert pool.actor.dump(pool.now)["disk"]["fault"] == ""
    pool.advance(1000)
    assert pool.actor.counts["disk_retries"] == 1


def test_one_batch_alone_probes_a_disk_that_failed():
    pool = disk_pool()
    pool.store(*range(1, 9))
    assert [work.is_probe for _, work in pool.batches()] == [False, False]
    pool.written(fail=(0, 1, 2), fault="no space left")
    pool.written()
    pool.advance(1)
    assert [work.is_probe for _, work in pool.batches()] == [True]
    pool.written(fail=(0,), fault="no space left")
    pool.advance(2)
    pool.written()
    pool.store(*range(9, 13))
    assert [work.is_probe for _, work in pool.batches()] == [False] * len(pool.batches())
    assert pool.batches()


def test_a_disk_that_stays_full_is_tried_less_and_less():
    pool = disk_pool()
    pool.store(1, 2)
    tried = []
    for _ in range(9):
        pool.written(fail=(0, 1), fault="no space left")
        assert degraded(pool) == ["writes"]
        began = pool.now
        while not pool.works:
            pool.advance(0.5)
        tried.append(pool.now - began)
    assert tried == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_disk_that_worked_for_long_is_tried_again_soon():
    pool = disk_pool()
    pool.store(1, 2)
    for _ in range(4):
        pool.written(fail=(0, 1), fault="no space left")
        pool.advance(60)
    pool.written()
    pool.advance(61)
    pool.store(3, 4)
    pool.written(fail=(0, 1), fault="no space left")
    assert not pool.works
    pool.advance(1)
    assert pool.works


def test_two_batches_that_fail_together_are_one_failure():
    pool = disk_pool()
    pool.store(*range(1, 9))
    assert len(pool.batches()) == 2
    pool.written(fail=(0, 1, 2), fault="no space left")
    pool.written(fail=(0, 1, 2), fault="no space left")
    assert pool.actor.counts["disk_faults[operation=write]"] == 1
    pool.advance(1)
    assert pool.works


def test_a_disk_that_failed_is_used_again_from_empty():
    pool = disk_pool(recovered=(9, 10))
    pool.store(1)
    pool.written()
    pool.lease(9)
    pool.copied(fail=(0,), fault="input/output error")
    assert degraded(pool) == ["reads", "writes"]
    assert pool.on_disk() == set()
    pool.advance(1)
    assert degraded(pool) == []
    assert pool.written() == (1,)
    assert pool.on_disk() == {1}
    assert pool.index["k"] == {keys(1)[0]: Medium.CPU}


def test_a_failing_disk_is_left_alone_and_the_node_goes_on():
    pool = disk_pool(recovered=(9, 10))
    pool.lease(9)
    pool.copied(fail=(0,), fault="input/output error")
    assert pool.one(BlocksLeased, "p0").slots == ()
    assert pool.index["k"] == {}
    pool.store(1)
    assert not pool.works
    assert len(pool.leased(1)[1]) == 1


def test_what_came_from_a_disk_that_then_fails_is_in_dram_alone():
    pool = disk_pool(recovered=(9, 10))
    pool.lease(9, 10)
    pool.copied(fail=(1,), fault="input/output error")
    assert pool.held() == {9}
    assert pool.actor.disk.unsaved == 1


def test_a_drain_writes_what_dram_alone_holds_before_it_ends():
    pool = disk_pool(ahead=0.0)
    pool.store(1, 2, 3, 4)
    assert not pool.works
    pool.drain()
    while pool.works:
        assert not pool.drained
        pool.written()
    assert pool.on_disk() == {1, 2, 3, 4}
    assert pool.drained


def test_a_disk_smaller_than_dram_is_not_rewritten_for_ever():
    pool = disk_pool(slots=4)
    pool.store(*range(1, 9))
    for _ in range(10):
        if pool.works:
            pool.written()
    assert not pool.works


@pytest.mark.parametrize("seed", range(10))
def test_children_are_colder_than_their_parents_however_the_tree_grew(seed):
    rng = random.Random(seed)
    pool = Pool(
        pool_bytes=30 * LAYOUT.slot_bytes,
        disk=DiskContents(60),
        ssd=SsdSettings(ahead=rng.choice((0.0, 0.5, 1.0)), batch_blocks=3),
    )
    parents = {}
    for number in range(1, 80):
        held = sorted(pool.held())
        path = [rng.choice(held)] if held and rng.random() < 0.9 else []
        while path and parents.get(path[0]) in held:
            path.insert(0, parents[path[0]])
        put_id = pool.fresh()
        before = key(path[-1]) if path else None
        parents[number] = path[-1] if path else None
        if rng.random() < 0.3 and path:
            lease_id, _ = pool.leased(*path)
            pool.say("p0", ReleaseLease(lease_id=lease_id))
        pool.say("p0", ReserveSlots(put_id=put_id, keys=keys(number), ttl_s=15.0, parent=before))
        pool.say("p0", CommitSlots(put_id=put_id, checksums=((0, 1),)))
        if pool.works and rng.random() < 0.5:
            pool.written()
        slots = pool.actor.slots
        order = [int.from_bytes(slots.key_of(slot), "big") for slot in slots.coldest(30)]
        for child in order:
            if parents[child] in order:
                assert order.index(child) < order.index(parents[child])


# --- copies on a conductor's wish


def test_a_wished_copy_is_fetched_and_holds_nothing_afterwards(pool):
    pool.say("k", ChangeReplica(keys=keys(1, 2), sources=("c1",)))
    pool.answer(pool.one(LeaseBlocks, "c1"), 1, 2)
    pool.copied()
    assert pool.held() == {1, 2}
    assert pool.busy() == {}


def test_a_copy_too_many_is_the_next_to_go(pool):
    pool.store(*range(1, CAPACITY + 1))
    pool.say("k", ChangeReplica(keys=keys(1), sources=()))
    pool.store(20)
    assert pool.held() == set(range(2, CAPACITY + 1)) | {20}


def test_wishes_are_limited():
    pool = Pool(max_requested_copies=1)
    pool.say("k", ChangeReplica(keys=keys(1), sources=("c1",)))
    pool.say("k", ChangeReplica(keys=keys(2), sources=("c1",)))
    assert pool.one(LeaseBlocks, "c1").keys == keys(1)
    assert pool.actor.counts["copies_not_made"] == 1


# --- what is told


def test_events_tell_tokens_and_parents_where_the_writer_told_them():
    pool = Pool()
    tokens = bytes(range(LAYOUT.block_tokens * 4 * 3))
    size = LAYOUT.block_tokens * 4
    told = []
    pool.agree = lambda: (told.extend(pool.published), pool.published.clear())
    pool.say("p0", ReserveSlots(put_id=1, keys=keys(1, 2, 3), ttl_s=15.0, parent=key(99), tokens=tokens))
    pool.say("p0", CommitSlots(put_id=1, checksums=((0, 1), (2, 1))))
    assert told == [
        BlocksStored(keys(1), Medium.CPU, key(99), tokens[:size]),
        BlocksStored(keys(3), Medium.CPU, key(2), tokens[2 * size :]),
    ]


def test_tokens_that_do_not_fit_the_blocks_are_not_told():
    pool = Pool()
    told = []
    pool.agree = lambda: (told.extend(pool.published), pool.published.clear())
    pool.say("p0", ReserveSlots(put_id=1, keys=keys(1), ttl_s=15.0, parent=key(99), tokens=b"1234"))
    pool.say("p0", CommitSlots(put_id=1, checksums=((0, 1),)))
    assert told == [BlocksStored(keys(1), Medium.CPU, key(99))]
    assert pool.actor.counts["put_tokens_misfit"] == 1


def test_a_fetched_copy_is_told_as_its_source_tells():
    pool = Pool(kv_events=EVENTS)
    pool.lease(1, 2, 3, sources=("c1",))
    ask = pool.one(LeaseBlocks, "c1")
    assert ask.contents
    pool.answer(ask, 1, 2, 3, parent=key(99))
    pool.copied(fail=(1,))
    first, third = pool.told
    assert first == BlocksStored(keys(1), Medium.CPU, key(99), tokens(1))
    assert third == BlocksStored(keys(3), Medium.CPU, key(2), tokens(3))


def test_a_copy_that_comes_when_nobody_waits_any_more_is_told_too():
    pool = Pool(kv_events=EVENTS)
    lease_id = pool.lease(1, 2, sources=("c1",))
    pool.answer(pool.one(LeaseBlocks, "c1"), 1, 2)
    pool.say("p0", ReleaseLease(lease_id=lease_id))
    pool.copied()
    assert pool.told == [BlocksStored(keys(1, 2), Medium.CPU, b"", tokens(1, 2))]


def test_a_source_is_told_only_on_request_and_only_what_is_known():
    pool = Pool(kv_events=EVENTS)
    pool.store(1, 2, parent=key(99))
    for contents, parents, told in ((True, (key(99), key(1)), (tokens(1), tokens(2))), (False, (), ())):
        pool.lease(1, 2, client="c1", contents=contents)
        answer = pool.one(BlocksLeased, "c1")
        assert (answer.parents, answer.tokens) == (parents, told)
    silent = Pool()
    silent.store(1, 2)
    silent.lease(1, 2, client="c1", contents=True)
    answer = silent.one(BlocksLeased, "c1")
    assert (len(answer.slots), answer.parents, answer.tokens) == (2, (), ())


def test_blocks_past_what_a_message_may_tell_are_leased_without(monkeypatch):
    monkeypatch.setattr(block_leases, "MAX_TOKENS", 2 * LAYOUT.block_tokens)
    pool = Pool(kv_events=EVENTS)
    pool.store(1, 2, 3)
    pool.lease(1, 2, 3, client="c1", contents=True)
    answer = pool.one(BlocksLeased, "c1")
    assert answer.tokens == (tokens(1), tokens(2), b"")
    assert answer.parents == (None, key(1), None)
    assert len(answer.slots) == 3


def test_tokens_of_a_source_that_do_not_fit_are_not_told():
    pool = Pool(kv_events=EVENTS)
    pool.tells = False
    pool.lease(1, 2, sources=("c1",))
    ask = pool.one(LeaseBlocks, "c1")
    refs = [SlotRef(node="c1", incarnation=1, slot=i, generation=2, checksum=1000 + i) for i in (1, 2)]
    pool.say("c1", structs.replace(leased(ask.lease_id, refs), parents=(None, key(1)), tokens=(tokens(1), b"short")))
    pool.copied()
    assert pool.told == [BlocksStored(keys(1, 2), Medium.CPU)]
    assert pool.actor.counts["fetched_tokens_misfit"] == 1


def test_copies_from_a_source_without_kv_events_are_told_in_the_order_that_was_asked_for():
    pool = Pool(kv_events=EVENTS)
    pool.tells = False
    pool.store(1)
    pool.told.clear()
    pool.lease(1, 2, 3, sources=("c1",))
    pool.answer(structs.replace(pool.one(LeaseBlocks, "c1"), contents=False), 2, 3)
    pool.copied()
    assert pool.told == [BlocksStored(keys(2, 3), Medium.CPU, key(1))]


def test_what_a_block_holds_goes_to_disk_with_it_and_is_told_after_a_restart():
    pool = disk_pool(kv_events=EVENTS)
    pool.store(1, 2, 3, parent=key(99))
    ((_, work),) = pool.batches()
    rows = tuple(block for _, block in work.blocks)
    assert [row.key for row in rows] == list(keys(3, 2, 1)), "children are colder"
    pool.told.clear()
    pool.written()
    told = BlocksStored(keys(1, 2, 3), Medium.DISK, key(99), tokens(1, 2, 3))
    assert pool.told == [told]
    again = Pool(disk=DiskContents(20, rows), ssd=pool.actor._parts.settings.ssd, kv_events=EVENTS)
    assert again.told == [told]
    again.lease(1, 2, 3)
    again.copied()
    assert again.told[1:] == [replace(told, medium=Medium.CPU)]
    again.lease(1, 2, client="c1", contents=True)
    assert again.one(BlocksLeased, "c1").tokens == (tokens(1), tokens(2))


def test_blocks_found_on_disk_of_which_nothing_is_known_are_told_without():
    pool = disk_pool(recovered=(1, 2))
    assert pool.told == [BlocksStored(keys(1, 2), Medium.DISK)]
    rows = (DiskBlock(0, key(1), 1001), DiskBlock(1, key(2), 1002, None, tokens(2)))
    off = Pool(disk=DiskContents(20, rows))
    assert off.told == [BlocksStored(keys(1, 2), Medium.DISK)], "there are no KV events to keep it for"


def test_tokens_found_on_disk_that_do_not_fit_are_not_told():
    disk = DiskContents(20, (DiskBlock(0, key(1), 1001, None, tokens(1)), DiskBlock(1, key(2), 1002, key(1), b"short")))
    node = CacheNode(name="me", host="h0", incarnation=3, settings=replace(BASE, kv_events=EVENTS), layout=LAYOUT, disk=disk)
    (published,) = [effect for effect in node.handle(0.0, Started()) if isinstance(effect, Publish)]
    first = BlocksStored(keys(1), Medium.DISK, b"", tokens(1))
    assert published.events == (first, BlocksStored(keys(2), Medium.DISK, key(1)))


@pytest.mark.parametrize("events", [KvEventsSettings(), replace(EVENTS, tokens=False)])
def test_without_tokens_in_kv_events_nothing_of_what_blocks_hold_goes_to_disk(events):
    pool = disk_pool(kv_events=events)
    told = {"parent": key(99), "tokens": tokens(1)}
    pool.say("p0", ReserveSlots(put_id=1, keys=keys(1), ttl_s=15.0, **told))
    pool.say("p0", CommitSlots(put_id=1, checksums=((0, 1001),)))
    ((_, work),) = pool.batches()
    assert [(block.parent, block.tokens) for _, block in work.blocks] == [(None, b"")]
    if not events.tokens:
        assert pool.told == [BlocksStored(keys(1), Medium.CPU, key(99))]


def test_a_source_that_was_slow_once_is_judged_anew(pool):
    pool.lease(1, sources=("c1",), compute_s=0.5)
    ask = pool.one(LeaseBlocks, "c1")
    pool.advance(4.0)
    pool.answer(ask, 1)
    pool.copied()
    pool.advance(40.0)
    for number in (2, 3):
        pool.lease(number, sources=("c1",), compute_s=0.5)
        pool.answer(pool.one(LeaseBlocks, "c1"), number)
        pool.copied()


def test_a_disk_that_hangs_does_not_take_the_whole_pool():
    pool = disk_pool(recovered=range(1, 9), fetch_batch_blocks=1)
    for number in range(1, 9):
        pool.lease(number, fetch_s=1.0)
    pool.advance(2.0)
    assert len(pool.take(BlocksLeased, "p0")) == 8, "what the disk does not give in time is computed"
    assert len(pool.put(20, 21, 22, 23)[1].grants) == 4


def test_a_corrupt_disk_copy_does_not_hide_what_the_disk_has_after_it():
    pool = disk_pool(recovered=(1, 2, 3), fetch_batch_blocks=1, pool_bytes=40 * LAYOUT.slot_bytes)
    pool.lease(1, 2, 3, sources=("c1",))
    first, second = (work_id for work_id in pool.works)
    pool.done(first, BlocksCopied((None,), (0,)))
    pool.done(second, BlocksCopied((1002,)))
    pool.copied()
    pool.answer(pool.one(LeaseBlocks, "c1"), 1)
    pool.copied()
    assert len(pool.one(BlocksLeased, "p0").slots) == 3


def test_a_put_does_not_evict_the_chain_that_it_continues(pool):
    pool.store(1, 2, 3, 4)
    pool.store(5, 6, 7, 8)
    put_id, reserved = pool.put(1, 2, 3, 4, 20, 21)
    assert len(reserved.grants) == 2
    assert pool.held() == {1, 2, 3, 4, 5, 6}
    pool.say("p0", CommitSlots(put_id=put_id, checksums=((4, 1), (5, 1))))
    pool.say("p0", ReserveSlots(put_id=99, keys=keys(22), ttl_s=15.0, parent=key(21)))
    assert {1, 2, 3, 4, 20, 21} <= pool.held()


def test_a_key_asked_for_twice_is_leased_twice(pool):
    pool.store(1, 2)
    lease_id, blocks = pool.leased(1, 2, 1)
    assert [block.checksum for block in blocks] == [1001, 1002, 1001]
    pool.say("p0", ReleaseLease(lease_id=lease_id))
    assert pool.busy() == {}


def test_a_wish_comes_from_a_conductor_alone(pool):
    pool.say("p0", ChangeReplica(keys=keys(1), sources=("c1",)))
    assert pool.take(LeaseBlocks) == []


def test_a_drain_leaves_wishes(pool):
    pool.say("k", ChangeReplica(keys=keys(1), sources=("c1",)))
    pool.drain()
    pool.answer(pool.one(LeaseBlocks, "c1"), 1)
    assert pool.drained


def test_a_block_corrupt_in_dram_is_not_kept_because_it_could_not_be_written():
    pool = disk_pool()
    pool.store(1, 2)
    work_id, work = pool.work(WriteToDisk)
    bad = [block.key for _, block in work.blocks].index(key(1))
    pool.done(work_id, DiskWritten((bad != 0, bad != 1), corrupt=(bad,)))
    assert pool.held() == {2}
    assert pool.on_disk() == {2}


def test_blocks_that_came_for_a_lease_are_written_when_it_ends():
    pool = disk_pool()
    lease_id = pool.lease(1, 2, sources=("c1",))
    pool.answer(pool.one(LeaseBlocks, "c1"), 1, 2)
    pool.copied()
    assert not pool.batches()
    pool.say("p0", ReleaseLease(lease_id=lease_id))
    assert pool.written() == (2, 1)


def test_leases_of_what_is_on_disk_too_are_not_looked_through_again_and_again():
    pool = disk_pool(slots=40)
    pool.store(1, 2, 3, 4)
    while pool.works:
        pool.written()
    looks = []
    pool.actor.slots.coldest = lambda limit: looks.append(limit) or []
    for _ in range(20):
        lease_id, _ = pool.leased(1, 2, 3, 4)
        pool.say("p0", ReleaseLease(lease_id=lease_id))
    assert looks == []


def test_a_draining_pool_grants_nothing_and_ends_when_all_is_given_back(pool):
    pool.store(1)
    lease_id, _ = pool.leased(1)
    pool.drain()
    assert not pool.drained
    assert pool.leased(1, client="d0")[1] == ()
    assert pool.put(5)[1].grants == ()
    pool.say("p0", ReleaseLease(lease_id=lease_id))
    assert pool.drained


def test_a_resting_pool_grants_nothing_is_planned_without_and_then_tells_what_it_holds(pool):
    pool.store(1)
    lease_id, _ = pool.leased(1)
    pool.set_cordon()
    assert pool.index["k"] == {}
    assert pool.leased(1, client="d0")[1] == ()
    assert pool.put(5)[1].grants == ()
    pool.up("k2")
    assert pool.index["k2"] == {}
    pool.say("p0", ReleaseLease(lease_id=lease_id))
    assert not pool.drained
    pool.set_cordon(False)
    assert pool.index["k"] == pool.index["k2"] == {key(1): Medium.CPU}
    assert pool.leased(1)[1] != ()
    assert len(pool.put(5)[1].grants) == 1


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_events_keeps_the_invariants_and_ends_idle(seed):
    rng = random.Random(seed)
    pool = Pool(
        fetch_batch_blocks=2,
        max_leases_per_client=5,
        max_put_share=0.6,
        ssd=SsdSettings(ahead=rng.choice((0.5, 1.0)), batch_blocks=3),
        disk=DiskContents(rng.choice((0, 3, 8, 20)) if seed % 4 else 0),
        kv_events=EVENTS if rng.random() < 0.7 else KvEventsSettings(),
    )
    leases, puts, asks = [], [], []
    lives = dict.fromkeys(pool.peers, 1)
    for _ in range(400):
        alive = [name for name in pool.peers if name in ("p0", "d0")]
        client = rng.choice(alive) if alive else None
        some = rng.sample(range(14), rng.randint(1, 5))
        match rng.randrange(13):
            case 0 | 1 if client:
                sources = tuple(rng.sample(("c1", "c2"), rng.randint(0, 2)))
                leases.append((client, pool.lease(*some, client=client, sources=sources, fetch_s=rng.choice((0, 3.0)))))
            case 2 if leases:
                client, lease_id = leases.pop(rng.randrange(len(leases)))
                if client in pool.peers:
                    pool.say(client, rng.choice((ReleaseLease(lease_id=lease_id), RenewLease(lease_id=lease_id, ttl_s=9.0))))
            case 3 | 4 if client:
                put_id, reserved = pool.put(*some, client=client)
                puts.append((client, put_id, reserved.grants))
            case 5 | 6 if puts:
                client, put_id, grants = puts.pop(rng.randrange(len(puts)))
                if client in pool.peers:
                    sums = tuple((grant.index, 1000) for grant in grants if rng.random() < 0.8)
                    pool.say(client, CommitSlots(put_id=put_id, checksums=sums))
            case 7 if pool.works:
                finish(pool, rng)
            case 8:
                pool.advance(rng.choice((0.1, 1.0, 6.0, 20.0)))
            case 9:
                name = rng.choice(["p0", "d0", "c1", "c2", "k"])
                if name in pool.peers:
                    pool.down(name)
                else:
                    lives[name] += rng.random() < 0.3
                    pool.up(name, lives[name], host={"c1": "h1", "c2": "h2"}.get(name, "h0"))
            case 10:
                names = [n for n in pool.actor.slots.committed_keys()]
                if rng.random() < 0.5 and "k" in pool.peers:
                    sources = tuple(rng.sample(("c1", "c2"), rng.randint(0, 2)))
                    pool.say("k", ChangeReplica(keys=keys(*some), sources=sources))
                elif names and client:
                    slot = pool.actor.slots.committed(rng.choice(names))
                    pool.say(client, ReportCorrupt(slots=(pool.actor._parts.ref(slot),)))
            case 11 if pool.cordons or rng.random() < 0.2:
                pool.set_cordon(not pool.cordons)
            case _:
                asks += [(to, m) for to, m in pool.sent if isinstance(m, LeaseBlocks)]
                pool.sent.clear()
                if asks:
                    source, ask = asks.pop(rng.randrange(len(asks)))
                    if source in pool.peers:
                        pool.answer(ask, *[int.from_bytes(k, "big") for k in ask.keys[: rng.randint(0, 5)]], source=source)
    for name in [n for n in ("c1", "c2") if n in pool.peers]:
        pool.down(name)
    while pool.works:
        finish(pool, rng)
    for name in ("p0", "d0"):
        if name in pool.peers:
            pool.down(name)
        pool.up(name, lives[name] + 1)
    pool.advance(100.0)
    while pool.works:
        finish(pool, rng)
    assert pool.busy() == {}
    pool.drain()
    while pool.works:
        finish(pool, rng)
    assert pool.drained


def finish(pool, rng):
    work_id, work = rng.choice(list(pool.works.items()))
    if rng.random() < 0.2:
        pool.done(work_id, WorkFailed("test"))
    elif isinstance(work, ProbeProcess):
        pool.done(work_id, ProcessProbed(alive=rng.random() < 0.5))
    elif isinstance(work, WriteToDisk):
        pool.done(work_id, DiskWritten(tuple(rng.random() < 0.9 for _ in work.blocks), "full" if rng.random() < 0.02 else ""))
    else:
        checksums = tuple(rng.choice((ref.checksum,) * 4 + (None, 5)) for ref, _ in work.copies)
        corrupt = tuple(i for i, checksum in enumerate(checksums) if checksum is None and rng.random() < 0.5)
        pool.done(work_id, BlocksCopied(checksums, corrupt, "failing" if rng.random() < 0.02 else ""))


def test_another_pool_is_leased_no_more_blocks_than_a_message_has_room_for(monkeypatch):
    monkeypatch.setattr(block_leases, "MAX_FETCHED_BLOCKS", 2)
    pool = Pool()
    pool.store(1, 2, 3)
    for client, blocks in (("c1", 2), ("p0", 3), ("d0", 3)):
        ask = LeaseBlocks(lease_id=pool.fresh(), keys=keys(1, 2, 3), sources=(), fetch_s=1.0, ttl_s=1.0)
        pool.say(client, ask)
        assert len(pool.one(BlocksLeased, client).slots) == blocks


@pytest.mark.parametrize(
    "bad",
    [
        {"pool_bytes": 0},
        {"probe_s": 0.0},
        {"fetch_batch_blocks": 0},
        {"fetch_batch_blocks": MAX_FETCHED_BLOCKS + 1},
        {"max_leases_per_client": 0},
        {"fetch_lease_s": 61.0},
    ],
)
def test_settings_that_cannot_work_are_refused(bad):
    with pytest.raises(ValueError):
        replace(BASE, **bad)


def test_a_key_asked_for_twice_is_leased_twice_and_let_go_with_the_lease():
    pool = Pool()
    pool.store(1)
    lease_id, blocks = pool.leased(1, 1)
    assert len(blocks) == 2
    assert pool.actor.gauges(pool.now)["leased_blocks"] == 1
    pool.say("p0", ReleaseLease(lease_id=lease_id))
    assert pool.actor.gauges(pool.now)["leased_blocks"] == 0


def test_a_block_found_corrupt_while_a_lease_waits_for_one_before_it_is_fetched_anew():
    """The copy that was pinned ahead of the gap is let go, and is not what is granted."""
    pool = Pool()
    pool.store(2)
    _, (stale,) = pool.leased(2)
    pool.lease(1, 2, sources=("c1",))
    pool.say("p0", ReportCorrupt(slots=(stale,)))
    ask = pool.one(LeaseBlocks, "c1")
    assert ask.keys == keys(1)
    pool.answer(ask, 1)
    pool.copied()
    again = pool.one(LeaseBlocks, "c1")
    assert again.keys == keys(2)
    pool.answer(again, 2)
    pool.copied()
    _, fresh = pool.one(BlocksLeased, "p0").sources
    assert (fresh.slot, fresh.generation) != (stale.slot, stale.generation)
