"""A pool client's clocks and puts: it stops before the granter does, and its sources go only when nothing reads them."""

import pytest
from actor_harness import leased

from mooncake_zmq.core.actor import CancelTimer, PeerUp, Send, SetTimer
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import (
    CommitSlots,
    GrantedSlot,
    Hello,
    LeaseRenewed,
    ReclaimSlots,
    RenewLease,
    ReportCorrupt,
    ReserveSlots,
    SlotRef,
    SlotsReserved,
)
from mooncake_zmq.core.work import BlocksCopied, WorkFailed
from mooncake_zmq.pool.node.client import COPY_MARGIN, POOL_ABSENT, PoolClient, PoolClientSettings

SETTINGS = PoolClientSettings(lease_ttl_s=10.0, fetch_s=2.0, max_puts=2)
REF = SlotRef(node="c", incarnation=1, slot=4, generation=2, checksum=9)
ROOT, TOKENS = b"r" * 16, b"t" * 32
KEYS = (b"a" * 16, b"b" * 16)


def up(name="c", host="h0", role="cache-node"):
    return PeerUp(name, 1, Hello(protocol=1, role=role, host=host, model="m", tokenizer="t", layout="l"))


@pytest.fixture
def client():
    client = PoolClient("h0", SETTINGS, Tally())
    client.peer_up(0.0, up())
    return client


def granted(client, lease_id=1, now=0.0):
    client.lease(now, lease_id, KEYS, (), fetch=False)
    client.on_leased(leased(lease_id, [REF]))


def grant(client, now=1.0, put_id=5, index=0, work_id=77):
    slot = GrantedSlot(index=index, slot=3, generation=1)
    return client.on_reserved(now, SlotsReserved(put_id=put_id, grants=(slot,)), work_id)


def test_only_the_hosts_own_cache_node_is_the_pool():
    client = PoolClient("h0", SETTINGS, Tally())
    client.peer_up(0.0, up("c9", host="h9"))
    client.peer_up(0.0, up("p", role="prefill"))
    assert client.node is None
    client.peer_up(0.0, up("c"))
    client.peer_up(0.0, up("c2"))
    assert client.node == "c", "one pool at a time: leases and puts are its alone"
    client.peer_down("c2")
    assert client.node == "c"


def test_reading_ends_before_the_lease_counted_from_when_it_was_asked_for(client):
    granted(client, now=100.0)
    usable = SETTINGS.lease_ttl_s * (1 - COPY_MARGIN)
    assert client.reading_time_s(100.0, 1) == pytest.approx(usable)
    assert client.reading_time_s(106.0, 1) == pytest.approx(usable - 6.0)
    assert client.reading_time_s(108.0, 1) == 0.0
    assert client.reading_time_s(100.0, 2) == client.reading_time_s(100.0, None) == 0.0


def test_a_renewal_counts_from_when_it_was_sent_and_only_once_confirmed(client):
    granted(client)
    assert client.renew(3.0) == [Send("c", RenewLease(lease_id=1, ttl_s=10.0))]
    assert client.renew(6.0) == [], "one renewal at a time, or the answers could not be told apart"
    assert client.reading_time_s(6.0, 1) == pytest.approx(1.5)
    client.on_renewed(6.0, "c", LeaseRenewed(lease_id=1))
    assert client.reading_time_s(6.0, 1) == pytest.approx(4.5)
    client.on_renewed(6.0, "c", LeaseRenewed(lease_id=1))
    assert client.reading_time_s(6.0, 1) == pytest.approx(4.5)
    assert client.renew(7.0) != []


def test_a_lease_only_asked_for_is_not_renewed_until_granted(client):
    client.lease(0.0, 1, KEYS, (), fetch=True)
    assert client.renew(3.0) == []
    client.on_leased(leased(1, [REF]))
    assert len(client.renew(4.0)) == 1


def test_a_lease_that_waits_for_the_pool_counts_from_when_it_was_asked_for():
    client = PoolClient("h0", SETTINGS, Tally())
    assert client.lease(0.0, 1, KEYS, (), fetch=True, wait_s=1.0) == [SetTimer((POOL_ABSENT, 1), 1.0)]
    assert client.peer_up(0.5, up("p", role="prefill")) == []
    stopped, asked = client.peer_up(1.0, up())
    assert stopped == CancelTimer((POOL_ABSENT, 1))
    assert (asked.to, asked.message.lease_id) == ("c", 1)
    assert not client.forgo(1), "it is asked for: the pool answers"
    client.on_leased(leased(1, [REF]))
    assert client.reading_time_s(1.0, 1) == pytest.approx(SETTINGS.lease_ttl_s * (1 - COPY_MARGIN))


def test_a_lease_waits_for_the_pool_no_longer_than_for_other_hosts():
    client = PoolClient("h0", SETTINGS, Tally())
    assert client.lease(0.0, 1, KEYS, (), fetch=True, wait_s=60.0) == [SetTimer((POOL_ABSENT, 1), SETTINGS.fetch_s)]
    assert client.wants(1)
    assert client.forgo(1)
    assert not client.wants(1)
    assert client.leases == 0
    assert client.peer_up(3.0, up()) == []


def test_a_dead_pool_voids_its_leases(client):
    granted(client)
    client.peer_down("c")
    assert client.leases == 0
    assert client.reading_time_s(0.0, 1) == 0.0
    assert client.release(1) == []


def test_a_released_or_empty_lease_is_over(client):
    granted(client)
    assert len(client.release(1)) == 1
    assert client.release(1) == []
    assert client.on_leased(leased(1, [], node="c")) is None
    client.lease(0.0, 2, KEYS, (), fetch=False)
    assert client.on_leased(leased(2, [], node="c")) == ()
    assert client.leases == 0


def test_a_put_copies_for_less_than_its_time_and_commits_what_was_written(client):
    assert client.put(0.0, 5, KEYS, (REF, REF), "token", parent=ROOT, tokens=TOKENS, tenant="alice") == [
        Send("c", ReserveSlots(put_id=5, keys=KEYS, ttl_s=10.0, parent=ROOT, tokens=TOKENS, tenant="alice"))
    ]
    (start,) = grant(client, now=1.0, index=1).effects
    assert start.deadline_s == pytest.approx(6.5)
    assert client.on_reclaim(1.0, "c", ReclaimSlots(put_id=5)) == [], "its copy still runs"
    ended = client.on_copied(77, BlocksCopied((42,)))
    assert ended.tokens == ["token"]
    assert ended.effects == [Send("c", CommitSlots(put_id=5, checksums=((1, 42),)))]
    assert client.on_reclaim(1.0, "c", ReclaimSlots(put_id=5)) == [Send("c", CommitSlots(put_id=5, checksums=()))]


@pytest.mark.parametrize("result", [WorkFailed("test"), BlocksCopied((None,))])
def test_a_failed_copy_gives_the_slots_back(client, result):
    client.put(0.0, 5, KEYS, (REF, REF), "token", parent=ROOT, tokens=TOKENS, tenant="alice")
    grant(client)
    assert client.on_copied(77, result).effects == [Send("c", CommitSlots(put_id=5, checksums=()))]


@pytest.mark.parametrize("late", [{"now": 7.6}, {"index": 2}])
def test_a_grant_that_comes_too_late_or_makes_no_sense_is_given_back(client, late):
    client.put(0.0, 5, KEYS, (REF, REF), "token", parent=ROOT, tokens=TOKENS, tenant="alice")
    ended = grant(client, **late)
    assert ended.effects == [Send("c", CommitSlots(put_id=5, checksums=()))]
    assert ended.tokens == ["token"]


def test_a_put_of_nothing_new_ends_at_once(client):
    client.put(0.0, 5, KEYS, (REF, REF), "token", parent=ROOT, tokens=TOKENS, tenant="alice")
    ended = client.on_reserved(1.0, SlotsReserved(put_id=5, grants=()), 77)
    assert (ended.effects, ended.tokens) == ([], ["token"])


def test_a_pool_that_dies_ends_puts_but_not_their_copies_in_flight(client):
    client.put(0.0, 5, KEYS, (REF, REF), "copying", parent=ROOT, tokens=TOKENS, tenant="alice")
    client.put(0.0, 6, KEYS, (REF, REF), "asked", parent=ROOT, tokens=TOKENS, tenant="alice")
    grant(client)
    assert client.peer_down("c").tokens == ["asked"]
    assert client.puts == 1
    client.peer_up(0.0, up())
    ended = client.on_copied(77, BlocksCopied((1,)))
    assert ended.tokens == ["copying"]


def test_puts_are_skipped_when_there_are_too_many_or_no_pool(client):
    for put_id in (5, 6):
        assert client.put(0.0, put_id, KEYS, (REF, REF), "token", parent=ROOT, tokens=TOKENS, tenant="alice")
    assert client.put(0.0, 7, KEYS, (REF, REF), "token", parent=ROOT, tokens=TOKENS, tenant="alice") is None
    client.peer_down("c")
    assert client.put(0.0, 8, KEYS, (REF, REF), "token", parent=ROOT, tokens=TOKENS, tenant="alice") is None
    assert client.put(0.0, 9, (), (), "token", parent=ROOT, tokens=TOKENS, tenant="alice") is None


def test_only_the_pools_own_copies_are_reported_to_it(client):
    other = SlotRef(node="p", incarnation=1, slot=4, generation=2, checksum=9)
    assert client.report_corrupt([other]) == []
    assert client.report_corrupt([other, REF]) == [Send("c", ReportCorrupt(slots=(REF,)))]


@pytest.mark.parametrize("bad", [{"fetch_s": 15.0}, {"fetch_s": 0.0}, {"max_puts": 0}])
def test_settings_that_cannot_work_are_refused(bad):
    with pytest.raises(ValueError):
        PoolClientSettings(**bad)
