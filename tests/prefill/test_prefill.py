"""The prefill actor: queue and chunks, reuse, handoff, puts; and nothing pinned or leaked whatever ends a job."""

import random
from dataclasses import replace

import pytest
from actor_harness import LAYOUT, Harness, leased

from mooncake_zmq.core.actor import Drained, TimerFired
from mooncake_zmq.core.chunking import chunk_stop
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.drain import MOVE_AGAIN_S
from mooncake_zmq.core.links import LINK_S
from mooncake_zmq.core.messages import (
    MAX_BLOCKS,
    MAX_TOKENS,
    AttemptFailed,
    BlocksAnnounced,
    CancelRequest,
    ChangeRole,
    CommitSlots,
    DecodeDenied,
    DecodeReserved,
    FirstToken,
    GrantedSlot,
    HandoffBlocks,
    HandoffDone,
    HandoffFailed,
    HandoffReceived,
    LayersReady,
    LeaseBlocks,
    LeaseRenewed,
    PlaceElsewhere,
    PrefillLoad,
    ReclaimSlots,
    ReleaseLease,
    RenewLease,
    ReportCorrupt,
    ReserveDecode,
    ReserveSlots,
    Sampling,
    SlotRef,
    SlotsReserved,
    StartPrefill,
    StopRule,
)
from mooncake_zmq.core.work import (
    BlocksCopied,
    ChunkComputed,
    ComputeChunk,
    CopyBlocks,
    LayersComputed,
    SampleTokens,
    TokensSampled,
    WorkFailed,
)
from mooncake_zmq.kv.block_hash import extend_keys, namespace, pack_tokens, unpack_tokens
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.pool.node.client import POOL_ABSENT, PoolClientSettings
from mooncake_zmq.prefill.prefill import Prefill
from mooncake_zmq.prefill.settings import PrefillSettings

B = LAYOUT.block_tokens
ROOT = namespace(model="m", layout="l")
COSTS = Costs()
BASE = PrefillSettings(
    overtake=1.0, slab_bytes=16 * LAYOUT.slot_bytes, chunk_tokens=2 * B, max_active=2, short_jobs=1, max_queued=4
)


def prompt(length, base=0):
    return list(range(base, base + length))


class Node(Harness):
    def __init__(self, *, costs=COSTS, may_become="", layout=LAYOUT, **settings):
        self.settings = replace(BASE, **settings)
        actor = Prefill(
            name="me", host="h0", incarnation=2, settings=self.settings, layout=layout, costs=costs, may_become=may_become
        )
        super().__init__(actor)
        for name in ("g", "c", "k"):
            self.up(name, 7)
        self.up("d", 7, host="h1")

    def start(self, request_id="r", tokens=None, *, attempt=1, reuse_blocks=0, sources=(), decode="d", **changes):
        tokens = prompt(10) if tokens is None else tokens
        packed = tokens if isinstance(tokens, bytes) else pack_tokens(tokens)
        fields = {
            "request_id": request_id,
            "attempt": attempt,
            "tokens": packed,
            "root": ROOT,
            "keys": tuple(extend_keys(ROOT, packed, B)),
            "first_index": 0,
            "sampling": Sampling(),
            "stop": StopRule(max_tokens=9),
            "decode": decode,
            "reuse_blocks": reuse_blocks,
            "sources": sources,
            "deadline_s": 60.0,
        }
        self.say("g", StartPrefill(**(fields | changes)))

    def reserve(self, request_id="r", *, attempt=1, held=0):
        self.say("d", DecodeReserved(request_id=request_id, attempt=attempt, held_blocks=held))

    def lease(self, count=0, *, remote=0):
        """The pool answers the one open lease with `count` blocks, the last `remote` of them fetched."""
        ask = self.one(LeaseBlocks, "c")
        refs = [SlotRef(node="c", incarnation=7, slot=i, generation=2, checksum=500 + i) for i in range(count)]
        self.say("c", leased(ask.lease_id, refs, remote=remote, node="c"))
        return ask.lease_id

    def ready(self, request_id="r", tokens=None, *, held=0, leased=0, **options):
        self.start(request_id, tokens, **options)
        if any(isinstance(m, LeaseBlocks) for _, m in self.sent):
            self.lease(leased)
        self.reserve(request_id, held=held, attempt=options.get("attempt", 1))

    def computed(self, *, token=77, failed=(), corrupt=(), elapsed_s=0.01, **more):
        work_id, work = self.work(ComputeChunk)
        sums = tuple(100 + grant.slot for grant in work.outputs)
        sampled = token if work.sampling is not None else None
        self.done(work_id, ChunkComputed(sums, sampled, elapsed_s, (*failed, *corrupt), corrupt, **more))
        return work

    def finish(self):
        while any(isinstance(work, ComputeChunk) for work in self.works.values()):
            self.computed()

    def received(self, request_id="r", attempt=1):
        self.say("d", HandoffReceived(request_id=request_id, attempt=attempt))

    def put_all(self, *, fail=False):
        for reserve in self.take(ReserveSlots, "c"):
            grants = tuple(GrantedSlot(index=i, slot=20 + i, generation=1) for i in range(len(reserve.keys)))
            self.say("c", SlotsReserved(put_id=reserve.put_id, grants=grants))
            for work_id, work in list(self.works.items()):
                if isinstance(work, CopyBlocks):
                    sums = tuple(source.checksum for source, _ in work.copies)
                    self.done(work_id, WorkFailed("test") if fail else BlocksCopied(sums))


@pytest.fixture
def node():
    return Node()


def test_the_decode_is_handed_what_its_pool_did_not_get_and_the_proof_covers_it(node):
    node.ready(reuse_blocks=2, leased=2, held=2)
    assert node.one(ReserveDecode, "d").sources == ("c",)
    assert [each.ready for each in node.take(HandoffBlocks)] == [False], "the decode loads both itself"
    node.reserve(held=1)
    given = node.one(HandoffBlocks)
    assert (given.first_block, [ref.slot for ref in given.sources], given.ready) == (1, [1], True)
    node.computed()
    done = node.one(HandoffDone)
    assert done.blocks == 2
    node.reserve(held=0)
    assert node.one(HandoffBlocks).first_block == 0
    again = node.one(HandoffDone)
    assert again.blocks == 3
    assert again.checksum == block_checksum([500, 501, 100])
    node.reserve(held=1)
    assert node.take(HandoffDone) == [], "it cannot hold more again"
    node.received()


def run_job(node, request_id="r", tokens=None, **options):
    node.ready(request_id, tokens, **options)
    node.finish()
    node.received(request_id)
    node.put_all()
    first = node.one(FirstToken)
    node.sent.clear()
    return first


# --- the way of a job


def test_a_job_runs_to_the_first_token_and_leaves_nothing_behind(node):
    node.start()
    ask = node.one(ReserveDecode, "d")
    assert (ask.tokens, ask.tail, ask.gateway) == (10, pack_tokens([8, 9]), "g")
    assert ask.last_key == extend_keys(ROOT, pack_tokens(prompt(10)), B)[-1]
    assert node.works == {}, "no compute before the reservation"
    node.reserve()
    assert node.works == {}, "nor before the pool has answered"
    node.lease(0)
    node.finish()
    first = node.one(FirstToken, "g")
    assert (first.token, first.index, first.own, first.local, first.remote) == (77, 0, 0, 0, 0)
    node.received()
    node.put_all()
    commit = node.one(CommitSlots, "c")
    assert [index for index, _ in commit.checksums] == [0, 1], "the partial tail is not a block of the pool"
    assert node.busy() == {}
    assert node.sequences == set()


def test_the_handoff_is_told_in_order_and_proved_by_a_checksum(node):
    node.ready(tokens=prompt(9))
    work_id, work = node.work(ComputeChunk)
    blocks = node.one(HandoffBlocks, "d")
    assert (blocks.first_block, blocks.ready) == (0, False)
    assert [ref.slot for ref in blocks.sources] == [grant.slot for grant in work.outputs]
    assert all(ref.checksum == 0 and ref.generation % 2 for ref in blocks.sources)
    node.progress(work_id, LayersComputed(1))
    node.progress(work_id, LayersComputed(2))
    assert [(m.first_block, m.stop_layer) for m in node.take(LayersReady, "d")] == [(0, 1), (0, 2)]
    sums = [100 + grant.slot for grant in work.outputs]
    node.finish()
    done = node.one(HandoffDone, "d")
    assert (done.blocks, done.layers, done.token) == (3, LAYOUT.layers, 77)
    assert done.checksum == block_checksum(sums)


@pytest.mark.parametrize("told", [0, 1, LAYOUT.layers])
def test_layers_not_told_of_before_are_told_once_with_the_result_of_each_chunk(node, told):
    node.ready(tokens=prompt(9))
    work_id, _ = node.work(ComputeChunk)
    if told:
        node.progress(work_id, LayersComputed(told))
    assert len(node.take(LayersReady, "d")) == bool(told)
    node.finish()
    others = HandoffBlocks | ReserveSlots | ReserveDecode | PrefillLoad | BlocksAnnounced
    told_last = [type(m) for _, m in node.sent if not isinstance(m, others)]
    assert told_last == [FirstToken, *([LayersReady] if told < LAYOUT.layers else []), HandoffDone], "a client waits for none"
    left = [] if told == LAYOUT.layers else [(0, LAYOUT.layers)]
    assert [(m.first_block, m.stop_layer) for m in node.take(LayersReady, "d")] == left


def test_chunks_are_whole_blocks_and_announced_one_by_one(node):
    node.ready(tokens=prompt(27))
    spans = []
    while node.works:
        blocks = node.one(HandoffBlocks, "d")
        work = node.computed()
        assert blocks.first_block * B == work.start
        spans.append((work.start, len(work.tokens) // 4, len(work.outputs)))
    assert spans == [(0, 8, 2), (8, 8, 2), (16, 8, 2), (24, 3, 1)]
    assert node.one(HandoffDone, "d").blocks == 7


def test_blocks_the_decode_holds_are_not_in_the_proof(node):
    node.ready(tokens=prompt(9), reuse_blocks=1, held=1)
    sums = [100 + grant.slot for grant in node.work(ComputeChunk)[1].outputs]
    node.finish()
    done = node.one(HandoffDone, "d")
    assert done.blocks == 2
    assert done.checksum == block_checksum(sums[1:])


# --- computing while the decode makes room


def told_of_the_end(node):
    return [type(m) for _, m in node.sent if isinstance(m, FirstToken | HandoffDone)]


def test_the_first_chunk_is_computed_while_the_decode_makes_room(node):
    node.start(tokens=prompt(3))
    asked = [type(m) for to, m in node.sent if to == "d"]
    assert asked == [ReserveDecode, HandoffBlocks], "in this order: it knows the request when it hears of blocks"
    node.computed()
    assert told_of_the_end(node) == [FirstToken, HandoffDone], "nobody waits for an answer that is nearly always yes"
    node.reserve()
    assert told_of_the_end(node) == [FirstToken, HandoffDone], "once"
    node.received()
    assert node.busy() == {}
    assert node.sequences == set()


def test_what_is_longer_than_a_chunk_waits_for_the_decode_and_holds_no_room_meanwhile(node):
    node.start(tokens=prompt(2 * B + 3))
    node.lease(0)
    assert node.works == {}
    assert node.actor.slots.pinned == 0
    node.reserve()
    node.finish()
    assert told_of_the_end(node) == [FirstToken, HandoffDone]


def test_what_is_longer_than_a_chunk_does_not_wait_where_one_chunk_is_left_of_it(node):
    run_job(node, "r0", prompt(2 * B))
    node.down("d")
    node.up("d", 8, host="h0")
    node.start(tokens=prompt(2 * B + 3), reuse_blocks=2)
    assert node.work(ComputeChunk)[1].start == 2 * B


def test_a_decode_that_goes_before_it_answered_is_told_by_the_prefill(node):
    """It may never have heard of the request: the gateway would wait for it until it takes the attempt for stalled."""
    node.start(tokens=prompt(3))
    node.computed()
    node.down("d")
    assert node.one(AttemptFailed, "g").avoid == "d"
    node.put_all()
    assert node.busy() == {}


def test_a_decode_that_goes_amid_a_handoff_is_the_gateways_matter(node):
    node.ready(tokens=prompt(3))
    node.finish()
    node.down("d")
    assert node.take(AttemptFailed) == []


def test_who_has_room_at_the_decode_is_computed_before_who_may_have(node):
    node.start("long", prompt(4 * B))
    node.lease(0)
    node.reserve("long")
    node.start("short", prompt(3, base=50))
    assert [job["state"] for job in node.actor.dump(node.now)["jobs"]] == ["computing", "ready"]
    assert node.computed().start == 0
    assert node.computed().start == 2 * B, "`short` ranks before it"
    assert len(node.computed().tokens) == 3 * 4, "with an idle engine `short` need not wait"


@pytest.mark.parametrize("refused", [True, False])
def test_a_decode_without_room_ends_the_chunk_that_was_begun_meanwhile(node, refused):
    node.start(tokens=prompt(3))
    deny(node, refused)
    failed = node.one(AttemptFailed, "g")
    assert (failed.refused, failed.avoid) == (refused, "d")
    assert len(node.cancelled) == 1, "the engine is wanted by others"
    node.finish()
    assert told_of_the_end(node) == []
    assert node.busy() == {}
    assert node.sequences == set()


def test_who_has_its_first_token_is_placed_again_where_its_decode_has_no_room(node):
    node.start(tokens=prompt(3))
    node.computed()
    deny(node, refused=True)
    failed = node.one(AttemptFailed, "g")
    assert (failed.refused, failed.full, failed.avoid) == (False, True, "d"), "and not refused, behind a token"
    node.put_all()
    assert node.busy() == {}


def deny(node, refused):
    node.say("d", DecodeDenied(request_id="r", attempt=1, reason="test", full=True, refused=refused, retry_after_s=2.0))


def test_what_the_decode_may_have_and_what_is_told_of_the_prompt_wait_for_its_answer(node):
    node.start("held", prompt(9), reuse_blocks=2)
    node.lease(0)
    node.start("scored", prompt(5, base=100), prompt_logprobs=0)
    assert node.works == {}
    node.reserve("scored")
    assert node.work(ComputeChunk)[1].prompt_logprobs == 0


def test_a_decode_on_the_same_host_is_not_asked_what_it_has(node):
    run_job(node, "r0", prompt(9))
    node.down("d")
    node.up("d", 8, host="h0")
    node.start(tokens=prompt(9), reuse_blocks=2)
    assert node.one(ReserveDecode, "d").reuse_keys == ()
    assert node.work(ComputeChunk)[1].start == 2 * B, "so it need not answer first"


def test_a_decode_that_says_to_have_what_it_was_not_asked_for_changes_no_proof(node):
    node.start(tokens=prompt(3))
    node.reserve(held=1)
    node.finish()
    assert node.one(HandoffDone, "d").blocks == 1


def test_reuse_is_counted_by_where_it_came_from_and_leaves_one_token_to_compute(node):
    run_job(node, "r0", prompt(9))
    node.start("r1", prompt(20), reuse_blocks=4, sources=("c9",))
    ask = [m for _, m in node.sent if isinstance(m, LeaseBlocks)][0]
    keys = extend_keys(ROOT, pack_tokens(prompt(20)), B)
    assert ask.keys == tuple(keys[2:4]), "own hits first; of 5 blocks the last keeps a token to compute"
    assert ask.fetch_s > 0
    node.lease(2, remote=1)
    node.reserve("r1", held=1)
    ready = [m for m in node.take(HandoffBlocks, "d") if m.ready]
    assert [(m.first_block, len(m.sources)) for m in ready] == [(1, 3)]
    work = node.computed()
    assert work.start == 16
    assert [load.source.node for load in work.prefix] == ["me", "me", "c", "c"]
    first = node.one(FirstToken)
    assert (first.own, first.local, first.remote) == (8, 4, 4)
    node.received("r1")
    node.put_all()
    assert node.busy() == {}


def test_blocks_are_waited_for_only_when_the_plan_counts_on_them(node):
    node.start(reuse_blocks=2)
    assert node.one(LeaseBlocks).fetch_s > 0.0, "this host's SSD may hold them"
    node.start("r1", reuse_blocks=0)
    assert node.one(LeaseBlocks).fetch_s == 0.0


@pytest.fixture
def early():
    """Begun after a restart, the gateway and the decode were heard and not yet the host's pool."""
    node = Node()
    node.down("c")
    node.start("r", prompt(20), reuse_blocks=4)
    node.reserve()
    return node


def test_a_request_that_comes_before_the_pool_was_heard_waits_for_what_its_plan_reuses(early):
    assert early.works == {}, "computing it all takes longer than the pool needs to be heard"
    early.down("k")
    assert early.works == {}, "somebody else's death says nothing of the pool"
    early.up("c", 8)
    ask = early.one(LeaseBlocks, "c")
    assert len(ask.keys) == 4
    early.say("c", leased(ask.lease_id, [SlotRef(node="c", incarnation=8, slot=i, generation=2, checksum=5) for i in range(4)]))
    assert early.computed().start == 16
    assert early.one(FirstToken).local == 16
    early.received()
    assert early.one(ReleaseLease, "c").lease_id == ask.lease_id
    early.put_all()
    assert_nothing_left(early)


def test_a_pool_is_waited_for_no_longer_than_computing_takes_what_it_would_spare(early):
    spared_s = COSTS.compute_s(16, 0)
    early.advance(spared_s * 0.9)
    assert early.works == {}
    early.advance(spared_s * 0.2)
    assert early.work(ComputeChunk)[1].start == 0
    early.up("c", 8)
    assert early.take(LeaseBlocks) == [], "it is computing"
    early.finish()
    early.received()
    early.put_all()
    assert_nothing_left(early)


def test_a_pool_that_was_not_heard_is_waited_for_only_when_the_plan_counts_on_it():
    node = Node()
    node.down("c")
    node.ready("r", prompt(20), reuse_blocks=0)
    assert node.work(ComputeChunk)[1].start == 0


def test_who_leaves_before_the_pool_was_heard_asks_it_for_nothing(early):
    early.say("g", CancelRequest(request_id="r", attempt=1))
    early.up("c", 8)
    assert early.take(LeaseBlocks) == []
    assert_nothing_left(early)


def test_a_prompt_of_whole_blocks_keeps_its_last_block_to_compute(node):
    run_job(node, "r0", prompt(8))
    first = run_job(node, "r1", prompt(8))
    assert first.own == 4


def test_two_jobs_with_the_same_prompt_hand_off_both_and_store_each_key_once(node):
    node.ready("r0", prompt(8))
    node.ready("r1", prompt(8))
    node.finish()
    node.received("r0")
    node.received("r1")
    node.put_all()
    assert node.busy() == {}
    assert len(node.actor.slots.committed_keys()) == 2


# --- order


def test_a_short_prompt_overtakes_a_long_one_between_two_chunks(node):
    node.ready("long", prompt(40))
    node.ready("short", prompt(5, base=900))
    order = []
    while node.works:
        work = node.computed()
        order.append("short" if work.tokens[:4] == pack_tokens([900]) else "long")
    assert order[:2] == ["long", "short"]


def in_order(node):
    """The first token of the prompt of each chunk, as they are computed."""
    order = []
    while any(isinstance(work, ComputeChunk) for work in node.works.values()):
        order.append(unpack_tokens(node.computed().tokens)[0])
    return order


def test_first_come_first_served_without_overtaking():
    node = Node(overtake=0.0)
    node.ready("long", prompt(20))
    node.advance(0.001)
    node.ready("short", prompt(3, base=900))
    assert in_order(node) == [0, 8, 16, 900]


def test_a_step_of_priority_is_worth_its_seconds():
    node = Node(max_active=3, overtake=0.0, priority_s=10.0)
    node.ready("busy", prompt(3, base=100))
    node.ready("late", prompt(3, base=200), priority=1)
    node.advance(9.0)
    node.ready("soon", prompt(3, base=300))
    assert in_order(node) == [100, 300, 200]


def answer_all(node):
    """Whatever pool and decode were asked."""
    for ask in node.take(LeaseBlocks, "c"):
        node.say("c", leased(ask.lease_id, [], node="c"))
    for ask in node.take(ReserveDecode, "d"):
        node.reserve(ask.request_id, attempt=ask.attempt)
    for done in node.take(HandoffDone, "d"):
        node.received(done.request_id)
    node.put_all()


def test_a_stream_of_short_prompts_does_not_keep_a_long_one_from_its_chunks():
    """Of those that come later only such pass as come within `overtake` times its work: then it is the long one's turn."""
    costs = Costs(prefill_token_s=1e-5, prefill_square_s=0.0)
    node = Node(costs=costs, max_queued=400)
    work_s, short_s = costs.compute_s(24, 0), costs.compute_s(4, 0)
    node.start("long", prompt(24))
    answer_all(node)
    began_at, passed, count = node.now, 0, 0
    while not any(m.request_id == "long" for m in node.take(FirstToken)):
        assert count < 300, "it starves"
        count += 1
        node.start(f"s{count}", prompt(4, base=900))
        answer_all(node)
        node.advance(short_s / 2)  # twice as many come as can be computed
        if count % 2:
            tokens = unpack_tokens(node.work(ComputeChunk)[1].tokens)
            passed += tokens[0] == 900
            node.computed(elapsed_s=costs.compute_s(len(tokens), 0))
            answer_all(node)
    assert 0 < passed <= work_s / (short_s / 2) + 1
    assert node.now - began_at <= 2 * (passed * short_s + work_s)


def test_a_rank_is_kept_whatever_is_measured_or_computed_later(node):
    node.ready("a", prompt(20))
    rank = node.actor.jobs.of("a").rank
    assert rank == pytest.approx(node.now + COSTS.compute_s(20, 0))
    node.computed(elapsed_s=100.0)
    assert node.actor.jobs.of("a").rank == rank


def test_blocks_that_nobody_will_look_for_here_are_free_once_they_are_handed_off():
    for own_reuse, kept in ((False, 0), (True, 2)):
        node = Node(own_reuse=own_reuse)
        node.ready()
        node.finish()
        node.put_all()
        node.received()
        assert node.actor.gauges(0.0)["cached_blocks"] == kept
        assert node.actor.slots.available == node.actor.slots.capacity


def test_what_the_plan_reuses_is_no_work_of_its_own(node):
    node.start("a", prompt(20), reuse_blocks=3)
    assert node.actor.jobs.of("a").rank == pytest.approx(node.now + COSTS.compute_s(20, 12))
    node.start("b", prompt(8, base=50), reuse_blocks=9)
    assert node.actor.jobs.of("b").rank == pytest.approx(node.now + COSTS.compute_s(8, 4)), "one token at least is computed"


def test_a_chunk_leaves_no_tiny_remainder():
    assert chunk_stop(0, 100, 64) == 64
    assert chunk_stop(0, 79, 64) == 79
    assert chunk_stop(0, 80, 64) == 64
    assert chunk_stop(64, 100, 64) == 100


def test_long_prompts_that_hold_every_place_do_not_keep_a_short_one_out(node):
    for name in ("a", "b", "c"):
        node.start(name, prompt(12, base=100 * ord(name)), decode="d")
    node.start("short", prompt(3))
    asked = [m.request_id for m in node.take(ReserveDecode)]
    assert asked == ["a", "b", "short"]
    node.start("short2", prompt(3))
    assert node.take(ReserveDecode) == []


def test_a_full_queue_refuses_at_once():
    node = Node(max_active=1, short_jobs=0, max_queued=1)
    for i in range(3):
        node.start(f"r{i}")
    failed = node.one(AttemptFailed, "g")
    assert (failed.request_id, failed.full) == ("r2", True)


@pytest.mark.parametrize(
    "bad",
    [
        {"tokens": b""},
        {"tokens": b"abc"},
        {"keys": ()},
        {"tokens": pack_tokens(prompt(100)), "keys": tuple(extend_keys(ROOT, pack_tokens(prompt(100)), B))},
    ],
    ids=["no tokens", "torn tokens", "keys", "too long"],
)
def test_a_job_that_cannot_be_done_here_is_refused(node, bad):
    node.start(**bad)
    failed = node.one(AttemptFailed, "g")
    assert (failed.attempt, failed.full) == (1, False), "the next attempts would fare no better: they are limited"
    assert node.busy() == {}


def test_a_job_whose_decode_has_yet_to_come_up_finds_no_room_and_one_whose_decode_stays_away_fails(node):
    for attempt, full in ((1, True), (2, False)):
        node.start(decode="d9", attempt=attempt)
        failed = node.one(AttemptFailed, "g")
        assert (failed.full, failed.avoid) == (full, "d9")
        node.advance(LINK_S)
    node.up("d9", role="decode")
    node.down("d9")
    node.start(decode="d9", attempt=3)
    assert node.one(AttemptFailed, "g").full, "its link was up meanwhile"
    assert node.busy() == {}


def test_a_draining_prefill_refuses_new_jobs_and_finishes_the_old(node):
    node.ready("r0")
    node.drain()
    node.start("r1")
    failed = node.one(AttemptFailed)
    assert (failed.request_id, failed.full) == ("r1", True)
    assert not node.drained
    node.finish()
    node.received("r0")
    node.put_all()
    assert node.drained


def test_a_resting_prefill_refuses_new_jobs_stays_and_takes_jobs_again(node):
    node.ready("r0")
    node.set_cordon()
    assert node.one(PrefillLoad, "k").draining, "it says so at once"
    node.start("r1")
    assert node.one(AttemptFailed).full
    node.finish()
    node.received("r0")
    node.put_all()
    assert not node.drained
    node.set_cordon(False)
    assert not node.take(PrefillLoad)[-1].draining
    node.ready("r2")
    node.set_cordon()
    node.drain()
    node.set_cordon(False)
    node.start("r3")
    assert node.one(AttemptFailed).request_id == "r3", "who leaves does so, whether it rested or not"
    node.finish()
    node.received("r2")
    node.put_all()
    assert node.drained


def test_a_draining_prefill_asks_at_once_to_place_elsewhere_the_prompts_whose_turn_comes_too_late():
    node = Node(costs=Costs(prefill_token_s=0.04), drain_grace_s=0.5, max_active=1, short_jobs=0)
    node.ready("r0", prompt(8))
    node.start("r1", prompt(8, base=50))
    node.start("r2", prompt(8, base=90))
    node.drain()
    assert node.one(PlaceElsewhere, "g").attempts == (("r1", 1), ("r2", 1)), "the first one ends sooner than elsewhere"
    node.say("g", CancelRequest(request_id="r1", attempt=1))
    node.advance(MOVE_AGAIN_S)
    assert node.one(PlaceElsewhere, "g").attempts == (("r2", 1),)
    node.finish()
    node.received("r0")
    node.put_all()
    assert not node.drained
    node.say("g", CancelRequest(request_id="r2", attempt=1))
    assert node.drained


def test_a_prompt_that_waits_for_something_else_than_the_engine_is_placed_elsewhere_after_a_while(node):
    node.start("r0")
    node.set_cordon()
    assert not node.take(PlaceElsewhere), "by its length it would end here sooner"
    node.advance(MOVE_AGAIN_S)
    assert node.one(PlaceElsewhere, "g").attempts == (("r0", 1),), "its decode has not answered"


def test_a_drain_that_ran_out_of_time_hands_everything_over_at_once(node):
    node.ready("r0")
    node.finish()
    node.put_all()
    node.ready("r1", prompt(8, base=50))
    node.start("r2", prompt(8, base=90))
    node.drain()
    node.sent.clear()
    node.run_out_of_drain()
    failed = {message.request_id: message for message in node.take(AttemptFailed, "g")}
    assert sorted(failed) == ["r0", "r1", "r2"], "computed to its end, computing, and not begun"
    assert all(message.full and not message.avoid for message in failed.values()), "nothing broke"
    assert {"r0", "r1"} <= {message.request_id for message in node.take(HandoffFailed, "d")}
    node.computed()
    assert node.drained
    assert node.busy() == {}


def test_the_load_tells_what_waits(node):
    node.ready("r0", prompt(20))
    node.advance(0.3)
    load = node.take(PrefillLoad, "k")[-1]
    left_s = COSTS.compute_s(20, 8)  # the chunk in flight should be over by now: it counts nothing, and never below that
    assert [job.left_s for job in load.jobs] == [pytest.approx(left_s)]
    node.finish()
    node.advance(0.3)
    assert node.take(PrefillLoad, "k")[-1].jobs == ()


def told(node):
    """The next report."""
    node.take(PrefillLoad)
    node.advance(node.settings.report_s)
    return node.take(PrefillLoad, "k")[-1]


def test_a_report_names_every_job_with_its_rank_and_what_is_left_of_it():
    node = Node(max_active=1, short_jobs=0, report_s=0.001)
    node.ready("a", prompt(20), booking=11)
    node.start("b", prompt(12, base=100), booking=12, reuse_blocks=2)
    node.start("c", prompt(4, base=200), booking=13, priority=2)
    load = told(node)
    assert (load.overtake, load.priority_s, load.room) == (1.0, 10.0, 2)
    assert [job.booking for job in load.jobs] == [12, 11, 13], "by rank: `b` has only one block to compute"
    by_booking = {job.booking: job for job in load.jobs}
    assert by_booking[11].left_s == pytest.approx(COSTS.compute_s(20, 0) - 0.001)
    assert by_booking[12].left_s == pytest.approx(COSTS.compute_s(12, 8))
    assert by_booking[13].left_s == pytest.approx(COSTS.compute_s(4, 0))
    assert by_booking[13].rank_s == pytest.approx(20.0 + COSTS.compute_s(4, 0) - 0.001)


def test_a_cached_prefix_is_no_work_before_and_after_the_lease_is_answered():
    """A queue of prompts that are mostly cached was told as if nothing of them were: 98 s for 4 s."""
    node = Node(report_s=0.001)
    node.start(tokens=prompt(40), reuse_blocks=8, sources=("c9",))
    (job,) = told(node).jobs
    assert job.left_s == pytest.approx(COSTS.compute_s(40, 32)), "as the plan promises"
    node.lease(5)
    (job,) = told(node).jobs
    assert job.left_s == pytest.approx(COSTS.compute_s(40, 20)), "as the pool says"


def test_loading_counts_only_where_it_takes_longer_than_computing():
    slow = replace(COSTS, load_bytes_per_s=1e6)
    node = Node(report_s=0.001, costs=slow)
    node.start(tokens=prompt(14), reuse_blocks=3)
    node.lease(3)
    node.reserve()
    (job,) = told(node).jobs
    assert slow.load_s(12) > slow.compute_s(14, 12)
    assert job.left_s == pytest.approx(slow.load_s(12) - 0.001)


def test_a_report_with_more_jobs_than_it_names_still_tells_all_their_work(monkeypatch):
    monkeypatch.setattr("mooncake_zmq.prefill.workload.MAX_REPORTED", 2)
    node = Node(report_s=0.001, max_queued=10)
    for number in range(5):
        node.start(f"r{number}", prompt(8, base=100 * number), booking=number)
    load = told(node)
    assert [job.booking for job in load.jobs] == [0, 1]
    assert sum(job.left_s for job in load.jobs) == pytest.approx(5 * COSTS.compute_s(8, 0))


def test_a_slow_first_chunk_does_not_stick(node):
    """Nobody gives work to a node that told to be a hundred times slower, so it measured nothing better, ever."""
    node.ready(tokens=prompt(8))
    node.computed(elapsed_s=100 * COSTS.compute_s(8, 0))
    node.received()
    node.put_all()
    first = told(node).compute
    assert 1.5 < first.seconds / first.predicted_s < 3, "cold caches on a few tokens are held against work as predicted"
    for _ in range(10):
        node.advance(60.0)
    last = told(node).compute
    assert last.seconds / last.predicted_s == pytest.approx(1.0, abs=0.01)


def test_a_chunk_that_waits_for_its_prefix_says_nothing_bad_about_computing(node):
    """With what the engine knows, and without."""
    for request_id, known in (("r0", {"loaded_s": 6.0, "waited_s": 5.98}), ("r1", {})):
        node.start(request_id, prompt(14, base=100 * len(known)))
        node.lease(3)
        node.reserve(request_id)
        compute_s = COSTS.compute_s(14, 12)
        node.computed(elapsed_s=5.98 + compute_s, **known)
        node.received(request_id)
        node.put_all()
        node.take(FirstToken)
    load = told(node)
    assert load.compute.seconds / load.compute.predicted_s < 1.1
    assert load.load.seconds / load.load.predicted_s > 30


def test_a_load_that_is_hidden_by_computing_is_measured_too_if_the_engine_knows(node):
    node.start(tokens=prompt(14))
    node.lease(3)
    node.reserve()
    node.computed(elapsed_s=0.02, loaded_s=3 * COSTS.load_s(12))
    load = told(node)
    assert load.load.seconds > load.load.predicted_s > 0


def test_reports_come_sooner_when_something_ended_but_not_for_each_end(node):
    node.advance(10.0)
    node.take(PrefillLoad)
    for number in range(8):
        run_job(node, f"r{number}", prompt(5, base=100 * number))
    node.advance(0.01)
    assert len(node.take(PrefillLoad, "k")) == 0
    node.advance(0.0625)
    assert len(node.take(PrefillLoad, "k")) == 1
    node.advance(0.24)
    assert len(node.take(PrefillLoad, "k")) == 1


# --- room in the slab


def test_a_job_waits_for_room_and_gets_it():
    node = Node(slab_bytes=6 * LAYOUT.slot_bytes)
    node.ready("r0", prompt(16))
    node.ready("r1", prompt(16, base=50))
    node.finish()
    assert "r1" not in {m.request_id for m in node.take(FirstToken)}
    node.received("r0")
    node.put_all()
    node.finish()
    assert node.one(FirstToken).request_id == "r1"


def test_jobs_that_wait_for_each_others_hits_do_not_stand_still():
    node = Node(slab_bytes=8 * LAYOUT.slot_bytes)
    run_job(node, "a0", prompt(16))
    run_job(node, "b0", prompt(16, base=50))
    node.start("a", prompt(28))
    node.start("b", prompt(28, base=50))
    for _ in range(2):
        ask = node.take(LeaseBlocks)
        for lease in ask:
            node.say("c", leased(lease.lease_id, [], node="c"))
    node.reserve("a")
    node.reserve("b")
    assert node.one(AttemptFailed).request_id == "b"
    node.advance(1.0)
    node.finish()
    assert node.one(FirstToken).request_id == "a"


# --- leases and puts


def test_a_lease_is_renewed_only_once_granted_and_then_for_as_long_as_needed(node):
    node.start(tokens=prompt(10))
    node.advance(4.0)
    assert node.take(RenewLease) == [], "what is only asked for is not renewed"
    lease_id = node.lease(2)
    for _ in range(10):
        node.advance(3.0)
        for renew in node.take(RenewLease):
            assert renew.lease_id == lease_id
            node.say("c", LeaseRenewed(lease_id=renew.lease_id))
    node.reserve()
    work = node.work(ComputeChunk)[1]
    assert len(work.prefix) == 2
    assert work.prefix_s > 5.0
    node.finish()
    assert node.take(ReleaseLease) == [], "the decode still reads under it"
    node.received()
    assert node.one(ReleaseLease).lease_id == lease_id


def test_a_lease_over_before_the_compute_is_a_miss_not_an_error(node):
    node.start(tokens=prompt(10), deadline_s=600.0)
    node.lease(2)
    node.advance(14.0)
    node.reserve()
    assert node.work(ComputeChunk)[1].prefix == ()
    node.finish()
    assert node.one(FirstToken).local == 0
    assert node.actor.counts["prefix_leases_expired"] == 1


def test_a_miss_is_not_counted_as_an_expired_lease(node):
    run_job(node)
    assert "prefix_leases_expired" not in node.actor.counts


def test_a_prefix_block_that_does_not_verify_is_reported_and_the_request_placed_anew(node):
    run_job(node, "r0", prompt(5))
    node.start("r1", prompt(14))
    node.lease(2)
    node.reserve("r1")
    own = node.actor.slots.committed(extend_keys(ROOT, pack_tokens(prompt(5)), B)[0])
    node.computed(corrupt=(0, 2))
    assert node.one(AttemptFailed, "g").request_id == "r1"
    assert node.one(HandoffFailed, "d").request_id == "r1"
    assert [ref.slot for ref in node.one(ReportCorrupt, "c").slots] == [1]
    assert node.actor.slots.committed_keys() == []
    assert node.actor.slots.key_of(own) is None
    assert node.busy() == {}


def reading_pool(node, attempt):
    """A job whose prefix of two blocks comes from the pool."""
    node.start(tokens=prompt(14), attempt=attempt)
    node.lease(2)
    node.reserve(attempt=attempt)


def test_a_prefix_that_did_not_arrive_accuses_nobody_and_is_computed_by_the_next_attempt(node):
    reading_pool(node, 1)
    node.computed(failed=(0, 1))
    assert node.one(AttemptFailed, "g").reason == "a reused block was not reached"
    assert node.take(ReportCorrupt) == []
    node.start(tokens=prompt(14), attempt=2)
    assert node.take(LeaseBlocks) == []
    assert node.take(ReserveDecode)[-1].reuse_keys == ()
    node.reserve(attempt=2)
    assert node.work(ComputeChunk)[1].prefix == ()
    node.finish()
    assert node.one(FirstToken).attempt == 2


def test_what_the_decode_could_not_load_is_computed_by_the_next_attempt(node):
    reading_pool(node, 1)
    node.say("d", HandoffFailed(request_id="r", attempt=1, reason="a handed-off block was not reached"))
    node.computed()
    node.start(tokens=prompt(14), attempt=2)
    assert node.take(LeaseBlocks) == []


def test_a_pooled_prefix_is_to_be_loaded_while_its_lease_lasts(node):
    node.start(tokens=prompt(14), deadline_s=600.0)
    node.lease(2)
    node.advance(2.0)
    node.reserve()
    ttl_s = BASE.pool.lease_ttl_s
    prefix_s = node.work(ComputeChunk)[1].prefix_s
    assert 0 < prefix_s <= ttl_s * 0.75 < BASE.work_deadline_s


def set_aside(node, request_id="r"):
    """A job is computed, and it is not known in time what its first token may be: the work that samples it."""
    node.ready(request_id)
    while not any(isinstance(work, SampleTokens) for work in node.works.values()):
        node.computed(token=None)
    return node.work(SampleTokens)[0]


def test_a_job_whose_first_token_waits_for_its_grammar_keeps_no_other_waiting():
    node = Node(max_active=1, short_jobs=0)
    sampling = set_aside(node)
    assert node.take(HandoffDone) == []
    assert node.take(FirstToken) == []
    assert node.actor.gauges(node.now)["requests_running"] == 1
    node.ready("other", prompt(4, base=200))
    node.computed(token=5)
    assert node.one(FirstToken).request_id == "other"
    assert node.one(HandoffDone).request_id == "other"
    node.done(sampling, TokensSampled(((77, None),)))
    first, done = node.one(FirstToken), node.one(HandoffDone)
    assert (first.request_id, first.token, done.token) == ("r", 77, 77)
    node.received()
    node.received("other")
    node.put_all()
    assert node.busy() == {}
    assert node.sequences == set()
    assert node.actor.counts["jobs_set_aside"] == 1


def test_what_a_job_set_aside_has_computed_is_with_its_decode_and_its_memory_is_free(node):
    node.ready()
    while not any(isinstance(work, SampleTokens) for work in node.works.values()):
        node.computed(token=None)
    assert node.sequences == set()
    assert [m.stop_layer for m in node.take(LayersReady)][-1] == LAYOUT.layers


@pytest.mark.parametrize("stuck", [True, False])
def test_a_job_whose_first_token_cannot_be_sampled_fails_by_that_name(node, stuck):
    node.done(set_aside(node), WorkFailed("constraint: its grammar was not ready in 20 s", stuck=stuck))
    failed = node.one(AttemptFailed)
    assert failed.reason == "no first token: constraint: its grammar was not ready in 20 s"
    assert failed.stuck is stuck
    assert node.one(HandoffFailed).request_id == "r"
    node.put_all()
    assert node.busy() == {}


def test_a_job_that_ends_while_it_is_set_aside_stops_that_work_and_holds_nothing(node):
    sampling = set_aside(node)
    node.say("g", CancelRequest(request_id="r", attempt=1))
    assert node.cancelled == [sampling]
    node.put_all()
    assert node.busy() == {}
    node.done(sampling, TokensSampled(((77, None),)))
    assert node.take(FirstToken) == []


def test_a_failed_put_frees_its_slots(node):
    node.ready()
    node.finish()
    node.received()
    node.put_all(fail=True)
    assert node.one(CommitSlots).checksums == ()
    assert node.actor.counts["put_failures"] == 2
    assert node.busy() == {}


def test_a_put_whose_pool_dies_in_the_copy_keeps_its_sources_until_the_copy_ends(node):
    node.ready()
    node.finish()
    node.received()
    reserve = node.one(ReserveSlots)
    node.say(
        "c",
        SlotsReserved(put_id=reserve.put_id, grants=(GrantedSlot(index=0, slot=1, generation=1),)),
    )
    node.say("c", ReclaimSlots(put_id=reserve.put_id))
    assert node.take(CommitSlots) == [], "the copy still runs"
    node.down("c")
    assert node.busy()["pinned_blocks"] == 2
    node.up("c", 8)
    work_id, work = node.work(CopyBlocks)
    assert work.copies[0][1].incarnation == 7
    node.done(work_id, BlocksCopied((1,)))
    assert node.busy() == {}
    node.sent.clear()
    node.say("c", ReclaimSlots(put_id=reserve.put_id))
    assert node.one(CommitSlots).checksums == ()


def test_a_requests_blocks_and_its_decode_are_told_whose_it_is(node):
    node.start(tenant="alice")
    assert node.one(ReserveDecode, "d").tenant == "alice"
    node.lease(0)
    node.reserve()
    node.finish()
    node.received()
    assert {reserve.tenant for reserve in node.take(ReserveSlots)} == {"alice"}


@pytest.mark.parametrize("keeps", [False, True])
def test_copies_are_spare_where_the_decodes_pool_keeps_the_prompt(node, keeps):
    node.start()
    lease_id = node.lease(1)
    node.say("d", DecodeReserved(request_id="r", attempt=1, held_blocks=1, keeps=keeps))
    node.finish()
    assert {reserve.spare for reserve in node.take(ReserveSlots)} == {keeps}
    node.received()
    assert node.one(ReleaseLease) == ReleaseLease(lease_id=lease_id, spare=keeps)


def test_puts_are_bounded(node):
    node = Node(pool=PoolClientSettings(max_puts=1))
    run = [("r0", prompt(5)), ("r1", prompt(5, base=50))]
    for name, tokens in run:
        node.ready(name, tokens)
        node.finish()
        node.received(name)
    assert len(node.take(ReserveSlots)) == 1
    assert node.actor.counts["puts_skipped"] == 1


# --- ends, at every state


STATES = ["queued", "preparing", "reserved", "ready", "computing", "handing off"]


def job_in(state):
    """A node whose job "r" (of prompt(18), two chunks, a leased prefix) is in `state`."""
    node = Node(max_active=1, short_jobs=0)
    if state in ("queued", "ready"):
        node.ready("other", prompt(20, base=500))
    if state == "ready":
        node = Node(max_active=2, short_jobs=0)
        node.ready("other", prompt(20, base=500))
    node.start("r", prompt(18))
    if state not in ("queued", "preparing"):
        node.lease(1)
    if state == "reserved":  # by the decode alone
        node = Node(max_active=1, short_jobs=0)
        node.start("r", prompt(18))
        node.reserve("r")
    elif state in ("ready", "computing", "handing off"):
        node.reserve("r")
    if state == "handing off":
        node.finish()
    return node


def settle(node):
    """Answer whatever is open and let the other job finish."""
    for _ in range(6):
        for ask in node.take(LeaseBlocks, "c"):
            node.say("c", leased(ask.lease_id, [], node="c"))
        for ask in node.take(ReserveDecode, "d"):
            node.say("d", DecodeReserved(request_id=ask.request_id, attempt=ask.attempt, held_blocks=0))
        while node.works:
            for work_id, work in list(node.works.items()):
                if isinstance(work, ComputeChunk):
                    node.computed()
                else:
                    node.done(work_id, WorkFailed("test"))
        for done in node.take(HandoffDone, "d"):
            if "d" in node.peers:
                node.received(done.request_id, done.attempt)
        if "c" in node.peers:
            node.put_all()
        node.advance(0.3)


def assert_nothing_left(node):
    assert node.busy() == {}
    assert node.sequences == set()
    assert not [timer for timer in node.timers if timer[0] in ("deadline", POOL_ABSENT)]


@pytest.mark.parametrize("state", STATES)
def test_a_cancel_ends_the_job_and_tells_the_decode(state):
    node = job_in(state)
    node.say("g", CancelRequest(request_id="r", attempt=1))
    told = [m for m in node.take(HandoffFailed, "d") if m.request_id == "r"]
    assert len(told) == (state != "queued"), "the decode may have reserved after the gateway's own cancel came there"
    if state == "computing":
        assert node.busy()["writing_blocks"] > 0, "a chunk in flight still writes its slots"
        assert node.cancelled == [node.work(ComputeChunk)[0]]
    settle(node)
    assert [m for m in node.take(FirstToken) if m.request_id == "r"][: state != "handing off"] == []
    assert node.take(AttemptFailed) == []
    assert_nothing_left(node)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("peer", ["g", "d", "c", "k"])
def test_no_peers_death_at_any_state_leaks(state, peer):
    node = job_in(state)
    node.sent = [(to, m) for to, m in node.sent if to != peer]
    node.down(peer)
    if peer == "d" and state not in ("queued", "handing off"):
        assert "r" in {m.request_id for m in node.take(AttemptFailed, "g")}
    settle(node)
    if peer == "d":
        node.up("d", 8)
    settle(node)
    node.advance(61.0)
    settle(node)
    assert_nothing_left(node)


@pytest.mark.parametrize("state", STATES)
def test_the_deadline_ends_the_job_at_any_state(state):
    node = job_in(state)
    node.advance(61.0)
    assert "r" in {m.request_id for m in node.take(AttemptFailed, "g")}
    settle(node)
    assert_nothing_left(node)


@pytest.mark.parametrize("state", STATES)
def test_a_newer_attempt_takes_the_place_of_an_older_and_not_the_reverse(state):
    node = job_in(state)
    node.start("r", prompt(18), attempt=3)
    node.start("r", prompt(18), attempt=2)
    node.say("g", CancelRequest(request_id="r", attempt=2))
    node.sent = [(to, m) for to, m in node.sent if not isinstance(m, ReserveDecode) or m.attempt == 3 or m.request_id != "r"]
    settle(node)
    assert 3 in {m.attempt for m in node.take(FirstToken) if m.request_id == "r"}
    assert_nothing_left(node)


@pytest.mark.parametrize("state", ["reserved", "ready", "computing", "handing off"])
def test_a_handoff_the_decode_gives_up_ends_the_job(state):
    node = job_in(state)
    node.take(HandoffFailed)
    node.say("d", HandoffFailed(request_id="r", attempt=1, reason="test"))
    assert [m for m in node.take(HandoffFailed, "d") if m.request_id == "r"] == []
    settle(node)
    assert_nothing_left(node)


@pytest.mark.parametrize("full", [True, False])
def test_a_denied_reservation_fails_the_attempt_with_a_reason_that_fits(node, full):
    node.start()
    node.say("d", DecodeDenied(request_id="r", attempt=1, reason="x" * 512, full=full))
    failed = node.one(AttemptFailed, "g")
    assert failed.reason.startswith("d denied: xxx")
    assert (failed.full, failed.avoid) == (full, "d")
    assert_nothing_left(node)


@pytest.mark.parametrize("state", ["preparing", "reserved", "ready", "computing"])
def test_a_job_that_the_decode_refuses_ends_as_refused(state):
    node = job_in(state)
    node.say("d", DecodeDenied(request_id="r", attempt=1, reason="slow", full=True, refused=True, retry_after_s=2.5))
    failed = node.one(AttemptFailed, "g")
    assert (failed.refused, failed.retry_after_s, failed.full, failed.avoid) == (True, 2.5, True, "d")
    assert node.cancelled == ([node.work(ComputeChunk)[0]] if state == "computing" else [])
    settle(node)
    assert [m for m in node.take(FirstToken) if m.request_id == "r"] == []
    assert_nothing_left(node)


def test_a_refusal_that_crosses_the_first_token_refuses_nothing_but_loses_nothing_either():
    node = job_in("handing off")
    node.take(FirstToken)
    node.say("d", DecodeDenied(request_id="r", attempt=1, reason="slow", full=True, refused=True, retry_after_s=2.5))
    failed = node.one(AttemptFailed, "g")
    assert (failed.refused, failed.full, failed.avoid) == (False, True, "d"), "its client has a token: it is placed again"
    settle(node)
    assert_nothing_left(node)


@pytest.mark.parametrize(("tokens", "offered"), [(700_000, True), (MAX_TOKENS, False)])
def test_the_blocks_of_a_prompt_that_penalties_read_too_are_not_offered_where_a_message_cannot_say_both(tokens, offered):
    layout = replace(LAYOUT, block_tokens=16)
    node = Node(layout=layout, slab_bytes=MAX_BLOCKS * layout.slot_bytes, chunk_tokens=512)
    keys = tuple([number.to_bytes(16, "big") for number in range(tokens // 16)])
    node.start(tokens=bytes(4 * tokens), keys=keys, sampling=Sampling(repetition_penalty=1.5, prompt_tokens=tokens))
    reserve = node.one(ReserveDecode, "d")
    assert (len(reserve.past), len(reserve.block_tokens)) == (4 * tokens, offered * 4 * tokens)


def test_the_decode_is_told_booking_and_slo(node):
    node.start(booking=5, tbt_slo_s=0.25)
    ask = node.one(ReserveDecode, "d")
    assert (ask.booking, ask.tbt_slo_s) == (5, 0.25)


def test_a_reservation_for_a_job_that_is_gone_is_given_back(node):
    node.reserve("gone")
    assert node.one(HandoffFailed, "d").request_id == "gone"


def test_a_failed_chunk_fails_the_attempt_and_the_next_job_computes(node):
    node.ready("r0", prompt(5))
    node.ready("r1", prompt(5, base=50))
    work_id, _ = node.work(ComputeChunk)
    node.done(work_id, WorkFailed("x" * 2000))
    assert node.one(AttemptFailed, "g").request_id == "r0"
    assert node.work(ComputeChunk)[1].tokens[:4] == pack_tokens([50])


def test_a_job_whose_lease_died_before_its_turn_gives_the_turn_to_the_next():
    node = Node(max_active=3)
    node.ready("busy", prompt(5, base=90))
    node.start("r0", prompt(10))
    node.lease(1)
    node.reserve("r0")
    node.ready("r1", prompt(20, base=50))
    node.down("c")
    node.computed()
    assert node.one(AttemptFailed, "g").request_id == "r0"
    assert node.work(ComputeChunk)[1].tokens[:4] == pack_tokens([50])


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_events_keeps_the_invariants_and_ends_idle(seed):
    rng = random.Random(seed)
    node = Node(slab_bytes=10 * LAYOUT.slot_bytes)
    lives = dict.fromkeys(node.peers, 7)
    attempts = {}
    asked = []
    for _ in range(300):
        name = rng.choice(("r0", "r1", "r2", "r3", "r4"))
        attempt = max(1, attempts.get(name, 1) - rng.randrange(2))
        asked += [m for _, m in node.sent if isinstance(m, ReserveDecode)]
        node.take(ReserveDecode)
        match rng.randrange(13):
            case 0 | 1 | 2 if "g" in node.peers:
                attempts[name] = attempts.get(name, 0) + rng.randrange(2) or 1
                tokens = prompt(rng.randint(1, 40), base=rng.choice((0, 0, 500)))
                node.start(name, tokens, attempt=attempts[name], sources=("c9",) * rng.randrange(2), reuse_blocks=3)
            case 3 | 4 if asked and "d" in node.peers:
                ask = asked.pop(rng.randrange(len(asked)))
                if rng.random() < 0.1:
                    node.say("d", DecodeDenied(request_id=ask.request_id, attempt=ask.attempt, reason="test", full=False))
                else:
                    held = rng.randint(0, len(ask.reuse_keys))
                    node.reserve(ask.request_id, attempt=ask.attempt, held=held)
            case 5 if "c" in node.peers and any(isinstance(m, LeaseBlocks) for _, m in node.sent):
                for ask in node.take(LeaseBlocks):
                    ref = SlotRef(node="c", incarnation=7, slot=0, generation=2, checksum=1)
                    refs = [ref] * rng.randint(0, len(ask.keys))
                    node.say("c", leased(ask.lease_id, refs, remote=rng.randint(0, len(refs))))
            case 6 | 7 if node.works:
                answer(node, rng)
            case 8 if "d" in node.peers:
                failed = HandoffFailed(request_id=name, attempt=attempt, reason="test")
                received = HandoffReceived(request_id=name, attempt=attempt)
                done = {m.request_id for m in node.take(HandoffDone)}
                node.say("d", received if name in done else failed)
                for other in sorted(done - {name}):
                    node.received(other, attempts[other])
            case 9 if "g" in node.peers:
                node.say("g", CancelRequest(request_id=name, attempt=attempt))
            case 10:
                peer = rng.choice(("g", "d", "c", "k"))
                if peer in node.peers:
                    node.down(peer)
                    node.sent = [(to, m) for to, m in node.sent if to != peer]
                    asked = [] if peer == "d" else asked
                else:
                    lives[peer] += rng.randrange(2)
                    node.up(peer, lives[peer])
            case 11 if "c" in node.peers:
                node.put_all(fail=rng.random() < 0.3)
            case 12:
                node.advance(rng.choice((0.1, 1.0, 20.0)))
    for peer in [p for p in ("g", "c") if p in node.peers]:
        node.down(peer)
    while node.works:
        answer(node, rng)
    assert_nothing_left(node)


def answer(node, rng):
    work_id, work = rng.choice(list(node.works.items()))
    if isinstance(work, CopyBlocks):
        node.done(work_id, BlocksCopied(tuple(rng.choice((1, 1, None)) for _ in work.copies)))
    elif rng.random() < 0.1:
        node.done(work_id, WorkFailed("test"))
    else:
        node.progress(work_id, LayersComputed(1))
        bad = (0,) if work.prefix and rng.random() < 0.2 else ()
        node.computed(**{rng.choice(("failed", "corrupt")): bad})


def test_a_lease_of_more_blocks_than_were_asked_for_is_cut():
    node = Node()
    node.start(tokens=prompt(10), reuse_blocks=2)
    refs = [SlotRef(node="c", incarnation=7, slot=slot, generation=1, checksum=5) for slot in range(6)]
    node.say("c", leased(node.one(LeaseBlocks).lease_id, refs, remote=6))
    node.say("d", DecodeReserved(request_id="r", attempt=1, held_blocks=0))
    _, chunk = node.work(ComputeChunk)
    assert len(chunk.prefix) == 2
    assert chunk.tokens == pack_tokens(prompt(10)[2 * B :])


def test_a_prefill_that_is_to_become_a_decode_finishes_its_jobs_first():
    node = Node(may_become="decode")
    node.ready("old")
    node.say("k", ChangeRole(role="decode"))
    assert node.one(PrefillLoad, "k").draining, "it says so at once"
    node.start("new")
    assert node.one(AttemptFailed, "g").full
    assert not node.drained
    node.finish()
    node.received("old")
    node.put_all()
    assert Drained("decode") in node.handle(TimerFired(("renew",)))
    assert node.busy() == {}


def test_a_prefill_that_is_cordoned_while_it_is_to_become_a_decode_stays_one_and_is_cordoned():
    node = Node(may_become="decode")
    node.ready("old")
    node.say("k", ChangeRole(role="decode"))
    node.set_cordon()
    node.finish()
    node.received("old")
    node.put_all()
    assert not node.drained
    assert node.take(PrefillLoad, "k")[-1].draining
    node.set_cordon(False)
    node.ready("new", prompt(6, base=50))
    assert not node.take(AttemptFailed)


def test_a_prefill_does_not_become_a_decode_while_first_tokens_of_a_cancelled_job_are_sampled():
    node = Node(may_become="decode")
    sampling = set_aside(node)
    node.say("k", ChangeRole(role="decode"))
    node.say("g", CancelRequest(request_id="r", attempt=1))
    node.put_all()
    assert node.cancelled == [sampling]
    assert Drained("decode") not in node.handle(TimerFired(("renew",)))
    node.done(sampling, WorkFailed("cancelled"))
    assert Drained("decode") in node.handle(TimerFired(("renew",)))


def test_a_node_that_became_a_prefill_is_no_decode_to_hand_over_to(node):
    node.down("d")
    node.up("d", 8, role="prefill")
    node.start()
    assert node.one(AttemptFailed, "g").avoid == "d"
    assert node.take(ReserveDecode) == []


def test_another_tenants_short_prompt_waits_for_one_chunk_of_many_long_ones():
    node = Node(max_active=1, overtake=0.0, slab_bytes=64 * LAYOUT.slot_bytes, max_queued=8)
    node.ready("long", prompt(6 * B), tenant="alice")
    for number in range(1, 4):
        node.start(f"long-{number}", prompt(6 * B, 10 * number), tenant="alice")
    node.ready("short", prompt(B, 50), tenant="bob")
    node.now += 0.1
    node.computed()
    assert node.work(ComputeChunk)[1].tokens == pack_tokens(prompt(B, 50))


def test_a_tenant_fills_half_of_the_queue_and_another_one_is_taken_beside_it():
    node = Node(max_active=1, short_jobs=0, overtake=0.0, max_queued=8)
    node.ready("first", tenant="alice")
    for number in range(4):
        node.start(f"alice-{number}", prompt(B, 10 * number), tenant="alice")
    assert node.take(AttemptFailed) == []
    node.start("alice-4", prompt(B, 60), tenant="alice")
    refused = node.one(AttemptFailed, "g")
    assert refused.full
    assert refused.reason == "alice has 4 requests in the prefill queue"
    for number in range(4):
        node.start(f"bob-{number}", prompt(B, 70 + number), tenant="bob")
    assert node.take(AttemptFailed) == []
    node.start("bob-4", prompt(B, 90), tenant="bob")
    assert node.one(AttemptFailed, "g").reason == "prefill queue is full"
