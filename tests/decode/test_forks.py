"""Choices that begin with one prompt's KV: one handoff, a copy for each, and nothing left whatever ends them."""

import pytest
from msgspec import structs
from test_decode import B, Node, assert_nothing_left

from mooncake_zmq.core.messages import (
    AttemptFailed,
    CancelRequest,
    DecodeDenied,
    DecodeReserved,
    HandoffFailed,
    HandoffReceived,
    Sibling,
    TokensDecoded,
)
from mooncake_zmq.core.work import DecodeStep, ForkSequence, SequenceForked, StepDecoded, WorkFailed


class Family(Node):
    """The request "r" with siblings "s" and "t"."""

    def reserve_three(self, length=6, **changes):
        siblings = tuple(Sibling(request_id=name, attempt=1, seed=seed) for name, seed in (("s", 7), ("t", 8)))
        self.reserve("r", length, siblings=siblings, **changes)

    def handoff_done(self, request_id="r", *, siblings=(("s", 21), ("t", 22)), wanted=True, **options):
        kept, self.handed = self.say, []
        self.say = lambda _, message: self.handed.append(message)
        super().handoff_done(request_id, **options)
        self.say = kept
        (done,) = self.handed
        self.say("p0", structs.replace(done, siblings=siblings, wanted=wanted))

    def three(self, **options):
        self.reserve_three(**options)
        self.blocks("r")
        self.pulled()
        self.handoff_done("r", token=20)

    def forked(self, result=None):
        work_id, work = self.work(ForkSequence)
        self.done(work_id, result or SequenceForked())
        return work

    def failed(self):
        return {message.request_id: message.full for message in self.take(AttemptFailed, "g")}


@pytest.fixture
def node():
    return Family(max_requests=8)


def test_one_handoff_serves_all(node):
    node.three()
    assert node.one(HandoffReceived, "p0").request_id == "r"
    assert len(node.take(DecodeReserved)) == 1
    fork = node.forked()
    assert (len(fork.targets), fork.tokens) == (2, 6)
    node.step()  # that of "r" alone, which did not wait for the copies
    work_id, work = node.work(DecodeStep)
    assert [(entry.token, entry.sampling.seed, entry.position) for entry in work.entries] == [(6, 0, 7), (21, 7, 6), (22, 8, 6)]
    assert {entry.sequence for entry in work.entries[1:]} == set(fork.targets)
    node.done(work_id, StepDecoded(((30, 31, 32),), 0.01))
    told = {entry[0]: entry[2:] for message in node.take(TokensDecoded) for entry in message.entries}
    assert told == {"r": (2, (30,)), "s": (1, (31,)), "t": (1, (32,))}


def test_all_hold_room_and_go_when_cancelled(node):
    node.three()
    assert node.busy()["reserved_tokens"] == 3 * 2 * B
    for name in ("r", "s", "t"):
        node.say("g", CancelRequest(request_id=name, attempt=1))
    node.forked()
    node.step()
    assert_nothing_left(node)


def test_who_finds_no_room_goes_elsewhere_and_the_others_run():
    node = Family(capacity_tokens=4 * B)
    node.reserve_three()
    assert node.failed() == {"t": True}
    node.blocks("r")
    node.pulled()
    node.handoff_done("r")
    assert len(node.forked().targets) == 1


def test_the_first_may_leave_while_its_handoff_goes_on_for_the_others(node):
    node.reserve_three()
    node.say("g", CancelRequest(request_id="r", attempt=1))
    assert not node.take(HandoffFailed)
    node.blocks("r")
    node.pulled()
    node.handoff_done("r")
    node.forked()
    assert [entry.sampling.seed for entry in node.work(DecodeStep)[1].entries] == [7, 8]
    assert "r" not in node.actor.requests.live


def test_the_first_whose_cancel_came_before_its_reservation_is_not_decoded(node):
    """The prefill heard of it in time, and went on for the others."""
    node.say("g", CancelRequest(request_id="r", attempt=1))
    node.reserve_three()
    node.blocks("r")
    node.pulled()
    node.handoff_done("r", wanted=False)
    assert node.one(HandoffReceived, "p0").request_id == "r"
    node.forked()
    assert [entry.sampling.seed for entry in node.work(DecodeStep)[1].entries] == [7, 8]
    node.step()
    for name in ("s", "t"):
        node.say("g", CancelRequest(request_id=name, attempt=1))
    node.step()
    assert_nothing_left(node)


def test_when_nobody_is_left_the_handoff_ends(node):
    node.reserve_three()
    for name in ("r", "s", "t"):
        assert not node.take(HandoffFailed)
        node.say("g", CancelRequest(request_id=name, attempt=1))
    assert node.one(HandoffFailed, "p0").request_id == "r"
    assert_nothing_left(node)


def test_a_choice_that_its_first_token_ends_needs_no_copy(node):
    node.reserve_three()
    node.blocks("r")
    node.pulled()
    node.handoff_done("r", siblings=(("s", 9), ("t", 22)))  # 9 ends an answer
    assert len(node.forked().targets) == 1
    assert "s" not in node.actor.requests.live


def test_what_breaks_before_the_copies_are_there_breaks_all(node):
    node.reserve_three()
    node.down("p0")
    assert node.failed() == {"r": False, "s": True, "t": True}
    assert_nothing_left(node)


def test_what_the_prefill_gives_up_it_tells_the_gateway_itself(node):
    node.reserve_three()
    node.say("p0", HandoffFailed(request_id="r", attempt=1, reason="test"))
    assert node.failed() == {}
    assert_nothing_left(node)


def test_a_copy_that_fails_fails_the_copies_alone(node):
    node.three()
    node.forked(WorkFailed("test"))
    assert node.failed() == {"s": False, "t": False}
    assert not node.take(HandoffFailed)
    assert list(node.actor.requests.live) == ["r"]


def test_a_copy_without_memory_goes_elsewhere_and_the_others_run(node):
    node.three()
    fork = node.work(ForkSequence)[1]
    node.forked(SequenceForked(fork.targets[:1]))
    assert node.failed() == {"s": True}
    assert list(node.actor.requests.live) == ["r", "t"]


def test_a_prefill_that_is_gone_is_missed_by_nobody_once_its_kv_is_here(node):
    node.three()
    node.down("p0")
    node.forked()
    assert node.failed() == {}
    assert len(node.actor.requests.live) == 3


def test_messages_about_a_copy_as_if_it_were_handed_off_are_not_heard(node):
    node.reserve_three()
    node.prompts["s"] = node.prompts["r"]
    node.blocks("s")
    node.say("p0", HandoffFailed(request_id="s", attempt=1, reason="test"))
    assert not node.works
    assert "s" in node.actor.requests.live


def test_a_group_is_refused_as_a_whole_and_alone_never(node):
    node.reserve_three(tbt_slo_s=1e-6)
    node.blocks("r")
    assert not node.take(DecodeDenied)
    node.pulled()
    node.handoff_done("r")
    node.forked()
    siblings = (Sibling(request_id="v", attempt=1, seed=7),)
    node.reserve("u", siblings=siblings, tbt_slo_s=1e-6)
    node.blocks("u")
    assert node.one(DecodeDenied, "p0").refused
    assert node.failed() == {}, "the prefill tells it"
    assert list(node.actor.requests.live) == ["r", "s", "t"]
