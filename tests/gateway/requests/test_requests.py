"""The owner of requests: every token once and in order, every request one end, and no timer left armed."""

import random
from dataclasses import replace

import pytest
from actor_harness import LAYOUT, Harness

from mooncake_zmq.core.actor import DrainTimedOut, DrainWanted, SetTimer
from mooncake_zmq.core.messages import (
    OLDEST_PROTOCOL,
    AttemptFailed,
    CancelRequest,
    DecodeTimes,
    Eviction,
    FirstToken,
    NodesReported,
    Placed,
    PromptScored,
    Rejected,
    RejectReason,
    RequestEnded,
    Sampling,
    Schedule,
    StartPrefill,
    StopRule,
    TokensDecoded,
    WeightsReported,
)
from mooncake_zmq.core.work import NO_FINITE_LOGITS
from mooncake_zmq.gateway.requests.answer import EARLY_TOKENS
from mooncake_zmq.gateway.requests.client_events import (
    ClientGone,
    ClientRequest,
    Failed,
    Finished,
    PromptLogprobs,
    StopFound,
    TokenOut,
)
from mooncake_zmq.gateway.requests.readiness import WAIT
from mooncake_zmq.gateway.requests.requests import Requests, RequestsSettings
from mooncake_zmq.kv.block_hash import extend_keys, namespace, pack_tokens, unpack_tokens

B = LAYOUT.block_tokens
ROOT = namespace(model="m", layout="l")
BASE = RequestsSettings(conductors=("k0", "k1"), max_open=8, deadline_s=100.0, max_attempts=6)
PROMPT = list(range(6))


def text(index):
    """The undisturbed output."""
    return 100 + index


class Node(Harness):
    def __init__(self, **settings):
        super().__init__(Requests(name="me", host="h0", incarnation=1, settings=replace(BASE, **settings), layout=LAYOUT))
        for name in ("k0", "k1", "p0", "p1", "d0", "d1"):
            self.up(name)

    def handle(self, event):
        effects = super().handle(event)
        if not any(self.actor.gauges(self.now).values()):
            assert self.timers.keys() <= {WAIT}, "no timer outlives its request"
        return effects

    def ask(self, request_id="r", *, max_tokens=5, eos_ids=(), **wishes):
        packed = pack_tokens(PROMPT)
        request = ClientRequest(
            tokens=packed,
            root=ROOT,
            keys=tuple(extend_keys(ROOT, packed, B)),
            sampling=Sampling(),
            stop=StopRule(max_tokens=max_tokens, eos_ids=eos_ids),
            **wishes,
        )
        self.client(request_id, request)

    def place(self, *, to=("p0", "d0"), conductor="k0", request_id="r", **plan):
        schedule = [m for m in self.take(Schedule) if m.request_id == request_id][-1]
        self.placed(schedule.attempt, to=to, conductor=conductor, request_id=request_id, **plan)
        return schedule

    def placed(self, attempt, *, to=("p0", "d0"), conductor="k0", request_id="r", **plan):
        self.say(
            conductor,
            Placed(
                request_id=request_id,
                attempt=attempt,
                prefill=to[0],
                decode=to[1],
                reuse_blocks=0,
                sources=(),
                **{"ttft_s": 0.0, "tbt_s": 0.0} | plan,
            ),
        )

    def first(self, index=0, *, attempt=1, token=None, sender="p0", own=4, queue_s=0.0, prefill_s=0.0, **more):
        self.say(
            sender,
            FirstToken(
                request_id="r",
                attempt=attempt,
                index=index,
                token=text(index) if token is None else token,
                own=own,
                local=0,
                remote=0,
                queue_s=queue_s,
                prefill_s=prefill_s,
                **more,
            ),
        )

    def tokens(self, *indexes, attempt=1, sender="d0", request_id="r"):
        for index in indexes:
            self.say(sender, TokensDecoded(entries=((request_id, attempt, index, (text(index),)),)))

    def fail(self, attempt, sender="p0", request_id="r", **more):
        self.say(sender, AttemptFailed(request_id=request_id, attempt=attempt, reason="test", **more))

    def reject(self, attempt, reason=RejectReason.TTFT, conductor="k0", request_id="r"):
        self.say(conductor, Rejected(request_id=request_id, attempt=attempt, reason=reason, retry_after_s=3.0))

    def text(self, request_id="r"):
        """The tokens the client got; asserts that each came once and in order."""
        out = [output for r, output in self.clients if r == request_id]
        tokens = [output for output in out if isinstance(output, TokenOut)]
        assert [token.index for token in tokens] == list(range(len(tokens)))
        assert all(isinstance(output, TokenOut) for output in out[:-1]), "nothing after the end"
        return [token.token for token in tokens]

    def end(self, request_id="r"):
        (end,) = [o for r, o in self.clients if r == request_id and not isinstance(o, TokenOut)]
        return end


@pytest.fixture
def node():
    return Node()


def in_state(state, **settings):
    node = Node(**settings)
    if state == "no conductor":
        node.down("k0")
        node.down("k1")
    node.ask()
    if state in ("prefilling", "decoding", "pausing"):
        node.place()
    if state == "decoding":
        node.first()
        node.tokens(1)
    if state == "pausing":
        node.fail(1)
    return node


STATES = ["no conductor", "placing", "prefilling", "decoding", "pausing"]


# --- the undisturbed way


def test_whose_a_request_is_goes_with_every_attempt(node):
    node.ask(tenant="alice")
    node.place()
    assert node.one(StartPrefill, "p0").tenant == "alice"
    node.fail(1)
    node.advance(1.0)
    node.place()
    assert node.one(StartPrefill, "p0").tenant == "alice"


def test_a_request_runs_to_its_end(node):
    node.ask()
    schedule = node.place()
    assert schedule.keys == tuple(extend_keys(ROOT, pack_tokens(PROMPT), B))
    assert (schedule.tokens, schedule.max_tokens) == (6, 5)
    start = node.one(StartPrefill, "p0")
    assert (start.decode, start.first_index, start.deadline_s) == ("d0", 0, 100.0)
    node.first()
    node.tokens(1, 2, 3, 4)
    assert node.text() == [text(i) for i in range(5)]
    end = node.end()
    assert (end.reason, end.completion_tokens, end.prompt_tokens, end.attempts) == ("length", 5, 6, 1)
    assert (end.cached_own, end.prefill, end.decode) == (4, "p0", "d0")
    assert node.one(RequestEnded, "k0").attempt == 1
    assert node.take(CancelRequest) == [], "all hops end by the same rule"
    assert node.busy() == {}


def versions(*placed, stop, attempt=1):
    return WeightsReported(request_id="r", attempt=attempt, stop=stop, versions=placed)


def test_an_answer_says_which_weights_made_its_tokens(node):
    node.ask()
    node.place()
    node.first()
    node.tokens(1, 2, 3)
    node.say("p0", versions(("one", 0), stop=1))
    node.say("d0", versions(("one", 1), ("two", 3), stop=5))
    node.tokens(4)
    assert node.end().versions == (("one", 0, 1), ("one", 1, 3), ("two", 3, 5))


def test_tokens_whose_weights_have_no_name_are_not_said_to_be_those_before(node):
    node.ask()
    node.place()
    node.say("p0", versions(("one", 0), stop=1))
    node.first()
    node.tokens(1, 2, 3, 4)
    assert node.end().versions == (("one", 0, 1), (None, 1, 5))


def test_an_answer_of_unnamed_weights_says_nothing_of_them(node):
    node.ask()
    node.place()
    node.first()
    node.tokens(1, 2, 3, 4)
    assert node.end().versions == ()


def test_a_prefills_report_may_come_after_its_decodes(node):
    node.ask()
    node.place()
    node.say("d0", versions(("one", 1), stop=5))
    node.tokens(1, 2, 3, 4)
    node.say("p0", versions(("one", 0), stop=1))
    node.first()
    assert node.end().versions == (("one", 0, 1), ("one", 1, 5))


def test_a_report_of_tokens_that_never_came_is_forgotten_with_its_attempt(node):
    node.ask()
    node.place()
    node.say("d0", versions(("lost", 1), stop=5))
    node.tokens(1, 2, 3, 4)
    node.fail(1)
    node.advance(1.0)
    node.place()
    node.first(attempt=2)
    node.tokens(1, 2, 3, 4, attempt=2)
    assert node.end().versions == ()


@pytest.mark.parametrize("placed", [(("a", 1), ("b", 4)), (("a", 3), ("b", 1)), (("a", 0), ("b", 0)), ()])
def test_a_report_that_contradicts_itself_is_ignored(node, placed):
    node.ask()
    node.place()
    node.first()
    node.say("d0", versions(*placed, stop=2))
    node.tokens(1, 2, 3, 4)
    assert node.end().versions == ()


def test_the_tokens_of_an_engine_that_died_are_by_unknown_weights(node):
    node.ask()
    node.place()
    node.first()
    node.tokens(1)
    node.fail(1, sender="d0")
    node.advance(1.0)
    node.place()
    node.say("d0", versions(("old", 0), stop=5))
    node.say("d1", versions(("another", 2), stop=5, attempt=2))
    node.first(2, attempt=2)
    node.tokens(3, attempt=2)
    node.say("d0", versions(("two", 2), stop=5, attempt=2))
    node.tokens(4, attempt=2)
    assert node.end().versions == ((None, 0, 2), ("two", 2, 5)), "of this attempt, and of its nodes"


def test_eos_ends_a_request(node):
    node.ask(eos_ids=(text(1),))
    node.place()
    node.first()
    node.tokens(1)
    assert node.end().reason == "stop"


def test_tokens_of_the_decode_may_overtake_the_first(node):
    node.ask()
    node.place()
    node.tokens(1, 2)
    assert node.text() == []
    node.first()
    assert node.text() == [text(0), text(1), text(2)]


def test_tokens_kept_ahead_of_a_gap_are_limited(node):
    node.ask(max_tokens=10_000)
    node.place()
    node.tokens(*range(1, EARLY_TOKENS + 50))
    node.first()
    assert len(node.text()) == EARLY_TOKENS + 1


def test_a_repeated_token_reaches_the_client_once(node):
    node.ask()
    node.place()
    node.first()
    node.first(token=1)
    node.tokens(1, 1, 2, 1)
    assert node.text() == [text(0), text(1), text(2)]
    assert node.actor.counts["duplicate_tokens"] == 2


# --- attempts


def test_the_next_attempt_resumes_from_the_tokens_so_far(node):
    node.ask()
    node.place()
    node.first()
    node.tokens(1, 2)
    node.fail(1, "d0")
    assert {to for to, m in node.sent if isinstance(m, CancelRequest)} == {"p0", "d0"}
    node.advance(0.1)
    schedule = node.place(to=("p1", "d1"))
    assert schedule.exclude == ("d0",)
    assert (schedule.tokens, schedule.max_tokens) == (9, 2)
    whole = PROMPT + [text(i) for i in range(3)]
    assert schedule.keys == tuple(extend_keys(ROOT, pack_tokens(whole), B))
    start = node.one(StartPrefill, "p1")
    assert unpack_tokens(start.tokens) == whole
    assert start.keys == schedule.keys
    assert start.first_index == 3
    node.first(3, attempt=2, sender="p1", own=0)
    node.tokens(4, attempt=2, sender="d1")
    assert node.text() == [text(i) for i in range(5)]
    assert (node.end().attempts, node.end().cached_own) == (2, 4)


@pytest.mark.parametrize("exact", [False, True])
def test_an_answer_that_began_approximately_stays_so_wherever_it_goes_on(node, exact):
    node.ask(exact=exact)
    node.place()
    assert node.one(StartPrefill, "p0").exact is exact
    node.first(parts=4, recomputed=1)
    node.fail(1, "d0")
    node.advance(1.0)
    node.place(to=("p1", "d1"))
    assert node.one(StartPrefill, "p1").first_index == 1, "which no prefill blends"
    node.first(1, attempt=2, sender="p1", own=0)
    node.tokens(2, 3, 4, attempt=2, sender="d1")
    assert (node.end().attempts, node.end().parts, node.end().recomputed) == (2, 4, 1)


def choosing(node, *indices, attempt=1, sender="d0"):
    """Tokens for which a decode chose what it attended to."""
    entries = tuple(("r", attempt, index, (text(index),)) for index in indices)
    node.say(sender, TokensDecoded(entries=entries, approximate=(("r", attempt),)))


def test_an_answer_is_approximate_from_the_token_on_that_few_of_many_tokens_were_attended_to_for(node):
    node.ask()
    node.place()
    node.first()
    choosing(node, 1)
    node.fail(1, "d0")
    node.advance(1.0)
    node.place(to=("p1", "d1"))
    node.first(2, attempt=2, sender="p1", own=0)
    node.tokens(3, 4, attempt=2, sender="d1")
    assert node.end().selected
    assert node.end().is_approximate


@pytest.mark.parametrize(("attempt", "sender", "index"), [(2, "d0", 1), (1, "d1", 1), (1, "d0", 2)])
def test_an_answer_is_exact_if_such_tokens_never_came_into_it(node, attempt, sender, index):
    node.ask()
    node.place()
    node.first()
    choosing(node, index, attempt=attempt, sender=sender)
    node.fail(1, "d0")
    node.advance(1.0)
    node.place(to=("p1", "d1"))
    node.first(1, attempt=2, sender="p1", own=0)
    node.tokens(2, 3, 4, attempt=2, sender="d1")
    assert not node.end().selected


@pytest.mark.parametrize(("attempt", "sender", "borrowed"), [(1, "d0", 4), (2, "d0", 0), (1, "d1", 0)])
def test_how_much_a_decode_borrowed_is_what_it_says_with_the_last_token(node, attempt, sender, borrowed):
    node.ask(max_tokens=2)
    node.place()
    node.first()
    times = DecodeTimes(request_id="r", attempt=attempt, handoff_s=0.0, wait_s=0.0, decode_s=0.0, steps=1, borrowed_tokens=4)
    node.say(sender, TokensDecoded(entries=(), times=(times,)))
    node.tokens(1)
    assert node.end().borrowed_tokens == borrowed


def test_nothing_of_a_stale_attempt_or_of_another_sender_counts(node):
    node.ask()
    node.place()
    node.first()
    node.fail(1, "d0")
    node.tokens(1)
    node.advance(0.1)
    node.place(to=("p1", "d1"))
    node.sent.clear()
    node.first(1, attempt=1)
    node.tokens(1, 2, attempt=1)
    node.fail(1, "d0")
    node.placed(1)
    node.reject(1)
    node.first(1, attempt=2, sender="p0")
    node.tokens(1, attempt=2, sender="d0")
    node.fail(2, "d0")
    assert node.text() == [text(0)]
    assert [m.attempt for m in node.take(CancelRequest, "d0")] == [1, 1], "a decode that goes on regardless is told again"
    assert node.busy() == {"requests_prefilling": 1}


def test_early_tokens_of_one_attempt_do_not_reach_the_next(node):
    node.ask()
    node.place()
    node.tokens(1)
    node.fail(1)
    node.advance(0.1)
    node.place(to=("p1", "d1"))
    node.first(0, attempt=2, sender="p1")
    assert node.text() == [text(0)]


def test_the_pause_between_attempts_grows_to_its_limit():
    node = in_state("prefilling", max_attempts=20)
    pauses = []
    for attempt in range(1, 10):
        node.fail(attempt)
        (at,) = [due for key, due in node.timers.items() if key[0] == "attempt"]
        pauses.append(at - node.now)
        node.advance(pauses[-1])
        node.place()
    assert pauses[:4] == pytest.approx([0.05, 0.1, 0.2, 0.4])
    assert max(pauses) == pauses[-1] == pytest.approx(1.0)


def test_a_request_that_fails_too_often_gets_one_error():
    node = in_state("prefilling", max_attempts=3)
    for attempt in (1, 2, 3):
        node.fail(attempt)
        node.advance(1.0)
        if attempt < 3:
            node.place()
    assert (node.end().status, node.end().code) == (503, "attempts_exhausted")
    assert node.busy() == {}


@pytest.mark.parametrize(("state", "sender"), [("prefilling", "p0"), ("decoding", "d0")])
def test_an_answer_that_cannot_follow_its_constraint_ends_at_once(state, sender):
    """The next attempt would come to the same place."""
    node = in_state(state)
    node.fail(1, sender, stuck=True)
    assert (node.end().status, node.end().code) == (400, "constraint_stuck")
    assert "test" in node.end().message
    assert not any(key[0] == "attempt" for key in node.timers)
    assert node.busy() == {}


def test_an_answer_for_which_the_model_computes_no_token_ends_at_once_and_says_so():
    node = in_state("decoding")
    node.say("d0", AttemptFailed("r", 1, f"chunk failed: {NO_FINITE_LOGITS}", stuck=True))
    assert (node.end().status, node.end().code) == (500, "no_finite_logits")
    assert NO_FINITE_LOGITS in node.end().message
    assert node.busy() == {}


def test_finding_no_room_costs_none_of_the_attempts_that_may_break_and_avoids_the_full_node():
    node = in_state("prefilling", max_attempts=2)
    for attempt in range(1, 20):
        node.fail(attempt, full=True, avoid="d0")
        node.advance(1.0)
        assert node.place().exclude == ("d0",)
    assert node.busy() != {}


def test_at_most_four_nodes_are_excluded_and_the_latest_stay():
    node = in_state("prefilling", max_attempts=20)
    for attempt in range(1, 7):
        node.fail(attempt, ("p0", "d0")[attempt % 2])
        node.advance(1.0)
        exclude = node.place().exclude
    assert exclude == ("d0", "p0")


# --- SLOs, priority, and what became of the promise


def test_slos_and_priority_go_to_conductor_and_prefill(node):
    node.ask(ttft_slo_s=2.0, tbt_slo_s=0.0, priority=-3)
    schedule = node.place(booking=7, tbt_slo_s=0.25, stages=("p1",))
    assert (schedule.ttft_slo_s, schedule.tbt_slo_s, schedule.priority) == (2.0, 0.0, -3)
    assert (schedule.begun, schedule.waited_s) == (False, 0.0)
    start = node.one(StartPrefill, "p0")
    assert (start.booking, start.priority, start.tbt_slo_s, start.stages) == (7, -3, 0.25, ("p1",))


@pytest.mark.parametrize(("asked", "least", "sent"), [(-3, -1, -1), (-3, -1000, -3), (2, -1, 2), (0, 0, 0)])
def test_a_prefill_is_sent_no_earlier_priority_than_its_conductor_predicted_with(node, asked, least, sent):
    node.ask(priority=asked)
    node.place(least_priority=least)
    assert node.one(StartPrefill).priority == sent


def test_a_further_attempt_tells_how_long_its_client_waited_and_whether_it_has_tokens(node):
    node.ask()
    node.place()
    node.advance(1.0)
    node.fail(1)
    node.advance(0.05)
    schedule = node.place()
    assert (schedule.begun, schedule.waited_s) == (False, pytest.approx(1.05))
    node.first(attempt=2)
    node.fail(2)
    node.advance(1.0)
    assert node.place().begun


@pytest.mark.parametrize("reason", [RejectReason.TTFT, RejectReason.TBT])
def test_a_request_without_a_token_is_refused_at_any_attempt(node, reason):
    node.ask()
    node.place()
    node.fail(1)
    node.advance(0.05)
    node.take(Schedule)
    node.reject(2, reason)
    assert (node.end().status, node.end().code, node.end().retry_after_s) == (429, reason.value, 3.0)
    assert node.busy() == {}


def test_a_request_that_its_decode_refuses_before_its_first_token_ends_as_rejected(node):
    node.ask()
    node.place()
    node.fail(1, refused=True, full=True, avoid="d0", retry_after_s=0.7)
    assert (node.end().status, node.end().code, node.end().retry_after_s) == (429, "tbt_slo", 0.7)
    assert node.actor.counts["requests_rejected[reason=tbt_slo]"] == 1
    assert node.one(RequestEnded, "k0").outcome is None
    assert node.busy() == {}


def test_a_request_with_a_token_is_placed_again_whatever_is_refused(node):
    node.ask()
    node.place()
    node.first()
    node.fail(1, refused=True, full=True, avoid="d0")
    node.advance(0.05)
    node.take(Schedule)
    node.reject(2, RejectReason.TBT)
    node.advance(1.0)
    node.place(to=("p1", "d1"))
    node.tokens(1, 2, 3, 4, attempt=3, sender="d1")
    assert node.text() == [text(i) for i in range(5)]


def test_the_end_of_an_attempt_tells_what_became_of_its_prediction(node):
    node.ask(max_tokens=22)
    node.place(ttft_s=1.5, tbt_s=0.25)
    node.advance(2.0)
    node.first()
    for index in range(1, 22):
        node.advance(0.9 if index in (5, 9) else 0.1)
        node.tokens(index)
    outcome = node.one(RequestEnded, "k0").outcome
    assert outcome.ttft_s == pytest.approx(2.0)
    assert outcome.tbt_s == pytest.approx(0.9), "the mean of the longest tenth of 21 gaps"
    assert (outcome.predicted_ttft_s, outcome.predicted_tbt_s) == (1.5, 0.25)
    assert (outcome.output_tokens, outcome.ended) == (22, True)
    counts = node.actor.counts
    assert counts["prediction_error_microseconds[of=ttft]"] == pytest.approx(500_000, abs=1)
    assert counts["actual_microseconds[of=ttft]"] == pytest.approx(2_000_000, abs=1)
    assert counts["predictions[of=tbt]"] == 1
    shown = node.actor.dump(node.now)["predictions"]["tbt"]
    means = {"actual_s": 0.9, "predicted_s": 0.25, "absolute_error_s": 0.65}
    assert shown == {"count": 1} | {name: pytest.approx(mean) for name, mean in means.items()}


def test_an_attempt_that_was_cut_off_is_told_as_such_and_each_is_told_once(node):
    node.ask()
    node.place()
    node.first()
    node.tokens(1)
    node.fail(1, "d0")
    first = node.one(RequestEnded, "k0")
    assert (first.attempt, first.outcome.output_tokens, first.outcome.ended) == (1, 2, False)
    node.advance(0.05)
    node.place(to=("p1", "d1"))
    node.advance(0.5)
    node.tokens(3, attempt=2, sender="d1")
    node.first(2, attempt=2, sender="p1")
    node.tokens(4, attempt=2, sender="d1")
    second = node.one(RequestEnded, "k0")
    assert (second.attempt, second.outcome.output_tokens, second.outcome.ended) == (2, 3, True)
    assert second.outcome.ttft_s == pytest.approx(0.5), "of this attempt"


def test_the_tokens_of_a_run_are_as_evenly_spread_as_the_engine_made_them(node):
    node.ask(max_tokens=50)
    node.place()
    node.first()
    node.advance(2.0)
    node.say("d0", TokensDecoded(entries=(("r", 1, 1, tuple(text(i) for i in range(1, 50))),)))
    assert node.one(RequestEnded).outcome.tbt_s == pytest.approx(2.0 / 49)


def test_the_stall_timer_is_armed_once_for_an_attempt_and_not_once_for_a_token(node):
    armed = []
    node.ask(max_tokens=1001)
    node.place()
    node.first()
    for index in range(1, 1000):
        armed += [e for e in node.say("d0", TokensDecoded(entries=(("r", 1, index, (5,)),))) if isinstance(e, SetTimer)]
    assert armed == []
    node.advance(59.0)
    node.tokens(1000)
    assert node.end().reason == "length"


# --- the conductors


def test_the_first_live_conductor_of_the_order_decides(node):
    node.down("k0")
    node.ask()
    node.place(conductor="k1")
    assert node.one(StartPrefill)
    node.up("k0")
    node.ask("r2")
    assert node.one(Schedule, "k0").request_id == "r2"


def test_a_conductor_that_rests_is_asked_only_where_no_other_is_there(node):
    node.say("k0", NodesReported(cordoned=True))
    node.ask()
    node.place(conductor="k1")
    assert node.one(StartPrefill)
    node.down("k1")
    node.ask("r2")
    node.place(request_id="r2")
    node.up("k1")
    node.say("k1", NodesReported(cordoned=True))
    node.ask("r3")
    assert node.one(Schedule, "k0").request_id == "r3", "where all rest, the first of the order"
    node.say("k1", NodesReported())
    node.ask("r4")
    assert node.one(Schedule, "k1").request_id == "r4"
    node.say("k0", NodesReported())
    node.ask("r5")
    assert node.one(Schedule, "k0").request_id == "r5"


def test_what_a_resting_conductor_was_asked_for_it_places_and_hears_the_end_of(node):
    node.ask()
    node.say("k0", NodesReported(cordoned=True))
    node.place(conductor="k0")
    node.first()
    node.tokens(1, 2, 3, 4)
    assert node.one(RequestEnded, "k0").request_id == "r"


def test_a_dead_conductors_placement_goes_to_the_next(node):
    node.ask()
    node.down("k0")
    node.advance(0.1)
    schedule = node.one(Schedule, "k1")
    assert schedule.attempt == 2
    node.placed(1, conductor="k1")
    assert node.take(StartPrefill) == []
    node.placed(2, conductor="k1")
    assert node.one(StartPrefill)


def test_without_a_conductor_a_request_waits_for_one_and_then_is_refused(node):
    node.down("k0")
    node.down("k1")
    node.ask("r")
    node.ask("r2")
    node.advance(9.0)
    assert node.clients == []
    node.up("k1")
    assert {m.request_id for m in node.take(Schedule, "k1")} == {"r", "r2"}
    node.placed(1, conductor="k1")
    node.advance(1.5)
    assert (node.end("r2").status, node.end("r2").code) == (503, "no_conductor")
    assert node.busy() == {"requests_prefilling": 1}


def test_a_request_never_placed_is_refused_however_many_conductors_died(node):
    node.ask()
    node.down("k0")
    node.advance(0.2)
    node.down("k1")
    node.advance(10.0)
    assert node.end().code == "no_conductor"


def test_a_placement_to_a_node_unknown_here_is_another_attempt_and_no_missing_conductor(node):
    node.advance(0)
    node.ask()
    node.advance(9.0)
    node.place(to=("p9", "d0"))
    node.advance(0.1)
    assert node.place().exclude == ("p9",)
    node.advance(1.0)
    assert node.clients == []


def test_if_the_last_resort_is_no_place_the_nodes_of_broken_attempts_are_tried_again(node):
    node.ask()
    node.place(to=("p0", "d0"))
    node.say("p0", AttemptFailed(request_id="r", attempt=1, reason="no room"))
    node.advance(0.1)
    assert node.place(to=("p9", "d0")).exclude == ("p0",)
    node.advance(0.2)
    assert node.place(to=("p9", "d0")).exclude == ("p0", "p9")
    node.advance(0.4)
    assert node.place().exclude == ("p9",)


def test_placements_to_nodes_unknown_here_count_as_none_and_not_as_broken():
    node = Node(max_attempts=1)
    node.ask()
    while not node.clients:
        if any(isinstance(m, Schedule) for _, m in node.sent):
            node.place(to=("p0", "d9"))
        node.advance(1.0)
    assert (node.end().status, node.end().code) == (503, "no_decode")


def test_the_times_of_the_last_attempt_are_told_at_the_end(node):
    node.ask(max_tokens=3)
    node.place()
    node.first(queue_s=1.0, prefill_s=2.0)
    node.fail(1, "d0")
    node.advance(0.1)
    node.place()
    node.first(1, attempt=2, queue_s=3.0, prefill_s=4.0)
    node.tokens(2, attempt=2)
    assert (node.end().queue_s, node.end().prefill_s) == (3.0, 4.0)


@pytest.mark.parametrize(
    ("reason", "status"),
    [(RejectReason.TTFT, 429), (RejectReason.TBT, 429), (RejectReason.NO_ROOM, 503)],
)
def test_a_rejection_is_told_with_its_retry_after(node, reason, status):
    node.ask()
    node.reject(1, reason)
    assert (node.end().status, node.end().code, node.end().retry_after_s) == (status, reason.value, 3.0)
    assert node.busy() == {}


@pytest.mark.parametrize("reason", [RejectReason.NO_PREFILL, RejectReason.NO_DECODE])
def test_nodes_that_are_not_there_yet_are_waited_for_but_not_longer_than_for_a_conductor(node, reason):
    node.ask()
    node.ask("r2")
    node.reject(1, reason)
    node.advance(0.1)
    node.place()
    node.first(attempt=2)
    assert node.text() == [text(0)]
    node.advance(10)
    assert (node.end("r2").status, node.end("r2").code) == (503, "no_conductor")


@pytest.mark.parametrize("reason", [RejectReason.NO_PREFILL, RejectReason.NO_DECODE])
def test_nodes_that_do_not_come_are_told_as_missing(node, reason):
    node.ask()
    for attempt in range(1, 30):
        if node.busy() and node.actor._requests["r"].state.value == "placing":
            node.reject(attempt, reason)
        node.advance(1.0)
    assert (node.end().status, node.end().code) == (503, reason.value)
    assert node.busy() == {}


def test_a_first_rejection_after_a_conductors_death_is_still_a_rejection(node):
    node.ask()
    node.down("k0")
    node.advance(0.2)
    node.reject(2, conductor="k1")
    assert node.end().status == 429


def test_a_request_once_admitted_is_not_rejected_but_tried_again(node):
    node.ask()
    node.place()
    node.first()
    node.fail(1, "d0")
    node.advance(0.1)
    node.reject(2)
    assert not [o for _, o in node.clients if isinstance(o, Failed)]
    node.advance(0.2)
    assert node.place(to=("p1", "d1")).exclude == ()


REFUSALS = [RejectReason.TTFT, RejectReason.TBT, RejectReason.NO_ROOM]


@pytest.mark.parametrize("reason", REFUSALS)
def test_prompts_of_one_call_wait_for_one_another_longer_than_for_a_placement(node, reason):
    for each in ("r", "r2"):
        node.ask(each, call="c")
    node.place()
    for attempt in range(1, 20):  # its mate's prompt is computed
        node.reject(attempt, reason, request_id="r2")
        node.advance(1.0)
    node.first()
    node.tokens(1, 2, 3, 4)
    node.reject(20, reason, request_id="r2")  # others took the room: what was answered is not to be in vain
    node.advance(1.0)
    assert not node.place(request_id="r2", to=("p1", "d1")).begun, "it is admitted as any other"
    node.fail(21, "d1", refused=True, request_id="r2")
    node.advance(1.0)
    assert [type(output) for who, output in node.clients if who == "r2"] == []
    node.advance(100.0)
    assert node.end("r2").code == "deadline_exceeded"


@pytest.mark.parametrize("reason", [RejectReason.TTFT, RejectReason.TBT])
def test_of_a_call_that_has_lost_its_places_each_is_refused_as_any_other(node, reason):
    for each in ("r", "r2"):
        node.ask(each, call="c")
    node.placed(1)
    node.placed(1, request_id="r2", to=("p1", "d1"))
    for each, prefill in (("r", "p0"), ("r2", "p1")):
        node.fail(1, prefill, request_id=each)
    node.advance(1.0)
    for each in ("r", "r2"):
        node.reject(2, reason, request_id=each)
        assert node.end(each).code == reason.value


@pytest.mark.parametrize("reason", REFUSALS)
def test_of_a_call_that_has_no_place_at_all_each_is_refused(node, reason):
    node.ask("r0", call="another")
    node.place(request_id="r0")
    for each in ("r", "r2"):
        node.ask(each, call="c")
    for each in ("r", "r2"):
        node.reject(1, reason, request_id=each)
        assert node.end(each).code == reason.value


# --- ends, at every state


@pytest.mark.parametrize("state", STATES)
def test_a_client_that_hangs_up_is_cancelled_at_every_hop(state):
    node = in_state(state)
    node.sent.clear()
    before = len(node.clients)
    node.client("r", ClientGone())
    placed = state in ("prefilling", "decoding")
    assert {to for to, m in node.sent if isinstance(m, CancelRequest)} == ({"p0", "d0"} if placed else set())
    assert len(node.take(RequestEnded, "k0")) == (placed or state == "placing")
    assert len(node.clients) == before, "nothing more is sent to it"
    assert node.busy() == {}
    node.client("r", ClientGone())


def test_a_stop_string_finishes_and_cancels(node):
    node = in_state("decoding")
    node.client("r", StopFound())
    assert isinstance(node.end(), Finished)
    assert node.end().reason == "stop"
    assert {to for to, m in node.sent if isinstance(m, CancelRequest)} == {"p0", "d0"}
    assert node.busy() == {}


@pytest.mark.parametrize("state", STATES)
def test_the_deadline_is_one_explicit_error(state):
    node = in_state(state, stall_s=1000.0, placement_wait_s=1000.0)
    node.advance(100.1)
    assert (node.end().status, node.end().code) == (504, "deadline_exceeded")
    node.text()
    assert node.busy() == {}


@pytest.mark.parametrize("state", ["prefilling", "decoding"])
def test_an_attempt_that_stalls_is_given_up(state):
    node = in_state(state, stall_s=20.0)
    node.advance(19.0)
    assert node.busy() == {f"requests_{state}": 1}
    node.sent.clear()
    node.advance(1.01)
    assert {to for to, m in node.sent if isinstance(m, CancelRequest)} == {"p0", "d0"}
    assert [m.stalled for _, m in node.sent if isinstance(m, RequestEnded)] == [True], "the conductor learns why"
    node.advance(0.1)
    assert node.place().attempt == 2


def test_every_token_puts_the_stall_off():
    node = in_state("decoding", stall_s=20.0)
    node.advance(15.0)
    node.tokens(2)
    node.advance(15.0)
    assert node.busy() == {"requests_decoding": 1}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("peer", ["k0", "k1", "p0", "d0", "p1"])
def test_whoever_dies_the_client_gets_the_same_text(state, peer):
    node = in_state(state)
    if peer in node.peers:
        node.down(peer)
    for name in ("k0", "k1"):
        if name not in node.peers:
            node.up(name)
    for _ in range(4):
        for schedule in node.take(Schedule):
            conductor = node.actor._requests["r"].conductor
            node.placed(schedule.attempt, conductor=conductor, to=tuple("1".join((n[0], "")) for n in ("p0", "d0")))
        node.advance(0.3)
        if "p1" not in node.peers:
            node.up("p1")
    request = node.actor._requests["r"]
    start = len(request.answer.tokens)
    if request.state.value == "prefilling":
        node.first(start, attempt=request.attempt, sender=request.prefill)
        start += 1
    node.tokens(*range(start, 5), attempt=request.attempt, sender=request.decode)
    assert node.text() == [text(i) for i in range(5)]
    assert isinstance(node.end(), Finished)
    assert node.busy() == {}


@pytest.mark.parametrize("told", [False, True])
def test_a_prefill_that_goes_before_its_decode_told_a_token_ends_the_attempt(told):
    """The decode may never have heard of the request: nobody else would say so before it stalls."""
    node = in_state("prefilling")
    node.first()
    if told:
        node.tokens(1)
    node.sent.clear()
    node.down("p0")
    assert [to for to, m in node.sent if isinstance(m, CancelRequest)] == ([] if told else ["d0"])
    assert node.actor._requests["r"].state.value == ("decoding" if told else "waiting")


def test_open_requests_are_limited():
    node = Node(max_open=1)
    node.ask("r1")
    node.ask("r2")
    assert (node.end("r2").status, node.end("r2").code) == (503, "overloaded")


def test_a_draining_gateway_refuses_new_requests_and_finishes_the_old():
    node = in_state("decoding")
    node.drain()
    node.ask("r2")
    assert node.end("r2").status == 503
    assert not node.drained
    node.tokens(2, 3, 4)
    assert isinstance(node.end("r"), Finished)
    assert node.drained


def test_a_resting_gateway_refuses_new_requests_finishes_the_old_and_takes_them_again():
    node = in_state("decoding")
    node.set_cordon()
    node.ask("r2")
    refused = node.end("r2")
    assert (refused.status, refused.retry_after_s) == (503, 1.0)
    assert "try another" in refused.message
    node.tokens(2, 3, 4)
    assert isinstance(node.end("r"), Finished)
    assert not node.drained, "it stays"
    node.set_cordon(False)
    node.ask("r3")
    assert node.one(Schedule).request_id == "r3"


def test_a_resting_gateway_that_is_stopped_ends_once_it_is_idle():
    node = in_state("decoding")
    node.set_cordon()
    node.drain()
    node.set_cordon(False)
    node.ask("r2")
    assert node.end("r2").status == 503, "who goes takes nothing more, whatever is undone"
    node.tokens(2, 3, 4)
    assert node.drained


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_events_gives_each_token_once_and_one_end(seed):
    rng = random.Random(seed)
    node = Node(stall_s=5.0, max_attempts=10)
    node.ask("r", max_tokens=12)
    lives = dict.fromkeys(node.peers, 1)
    first_index = {}
    for _ in range(150):
        request = node.actor._requests.get("r")
        if request is None:
            break
        attempt = max(1, request.attempt - (rng.random() < 0.2))
        match rng.randrange(13):
            case 0 | 1 | 10:
                conductor = request.conductor
                if conductor in node.peers:
                    node.placed(attempt, to=(rng.choice(("p0", "p1")), rng.choice(("d0", "d1"))), conductor=conductor)
            case 2 | 3 if request.prefill in node.peers:
                node.first(first_index.get(attempt, 0), attempt=attempt, sender=request.prefill)
            case 4 | 5 | 6 if request.decode in node.peers:
                index = first_index.get(attempt, 0) + 1 + rng.randrange(6)
                node.tokens(index, attempt=attempt, sender=request.decode)
            case 7 if rng.random() < 0.4:
                name = rng.choice(list(lives))
                if name in node.peers:
                    node.down(name)
                else:
                    lives[name] += 1
                    node.up(name, lives[name])
            case 8 if request.prefill in node.peers and rng.random() < 0.3:
                node.fail(attempt, request.prefill)
            case _:
                node.advance(rng.choice((0.05, 0.1, 0.5)))
        first_index |= {m.attempt: m.first_index for m in node.take(StartPrefill)}
        got = node.text()
        assert got == [text(i) for i in range(len(got))]
    node.advance(101.0)
    assert node.end() is not None
    assert node.busy() == {}


def test_a_drain_that_may_take_no_longer_tells_every_client_and_cancels_at_every_hop():
    node = Node()
    for request_id in ("r", "other"):
        node.ask(request_id)
        node.place(request_id=request_id)
    node.first()
    node.handle(DrainWanted())
    assert not node.drained
    node.clients.clear()
    node.sent.clear()
    node.handle(DrainTimedOut())
    ends = dict(node.clients)
    assert {request_id: (end.status, end.code) for request_id, end in ends.items()} == dict.fromkeys(
        ("r", "other"), (503, "gateway_stopped")
    )
    assert sorted(to for to, message in node.sent if isinstance(message, CancelRequest)) == ["d0", "d0", "p0", "p0"]
    assert sorted(to for to, message in node.sent if isinstance(message, RequestEnded)) == ["k0", "k0"]
    assert node.drained


def test_a_vllm_that_is_both_serves_and_tells_at_the_end_what_it_reused():
    node = Node()
    node.up("v0")
    node.ask(max_tokens=3)
    node.place(to=("v0", "v0"))
    node.one(StartPrefill, "v0")
    node.first(sender="v0", own=0)
    node.tokens(1, sender="v0")
    node.say("v0", TokensDecoded(entries=(("r", 1, 2, (text(2),)),), reused=(("r", 1, 5),)))
    (finished,) = [output for _, output in node.clients if isinstance(output, Finished)]
    assert (finished.cached_own, finished.prefill, finished.decode) == (5, "v0", "v0")
    assert node.text() == [text(0), text(1), text(2)]


def test_a_vllm_is_told_of_a_cancel_once():
    node = Node()
    node.up("v0")
    node.ask()
    node.place(to=("v0", "v0"))
    node.client("r", ClientGone())
    assert len(node.take(CancelRequest, "v0")) == 1


def test_what_a_resumed_attempt_reused_is_not_the_prompt_s():
    node = Node()
    node.up("v0")
    node.up("v1")
    node.ask(max_tokens=3)
    node.place(to=("v0", "v0"))
    node.first(sender="v0", own=0)
    node.down("v0")
    node.advance(5)
    node.place(to=("v1", "v1"))
    node.first(1, attempt=2, sender="v1", own=0)
    node.say("v1", TokensDecoded(entries=(("r", 2, 2, (text(2),)),), reused=(("r", 2, 6),)))
    (finished,) = [output for _, output in node.clients if isinstance(output, Finished)]
    assert finished.cached_own == 0


# --- a prompt's probabilities


def score(node, first, *values, attempt=1, sender="p0"):
    told = tuple((-value, ((7, -value),)) for value in values)
    node.say(sender, PromptScored(request_id="r", attempt=attempt, first=first, logprobs=told))


def scores(node):
    told = [output for _, output in node.clients if isinstance(output, PromptLogprobs)]
    assert [each.first for each in told] == [1 + sum(len(other.logprobs) for other in told[:at]) for at in range(len(told))]
    return [-own for each in told for own, _ in each.logprobs]


def test_a_prompts_probabilities_reach_the_client_once_and_in_order(node):
    node.ask(prompt_logprobs=1)
    schedule = node.place()
    assert schedule.keys == (), "nothing is reused"
    start = node.one(StartPrefill, "p0")
    assert (start.prompt_logprobs, start.stages, len(start.keys)) == (1, (), 1)
    score(node, 1, 1.0, 2.0)
    node.fail(1)
    node.advance(1.0)
    node.place()
    score(node, 1, 1.0, 2.0, 3.0, attempt=2)
    score(node, 4, 4.0, 5.0, attempt=2)
    assert scores(node) == [1.0, 2.0, 3.0, 4.0, 5.0]
    node.first(attempt=2)
    node.fail(2)
    node.advance(1.0)
    assert node.place().keys, "what is told need not be computed again"
    assert node.take(StartPrefill)[-1].prompt_logprobs is None


@pytest.mark.parametrize("message", ["a gap", "too many", "no such token", "a token first"])
def test_a_prefill_that_scores_what_is_not_there_has_failed(message):
    node = Node()
    node.actor._layouts = {"": replace(LAYOUT, vocab_size=8)}
    node.ask(prompt_logprobs=1)
    node.place()
    match message:
        case "a gap":
            score(node, 2, 1.0)
        case "too many":
            score(node, 1, *[1.0] * 6)
        case "no such token":
            node.say("p0", PromptScored(request_id="r", attempt=1, first=1, logprobs=((-1.0, ((8, -1.0),)),)))
        case "a token first":
            node.first(token=7)
    assert scores(node) == []
    assert node.actor.counts["tokens_out_of_range"] == 1
    assert node.one(CancelRequest, "p0").attempt == 1


FEW = Eviction(kind="elastic", kept=5)


def test_a_request_for_few_of_its_tokens_names_no_keys_and_goes_on_with_all_of_its_answer(node):
    node.ask(eviction=FEW)
    schedule = node.place(stages=("p1",), lenders=("d1",))
    assert (schedule.keys, schedule.tokens, schedule.kept_tokens) == ((), 6, 5)
    start = node.one(StartPrefill, "p0")
    assert (start.keys, start.stages, start.lenders, start.eviction) == ((), (), (), FEW)
    node.first(own=0, dropped=1)
    node.tokens(1, 2)
    node.fail(1, "d0")
    node.advance(1.0)
    schedule = node.place(to=("p1", "d1"))
    assert (schedule.keys, schedule.tokens, schedule.kept_tokens) == ((), 9, 8)
    start = node.one(StartPrefill, "p1")
    assert start.eviction == Eviction(kind="elastic", kept=8, last=4)
    node.first(3, attempt=2, sender="p1", own=0, dropped=1)
    node.tokens(4, attempt=2, sender="d1")
    assert (node.end().dropped, node.end().is_approximate) == (1, True)


@pytest.mark.parametrize("peer", ["p0", "d0"])
def test_a_node_of_a_release_that_keeps_all_is_no_place_for_it(node, peer):
    node.up(peer, 8, protocol=OLDEST_PROTOCOL)
    node.ask(eviction=FEW)
    node.place()
    assert not node.take(StartPrefill)
    node.advance(1.0)
    schedule = node.place(to=("p1", "d1"))
    assert schedule.exclude == (peer,)
    assert node.one(StartPrefill, "p1").eviction == FEW
