"""The conductor as an actor: whom it chooses, what it remembers, and that it forgets."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conductor_harness import BLOCK, Cluster, hello, key, keys
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mooncake_zmq.core.actor import CordonWanted, Drained, DrainWanted, PeerUp, Received, WorkDone
from mooncake_zmq.core.messages import (
    BlocksAnnounced,
    CacheLoad,
    HandoffReceived,
    Placed,
    PrefillLoad,
    QueuedJob,
    Rejected,
    RequestEnded,
    Schedule,
)
from mooncake_zmq.core.work import WorkFailed

DOC = keys("doc", 20)


def test_cold_prompts_rotate_over_idle_nodes():
    cluster = Cluster(4)
    answers = [cluster.schedule(keys(f"cold{i}", 8)) for i in range(8)]
    assert Counter(answer.prefill for answer in answers) == {"p0": 2, "p1": 2, "p2": 2, "p3": 2}
    assert all((answer.reuse_blocks, answer.sources) == (0, ()) for answer in answers)


def test_a_prefix_draws_its_request_to_the_host_that_holds_it():
    cluster = Cluster(4)
    cluster.announce("c2", DOC)
    answer = cluster.schedule(DOC)
    assert (answer.prefill, answer.reuse_blocks, answer.sources) == ("p2", 20, ())
    assert answer.decode == "d2", "the handoff is then a read of shared memory"
    assert answer.ttft_s > 0
    assert answer.tbt_s > 0


def test_the_end_of_an_attempt_leaves_the_booking_of_the_next_one_that_was_placed_meanwhile():
    cluster = Cluster(2)
    first = cluster.schedule(DOC, request_id="r")
    second = cluster.schedule(DOC, request_id="r", attempt=2, exclude=(first.decode,))
    assert second.decode != first.decode
    cluster.end(first)
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 1
    cluster.end(second)
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 0


def test_the_last_token_is_always_computed():
    cluster = Cluster(1)
    cluster.announce("c0", DOC)
    assert cluster.schedule(DOC, tokens=20 * BLOCK).reuse_blocks == 19
    assert cluster.schedule(DOC, tokens=20 * BLOCK + 1).reuse_blocks == 20


def test_a_long_queue_loses_to_an_idle_node_that_fetches():
    cluster = Cluster(3)
    cluster.announce("c0", DOC)
    cluster.announce("c2", DOC[:10])
    cluster.prefill_load("p0", queued_s=50)
    answer = cluster.schedule(DOC)
    assert answer.prefill in ("p1", "p2")
    assert answer.reuse_blocks == 20
    assert answer.sources == (("c0",) if answer.prefill == "p2" else ("c0", "c2"))


def test_a_hot_prefix_spreads_over_nodes_and_sources():
    cluster = Cluster(4)
    cluster.announce("c0", DOC)
    used, sources = Counter(), Counter()
    for number in range(120):
        answer = cluster.schedule((*DOC, *keys(f"q{number}", 12)))
        used[answer.prefill] += 1
        sources.update(answer.sources[:1])
        assert answer.reuse_blocks == 20
        if answer.sources:
            cluster.announce("c" + answer.prefill[1:], DOC)
        cluster.advance(0.1)
    assert set(used) == {"p0", "p1", "p2", "p3"}
    assert max(used.values()) <= 40
    assert sum(sources.values()) == 3, "each other host fetched it once and keeps a replica"


def test_equal_sources_rotate():
    cluster = Cluster(4, kvcache_balancing_threshold=1)
    for node in ("c1", "c2", "c3"):
        cluster.announce(node, DOC)
    for node in ("p1", "p2", "p3"):
        cluster.prefill_load(node, queued_s=1000)
    first = [cluster.schedule(DOC).sources[0] for _ in range(6)]
    assert Counter(first) == {"c1": 2, "c2": 2, "c3": 2}


def test_sharing_one_leading_block_does_not_collapse_on_one_node():
    cluster = Cluster(4)
    system = key("system")
    cluster.announce("c0", (system,))
    used = Counter()
    for number in range(200):
        prompt = (system, *keys(f"user{number}", 46))
        answer = cluster.schedule(prompt)
        used[answer.prefill] += 1
        cluster.announce("c" + answer.prefill[1:], prompt)
        cluster.advance(5.0)
        cluster.end(answer)
    assert set(used) == {"p0", "p1", "p2", "p3"}
    assert max(used.values()) <= 60, used


def test_conversations_stay_where_their_blocks_are():
    cluster = Cluster(4)
    home, moves, turns = {}, 0, 0
    for turn in range(1, 6):
        for chat in range(12):
            prompt = keys(f"chat{chat}", 8 * turn)
            answer = cluster.schedule(prompt)
            turns += turn > 1
            moves += turn > 1 and home[chat] != answer.prefill
            home[chat] = answer.prefill
            cluster.announce("c" + answer.prefill[1:], prompt)
            cluster.advance(20)
            cluster.end(answer)
    assert moves <= turns / 10


def test_a_cache_node_forgets_at_peer_down_and_at_peer_up():
    cluster = Cluster(policy="global")
    cluster.announce("c0", DOC)
    cluster.announce("c1", DOC[:3])
    cluster.down("c0")
    assert cluster.schedule(DOC).reuse_blocks == 3
    cluster.up("c0", "cache-node", "h0", incarnation=2)
    assert cluster.conductor.gauges(cluster.now)["cached_copies"] == 3
    cluster.announce("c0", DOC)
    cluster.up("c0", "cache-node", "h0", incarnation=3)
    assert cluster.conductor.gauges(cluster.now)["cached_copies"] == 3
    cluster.announce("c0", DOC[:8], removed=DOC[5:8])
    assert cluster.schedule(DOC).reuse_blocks == 8, "stored again after being removed"
    cluster.announce("c0", removed=DOC[2:8])
    assert cluster.schedule(DOC).reuse_blocks == 3


def test_a_host_without_a_cache_node_neither_loads_nor_fetches():
    cluster = Cluster()
    cluster.down("c1")
    cluster.announce("c0", DOC)
    cluster.down("p0")
    answer = cluster.schedule(DOC)
    assert (answer.prefill, answer.reuse_blocks, answer.sources) == ("p1", 0, ())


def test_a_full_index_forgets_what_is_oldest_and_goes_on_learning():
    cluster = Cluster(max_keys=25)
    cluster.announce("c0", DOC)
    other = keys("other", 15)
    cluster.announce("c1", other)
    assert cluster.conductor.counts["keys_evicted"] == 10
    assert cluster.schedule(other).reuse_blocks == 15


def test_dead_draining_and_excluded_nodes_are_not_chosen():
    cluster = Cluster(4)
    cluster.announce("c0", DOC)
    cluster.down("p0")
    cluster.down("d0")
    cluster.prefill_load("p1", draining=True)
    cluster.decode_load("d1", draining=True)
    for _ in range(8):
        answer = cluster.schedule(DOC, exclude=("p2", "d2"))
        assert (answer.prefill, answer.decode) == ("p3", "d3")


def test_excluded_nodes_are_a_last_resort():
    cluster = Cluster()
    answer = cluster.schedule(tokens=100, exclude=("p0", "p1", "d0"))
    assert answer.prefill in ("p0", "p1")
    assert answer.decode == "d1"
    cluster.decode_load("d1", free=0)
    last_resort = cluster.schedule(tokens=100, exclude=("d0",))
    assert last_resort.decode == "d0"
    for one in (answer, last_resort):
        cluster.end(one)
    cluster.decode_load("d0", draining=True)
    assert isinstance(cluster.schedule(tokens=100, exclude=("d0",)), Rejected)


def test_nodes_that_have_not_reported_yet_may_serve():
    assert isinstance(Cluster(reports=False).schedule(DOC), Placed)


def test_a_node_that_stops_draining_serves_again():
    cluster = Cluster(1)
    cluster.prefill_load("p0", draining=True)
    assert isinstance(cluster.schedule(tokens=10), Rejected)
    cluster.prefill_load("p0")
    assert isinstance(cluster.schedule(tokens=10), Placed)


def test_a_repeated_schedule_is_answered_alike_and_booked_once():
    cluster = Cluster(4)
    first = cluster.schedule(DOC, request_id="r")
    before = cluster.conductor.dump(cluster.now)
    cluster.announce("c3", DOC)
    assert cluster.schedule(DOC, request_id="r") == first
    assert cluster.conductor.dump(cluster.now)["bookings"] == before["bookings"]
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 1
    assert cluster.conductor.counts["repeated_schedules"] == 1


def test_a_newer_attempt_replaces_the_booking_and_an_older_one_is_ignored():
    cluster = Cluster(1)
    cluster.schedule(DOC, request_id="r", attempt=1)
    booked = cluster.conductor.gauges(cluster.now)
    second = cluster.schedule(DOC, request_id="r", attempt=2)
    assert second.attempt == 2
    assert cluster.conductor.gauges(cluster.now) == booked
    assert cluster.schedule(DOC, request_id="r", attempt=1) is None
    cluster.say("g", RequestEnded(request_id="r", attempt=1))
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 1, "the end of an older attempt"
    cluster.end(second)
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 0


@pytest.mark.parametrize("tenant", ["", "t"])
@pytest.mark.parametrize("reported", [True, False])
def test_an_attempt_whose_request_finds_no_other_place_goes_on_and_stays_booked(tenant, reported):
    cluster = Cluster(1)
    first = cluster.schedule(DOC, request_id="r", tenant=tenant)
    if reported:
        cluster.decode_load("d0", running=1, bookings=(first.booking,))
    cluster.decode_load("d0", running=1, bookings=(first.booking,) * reported, draining=True)
    node = cluster.conductor._decodes.by_name["d0"]
    before = node.free, node.coming_requests, list(node.tenants)
    cluster.advance(1.0)
    assert isinstance(cluster.schedule(DOC, request_id="r", attempt=2, tenant=tenant, begun=True), Rejected)
    assert (node.free, node.coming_requests, list(node.tenants)) == before
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 1
    cluster.end(first)
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 0
    assert not node.tenants


def test_two_gateways_may_use_one_request_id():
    cluster = Cluster()
    cluster.up("g2", "gateway", "h1")
    cluster.schedule(DOC, request_id="r")
    message = Schedule(request_id="r", attempt=1, keys=(), tokens=5, max_tokens=5)
    assert cluster.say("g2", message)[0].to == "g2"
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 2


@pytest.mark.parametrize("how", ["ended", "expired", "gateway down", "nodes down"])
def test_at_idle_every_gauge_is_zero(how):
    cluster = Cluster()
    answers = [cluster.schedule(keys(str(i), 3)) for i in range(10)]
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 10
    if how == "ended":
        for answer in answers:
            cluster.end(answer)
    elif how == "expired":
        cluster.advance(cluster.settings.booking_ttl_s * 1.01)
        assert cluster.conductor.counts["bookings_expired"] == 10
        assert cluster.timers == {}
    elif how == "gateway down":
        cluster.down("g")
    else:
        for name in ("p0", "p1"):
            cluster.down(name)
    gauges = cluster.conductor.gauges(cluster.now)
    assert [name for name, value in gauges.items() if value and not name.startswith(("capacity_", "cached_"))] == []


def test_bookings_expire_one_by_one_without_any_other_event():
    cluster = Cluster(booking_ttl_s=10)
    for _ in range(4):
        cluster.schedule(tokens=10)
        cluster.advance(3)
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 3
    cluster.advance(3.1)
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 2
    cluster.advance(100)
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 0
    assert cluster.timers == {}


def test_at_the_limit_the_oldest_booking_is_dropped():
    cluster = Cluster(max_bookings=3)
    for _ in range(5):
        cluster.schedule(tokens=10)
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 3
    assert cluster.conductor.counts["bookings_dropped"] == 2


def test_a_dead_node_takes_its_bookings_along():
    cluster = Cluster()
    answer = cluster.schedule(tokens=10)
    cluster.down(answer.prefill)
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 0
    cluster.end(answer)
    again = cluster.schedule(tokens=10, request_id=answer.request_id, attempt=2)
    assert again.prefill != answer.prefill


def test_messages_that_do_not_fit_their_sender_are_counted():
    cluster = Cluster()
    load = PrefillLoad(jobs=(QueuedJob(booking=0, rank_s=0.0, left_s=9.0),), draining=True)
    for sender, message in [
        ("d0", load),
        ("nobody", load),
        ("d0", BlocksAnnounced(stored=DOC)),
        ("c0", Schedule(request_id="r", attempt=1, keys=(), tokens=5, max_tokens=5)),
        ("g", HandoffReceived(request_id="r", attempt=1)),
    ]:
        assert cluster.say(sender, message) == []
    assert sum(n for name, n in cluster.conductor.counts.items() if name.startswith("unexpected")) == 5
    cluster.say("g", RequestEnded(request_id="unknown", attempt=1))


def test_a_peer_of_an_unknown_role_is_no_member():
    cluster = Cluster()
    cluster.up("x", "observer", "h0")
    cluster.up("k2", "conductor", "h1")
    assert cluster.conductor.counts["strangers"] == 1
    assert "x" not in json.dumps(cluster.conductor.dump(cluster.now)["members"])


def test_drain_is_immediate():
    assert Cluster().handle(DrainWanted()) == [Drained()]


def test_events_of_no_concern_are_bugs():
    with pytest.raises(TypeError):
        Cluster().handle(WorkDone(1, WorkFailed("no")))


def test_checks_see_a_booking_on_an_unknown_node():
    cluster = Cluster()
    answer = cluster.schedule(tokens=10)
    cluster.conductor._prefills.leave(cluster.conductor._prefills.by_name[answer.prefill])
    with pytest.raises(AssertionError):
        cluster.conductor.check(cluster.now)


NODES = [f"{kind}{i}" for kind in "pdc" for i in range(3)]
ROLES = {"p": "prefill", "d": "decode", "c": "cache-node"}
steps = st.lists(
    st.one_of(
        st.tuples(st.just("up"), st.sampled_from(NODES)),
        st.tuples(st.just("down"), st.sampled_from([*NODES, "g"])),
        st.tuples(st.just("announce"), st.integers(0, 2), st.integers(0, 20), st.integers(0, 20)),
        st.tuples(st.just("schedule"), st.integers(0, 9), st.integers(1, 3), st.integers(0, 20), st.integers(0, 6000)),
        st.tuples(st.just("exclude"), st.lists(st.sampled_from(NODES), max_size=6)),
        st.tuples(st.just("end"), st.integers(0, 9), st.integers(1, 3)),
        st.tuples(st.just("prefill_load"), st.integers(0, 2), st.floats(0, 60), st.booleans()),
        st.tuples(st.just("decode_load"), st.integers(0, 2), st.integers(0, 20), st.integers(0, 8000), st.booleans()),
        st.tuples(st.just("advance"), st.floats(0, 20)),
    ),
    max_size=60,
)


class Walk:
    """A random life of a cluster: what it must never do is asserted at each step."""

    def __init__(self):
        self.cluster = Cluster(3, ttft_slo_s=30, tbt_slo_s=0.1)
        self.alive = {*NODES, "g"}
        self.draining = set()

    def step(self, what, *args):
        getattr(self, what)(*args)

    def up(self, name):
        self.cluster.up(name, ROLES[name[0]], f"h{name[1]}")
        self.alive.add(name)
        self.draining.discard(name)

    def down(self, name):
        self.cluster.down(name)
        if name == "g":
            self.cluster.up("g", "gateway", "h0")
        else:
            self.alive.discard(name)

    def announce(self, node, stored, removed):
        self.cluster.announce(f"c{node}", DOC[:stored], DOC[removed:])

    def exclude(self, names):
        self.place(self.cluster.schedule(DOC, exclude=tuple(names)), DOC, 20 * BLOCK + 10, names)

    def schedule(self, request, attempt, blocks, tokens):
        repeated = self.cluster.conductor.counts.get("repeated_schedules", 0)
        answer = self.cluster.schedule(DOC[:blocks], tokens, request_id=f"x{request}", attempt=attempt)
        if answer is not None and self.cluster.conductor.counts.get("repeated_schedules", 0) == repeated:
            self.place(answer, DOC[:blocks], tokens, ())

    def place(self, answer, block_keys, tokens, excluded):
        if isinstance(answer, Rejected):
            assert 1 <= answer.retry_after_s <= 60
            return
        free = [name for name in NODES if name in self.alive - self.draining]
        assert {answer.prefill, answer.decode} <= set(free)
        if answer.prefill in excluded:
            assert not [name for name in free if name[0] == "p" and name not in excluded]
        assert answer.reuse_blocks <= min(len(block_keys), max(0, (tokens - 1) // BLOCK))
        assert set(answer.sources) <= self.alive
        assert f"c{answer.prefill[1:]}" not in answer.sources

    def end(self, request, attempt):
        self.cluster.say("g", RequestEnded(request_id=f"x{request}", attempt=attempt))

    def prefill_load(self, node, queued_s, draining):
        self.cluster.prefill_load(f"p{node}", queued_s, draining=draining)
        self.set_draining(f"p{node}", draining)

    def decode_load(self, node, running, free, draining):
        self.cluster.decode_load(f"d{node}", running, free=free, step_s=0.05, draining=draining)
        self.set_draining(f"d{node}", draining)

    def set_draining(self, name, draining):
        if name in self.alive:
            (self.draining.add if draining else self.draining.discard)(name)

    def advance(self, seconds):
        self.cluster.advance(seconds)


@given(steps)
@example([("schedule", 1, 1, 1, 0), ("schedule", 0, 1, 1, 257), ("schedule", 1, 2, 0, 0)])  # ends a wait, and answers
@settings(max_examples=300)
def test_random_lives(life):
    walk = Walk()
    for one in life:
        walk.step(*one)
    walk.cluster.advance(1000)
    for i in range(3):
        walk.cluster.prefill_load(f"p{i}")
        walk.cluster.decode_load(f"d{i}")
    gauges = walk.cluster.conductor.gauges(walk.cluster.now)
    assert not [name for name, value in gauges.items() if value and not name.startswith(("capacity_", "cached_"))]


SCRIPT = """
import hashlib, random
from conductor_harness import Cluster, keys
chance = random.Random(7)
cluster = Cluster(5, ttft_slo_s=20)
digest = hashlib.sha256()
for number in range(400):
    prompt = keys(f"doc{chance.randrange(12)}", chance.randrange(1, 30)) + keys(f"q{number}", 2)
    answer = cluster.schedule(prompt, exclude=tuple(f"p{i}" for i in range(5) if chance.random() < 0.1))
    digest.update(repr(answer).encode())
    cluster.announce(f"c{chance.randrange(5)}", prompt, prompt[: chance.randrange(3)])
    if chance.random() < 0.05:
        cluster.up(f"c{chance.randrange(5)}", "cache-node", f"h{chance.randrange(5)}")
    cluster.advance(chance.random())
digest.update(repr(cluster.conductor.dump(cluster.now)).encode())
print(digest.hexdigest())
"""


def test_effects_do_not_depend_on_the_process():
    def run(seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True, timeout=120
        )
        return done.stdout

    first = run("1")
    assert len(first) > 60
    assert run("2") == first
    assert run("3") == first


def test_the_order_of_arrival_decides_nothing():
    def answers(order):
        cluster = Cluster(0)
        for name in order:
            cluster.handle(PeerUp(name, 1, hello(ROLES[name[0]], f"h{name[1]}")))
        for node in [name for name in order if name[0] == "c"]:
            cluster.handle(Received(node, BlocksAnnounced(stored=DOC[:5])))
        return [cluster.schedule(keys(str(i), 4)) for i in range(9)] + [cluster.schedule(DOC)]

    assert answers(NODES) == answers(NODES[::-1])


def test_a_conductor_that_rests_keeps_its_bookings_until_their_requests_end_and_places_who_still_asks():
    cluster = Cluster(2)
    before = [cluster.schedule(keys(str(i), 4)) for i in range(3)]
    cluster.handle(CordonWanted(True))
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 3
    late = cluster.schedule(keys("late", 4))
    assert isinstance(late, Placed), "a gateway has not heard, or knows no other"
    for left, placed in zip((3, 2, 1, 0), (*before, late), strict=True):
        cluster.end(placed)
        assert cluster.conductor.gauges(cluster.now)["bookings"] == left
    cluster.handle(CordonWanted(False))
    assert isinstance(cluster.schedule(DOC), Placed)


def test_a_pool_that_rests_is_nobodys_home_until_it_serves_again():
    cluster = Cluster(2)
    chain = keys("y", 200)
    cluster.announce("c1", stored=chain)
    cluster.prefill_load("p1", queued_s=1e5)
    assert cluster.schedule(chain).reuse_blocks > 0
    cluster.say("c0", CacheLoad(sources=(), cordoned=True))
    placed = cluster.schedule(chain)
    assert (placed.prefill, placed.reuse_blocks, placed.sources) == ("p0", 0, ())
    cluster.conductor._copies.change(cluster.now, chain, 2)
    assert cluster.copy_requests == []
    cluster.say("c0", CacheLoad(sources=()))
    assert cluster.schedule(chain).reuse_blocks > 0
