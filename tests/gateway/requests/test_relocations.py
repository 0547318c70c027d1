"""A draining node's requests go on elsewhere: asked for while they go on, without a pause, neither as failures nor as tries."""

import pytest
from test_requests import Node, in_state, text

from mooncake_zmq.core.messages import (
    AttemptFailed,
    CancelRequest,
    PlaceElsewhere,
    RejectReason,
    RequestEnded,
    Schedule,
    StartPrefill,
)
from mooncake_zmq.gateway.requests.client_events import ClientGone, Finished
from mooncake_zmq.gateway.requests.request_log import RequestLog
from mooncake_zmq.kv.block_hash import unpack_tokens


def wants(node, sender="d0", attempt=1, request_id="r"):
    node.say(sender, PlaceElsewhere(attempts=((request_id, attempt),)))


def asked():
    node = in_state("decoding")
    node.sent.clear()
    wants(node)
    return node


def test_an_answer_goes_on_at_another_place_from_the_tokens_that_came_until_then():
    node = asked()
    schedule = node.one(Schedule, "k0")
    assert (schedule.attempt, schedule.exclude, schedule.begun) == (2, ("d0",), True)
    node.tokens(2)
    assert node.text() == [text(i) for i in range(3)], "the attempt under way goes on"
    assert not node.take(CancelRequest)
    node.placed(2, to=("p1", "d1"))
    assert [node.one(CancelRequest, name).attempt for name in ("p0", "d0")] == [1, 1]
    start = node.one(StartPrefill, "p1")
    assert (start.attempt, start.first_index, start.decode) == (2, 3, "d1")
    assert unpack_tokens(start.tokens)[-1] == text(2)
    node.tokens(3, sender="d0")
    node.first(3, attempt=2, sender="p1")
    node.tokens(4, attempt=2, sender="d1")
    end = node.end()
    assert isinstance(end, Finished)
    assert (end.attempts, end.relocations, node.text()) == (1, 1, [text(i) for i in range(5)])
    assert [each.attempt for each in node.take(RequestEnded)] == [1, 2], "both bookings end"
    assert node.actor.counts["requests_relocated"] == 1
    assert "attempts_retried" not in node.actor.counts


def test_without_another_place_it_stays_and_may_be_asked_for_again():
    node = asked()
    node.take(Schedule)
    wants(node)
    assert not node.take(Schedule), "one question at a time"
    node.reject(2, RejectReason.NO_ROOM)
    assert not node.take(CancelRequest)
    wants(node)
    assert node.one(Schedule).attempt == 3
    node.placed(3, to=("p0", "d0"))
    assert node.one(RequestEnded).attempt == 3, "the node that it would leave is no other place"
    node.tokens(2, 3, 4)
    assert (node.end().attempts, node.end().relocations) == (1, 0)


@pytest.mark.parametrize("how", ["ended", "failed", "gone"])
def test_the_booking_of_a_place_that_is_not_used_ends(how):
    node = asked()
    node.take(Schedule)
    if how == "ended":
        node.tokens(2, 3, 4)
    elif how == "failed":
        node.fail(1, sender="d0", full=True)
    else:
        node.client("r", ClientGone())
    assert [each.attempt for each in node.take(RequestEnded)] == [1, 2]
    node.placed(2, to=("p1", "d1"))
    assert not node.take(StartPrefill)
    if how == "failed":
        node.advance(1.0)
        assert node.one(Schedule).attempt == 3, "no number is used twice"


def test_a_conductor_that_goes_takes_the_question_with_it():
    node = asked()
    node.take(Schedule)
    node.down("k0")
    wants(node)
    assert node.one(Schedule, "k1").attempt == 3
    node.placed(3, to=("p1", "d1"), conductor="k1")
    assert node.one(StartPrefill, "p1").attempt == 3


def test_a_prompt_that_waits_at_a_draining_prefill_goes_to_another_one():
    node = in_state("prefilling")
    node.sent.clear()
    wants(node, "p0")
    node.placed(node.one(Schedule).attempt, to=("p1", "d0"))
    assert node.one(StartPrefill, "p1").first_index == 0
    node.first(0, attempt=2, sender="p1")
    node.tokens(1, attempt=2)
    assert node.text() == [text(0), text(1)]


@pytest.mark.parametrize(("sender", "attempt", "request_id"), [("d1", 1, "r"), ("d0", 2, "r"), ("d0", 1, "x"), ("p0", 1, "r")])
def test_only_the_node_of_the_attempt_under_way_may_ask(sender, attempt, request_id):
    node = in_state("decoding")
    node.sent.clear()
    wants(node, sender, attempt, request_id)
    assert not node.take(Schedule), "a prefill whose decode has sent tokens has nothing left of it"


def test_drains_without_end_use_up_no_attempt():
    node = Node(max_attempts=1)
    node.ask()
    node.place()
    for attempt in range(1, 9):
        here, there = ("d0", "d1") if attempt % 2 else ("d1", "d0")
        wants(node, here, attempt)
        node.placed(attempt + 1, to=("p0", there))
    assert node.take(StartPrefill)[-1].attempt == 9
    assert not node.take(AttemptFailed)


def test_the_log_has_both_attempts_and_why_the_first_ended():
    ended = []
    log, node = RequestLog(ended.append), Node()
    handle = node.actor.handle

    def observed(now, event):
        effects = handle(now, event)
        log.observe(now, event, effects)
        return effects

    node.actor.handle = observed
    node.ask()
    node.place()
    node.first()
    node.tokens(1)
    wants(node)
    node.placed(2, to=("p1", "d1"))
    node.first(2, attempt=2, sender="p1")
    node.tokens(3, 4, attempt=2, sender="d1")
    (entry,) = ended
    assert [(each.number, each.prefill, each.decode, each.why) for each in entry.attempts] == [
        (1, "p0", "d0", "its node drains"),
        (2, "p1", "d1", "length"),
    ]
    assert entry.attempts[0].tokens == 2
