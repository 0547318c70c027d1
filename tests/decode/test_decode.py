"""The decode actor: reservation, verified handoff, batch, preemption, puts; and no KV leaks whatever ends a request."""

import random
from dataclasses import dataclass, replace

import pytest
from actor_harness import LAYOUT, Harness, leased
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.core.actor import Drained, TimerFired
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.drain import MOVE, MOVE_AGAIN_S
from mooncake_zmq.core.links import LINK_S
from mooncake_zmq.core.messages import (
    AttemptFailed,
    CancelRequest,
    ChangeRole,
    CommitSlots,
    DecodeDenied,
    DecodeLoad,
    DecodeReserved,
    GrantedSlot,
    HandoffBlocks,
    HandoffDone,
    HandoffFailed,
    HandoffReceived,
    LayersReady,
    LeaseBlocks,
    PlaceElsewhere,
    ReleaseLease,
    ReportCorrupt,
    ReserveDecode,
    ReserveSlots,
    Sampling,
    SlotRef,
    SlotsReserved,
    StopRule,
    TokensDecoded,
)
from mooncake_zmq.core.work import (
    BlocksCopied,
    BlocksPulled,
    CopyBlocks,
    DecodeStep,
    ForkSequence,
    PullBlocks,
    SampleTokens,
    SequenceForked,
    StepDecoded,
    TokensSampled,
    WorkFailed,
)
from mooncake_zmq.decode.batch import Place, ahead_of, retry_after_s
from mooncake_zmq.decode.decode import Decode
from mooncake_zmq.decode.handoff import HELD_GRACE_S
from mooncake_zmq.decode.masks import mask_s
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.decode.steps import HOLD_SHARE
from mooncake_zmq.kv.block_hash import extend_keys, namespace, pack_tokens
from mooncake_zmq.kv.checksum import block_checksum

B = LAYOUT.block_tokens
ROOT = namespace(model="m", layout="l")
COSTS = Costs()
BASE = DecodeSettings(capacity_tokens=16 * B, max_batch=3, max_requests=6)


def part(block, layer):
    return 1000 * block + layer


def block_sum(block):
    return block_checksum([part(block, layer) for layer in range(LAYOUT.layers)])


class Node(Harness):
    """The decode "me" on host h0; prefill p0 on h0, p1 on h1; `prompts` by request."""

    def __init__(self, *, costs=COSTS, may_become="", **settings):
        self.settings = replace(BASE, **settings)
        actor = Decode(
            name="me", host="h0", incarnation=2, settings=self.settings, layout=LAYOUT, costs=costs, may_become=may_become
        )
        super().__init__(actor)
        for name in ("g", "g2", "c", "k", "p0"):
            self.up(name, 7)
        self.up("p1", 7, host="h1")
        self.prompts = {}
        self.copied = []
        self.blocks_put = []

    def reserve(self, request_id="r", length=6, *, attempt=1, prefill="p0", reuse=0, max_tokens=50, **changes):
        tokens = [1000 + i for i in range(length)]
        self.prompts[request_id] = tokens
        packed = pack_tokens(tokens)
        keys = extend_keys(ROOT, packed, B)
        fields = {
            "request_id": request_id,
            "attempt": attempt,
            "gateway": "g",
            "tokens": length,
            "reuse_keys": tuple(keys[:reuse]),
            "last_key": keys[-1] if keys else ROOT,
            "tail": packed[len(keys) * B * 4 :],
            "first_index": 0,
            "sampling": Sampling(),
            "stop": StopRule(max_tokens=max_tokens, eos_ids=(9,)),
            "deadline_s": 60.0,
        }
        self.say(prefill, ReserveDecode(**(fields | changes)))

    def blocks(self, request_id="r", first=0, count=None, *, ready=True, prefill="p0", attempt=1):
        count = LAYOUT.blocks_for(len(self.prompts[request_id])) - first if count is None else count
        sources = tuple(
            SlotRef(node=prefill, incarnation=7, slot=i, generation=2 if ready else 1, checksum=block_sum(i) if ready else 0)
            for i in range(first, first + count)
        )
        self.say(
            prefill,
            HandoffBlocks(request_id=request_id, attempt=attempt, first_block=first, sources=sources, ready=ready),
        )

    def layer(self, layer, first=0, request_id="r"):
        self.say("p0", LayersReady(request_id=request_id, attempt=1, first_block=first, stop_layer=layer + 1))

    def pulled(self, *, failed=(), corrupt=(), wrong=False):
        work_id, work = self.work(PullBlocks)
        parts = tuple(
            (load.block, layer, part(load.block, layer) + wrong)
            for load in work.loads
            for layer in range(load.first_layer, load.stop_layer)
            if load.block not in (*failed, *corrupt)
        )
        self.done(work_id, BlocksPulled(parts, (*failed, *corrupt), tuple(corrupt)))
        return work

    def handoff_done(self, request_id="r", *, held=0, token=5, prefill="p0", attempt=1, blocks=None, checksum=None, **more):
        count = LAYOUT.blocks_for(len(self.prompts[request_id])) if blocks is None else blocks
        folded = block_checksum([block_sum(i) for i in range(held, count)])
        self.say(
            prefill,
            HandoffDone(
                request_id=request_id,
                attempt=attempt,
                layers=LAYOUT.layers,
                blocks=count - held,
                checksum=folded if checksum is None else checksum,
                token=token,
                index=0,
                **more,
            ),
        )

    def run(self, request_id="r", length=6, **options):
        """Reserve and hand off; the request is then ready or in a step."""
        self.reserve(request_id, length, **options)
        self.blocks(request_id, attempt=options.get("attempt", 1))
        self.pulled()
        self.handoff_done(request_id, attempt=options.get("attempt", 1))

    def step(self, token=6, *, steps=1, elapsed_s=0.01):
        work_id, work = self.work(DecodeStep)
        assert steps <= work.steps
        self.done(work_id, StepDecoded(((token,) * len(work.entries),) * steps, elapsed_s))
        return work

    def told(self):
        """The next report."""
        self.take(DecodeLoad)
        self.advance(self.settings.report_s)
        return self.take(DecodeLoad, "k")[-1]

    def pool_has(self, ask, count, *, first=0):
        """The pool's answer to a lease whose first block is `first`: it has so many."""
        blocks = range(first, first + count)
        refs = [SlotRef(node="c", incarnation=7, slot=i, generation=2, checksum=block_sum(i)) for i in blocks]
        self.say("c", leased(ask.lease_id, refs))

    def put_all(self, *, fail=False):
        for reserve in self.take(ReserveSlots, "c"):
            grants = tuple(GrantedSlot(index=i, slot=3 + i, generation=1) for i in range(len(reserve.keys)))
            self.say("c", SlotsReserved(put_id=reserve.put_id, grants=grants))
        for work_id, work in list(self.works.items()):
            if isinstance(work, CopyBlocks):
                self.copied.append(work)
                self.done(work_id, WorkFailed("test") if fail else BlocksCopied((1,) * len(work.copies)))

    def settle(self):
        while self.works:
            for work_id, work in list(self.works.items()):
                if isinstance(work, DecodeStep):
                    self.done(work_id, StepDecoded(((9,) * len(work.entries),) * work.steps, 0.01))
                else:
                    self.done(work_id, WorkFailed("test"))
        if "c" in self.peers:
            self.put_all()


@pytest.fixture
def node():
    return Node()


def assert_nothing_left(node):
    assert node.busy() == {}
    assert node.sequences == set(node.actor.kept_sequences)
    assert not [timer for timer in node.timers if timer[0] == "deadline"]


# --- reservation


def test_a_reservation_takes_whole_blocks_for_the_prompt_and_the_first_token(node):
    node.reserve(length=8)
    assert node.one(DecodeReserved, "p0").held_blocks == 0
    assert node.busy()["reserved_tokens"] == 12
    node.advance(0.3)
    load = node.take(DecodeLoad, "k")[-1]
    assert (load.reserved, load.running, load.free_tokens) == (1, 0, 52)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"length": 64}, "KV"),
        ({"tail": b""}, "match"),
        ({"tokens": 0, "tail": b""}, "match"),
        ({"length": 5, "reuse_keys": (b"k" * 16,) * 2}, "match"),
    ],
)
def test_a_reservation_that_cannot_be_kept_is_denied_for_good(node, changes, why):
    node.reserve(**changes)
    denied = node.one(DecodeDenied, "p0")
    assert why in denied.reason
    assert not denied.full, "it counts as an attempt that broke"
    assert_nothing_left(node)


def test_a_reservation_for_a_gateway_that_has_yet_to_come_up_finds_no_room_and_fails_if_it_stays_away(node):
    for attempt, full in ((1, True), (2, False)):
        node.reserve(attempt=attempt, gateway="g9")
        denied = node.one(DecodeDenied, "p0")
        assert "not reachable" in denied.reason
        assert denied.full == full
        node.advance(LINK_S)
    assert_nothing_left(node)


def test_a_reservation_that_finds_no_kv_now_is_told_apart(node):
    node.reserve("r0", length=40)
    node.reserve("r1", length=40)
    denied = node.one(DecodeDenied, "p0")
    assert (denied.request_id, denied.reason, denied.full) == ("r1", "no KV left", True)


def test_requests_that_hold_kv_are_limited():
    node = Node(max_requests=1)
    node.reserve("r0")
    node.reserve("r1")
    assert node.one(DecodeDenied).request_id == "r1"


def test_a_duplicate_reservation_changes_nothing_and_an_older_attempt_is_denied(node):
    node.reserve(attempt=2)
    node.sent.clear()
    node.reserve(attempt=2)
    assert node.sent == []
    node.reserve(attempt=1, prefill="p1")
    assert node.one(DecodeDenied, "p1").attempt == 1
    assert node.busy()["reserved_tokens"] == 8


def test_a_newer_attempt_takes_the_place_of_an_older_and_its_prefill_is_told(node):
    node.reserve(attempt=1, prefill="p0")
    node.blocks()
    node.reserve(attempt=2, prefill="p1")
    assert node.one(HandoffFailed, "p0").attempt == 1
    assert node.busy() == {"reserved_tokens": 16, "requests_waiting": 1, "requests_closing": 1}
    node.pulled()
    node.blocks(prefill="p1", attempt=2)
    node.pulled()
    node.handoff_done(prefill="p1", attempt=2)
    assert node.busy() == {"reserved_tokens": 8, "requests_running": 1}


def test_a_draining_decode_denies_new_requests_and_finishes_the_old(node):
    node.run("r0", max_tokens=2)
    node.drain()
    node.reserve("r1")
    denied = node.one(DecodeDenied)
    assert (denied.request_id, denied.full) == ("r1", True)
    assert not node.drained
    node.step()
    node.settle()
    assert node.drained


def test_a_resting_decode_denies_new_requests_stays_and_takes_them_again(node):
    node.run("r0", max_tokens=2)
    node.set_cordon()
    node.reserve("r1")
    assert node.one(DecodeDenied).full
    node.step()
    node.settle()
    assert not node.drained
    node.set_cordon(False)
    assert not node.take(DecodeLoad)[-1].draining
    node.run("r2", max_tokens=2)


def test_a_draining_decode_asks_to_place_elsewhere_what_does_not_end_within_the_grace(node):
    node.run("r0", max_tokens=2)
    node.run("r1")
    node.reserve("r2", attempt=3)
    node.set_cordon()
    assert not node.take(PlaceElsewhere)
    node.step()
    node.advance(node.settings.drain_grace_s)
    assert node.one(PlaceElsewhere, "g").attempts == (("r1", 1), ("r2", 3)), "the other one has ended"
    node.step()
    assert node.take(TokensDecoded), "it goes on until its gateway has another place"
    node.say("g", CancelRequest(request_id="r1", attempt=1))
    node.advance(MOVE_AGAIN_S)
    assert node.one(PlaceElsewhere, "g").attempts == (("r2", 3),), "for what stays it asks again"
    node.set_cordon(False)
    node.advance(3 * MOVE_AGAIN_S)
    assert not node.take(PlaceElsewhere)


def test_an_idle_decode_that_drains_asks_for_nothing(node):
    node.set_cordon()
    node.advance(3.0)
    assert not node.take(PlaceElsewhere)
    assert MOVE not in node.timers


def test_a_drain_that_ran_out_of_time_hands_everything_over_at_once(node):
    node.run("r0")
    node.run("r1")
    node.reserve("r2")
    node.blocks("r2")
    node.reserve("r3")
    node.drain()
    node.sent.clear()
    node.run_out_of_drain()
    failed = {message.request_id: message for message in node.take(AttemptFailed, "g")}
    assert sorted(failed) == ["r0", "r1", "r2", "r3"]
    assert all(message.full and not message.avoid for message in failed.values()), "nothing broke"
    assert sorted(message.request_id for message in node.take(HandoffFailed, "p0")) == ["r2", "r3"]
    node.settle()
    assert node.drained, "nothing is left but what was in flight"
    assert node.take(TokensDecoded) == [], "what a step still made belongs to nobody"
    assert node.busy() == {}
    node.reserve("r4")
    assert node.one(DecodeDenied).full


# --- handoff


def test_layers_are_pulled_as_they_become_ready_and_one_copy_runs_at_a_time(node):
    node.reserve()
    node.blocks(ready=False)
    assert node.works == {}
    node.layer(0)
    assert [(x.block, x.first_layer, x.stop_layer, x.tokens) for x in node.work(PullBlocks)[1].loads] == [
        (0, 0, 1, 4),
        (1, 0, 1, 2),
    ]
    node.layer(1)
    node.handoff_done()
    node.pulled()
    assert node.take(HandoffReceived) == []
    assert {x.first_layer for x in node.work(PullBlocks)[1].loads} == {1}
    node.pulled()
    assert node.one(HandoffReceived, "p0").request_id == "r"
    entry = node.work(DecodeStep)[1].entries[0]
    assert (entry.token, entry.position) == (5, 6)


def test_blocks_of_the_own_host_are_loaded_from_the_pool_and_the_rest_handed_off(node):
    node.reserve(length=10, prefill="p1", reuse=2, sources=("c1",))
    ask = node.one(LeaseBlocks, "c")
    assert ask.fetch_s > 0
    assert ask.sources == ("c1",), "from where the prefill says"
    assert node.one(DecodeReserved, "p1").held_blocks == 2, "the prefill need not wait for the pool"
    node.pool_has(ask, 2)
    node.blocks(first=2, count=1, prefill="p1")
    assert [x.block for x in node.pulled().loads] == [0, 1]
    assert node.one(ReleaseLease, "c").lease_id == ask.lease_id
    assert [x.block for x in node.pulled().loads] == [2]
    node.handoff_done(held=2, prefill="p1")
    assert node.take(DecodeReserved) == []
    assert node.busy()["requests_running"] == 1


@pytest.mark.parametrize("when", ["before it is handed off", "after", "after all is computed"])
def test_what_the_pool_does_not_get_is_handed_off(node, when):
    """The prefill computed block 1 though the decode was to have it, and reuses block 0."""
    node.reserve(length=10, prefill="p1", reuse=2)
    ask = node.one(LeaseBlocks, "c")
    if when == "before it is handed off":
        node.pool_has(ask, 0)
    node.blocks(first=1, count=2, prefill="p1")
    if when == "after":
        assert [x.block for x in node.pulled().loads] == [2]
        node.pool_has(ask, 0)
    if when == "after all is computed":
        assert [x.block for x in node.pulled().loads] == [2]
        node.handoff_done(held=2, prefill="p1")
        node.pool_has(ask, 0)
        assert node.busy()["requests_waiting"] == 1, "its proof does not cover blocks 0 and 1"
    assert [each.held_blocks for each in node.take(DecodeReserved, "p1")] == [2, 0]
    assert 1 in [x.block for x in node.pulled().loads], "it was offered before, and is wanted now"
    node.blocks(first=0, count=1, prefill="p1")
    node.pulled()
    node.handoff_done(held=0, prefill="p1")
    assert node.busy()["requests_running"] == 1


def test_a_pool_that_goes_or_is_late_holds_nothing_more(node):
    node.reserve("r0", length=10, prefill="p1", reuse=2)
    node.blocks("r0", first=2, count=1, prefill="p1")
    node.pulled()
    node.handoff_done("r0", held=2, prefill="p1")
    node.advance(HELD_GRACE_S)
    assert [each.held_blocks for each in node.take(DecodeReserved)] == [2, 0], "late"
    assert node.one(ReleaseLease, "c")
    node.reserve("r1", length=10, prefill="p1", reuse=2)
    node.down("c")
    assert [each.held_blocks for each in node.take(DecodeReserved)] == [2, 0], "gone"
    node.reserve("r2", length=10, prefill="p1", reuse=2)
    assert [each.held_blocks for each in node.take(DecodeReserved)] == [0], "never there"


def test_what_is_held_is_leased_a_segment_at_a_time():
    node = Node(capacity_tokens=100 * B)
    node.reserve(length=40 * B, prefill="p1", reuse=39)
    asked = 0
    while asked < 39:
        ask = node.one(LeaseBlocks, "c")
        asked += len(ask.keys)
        node.pool_has(ask, len(ask.keys), first=asked - len(ask.keys))
    assert node.take(LeaseBlocks) == []
    node.blocks(first=39, prefill="p1")
    while any(isinstance(work, PullBlocks) for work in node.works.values()):
        node.pulled()
    node.handoff_done(held=39, prefill="p1")
    assert node.busy()["requests_running"] == 1


def test_a_prompt_prefilled_elsewhere_is_kept_in_the_own_pool(node):
    keys = extend_keys(ROOT, pack_tokens([1000 + i for i in range(10)]), B)
    tokens = pack_tokens([1000 + i for i in range(8)])
    node.reserve(length=10, prefill="p1", reuse=1, new_keys=tuple(keys[1:2]), block_tokens=tokens)
    node.pool_has(node.one(LeaseBlocks, "c"), 1)
    node.blocks(first=1, count=2, prefill="p1")
    node.pulled()
    node.pulled()
    node.handoff_done(held=1, prefill="p1")
    put = node.one(ReserveSlots, "c")
    assert (put.keys, put.parent, put.tokens) == (tuple(keys[1:2]), keys[0], tokens[4 * B :]), "what did not come from there"


# --- kept KV


def finish(node, request_id, length, *, reuse=0, max_tokens=2, tokens=None):
    """Prefill a prompt on another host, hand it off and end the request, after which its KV is kept."""
    keys = extend_keys(ROOT, pack_tokens([1000 + i for i in range(length)]), B)
    options = {"prefill": "p1", "reuse": reuse, "max_tokens": max_tokens}
    node.reserve(request_id, length, new_keys=tuple(keys[reuse:]), **options)
    node.blocks(request_id, prefill="p1")
    node.pulled()
    node.handoff_done(request_id, prefill="p1")
    node.step(9)
    node.put_all()


def kept_node(**settings):
    node = Node(**{"capacity_tokens": 100 * B} | settings)
    finish(node, "r0", 3 * B)
    node.sent.clear()
    return node


def test_a_prompt_that_begins_as_one_that_ended_here_copies_its_kv():
    node = kept_node()
    (kept,) = node.actor.kept_sequences
    node.reserve("r1", 6 * B, prefill="p1", reuse=5)
    work_id, copy = node.work(ForkSequence)
    assert (copy.source, copy.tokens) == (kept, 3 * B)
    copied, rest = node.take(LeaseBlocks, "c")
    assert (len(copied.keys), len(rest.keys)) == (3, 2)
    assert copied.fetch_s > 0, "its pool gets what it lacks as well"
    node.pool_has(rest, 2, first=3)
    node.blocks("r1", first=5, prefill="p1")
    assert not any(isinstance(work, PullBlocks) for work in node.works.values()), "one copy at a time"
    node.done(work_id, SequenceForked())
    assert [load.block for load in node.pulled().loads] == [3, 4, 5]
    node.handoff_done("r1", held=5, prefill="p1")
    assert node.one(HandoffReceived, "p1")
    node.pool_has(copied, 3)
    released = [each.lease_id for each in node.take(ReleaseLease, "c")]
    assert released == [rest.lease_id, copied.lease_id], "the pool keeps them for others"


def test_without_a_pool_kept_kv_is_copied_and_the_rest_handed_off():
    node = kept_node()
    node.down("c")
    node.reserve("r1", 6 * B, prefill="p1", reuse=5)
    assert node.one(DecodeReserved, "p1").held_blocks == 3
    node.done(node.work(ForkSequence)[0], SequenceForked())
    node.blocks("r1", first=3, prefill="p1")
    node.pulled()
    node.handoff_done("r1", held=3, prefill="p1")
    assert node.one(HandoffReceived, "p1")


def test_the_pool_is_offered_what_it_lacks_of_copied_blocks():
    node = kept_node()
    tokens = pack_tokens([1000 + i for i in range(4 * B)])
    keys = extend_keys(ROOT, tokens, B)
    node.reserve("r1", 4 * B, prefill="p1", reuse=3, new_keys=tuple(keys[3:]), block_tokens=tokens)
    node.pool_has(node.one(LeaseBlocks, "c"), 1)
    node.done(node.work(ForkSequence)[0], SequenceForked())
    node.blocks("r1", first=3, prefill="p1")
    node.pulled()
    node.handoff_done("r1", held=3, prefill="p1")
    assert node.one(ReserveSlots, "c").keys == tuple(keys[1:])


def test_of_two_sequences_that_begin_alike_the_longer_is_kept():
    node = kept_node()
    (shorter,) = node.actor.kept_sequences
    finish(node, "r1", 5 * B)
    (longer,) = node.actor.kept_sequences
    assert longer != shorter
    finish(node, "r2", 4 * B)
    assert node.actor.kept_sequences == [longer]
    assert node.sequences == {longer}


def test_kept_kv_goes_when_others_need_the_room_the_least_recently_used_first():
    node = kept_node(capacity_tokens=12 * B)
    node.reserve("r1", 4 * B, prefill="p1", reuse=3, max_tokens=4)
    assert len(node.sequences) == 2
    node.reserve("r2", 6 * B, prefill="p0", max_tokens=4)
    assert len(node.sequences) == 3, "a sequence that is being copied stays"
    node.done(node.work(ForkSequence)[0], SequenceForked())
    assert node.actor.kept_sequences == []
    assert len(node.sequences) == 2


@pytest.mark.parametrize("result", [WorkFailed("test"), SequenceForked(without_memory=(0,))], ids=["failed", "no memory"])
def test_a_copy_of_kept_kv_that_fails_fails_the_attempt(result):
    node = kept_node()
    node.reserve("r1", 5 * B, prefill="p1", reuse=4)
    copied, rest = node.take(LeaseBlocks, "c")
    node.pool_has(rest, 1, first=3)
    node.done(node.work(ForkSequence)[0], result)
    failed = node.one(AttemptFailed, "g")
    assert failed.full == isinstance(result, SequenceForked)
    assert {each.lease_id for each in node.take(ReleaseLease, "c")} == {copied.lease_id, rest.lease_id}
    assert_nothing_left(node)


def test_a_request_that_ends_while_kept_kv_is_copied_is_closed_after_it():
    node = kept_node()
    node.reserve("r1", 5 * B, prefill="p1", reuse=4)
    copied, rest = node.take(LeaseBlocks, "c")
    node.pool_has(rest, 1, first=3)
    node.say("g", CancelRequest(request_id="r1", attempt=1))
    assert len(node.sequences) == 2
    node.done(node.work(ForkSequence)[0], SequenceForked())
    assert {each.lease_id for each in node.take(ReleaseLease, "c")} == {copied.lease_id, rest.lease_id}
    assert_nothing_left(node)


def test_a_draining_decode_keeps_nothing():
    node = kept_node()
    node.drain()
    assert node.drained
    assert node.sequences == set()


def test_a_decode_keeps_nothing_where_it_is_not_to():
    node = kept_node(own_reuse=False)
    assert node.sequences == set()
    node.reserve("r1", 6 * B, prefill="p1", reuse=5)
    assert node.works == {}


@pytest.mark.parametrize(
    ("store_prompts", "sources", "booking", "offered", "keeps"),
    [
        (True, ("c1",), 1, True, True),
        (True, ("c1",), 2, True, False),
        (True, ("c",), 1, True, False),
        (False, ("c1",), 1, True, False),
        (True, ("c1",), 1, False, False),
    ],
)
def test_of_two_pools_that_get_a_prompt_one_is_to_keep_it_by_turns(store_prompts, sources, booking, offered, keeps):
    node = Node(store_prompts=store_prompts)
    keys, tokens = tuple(extend_keys(ROOT, bytes(4 * B), B)), bytes(4 * B * offered)
    node.reserve(prefill="p1", sources=sources, booking=booking, new_keys=keys, block_tokens=tokens)
    assert node.one(DecodeReserved, "p1").keeps == keeps


def test_a_step_waits_a_little_for_whoever_is_nearly_there(node):
    node.run("r0")
    node.step(elapsed_s=0.1)
    node.reserve("r1")
    node.blocks("r1", ready=True)
    node.handoff_done("r1")
    node.step(elapsed_s=0.1)
    assert not any(isinstance(work, DecodeStep) for work in node.works.values()), "its last copy is under way"
    node.pulled()
    assert len(node.work(DecodeStep)[1].entries) == 2
    node.reserve("r2")
    node.blocks("r2", ready=True)
    node.handoff_done("r2")
    node.step(elapsed_s=0.1)
    node.advance(HOLD_SHARE * 0.1)
    assert len(node.work(DecodeStep)[1].entries) == 2, "nobody waits for long"


@pytest.mark.parametrize(
    "change",
    [{"checksum": 1}, {"blocks": 3}, {"blocks": 3, "checksum": block_checksum([block_sum(0), block_sum(1)])}],
    ids=["checksum", "more blocks", "more blocks, same checksum"],
)
def test_a_handoff_that_does_not_fold_to_its_proof_fails_the_attempt(node, change):
    node.reserve()
    node.blocks()
    node.pulled()
    node.handoff_done(**change)
    assert node.one(AttemptFailed, "g").request_id == "r"
    assert node.one(HandoffFailed, "p0").request_id == "r"
    assert_nothing_left(node)


def test_a_handoff_with_a_layer_missing_does_not_count(node):
    node.reserve()
    node.blocks(ready=False)
    node.layer(0)
    node.pulled()
    node.handoff_done()
    assert "incomplete" in node.one(AttemptFailed).reason
    assert_nothing_left(node)


def test_wrong_bytes_fail_the_attempt(node):
    node.reserve()
    node.blocks()
    node.pulled(wrong=True)
    node.handoff_done()
    assert "checksum" in node.one(AttemptFailed).reason
    assert_nothing_left(node)


def test_a_block_that_does_not_verify_is_reported_to_its_owner(node):
    node.reserve()
    node.blocks()
    node.pulled(failed=(0,), corrupt=(1,))
    assert [ref.slot for ref in node.one(ReportCorrupt, "p0").slots] == [1]
    assert node.one(AttemptFailed)
    assert_nothing_left(node)


def test_a_handoff_that_did_not_arrive_says_nothing_about_its_blocks(node):
    node.reserve()
    node.blocks()
    node.pulled(failed=(1,))
    assert node.take(ReportCorrupt) == []
    assert node.one(AttemptFailed)
    assert_nothing_left(node)


def test_handoff_messages_before_the_reservation_or_of_another_attempt_change_nothing(node):
    node.reserve(length=10, prefill="p1", reuse=1)
    node.blocks(prefill="p1")
    node.handoff_done(prefill="p1")
    node.pulled()
    node.blocks(prefill="p0")
    node.blocks(prefill="p1", attempt=2)
    assert node.works == {}
    assert node.busy()["requests_waiting"] == 1


def stage(node, first_layer, stop_layer, *, prefill="p0", count=2):
    """A pipeline's stage on `p1` has written its layers of the first blocks."""
    sources = tuple(
        SlotRef(node="p1", incarnation=7, slot=10 * first_layer + i, generation=1, checksum=0) for i in range(count)
    )
    node.say(
        prefill,
        HandoffBlocks(
            request_id="r",
            attempt=1,
            first_block=0,
            sources=sources,
            ready=True,
            first_layer=first_layer,
            stop_layer=stop_layer,
        ),
    )


def test_layers_of_a_block_come_from_the_stages_that_computed_them_and_the_pool_gets_it_whole(node):
    node.reserve(length=8)
    stage(node, 0, 1)
    loads = node.work(PullBlocks)[1].loads
    assert {(load.block, load.first_layer, load.stop_layer, load.source.slot) for load in loads} == {(0, 0, 1, 0), (1, 0, 1, 1)}
    node.pulled()
    stage(node, 1, 2)
    loads = node.work(PullBlocks)[1].loads
    assert {(load.block, load.first_layer, load.stop_layer, load.source.slot) for load in loads} == {
        (0, 1, 2, 10),
        (1, 1, 2, 11),
    }
    node.pulled()
    packed = pack_tokens(node.prompts["r"])
    keys = tuple(extend_keys(ROOT, packed, B))
    folded = block_checksum([block_sum(i) for i in range(2)])
    done = HandoffDone(
        request_id="r",
        attempt=1,
        layers=LAYOUT.layers,
        blocks=2,
        checksum=folded,
        token=5,
        index=0,
        keys=keys,
        block_tokens=packed,
    )
    node.say("p0", done)
    assert node.one(HandoffReceived)
    put = node.one(ReserveSlots, "c")
    assert (put.keys, put.parent, put.tokens) == (keys, None, packed)


@pytest.mark.parametrize("layers", [(1, 1), (0, 3), (2, 1)])
def test_layers_that_the_model_does_not_have_fail_the_attempt(node, layers):
    node.reserve(length=8)
    stage(node, *layers)
    assert node.one(AttemptFailed)


def test_more_blocks_than_the_prompt_has_fail_the_attempt(node):
    node.reserve()
    node.blocks(count=3)
    assert node.one(AttemptFailed)
    assert_nothing_left(node)


# --- the batch


def test_tokens_are_numbered_and_sent_once_per_step_and_gateway(node):
    node.run("r0")
    node.reserve("r1")
    node.blocks("r1")
    node.pulled()
    node.handoff_done("r1")
    node.reserve("r2", gateway="g2")
    node.blocks("r2")
    node.pulled()
    node.handoff_done("r2")
    node.step()
    assert node.one(TokensDecoded, "g").entries == (("r0", 1, 1, (6,)),)
    assert [entry.position for entry in node.work(DecodeStep)[1].entries] == [7, 6, 6], "new ones join at the next step"
    node.step(8)
    assert node.one(TokensDecoded, "g").entries == (("r0", 1, 2, (8,)), ("r1", 1, 1, (8,)))
    assert node.one(TokensDecoded, "g2").entries == (("r2", 1, 1, (8,)),)


def test_a_resumed_request_goes_on_with_its_count(node):
    node.run(first_index=7, max_tokens=9)
    node.step()
    assert node.one(TokensDecoded).entries == (("r", 1, 8, (6,)),)
    assert_nothing_left(node)


def test_eos_and_length_end_a_request(node):
    node.run("eos")
    node.step(9)
    assert node.one(TokensDecoded).entries[0][3] == (9,)
    node.run("length", max_tokens=3)
    node.step()
    node.step()
    node.put_all()
    assert_nothing_left(node)
    assert node.take(AttemptFailed) == []


def test_a_request_whose_first_token_is_its_last_never_steps(node):
    node.run(max_tokens=1)
    assert node.one(HandoffReceived)
    assert node.works == {}
    assert_nothing_left(node)


def test_the_oldest_fill_the_batch():
    node = Node(max_batch=2)
    for name in ("r0", "r1", "r2"):
        node.run(name)
    node.step()
    assert len(node.work(DecodeStep)[1].entries) == 2
    node.step(9)
    assert len(node.work(DecodeStep)[1].entries) == 1, "a place came free"


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_full_blocks_go_to_the_pool_under_the_keys_of_the_whole_text(node, length):
    node.run(length=length, max_tokens=14, tenant="alice")
    outputs = [5]
    token = 20
    puts = []
    while any(isinstance(work, DecodeStep) for work in node.works.values()):
        node.step(token)
        outputs.append(token)
        token += 1
        for reserve in [m for _, m in node.sent if isinstance(m, ReserveSlots)]:
            puts += reserve.keys
            assert reserve.tenant == "alice"
        node.put_all()
        node.blocks_put += [source.block for work in node.copied for source, _ in work.copies]
        node.copied.clear()
    text = pack_tokens(node.prompts["r"] + outputs[:-1])
    assert puts == extend_keys(ROOT, text, B)[length // B :], "the last token's KV was never computed"
    assert node.blocks_put == list(range(length // B, length // B + len(puts)))
    assert len(node.take(CommitSlots)) == len(puts)
    assert_nothing_left(node)


def test_a_put_copies_the_right_block_and_keeps_the_sequence_open(node):
    node.run(length=6, max_tokens=4)
    node.step()
    node.step()
    reserve = node.one(ReserveSlots)
    node.say(
        "c",
        SlotsReserved(put_id=reserve.put_id, grants=(GrantedSlot(index=0, slot=1, generation=1),)),
    )
    work_id, work = node.work(CopyBlocks)
    assert work.copies[0][0].block == 1
    node.step()
    assert node.busy() == {"requests_closing": 1, "reserved_tokens": 12, "puts": 1}
    node.done(work_id, BlocksCopied((1,)))
    assert_nothing_left(node)


def test_kv_grows_block_by_block(node):
    node.run(length=6)
    assert node.busy()["reserved_tokens"] == 8
    node.step()
    node.step()
    assert node.busy()["reserved_tokens"] == 12
    node.put_all()


def test_short_of_kv_the_youngest_gives_way_and_the_oldest_goes_on():
    node = Node(capacity_tokens=4 * B)
    node.run("old", length=6)
    node.run("young", length=6)
    for _ in range(4):
        node.step()
        node.put_all()
    failed = node.one(AttemptFailed, "g")
    assert (failed.request_id, failed.reason) == ("young", "preempted")
    assert node.actor.counts["preemptions"] == 1
    for _ in range(3):
        node.step()
    assert node.busy()["requests_running"] == 1


def test_a_request_still_loading_is_preempted_before_a_running_one():
    node = Node(capacity_tokens=4 * B)
    node.run("old", length=6)
    node.reserve("loading", length=6)
    node.blocks("loading")
    for _ in range(2):
        node.step()
    assert node.one(HandoffFailed, "p0").request_id == "loading"
    assert node.works.keys() == {node.work(PullBlocks)[0]}, "its KV comes back only when its copy has ended"
    node.pulled()
    assert len(node.work(DecodeStep)[1].entries) == 1


def test_a_failed_step_fails_all_its_requests(node):
    node.run("r0")
    work_id, _ = node.work(DecodeStep)
    node.done(work_id, WorkFailed("x" * 2000))
    assert node.one(AttemptFailed).request_id == "r0"
    assert_nothing_left(node)


@pytest.mark.parametrize("stuck", [True, False])
def test_a_step_that_cannot_follow_ones_constraint_fails_that_request_alone(node, stuck):
    node.run("r0")
    node.run("r1")
    node.step()
    work_id, work = node.work(DecodeStep)
    node.take(TokensDecoded)
    node.done(work_id, StepDecoded(((0, 6),), 0.01, failed=((0, WorkFailed("too complex", stuck=stuck)),)))
    failed = node.one(AttemptFailed)
    assert (failed.request_id, failed.reason, failed.stuck) == ("r0", "too complex", stuck)
    assert [entry[0] for entry in node.one(TokensDecoded).entries] == ["r1"]


def constrained(node, request_id):
    sampling = Sampling(constraint=b"a grammar", prompt_tokens=6)
    node.run(request_id, sampling=sampling)


def sits_out(node):
    """r0 follows a grammar and sat out the second step of a batch with r1; the work that samples for it."""
    constrained(node, "r0")
    node.run("r1")
    node.step()
    node.take(TokensDecoded)
    work_id, work = node.work(DecodeStep)
    node.done(work_id, StepDecoded(((0, 6),), 0.01, sat_out=(0,)))
    assert [entry[0] for entry in node.one(TokensDecoded).entries] == ["r1"]
    return node.work(SampleTokens)[0], work


def test_an_answer_whose_mask_is_late_sits_steps_out_until_its_token_is_sampled(node):
    late_id, work = sits_out(node)
    for _ in range(3):
        assert len(node.work(DecodeStep)[1].entries) == 1, "others step meanwhile"
        node.step()
    assert node.actor.counts["steps_sat_out"] == 4
    node.take(TokensDecoded)
    node.done(late_id, TokensSampled(((8, None),)))
    ((name, _, _, tokens),) = node.one(TokensDecoded).entries
    assert (name, tokens) == ("r0", (8,))
    node.step()
    again = node.work(DecodeStep)[1].entries
    assert (again[0].token, again[0].position) == (8, work.entries[0].position + 1)
    assert node.actor.counts["steps_sat_out"] == 4


def test_a_step_waits_for_those_alone_that_keep_up_and_for_a_small_part_of_its_time(node):
    late_id, work = sits_out(node)
    keeps_up, plain = work.entries
    assert plain.mask_s == 0.0
    assert keeps_up.mask_s == mask_s(0.01, constrained=True, was_late=False)
    node.done(late_id, TokensSampled(((8, None),)))
    node.step()
    assert node.work(DecodeStep)[1].entries[0].mask_s == 0.0
    node.step()
    assert node.work(DecodeStep)[1].entries[0].mask_s == keeps_up.mask_s, "it kept up again"


def test_nobody_left_to_step_waits_for_the_first_token_that_is_sampled(node):
    constrained(node, "r0")
    constrained(node, "r1")
    work_id, _ = node.work(DecodeStep)
    node.done(work_id, StepDecoded(((0,),), 0.01, sat_out=(0,)))
    work_id, _ = node.work(DecodeStep)
    node.done(work_id, StepDecoded(((0,),), 0.01, sat_out=(0,)))
    assert not any(isinstance(work, DecodeStep) for work in node.works.values())
    late_id = max(work_id for work_id, work in node.works.items() if isinstance(work, SampleTokens))
    node.done(late_id, TokensSampled(((8, None),)))
    assert [entry.token for entry in node.work(DecodeStep)[1].entries] == [8]


@pytest.mark.parametrize("stuck", [True, False])
def test_an_answer_whose_token_cannot_be_sampled_fails_alone(node, stuck):
    late_id, _ = sits_out(node)
    node.done(late_id, WorkFailed("constraint: not ready", stuck=stuck))
    failed = node.one(AttemptFailed)
    assert (failed.request_id, failed.stuck) == ("r0", stuck)
    assert len(node.work(DecodeStep)[1].entries) == 1


def test_an_answer_that_ends_while_it_sits_out_holds_its_memory_until_that_work_ended(node):
    late_id, _ = sits_out(node)
    held = node.actor.gauges(node.now)["reserved_tokens"]
    node.say("g", CancelRequest(request_id="r0", attempt=1))
    assert node.cancelled == [late_id]
    assert node.actor.gauges(node.now)["reserved_tokens"] == held
    node.done(late_id, WorkFailed("cancelled"))
    assert node.actor.gauges(node.now)["reserved_tokens"] < held
    assert node.take(AttemptFailed) == []


def test_a_late_token_that_ends_the_answer_ends_it(node):
    late_id, _ = sits_out(node)
    node.done(late_id, TokensSampled(((9, None),)))
    assert node.one(TokensDecoded).times[0].request_id == "r0"
    assert "r0" not in node.actor.requests.live


def test_what_a_run_sampled_before_one_sat_out_is_told():
    node = Node(max_steps=10)
    constrained(node, "r0")
    work_id, work = node.work(DecodeStep)
    node.done(work_id, StepDecoded(((5,), (6,), (0,)), 0.01, sat_out=(0,)))
    assert [entry[3] for entry in node.one(TokensDecoded).entries] == [(5, 6)]
    node.done(node.work(SampleTokens)[0], TokensSampled(((8, None),)))
    entry = node.work(DecodeStep)[1].entries[0]
    assert (entry.token, entry.position) == (8, work.entries[0].position + 3)


def test_what_a_run_sampled_before_it_got_stuck_is_told_first():
    node = Node(max_steps=10)
    node.run("r0")
    work_id, _ = node.work(DecodeStep)
    node.done(work_id, StepDecoded(((5,), (6,), (0,)), 0.01, failed=((0, WorkFailed("too complex", stuck=True)),)))
    told = [m for to, m in node.sent if to == "g" and isinstance(m, TokensDecoded | AttemptFailed)]
    assert [type(m) for m in told] == [TokensDecoded, AttemptFailed]
    assert [entry[3] for entry in told[0].entries] == [(5, 6)]


def test_an_answer_that_ended_before_its_run_got_stuck_is_whole():
    node = Node(max_steps=10)
    node.run("r0")
    work_id, _ = node.work(DecodeStep)
    node.done(work_id, StepDecoded(((5,), (9,), (0,)), 0.01, failed=((0, WorkFailed("too complex", stuck=True)),)))
    assert [entry[3] for entry in node.one(TokensDecoded).entries] == [(5, 9)]
    assert node.take(AttemptFailed) == []


# --- what it tells


def test_a_report_tells_the_batch_and_what_it_holds():
    node = Node(max_batch=2)
    for number in range(3):
        node.run(f"r{number}", length=4 + number, booking=10 + number)
    node.reserve("coming", length=5, booking=20)
    load = node.told()
    assert (load.running, load.reserved, load.max_batch, load.room) == (3, 1, 2, 2)
    assert load.context_tokens == 5 + 6 + 7
    assert load.bookings == (10, 11, 12, 20)
    node.step()
    node.step()
    assert node.told().context_tokens == 7 + 7 + 7, "the third waits for a place: `running` counts it, its KV does not grow"


def test_a_step_is_measured_against_its_own_batch_and_context():
    costs = Costs(decode_context_s=1e-3)
    node = Node(costs=costs, max_batch=4)
    for number in range(3):
        node.run(f"r{number}", length=8)
    node.step()
    for _ in range(300):
        works = [work for work in node.works.values() if isinstance(work, DecodeStep)]
        if not works:
            break
        context = sum(entry.position + 1 for entry in works[0].entries)
        node.step(elapsed_s=3 * costs.step_s(len(works[0].entries), context))
        node.put_all()
    load = node.told()
    assert load.step.seconds / load.step.predicted_s == pytest.approx(3.0, rel=0.25)
    assert load.step_s > 0


def test_a_slow_first_step_does_not_stick(node):
    node.run(max_tokens=3)
    node.step(elapsed_s=2.0)
    slow = node.told().step
    assert slow.seconds / slow.predicted_s > 3
    node.step()
    node.advance(1000.0)
    later = node.told().step
    assert later.seconds / later.predicted_s == pytest.approx(1.0, abs=0.01)


# --- TBT, held against the batch once more


@dataclass(frozen=True)
class Named:
    """A member of a batch, as far as places go by tenants."""

    tenant: str
    order: int = 0


def batch_of(count, **settings):
    """`count` requests in the batch; a step of n takes n * 10 ms."""
    costs = Costs(decode_step_s=1e-9, decode_request_s=0.01)
    node = Node(costs=costs, **{"max_batch": 8, "max_requests": 12, "capacity_tokens": 200 * B} | settings)
    for number in range(count):
        node.run(f"r{number}", max_tokens=20)
    return node


def test_a_request_that_would_make_the_steps_too_long_is_refused_when_its_prefill_is_done():
    node = batch_of(3)
    node.reserve("r", length=10, tbt_slo_s=0.035)
    assert node.take(DecodeReserved)[-1].request_id == "r", "what is here now may be gone by then"
    node.blocks("r", 0, 2, ready=False)
    assert node.take(DecodeDenied) == []
    node.blocks("r", 2, 1, ready=False)
    denied = node.one(DecodeDenied, "p0")
    assert (denied.refused, denied.full) == (True, True)
    assert denied.retry_after_s == pytest.approx(19 * 0.04), "when the first of those here will have ended"
    assert node.take(HandoffFailed) == []
    assert node.actor.counts["requests_refused"] == 1
    assert node.busy()["requests_running"] == 3
    assert "requests_closing" not in node.busy()


@pytest.mark.parametrize("changes", [{"tbt_slo_s": 0.071}, {"tbt_slo_s": 0.0}, {"first_index": 3}, {"max_tokens": 1}])
def test_others_are_not_refused(changes):
    """One that fits, one without a bound, one whose client has tokens, one that takes no step."""
    node = batch_of(3)
    node.reserve("r", length=10, **{"tbt_slo_s": 0.035} | changes)
    node.blocks("r", ready=False)
    assert node.take(DecodeDenied) == []


def test_an_empty_decode_refuses_nobody():
    node = batch_of(0)
    node.reserve("r", length=10, tbt_slo_s=0.001)
    node.blocks("r", ready=False)
    assert node.take(DecodeDenied) == []


def test_those_about_to_join_count_too():
    node = batch_of(1)
    for name in ("a", "b", "c"):
        node.reserve(name, length=10, tbt_slo_s=0.048, max_tokens=12)
        node.blocks(name, ready=False)
    assert node.one(DecodeDenied).request_id == "c"


def test_nobody_joins_whose_coming_breaks_a_promise_to_another():
    node = batch_of(1)
    node.reserve("promised", length=10, tbt_slo_s=0.04, max_tokens=12)
    node.blocks("promised", ready=False)
    node.reserve("easy", length=10, tbt_slo_s=10.0)
    node.blocks("easy", ready=False)
    assert node.one(DecodeDenied).request_id == "easy"


def test_a_short_output_is_refused_where_a_long_one_may_come():
    """Its longest tenth is its first gap alone."""
    for max_tokens, refused in ((400, False), (12, True)):
        node = batch_of(3)
        node.reserve("r", length=10, tbt_slo_s=0.045, max_tokens=max_tokens)
        node.blocks("r", ready=False)
        assert bool(node.take(DecodeDenied)) is refused


def test_who_comes_to_a_full_batch_waits_and_is_refused_for_that():
    """34 ms were predicted for one that then waited 53 s."""
    node = batch_of(2, max_batch=2)
    node.reserve("r", length=10, tbt_slo_s=0.1)
    node.blocks("r", ready=False)
    assert node.one(DecodeDenied).retry_after_s == pytest.approx(19 * 0.02)


@pytest.mark.parametrize(("tenant", "refused"), [("bob", False), ("alice", True)])
def test_a_batch_that_one_tenant_fills_has_a_place_for_another_one(tenant, refused):
    costs = Costs(decode_request_s=0.01, decode_context_s=0.0)
    node = Node(costs=costs, max_batch=2, max_requests=12, capacity_tokens=200 * B)
    for number in range(2):
        node.run(f"r{number}", max_tokens=20, tenant="alice")
    node.reserve("r", length=10, tbt_slo_s=0.1, tenant=tenant)
    node.blocks("r", ready=False)
    assert bool(node.take(DecodeDenied)) is refused


def test_each_tenant_has_as_many_places_before_a_newcomer_as_the_newcomers_own_and_one_more():
    others = [Named(tenant) for tenant in "aaaabbc"]
    assert {tenant: ahead_of(others, tenant) for tenant in "abcd"} == {"a": 7, "b": 2 + 3 + 1, "c": 1 + 2 + 2, "d": 3}


def test_how_long_to_wait_is_until_enough_have_ended():
    costs = Costs(decode_step_s=0.01, decode_request_s=0.01, decode_context_s=1e-5)
    others = [Place(1000, 50), Place(2000, 10), Place(3000, 30)]
    more = {"slowness": 2.0, "max_batch": 8, "others": others, "own_context": 1000, "ahead": 3}
    now_s = 2 * costs.step_s(4, 7000)
    assert retry_after_s(costs, slo_s=now_s, **more) is None
    assert retry_after_s(costs, slo_s=now_s - 0.001, **more) == pytest.approx(10 * now_s)
    assert retry_after_s(costs, slo_s=2 * costs.step_s(3, 5000) - 0.001, **more) == pytest.approx(30 * now_s)
    assert retry_after_s(costs, slo_s=1e-6, **more) == pytest.approx(50 * now_s), "alone it may come"
    assert retry_after_s(costs, slo_s=1e-6, **more | {"others": []}) is None
    assert retry_after_s(costs, slo_s=1e-6, **more | {"others": [Place(1, 10**6)]}) == 60.0


def test_a_short_wait_for_a_place_is_a_gap_like_others():
    costs = Costs(decode_step_s=0.01, decode_request_s=0.01)
    more = {"slowness": 1.0, "max_batch": 1, "others": [Place(10, 3)], "own_context": 10, "ahead": 1}
    assert retry_after_s(costs, slo_s=0.07, **more) is None
    assert retry_after_s(costs, slo_s=0.05, **more) == pytest.approx(0.06)


# --- several steps in one work


def test_live_engines_are_asked_for_one_step(node):
    node.run()
    assert node.work(DecodeStep)[1].steps == 1
    node.run("r1")
    assert node.cancelled == []


def test_a_run_ends_with_its_first_member_and_its_tokens_come_together():
    node = Node(max_steps=100, capacity_tokens=100 * B)
    node.run("r0", max_tokens=8)
    assert node.work(DecodeStep)[1].steps == 7
    node.step(steps=7, elapsed_s=0.7)
    assert node.one(TokensDecoded, "g").entries == (("r0", 1, 1, (6,) * 7),)
    assert node.told().step_s == pytest.approx(0.1)
    node.put_all()
    assert_nothing_left(node)


def test_a_run_gives_way_to_a_request_that_became_ready():
    node = Node(max_steps=100, capacity_tokens=100 * B)
    node.run("r0")
    node.run("r1")
    work_id, _ = node.work(DecodeStep)
    assert node.cancelled == [work_id]
    node.run("r2")
    assert node.cancelled == [work_id], "once"
    node.step(steps=3)
    assert node.one(TokensDecoded).entries == (("r0", 1, 1, (6,) * 3),)
    assert [entry.position for entry in node.work(DecodeStep)[1].entries] == [9, 6, 6]


def test_a_run_gives_way_to_a_member_that_ends_but_not_for_one_that_finds_no_place():
    node = Node(max_steps=100, max_batch=1, capacity_tokens=100 * B)
    node.run("r0")
    node.run("r1")
    assert node.cancelled == []
    node.say("g", CancelRequest(request_id="r0", attempt=1))
    assert node.cancelled == [node.work(DecodeStep)[0]]
    node.step()
    assert [work.steps for work in node.works.values()] == [49], "its KV is back, and the other goes on"


def test_a_run_is_as_long_as_a_part_of_the_free_kv_allows_and_gives_back_what_it_did_not_use():
    node = Node(max_steps=1000, capacity_tokens=30 * B)
    node.run("r0", length=6, max_tokens=5000)
    work = node.work(DecodeStep)[1]
    assert 1 < work.steps < 40
    reserved = node.busy()["reserved_tokens"]
    assert reserved <= 8 + 28 * B // 4
    node.run("r1", length=6)
    node.step()
    node.put_all()
    node.say("g", CancelRequest(request_id="r1", attempt=1))
    node.settle()
    assert_nothing_left(node)


def outputs(max_steps, lengths, eos_at, store_output=True):
    """What three requests put out and put into the pool, for an engine whose tokens follow from the position."""
    node = Node(max_steps=max_steps, capacity_tokens=400 * B, max_batch=3, store_output=store_output)
    for number, length in enumerate(lengths):
        node.run(f"r{number}", length=length, max_tokens=30 + number)
    tokens, puts = {}, []
    while found := [(i, work) for i, work in node.works.items() if isinstance(work, DecodeStep)]:
        ((work_id, work),) = found
        made = 1 if work_id in node.cancelled else work.steps
        rows = [
            tuple(9 if entry.position + step == eos_at else 20 + entry.position + step for entry in work.entries)
            for step in range(made)
        ]
        node.done(work_id, StepDecoded(tuple(rows), 0.01))
        for message in node.take(TokensDecoded):
            for request_id, _, first, run in message.entries:
                before = tokens.setdefault(request_id, [])
                assert first == 1 + len(before)
                before += run
        for reserve in [m for _, m in node.sent if isinstance(m, ReserveSlots)]:
            puts += zip(reserve.keys, [reserve.parent, *reserve.keys[:-1]], strict=True)
        node.put_all()
    assert_nothing_left(node)
    return tokens, sorted(puts)


@given(st.lists(st.integers(1, 13), min_size=3, max_size=3), st.integers(0, 60), st.sampled_from([2, 7, 64]))
@settings(max_examples=60)
def test_runs_put_out_and_store_what_single_steps_do(lengths, eos_at, max_steps):
    assert outputs(max_steps, lengths, eos_at) == outputs(1, lengths, eos_at)


def test_output_that_is_not_stored_is_not_offered_to_the_pool():
    kept, _ = outputs(64, [3, 4, 5], 0)
    assert outputs(64, [3, 4, 5], 0, store_output=False) == (kept, [])


# --- ends, at every state

STATES = ["reserving", "loading", "pulling", "stepping", "stepping with a put", "putting"]


def request_in(state):
    node = Node()
    if state == "reserving":
        node.reserve(length=10, prefill="p1", reuse=2)
        return node
    node.reserve(length=6)
    if state == "loading":
        return node
    node.blocks()
    if state == "pulling":
        return node
    node.pulled()
    node.handoff_done()
    if state != "stepping":
        node.step()
        node.step()
        if state == "putting":
            reserve = node.one(ReserveSlots)
            grants = (GrantedSlot(index=0, slot=1, generation=1),)
            node.say("c", SlotsReserved(put_id=reserve.put_id, grants=grants))
    return node


@pytest.mark.parametrize("state", STATES)
def test_a_cancel_frees_everything_once_no_work_uses_it(state):
    node = request_in(state)
    node.say("g2", CancelRequest(request_id="r", attempt=9))
    node.say("g", CancelRequest(request_id="r", attempt=0))
    assert "requests_cancelled" not in node.actor.counts, "neither a stranger nor an older attempt cancels"
    node.say("g", CancelRequest(request_id="r", attempt=1))
    told = node.take(HandoffFailed)
    assert len(told) == (state in ("reserving", "loading", "pulling"))
    if state in ("pulling", "stepping", "putting"):
        assert node.busy()["requests_closing"] == 1
    node.settle()
    assert node.take(AttemptFailed) == []
    assert_nothing_left(node)


@pytest.mark.parametrize("state", STATES)
def test_the_deadline_ends_a_request_at_any_state(state):
    node = request_in(state)
    node.advance(61.0)
    assert node.one(AttemptFailed, "g").request_id == "r"
    node.settle()
    assert_nothing_left(node)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("peer", ["g", "p", "c", "k"])
def test_no_peers_death_at_any_state_leaks(state, peer):
    node = request_in(state)
    prefill = "p1" if state == "reserving" else "p0"
    node.down(prefill if peer == "p" else peer)
    loading = state in ("reserving", "loading", "pulling")
    failed = [m.request_id for m in node.take(AttemptFailed, "g")] if peer != "g" else []
    assert failed == (["r"] if peer == "p" and loading else []), "once verified, a request needs no prefill"
    node.settle()
    node.say("k" if peer == "g" else "g", CancelRequest(request_id="r", attempt=1))
    node.settle()
    node.advance(61.0)
    assert_nothing_left(node)


@pytest.mark.parametrize("state", ["reserving", "loading", "pulling"])
def test_a_handoff_the_prefill_gives_up_ends_the_request(state):
    node = request_in(state)
    prefill = "p1" if state == "reserving" else "p0"
    node.say("p1" if prefill == "p0" else "p0", HandoffFailed(request_id="r", attempt=1, reason="not its prefill"))
    assert node.busy()["requests_waiting"] == 1
    node.say(prefill, HandoffFailed(request_id="r", attempt=1, reason="test"))
    node.settle()
    assert_nothing_left(node)


def test_a_lease_answer_that_comes_after_the_end_is_given_back(node):
    node.reserve(length=10, prefill="p1", reuse=2)
    ask = node.one(LeaseBlocks)
    node.say("g", CancelRequest(request_id="r", attempt=1))
    assert node.one(ReleaseLease).lease_id == ask.lease_id
    ref = SlotRef(node="c", incarnation=7, slot=3, generation=2, checksum=1)
    node.say("c", leased(ask.lease_id, [ref]))
    assert_nothing_left(node)


@pytest.mark.parametrize("max_steps", [1, 7])
@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_events_keeps_the_invariants_and_ends_idle(seed, max_steps):
    rng = random.Random(seed)
    node = Node(capacity_tokens=8 * B, max_batch=2, max_steps=max_steps)
    lives = dict.fromkeys(node.peers, 7)
    attempts = {}
    for _ in range(300):
        name = rng.choice(("r0", "r1", "r2", "r3"))
        prefill = rng.choice(("p0", "p1"))
        attempt = max(1, attempts.get(name, 1) - rng.randrange(2))
        known = name in node.prompts and prefill in node.peers
        match rng.randrange(20):
            case 14 | 15 | 16 if {"p0", "g"} <= node.peers.keys() and not any(
                isinstance(w, PullBlocks) for w in node.works.values()
            ):
                attempts[name] = attempts.get(name, 0) + 1
                node.reserve(name, rng.randint(1, 14), attempt=attempts[name], max_tokens=rng.randint(1, 30))
                node.blocks(name, attempt=attempts[name])
                if any(isinstance(w, PullBlocks) for w in node.works.values()):
                    node.pulled()
                node.handoff_done(name, attempt=attempts[name])
            case 17 | 18 | 19 if node.works:
                answer(node, rng)
            case 0 | 1 | 2 if prefill in node.peers:
                attempts[name] = attempts.get(name, 0) + rng.randrange(2) or 1
                length = rng.randint(1, 14)
                reuse = rng.randint(0, length // B)
                node.reserve(name, length, attempt=attempts[name], prefill=prefill, reuse=reuse, max_tokens=rng.randint(1, 12))
            case 3 | 4 if known:
                node.blocks(name, ready=rng.random() < 0.7, prefill=prefill, attempt=attempt)
            case 5 if known and prefill == "p0":
                node.layer(rng.randrange(3), request_id=name)
            case 6 if known:
                node.handoff_done(name, prefill=prefill, attempt=attempt)
            case 7 | 8 | 9 if node.works:
                answer(node, rng)
            case 10:
                for ask in node.take(LeaseBlocks, "c"):
                    ref = SlotRef(node="c", incarnation=7, slot=0, generation=2, checksum=1)
                    refs = [ref] * rng.randint(0, len(ask.keys))
                    if "c" in node.peers:
                        node.say("c", leased(ask.lease_id, refs))
                if "c" in node.peers:
                    node.put_all(fail=rng.random() < 0.3)
            case 11 if "g" in node.peers:
                node.say("g", CancelRequest(request_id=name, attempt=attempt))
            case 12:
                peer = rng.choice(("g", "p0", "p1", "c", "k"))
                if peer in node.peers:
                    node.down(peer)
                    node.sent = [(to, m) for to, m in node.sent if to != peer]
                else:
                    lives[peer] += rng.randrange(2)
                    node.up(peer, lives[peer], host="h1" if peer == "p1" else "h0")
            case 13:
                node.advance(rng.choice((0.1, 1.0, 20.0)))
    for peer in [p for p in ("g", "c") if p in node.peers]:
        node.down(peer)
    while node.works:
        answer(node, rng)
    assert_nothing_left(node)


def answer(node, rng):
    work_id, work = rng.choice(list(node.works.items()))
    if rng.random() < 0.1:
        node.done(work_id, WorkFailed("test"))
    elif isinstance(work, DecodeStep):
        made = rng.randint(1, work.steps)
        node.done(work_id, StepDecoded(tuple(tuple(rng.choice((5, 6, 7, 9)) for _ in work.entries) for _ in range(made)), 0.01))
    elif isinstance(work, CopyBlocks):
        node.done(work_id, BlocksCopied((1,) * len(work.copies)))
    else:
        failed = {load.block for load in work.loads if rng.random() < 0.03}
        parts = [(x.block, n, part(x.block, n)) for x in work.loads for n in range(x.first_layer, x.stop_layer)]
        node.done(work_id, BlocksPulled(tuple(p for p in parts if p[0] not in failed), tuple(failed)))


def test_a_lease_of_more_blocks_than_were_asked_for_is_cut():
    node = Node()
    node.reserve(length=6, prefill="p1", reuse=1)
    refs = [SlotRef(node="c", incarnation=7, slot=slot, generation=1, checksum=5) for slot in range(6)]
    node.say("c", leased(node.one(LeaseBlocks).lease_id, refs))
    assert node.one(DecodeReserved, to="p1").held_blocks == 1
    _, pull = node.work(PullBlocks)
    assert len(pull.loads) == 1


def test_a_reservation_for_a_gateway_that_is_not_there_is_denied():
    node = Node()
    node.reserve(length=6, prefill="p0", reuse=1, gateway="gone")
    assert "gone" in node.one(DecodeDenied).reason
    assert not node.busy()


def test_a_decode_that_is_to_become_a_prefill_finishes_its_requests_first():
    node = Node(may_become="prefill")
    node.reserve("old")
    node.say("k", ChangeRole(role="prefill"))
    assert node.one(DecodeLoad, "k").draining, "it says so at once"
    node.reserve("new")
    assert node.one(DecodeDenied, "p0").full
    assert not node.drained
    node.say("g", CancelRequest(request_id="old", attempt=1))
    assert Drained("prefill") in node.handle(TimerFired(("renew",)))
    assert node.busy() == {}
