"""Prompts of which a decode gets few tokens: computed as a whole, handed off at the end, and never under a key."""

import pytest
from actor_harness import LAYOUT
from test_prefill import B, Node, prompt, run_job

from mooncake_zmq.core.messages import (
    AttemptFailed,
    BlocksAnnounced,
    Eviction,
    FirstToken,
    HandoffBlocks,
    HandoffDone,
    LayersReady,
    LeaseBlocks,
    ReserveDecode,
    ReserveSlots,
)
from mooncake_zmq.kv.block_hash import pack_tokens
from mooncake_zmq.kv.checksum import block_checksum

LENGTH = 7 * B + 1
EVICTION = Eviction(kind="recent", kept=2 * B + 1)


@pytest.fixture
def node():
    return Node(blend=True)


def evict(node, request_id="r", eviction=EVICTION, tokens=None, **changes):
    node.start(request_id, prompt(LENGTH) if tokens is None else tokens, keys=(), eviction=eviction, **changes)


def test_it_reuses_nothing_and_hands_off_what_is_kept_behind_its_last_chunk(node):
    run_job(node, "before", prompt(LENGTH))
    evict(node)
    assert not node.take(LeaseBlocks)
    ask = node.one(ReserveDecode, "d")
    assert (ask.tokens, ask.kept_tokens, ask.reuse_keys, ask.new_keys) == (LENGTH, 2 * B + 1, (), ())
    assert (ask.block_tokens, ask.lenders, ask.approximate) == (b"", (), False)
    assert ask.tail == pack_tokens([LENGTH - 1])
    node.reserve()
    works = [node.computed() for _ in range(2)]
    assert not [*node.take(HandoffBlocks), *node.take(LayersReady)]
    works += [node.computed() for _ in range(2)]
    assert [(each.first_block, len(each.sources), each.ready) for each in node.take(HandoffBlocks, "d")] == [(0, 3, False)]
    assert [(each.first_block, each.stop_layer) for each in node.take(LayersReady, "d")] == [(0, LAYOUT.layers)]
    assert [work.start for work in works] == [0, 2 * B, 4 * B, 6 * B]
    assert [len(work.outputs) for work in works] == [0, 0, 0, 3]
    assert all(work.eviction == EVICTION and not work.prefix and not work.parts for work in works)
    done = node.one(HandoffDone, "d")
    assert (done.blocks, done.checksum) == (3, block_checksum([100 + grant.slot for grant in works[-1].outputs]))
    first = node.one(FirstToken, "g")
    assert (first.own, first.local, first.remote, first.dropped) == (0, 0, 0, 5 * B)
    node.received()
    node.put_all()
    assert not node.take(ReserveSlots)
    assert node.busy() == {}
    assert node.sequences == set()
    assert node.actor.counts["prompt_tokens_dropped"] == 5 * B


def test_nothing_of_it_is_announced_or_reused_by_the_same_prompt(node):
    evict(node)
    node.reserve()
    node.finish()
    node.received()
    assert not [each for each in node.take(BlocksAnnounced) if each.stored]
    node.sent.clear()
    assert run_job(node, "exact", prompt(LENGTH)).own == 0


def test_it_needs_room_for_what_is_kept_alone():
    """The slab has sixteen blocks."""
    node = Node()
    long = prompt(40 * B)
    node.start(tokens=long)
    assert node.one(AttemptFailed, "g").reason == "prompt is longer than the slab"
    evict(node, "few", Eviction(kind="elastic", kept=15 * B), tokens=long)
    node.reserve("few")
    node.finish()
    assert node.one(FirstToken, "g").dropped == 25 * B


@pytest.mark.parametrize(
    "bad",
    [
        {"eviction": Eviction(kind="recent", kept=LENGTH)},
        {"eviction": Eviction(kind="recent", kept=5, last=2)},
        {"prompt_logprobs": 1},
        {"lenders": ("d2",)},
        {"tokens": prompt(2 * B)},
    ],
)
def test_what_cannot_be_evicted_so_is_refused(node, bad):
    evict(node, **bad)
    assert node.one(AttemptFailed, "g").reason == "a prompt that cannot be evicted so"
