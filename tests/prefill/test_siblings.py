"""Choices of one prompt: computed once, and a first token for each that is still wanted."""

import pytest
from test_prefill import Node, prompt

from mooncake_zmq.core.messages import (
    AttemptFailed,
    CancelRequest,
    FirstToken,
    HandoffDone,
    HandoffFailed,
    HandoffReceived,
    LeaseBlocks,
    PromptScored,
    ReserveDecode,
    Sibling,
)
from mooncake_zmq.core.work import ComputeChunk, WorkFailed
from mooncake_zmq.kv.block_hash import unpack_tokens

SIBLINGS = tuple(Sibling(request_id=f"s{index}", attempt=1, seed=index) for index in range(1, 16))


@pytest.fixture
def node():
    node = Node()
    node.down("c")
    return node


def begin(node):
    node.start(siblings=SIBLINGS)
    node.reserve()


def compute(node):
    """The last chunk of two."""
    assert node.computed().seeds == ()
    others = tuple((100 + sibling.seed, None) for sibling in SIBLINGS)
    return node.computed(token=100, others=others)


def test_sixteen_choices_compute_their_prompt_once(node):
    begin(node)
    assert node.one(ReserveDecode, "d").siblings == SIBLINGS
    assert compute(node).seeds == tuple(range(1, 16))
    assert node.actor.counts["prompt_tokens_computed"] == 10
    firsts = node.take(FirstToken, "g")
    assert [first.token for first in firsts] == list(range(100, 116))
    assert [first.request_id for first in firsts] == ["r", *(sibling.request_id for sibling in SIBLINGS)]
    done = node.one(HandoffDone, "d")
    assert (done.token, done.siblings) == (100, tuple((sibling.request_id, 100 + sibling.seed) for sibling in SIBLINGS))
    node.say("d", HandoffReceived(request_id="r", attempt=1))
    assert node.busy() == {}


def test_choices_wait_for_the_decode_however_short_their_prompt_is(node):
    """Denied behind their first tokens, each would be placed by itself and computed anew."""
    node.start(tokens=[1, 2, 3], siblings=SIBLINGS)
    assert node.works == {}
    node.reserve()
    assert len(node.computed(others=tuple((7, None) for _ in SIBLINGS)).seeds) == len(SIBLINGS)


@pytest.mark.parametrize("gone", ["r", "s3"])
def test_who_leaves_gets_no_token_and_the_others_do(node, gone):
    begin(node)
    node.say("g", CancelRequest(request_id=gone, attempt=1))
    compute(node)
    firsts = {first.request_id for first in node.take(FirstToken, "g")}
    assert (len(firsts), gone in firsts) == (15, False)
    done = node.one(HandoffDone, "d")
    assert gone not in dict(done.siblings)
    assert done.wanted == (gone != "r")


def test_no_room_is_taken_for_who_left_the_queue():
    """The decode has heard of the cancel before, and would hear of it no more."""
    node = Node(max_active=1, short_jobs=0)
    node.down("c")
    node.ready("before")
    node.start(siblings=SIBLINGS[:3])
    node.say("g", CancelRequest(request_id="s2", attempt=1))
    node.computed()
    node.sent.clear()
    node.computed()
    assert node.one(ReserveDecode, "d").siblings == (SIBLINGS[0], SIBLINGS[2])
    node.take(HandoffDone)
    node.reserve()
    node.computed(others=tuple((each.seed, None) for each in SIBLINGS[:3]))
    assert dict(node.one(HandoffDone, "d").siblings) == {"s1": 1, "s3": 3}


def test_the_job_ends_with_the_last_who_wants_it(node):
    begin(node)
    for sibling in SIBLINGS:
        node.say("g", CancelRequest(request_id=sibling.request_id, attempt=2))
        assert not node.take(HandoffFailed)
    node.say("g", CancelRequest(request_id="r", attempt=0))
    assert not node.take(HandoffFailed)
    node.say("g", CancelRequest(request_id="r", attempt=1))
    assert node.one(HandoffFailed, "d").request_id == "r"
    work_id, _ = node.work(ComputeChunk)
    assert work_id in node.cancelled


def test_what_breaks_is_told_to_each_that_is_left(node):
    begin(node)
    node.say("g", CancelRequest(request_id="s1", attempt=1))
    node.down("d")
    assert {failed.request_id for failed in node.take(AttemptFailed, "g")} == {"r", *(s.request_id for s in SIBLINGS[1:])}


def test_answers_that_cannot_follow_their_constraint_are_told_so(node):
    begin(node)
    node.computed()
    work_id, _ = node.work(ComputeChunk)
    node.done(work_id, WorkFailed("constraint: no token can follow", stuck=True))
    failed = node.take(AttemptFailed, "g")
    assert len(failed) == 16
    assert all(message.stuck and message.reason.endswith("no token can follow") for message in failed)


def test_a_refused_job_is_told_to_each(node):
    node.start(siblings=SIBLINGS, decode="d9")
    assert len(node.take(AttemptFailed, "g")) == 16


def test_a_newer_attempt_of_one_sends_the_others_elsewhere(node):
    begin(node)
    node.start(attempt=2)
    failed = {failed.request_id: failed.full for failed in node.take(AttemptFailed, "g")}
    assert failed == {sibling.request_id: True for sibling in SIBLINGS}


def test_a_prompt_whose_probabilities_are_wanted_is_computed_whole_and_told_chunk_by_chunk():
    node = Node()
    node.ready("before")
    node.computed()
    node.computed()
    node.say("d", HandoffReceived(request_id="before", attempt=1))
    node.take(ReserveDecode)
    node.take(LeaseBlocks)
    node.start(prompt_logprobs=1, reuse_blocks=2)
    assert not node.take(LeaseBlocks)
    assert node.one(ReserveDecode, "d").reuse_keys == ()
    node.reserve()
    told = tuple((-float(position), ()) for position in range(1, 10))
    first = node.computed(scored=told[:8])
    assert (first.start, first.prefix, first.prompt_logprobs, unpack_tokens(first.following)) == (0, (), 1, [8])
    last = node.computed(scored=told[8:])
    assert last.following == b""
    sent = [m for _, m in node.sent if isinstance(m, PromptScored | FirstToken)]
    assert [(m.first, m.logprobs) for m in sent[-3:-1]] == [(1, told[:8]), (9, told[8:])]
    assert isinstance(sent[-1], FirstToken)


def test_what_scoring_takes_is_no_measure_of_what_others_will():
    node = Node()
    node.down("c")
    before = node.actor.dump(node.now)["compute"]
    node.ready(prompt_logprobs=1)
    node.computed(scored=tuple((-1.0, ()) for _ in range(8)), elapsed_s=100.0)
    assert node.actor.dump(node.now)["compute"] == before
    node.computed(scored=((-1.0, ()),), elapsed_s=100.0)
    assert node.actor.dump(node.now)["compute"] == before
    node.ready("plain", prompt(10, base=900))
    node.computed(elapsed_s=100.0)
    assert node.actor.dump(node.now)["compute"] != before
