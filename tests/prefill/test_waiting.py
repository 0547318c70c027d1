"""One prefill computes what its prompts share once: chunks count when they end, are looked for again, and may be waited for."""

import pytest
from actor_harness import LAYOUT
from test_prefill import ROOT, B, Node, prompt

from mooncake_zmq.core.messages import (
    AttemptFailed,
    BlocksAnnounced,
    CancelRequest,
    FirstToken,
    HandoffBlocks,
    LeaseBlocks,
    PrefillLoad,
    ReserveDecode,
    ReserveSlots,
    WaitEnded,
)
from mooncake_zmq.core.work import ComputeChunk
from mooncake_zmq.kv.block_hash import extend_keys, pack_tokens

LONG = prompt(4 * B)
KEYS = tuple(extend_keys(ROOT, pack_tokens(LONG), B))


@pytest.fixture
def node():
    return Node(slab_bytes=64 * LAYOUT.slot_bytes, max_queued=8)


def follow(own):
    """The long prompt and some tokens of its own."""
    return [*LONG, *prompt(3, base=100 + 10 * own)]


def begin_two(node):
    """Prepare two jobs that begin alike; the first one's first chunk is under way."""
    for number, request_id in enumerate(("a", "b")):
        node.ready(request_id, follow(number))


def test_what_a_job_computes_its_follower_finds_though_it_was_prepared_before(node):
    begin_two(node)
    computed = []
    while any(isinstance(work, ComputeChunk) for work in node.works.values()):
        work = node.computed(token=5)
        computed.append((work.start, len(work.tokens) // 4, len(work.prefix)))
    assert computed == [(0, 2 * B, 0), (2 * B, 2 * B, 0), (4 * B, 3, 0), (4 * B, 3, 4)]
    first, second = (m for _, m in node.sent if isinstance(m, FirstToken))
    assert (first.own, second.own) == (0, 4 * B)
    assert node.actor.counts["blocks_found_while_queued"] == 4


def test_found_blocks_are_handed_off_where_they_stand_and_verified_with_the_rest(node):
    begin_two(node)
    node.take(HandoffBlocks, "d")
    node.finish()
    ready = [m for _, m in node.sent if isinstance(m, HandoffBlocks) and m.ready]
    assert [(m.request_id, m.first_block, len(m.sources)) for m in ready] == [("b", 0, 4)]


def test_a_chunk_counts_as_soon_as_it_ends(node):
    node.ready("a", follow(0))
    assert not node.actor.holds(KEYS[0])
    node.computed()
    assert [node.actor.holds(key) for key in KEYS] == [True, True, False, False]
    assert node.one(BlocksAnnounced, "k").stored == KEYS[:2]
    assert node.one(ReserveSlots, "c").keys == KEYS[:2]


def test_conductors_that_come_later_learn_what_stands(node):
    node.ready("a", follow(0))
    node.finish()
    node.up("k2", 3, role="conductor")
    assert node.one(BlocksAnnounced, "k2").stored == KEYS


def test_evicted_blocks_are_taken_back():
    node = Node(slab_bytes=8 * LAYOUT.slot_bytes, max_queued=8)
    node.ready("a", prompt(4 * B))
    node.finish()
    node.put_all()
    node.received("a")
    node.take(BlocksAnnounced, "k")
    node.ready("b", prompt(7 * B, base=200))
    removed = [key for m in node.take(BlocksAnnounced, "k") for key in m.removed]
    assert removed
    assert set(removed) <= set(KEYS)


def wait(node, request_id="w", own=5, *, coming_s=4.0, booking=31, **more):
    node.start(request_id, follow(own), coming_blocks=4, reuse_blocks=4, coming_s=coming_s, booking=booking, **more)


def is_waiting(node):
    return not any(isinstance(m, ReserveDecode) for _, m in node.sent)


def test_a_waiting_job_asks_nobody_for_anything(node):
    wait(node)
    assert is_waiting(node)
    assert not node.take(LeaseBlocks, "c")
    assert node.actor.gauges(node.now)["requests_waiting"] == 1


def test_the_conductor_ends_a_wait_and_names_the_source(node):
    wait(node)
    node.say("k", WaitEnded(booking=30, sources=("x",)))
    assert is_waiting(node)
    node.say("k", WaitEnded(booking=31, sources=("x",)))
    ask = node.one(LeaseBlocks, "c")
    assert ask.keys == KEYS
    assert ask.sources == ("x",)
    node.say("k", WaitEnded(booking=31, sources=("y",)))
    assert node.actor.counts["waits_ended[by=pool]"] == 1


def test_it_computes_at_once_where_the_blocks_will_not_come(node):
    wait(node, sources=("y",))
    node.say("k", WaitEnded(booking=31))
    assert node.one(LeaseBlocks, "c").sources == ("y",), "some of them may be there"
    assert node.actor.counts["waits_ended[by=loss]"] == 1


def test_a_wait_ends_with_the_conductor_that_would_end_it(node):
    wait(node, conductor="k")
    node.down("k")
    assert not is_waiting(node)


def test_an_end_that_comes_before_its_job_counts(node):
    node.say("k", WaitEnded(booking=31, sources=("x",)))
    wait(node)
    assert node.one(LeaseBlocks, "c").sources == ("x",)


@pytest.mark.parametrize(("gone", "waits"), [("g2", False), ("k", True)])
def test_an_end_that_comes_before_its_job_is_forgotten_with_its_conductor_alone(node, gone, waits):
    """A conductor that comes back counts its placements anew."""
    node.up("g2", 1, role="gateway")
    node.say("k", WaitEnded(booking=31, sources=("x",)))
    node.down(gone)
    if gone == "k":
        node.up("k", 8)
    wait(node, conductor="k")
    assert is_waiting(node) == waits


def test_an_end_that_comes_before_the_job_of_another_conductor_is_not_its(node):
    node.up("k2", 1, role="conductor")
    node.say("k2", WaitEnded(booking=31, sources=("x",)))
    wait(node, conductor="k")
    assert is_waiting(node)


def test_without_the_conductor_that_would_end_it_nothing_is_waited_for(node):
    wait(node, conductor="k9")
    assert not is_waiting(node)


def test_another_conductor_ends_no_wait(node):
    node.up("k2", 1, role="conductor")
    wait(node, conductor="k")
    node.say("k2", WaitEnded(booking=31))
    assert is_waiting(node)


def test_a_wait_ends_by_itself(node):
    wait(node)
    node.advance(3.9)
    assert is_waiting(node)
    node.advance(0.2)
    assert not is_waiting(node)
    assert node.actor.counts["waits_ended[by=time]"] == 1


def test_a_wait_ends_when_the_own_slab_has_the_blocks(node):
    node.ready("a", follow(0))
    wait(node)
    node.take(ReserveDecode, "d")
    node.finish()
    assert not is_waiting(node)
    node.take(LeaseBlocks, "c")
    node.reserve("w")
    node.finish()
    assert [m.own for _, m in node.sent if isinstance(m, FirstToken)] == [0, 4 * B]


def test_blocks_that_stand_already_are_not_waited_for(node):
    node.ready("a", follow(0))
    node.finish()
    node.take(ReserveDecode, "d")
    wait(node)
    assert not is_waiting(node)


def test_a_cancelled_waiter_leaves_nothing_behind(node):
    wait(node)
    node.say("g", CancelRequest(request_id="w", attempt=1))
    node.advance(5)
    assert is_waiting(node)
    assert node.actor.gauges(node.now)["requests_waiting"] == 0


def test_waiters_count_as_queued(node):
    for number in range(8):
        wait(node, f"w{number}", number, booking=40 + number)
    wait(node, "late", 8, booking=60)
    assert node.one(AttemptFailed, "g").full
    node.advance(0.3)
    load = node.take(PrefillLoad, "k")[-1]
    assert load.room == 0
    assert [job.booking for job in load.jobs] == [40 + number for number in range(8)]


def test_a_waiting_job_keeps_its_rank():
    node = Node(slab_bytes=64 * LAYOUT.slot_bytes, max_queued=8, overtake=0.0, max_active=1, short_jobs=0)
    wait(node)
    node.ready("a", prompt(2 * B, base=300))
    node.start("b", prompt(2 * B, base=400))
    node.take(ReserveDecode, "d")
    node.say("k", WaitEnded(booking=31))
    node.finish()
    node.received("a")
    assert node.take(ReserveDecode, "d")[0].request_id == "w", "it came first"
