"""Requests of whose prompt few tokens are handed off: room for these and the answer, positions behind all, and no key."""

import pytest
from test_decode import ROOT, B, Node

from mooncake_zmq.core.actor import OpenSequence
from mooncake_zmq.core.messages import CommitSlots, DecodeDenied, ReserveSlots
from mooncake_zmq.core.work import DecodeStep
from mooncake_zmq.kv.block_hash import pack_tokens

LENGTH, KEPT = 10 * B + 3, 2 * B


@pytest.fixture
def node():
    return Node(capacity_tokens=4 * B, lend_tokens=0)


def reserve(node, request_id="r", kept=KEPT, **changes):
    node.reserve(request_id, LENGTH, kept_tokens=kept, last_key=ROOT, **changes)
    node.prompts[request_id] = node.prompts[request_id][:kept]


def hand_off(node, **changes):
    reserve(node, **changes)
    node.blocks()
    node.pulled()
    node.handoff_done()


def test_it_has_room_where_the_whole_prompt_has_none_and_goes_on_behind_all_of_it(node):
    node.reserve("whole", LENGTH)
    assert node.one(DecodeDenied, "p0").reason == "prompt is longer than the KV budget"
    hand_off(node)
    assert node.actor.gauges(node.now)["reserved_tokens"] == 3 * B
    work_id, work = node.work(DecodeStep)
    assert [entry.position for entry in work.entries] == [LENGTH]
    for made in range(2 * B - 1):
        assert [entry.position for entry in node.step(20 + made).entries] == [LENGTH + made]
    assert node.actor.gauges(node.now)["reserved_tokens"] == 4 * B, "as far as the answer goes"


def test_its_sequence_is_opened_for_what_is_kept_and_knows_what_was_dropped():
    class Opening(Node):
        opened: OpenSequence

        def apply(self, effect):
            self.opened = effect if isinstance(effect, OpenSequence) else self.opened
            super().apply(effect)

    Opening.opened = None
    node = Opening()
    reserve(node, max_tokens=9)
    opened = node.opened
    assert (opened.capacity_tokens, opened.filled_tokens, opened.dropped_tokens) == (KEPT + 9, KEPT, LENGTH - KEPT)


def test_nothing_of_it_is_put_or_kept(node):
    hand_off(node, max_tokens=2 * B)
    for made in range(2 * B - 1):
        node.step(20 + made)
    assert not [*node.take(ReserveSlots), *node.take(CommitSlots)]
    assert node.busy() == {}
    assert node.actor.gauges(node.now)["cached_tokens"] == 0
    assert node.sequences == set()


@pytest.mark.parametrize("bad", [{"kept": LENGTH + 1}, {"lenders": ("d2",)}, {"reuse": 1}, {"new_keys": (ROOT,)}])
def test_what_cannot_be_evicted_so_is_denied(node, bad):
    reserve(node, tail=pack_tokens([1, 2, 3]), **bad)
    assert node.one(DecodeDenied, "p0").reason == "a prompt that cannot be evicted so"
