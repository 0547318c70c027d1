"""Several answers to one prompt: placed together until one of them has a token, and each by itself from then on."""

import pytest
from test_requests import Node, text

from mooncake_zmq.core.actor import DrainWanted
from mooncake_zmq.core.messages import (
    AttemptFailed,
    CancelRequest,
    FirstToken,
    Rejected,
    RejectReason,
    RequestEnded,
    Sampling,
    Schedule,
    StartPrefill,
)
from mooncake_zmq.gateway.requests.client_events import ClientGone, Failed
from mooncake_zmq.kv.block_hash import unpack_tokens

THREE = ("r", "s", "t")


class Family(Node):
    """One call that asks for three answers."""

    def ask_three(self, **wishes):
        self.ask(siblings=(("s", 7), ("t", 8)), **wishes)

    def firsts(self, *names, attempt=1):
        for name in names or THREE:
            counts = {"own": 4, "local": 0, "remote": 0, "queue_s": 0.0, "prefill_s": 0.0}
            self.say("p0", FirstToken(request_id=name, attempt=attempt, index=0, token=text(0), **counts))

    def schedules(self):
        return {m.request_id: m for m in self.take(Schedule)}


@pytest.fixture
def node():
    return Family()


def test_choices_are_placed_and_computed_together_and_end_apart(node):
    node.ask_three()
    schedule = node.place()
    assert (schedule.choices, node.take(Schedule)) == (3, [])
    start = node.one(StartPrefill, "p0")
    assert start.sampling == Sampling()
    assert [(each.request_id, each.attempt, each.seed) for each in start.siblings] == [("s", 1, 7), ("t", 1, 8)]
    node.firsts()
    for name in reversed(THREE):
        node.tokens(1, 2, 3, 4, request_id=name)
        assert node.end(name).completion_tokens == 5
    assert [node.text(name) for name in THREE] == [[text(i) for i in range(5)]] * 3
    assert node.one(RequestEnded, "k0").request_id == "r", "there is one booking"
    assert node.busy() == {}


def test_each_choice_resumes_alone_once_it_has_a_token(node):
    node.ask_three()
    node.place()
    node.take(StartPrefill)
    node.firsts()
    node.tokens(1, request_id="s")
    node.down("d0")
    node.advance(2.0)
    asked = node.schedules()
    assert {name: (m.attempt, m.choices, m.tokens) for name, m in asked.items()} == {
        "r": (2, 1, 7),
        "s": (2, 1, 8),
        "t": (2, 1, 7),
    }
    for name in THREE:
        node.placed(2, to=("p1", "d1"), request_id=name)
    starts = {m.request_id: m for m in node.take(StartPrefill, "p1")}
    assert starts["s"].sampling.seed == 7
    assert unpack_tokens(starts["s"].tokens)[-2:] == [text(0), text(1)]
    assert not any(m.siblings for m in starts.values())


def test_choices_without_a_token_are_placed_together_again(node):
    node.ask_three()
    node.place()
    node.take(StartPrefill)
    node.down("p0")
    node.advance(1.0)
    (schedule,) = node.schedules().values()
    assert (schedule.choices, schedule.attempt) == (3, 2)
    node.placed(2, to=("p1", "d0"), request_id=schedule.request_id)
    assert len(node.one(StartPrefill, "p1").siblings) == 2


def test_those_for_which_a_decode_has_no_room_are_placed_together_elsewhere(node):
    node.ask_three()
    node.place()
    node.take(StartPrefill)
    for name in ("s", "t"):
        node.say("d0", AttemptFailed(request_id=name, attempt=1, reason="no KV left", full=True))
    node.firsts("r")
    node.advance(1.0)
    (schedule,) = node.schedules().values()
    assert (schedule.choices, schedule.exclude) == (2, ("d0",))
    assert {m.request_id for m in node.take(CancelRequest, "p0")} == {"s", "t"}


def test_a_refusal_is_for_all(node):
    node.ask_three()
    node.take(Schedule)
    node.reject(1)
    assert {node.end(name).code for name in THREE} == {"ttft_slo"}
    assert node.busy() == {}


def test_who_has_a_token_of_one_answer_is_not_refused_the_others(node):
    node.ask_three()
    node.place()
    node.say("d0", AttemptFailed(request_id="s", attempt=1, reason="no KV left", full=True))
    node.firsts("r")
    node.advance(1.0)
    assert node.schedules()["s"].begun
    node.say("k0", Rejected(request_id="s", attempt=2, reason=RejectReason.TTFT, retry_after_s=3.0))
    node.advance(1.0)
    assert node.schedules()["s"].attempt == 3


def test_when_the_one_that_is_asked_for_leaves_the_others_ask_again(node):
    node.ask_three()
    node.take(Schedule)
    node.client("r", ClientGone())
    node.advance(1.0)
    (schedule,) = node.schedules().values()
    assert (schedule.choices, schedule.request_id != "r") == (2, True)
    node.placed(schedule.attempt, request_id=schedule.request_id)
    assert len(node.one(StartPrefill, "p0").siblings) == 1


def test_a_call_that_hangs_up_ends_all(node):
    node.ask_three()
    node.place()
    node.firsts("r")
    for name in THREE:
        node.client(name, ClientGone())
    assert sorted(m.request_id for m in node.take(CancelRequest, "d0")) == list(THREE)
    assert sorted(m.request_id for m in node.take(CancelRequest, "p0")) == list(THREE)
    assert node.busy() == {}


def test_a_conductor_that_dies_while_it_places_is_replaced_once(node):
    node.ask_three()
    node.take(Schedule)
    node.down("k0")
    node.advance(1.0)
    (schedule,) = node.take(Schedule, "k1")
    assert schedule.choices == 3


def test_choices_count_as_open_requests_and_come_all_or_not_at_all():
    node = Family(max_open=4)
    node.ask("x")
    node.ask("y")
    node.ask_three()
    assert {node.end(name).code for name in THREE} == {"overloaded"}
    node.handle(DrainWanted())
    assert isinstance(node.end("r"), Failed)


def test_a_deadline_is_for_each(node):
    node.ask_three()
    node.advance(200.0)
    assert len({node.end(name).code for name in THREE}) == 1
    assert node.busy() == {}
