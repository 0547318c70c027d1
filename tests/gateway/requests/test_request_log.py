"""What is told of a request is what its actor heard and said: by the real actor, and in seeds with faults."""

import json
from collections import Counter
from typing import Any

import pytest
from test_requests import Node

from mooncake_zmq.core.messages import (
    DecodeTimes,
    FirstToken,
    Outcome,
    Rejected,
    RejectReason,
    RequestEnded,
    TokensDecoded,
)
from mooncake_zmq.gateway.requests.client_events import ClientGone, StopFound
from mooncake_zmq.gateway.requests.request_log import (
    CANCELLED,
    MAX_ATTEMPTS,
    MAX_OPEN,
    Attempt,
    RequestEntry,
    RequestLog,
    Slos,
    as_json,
    line,
    spans,
)
from mooncake_zmq.gateway.requests.traces import MAX_FOUND, MAX_TRACES, Names, Traces, Wanted, names_of
from mooncake_zmq.simulation.checkers import Checkers
from mooncake_zmq.simulation.run import run_seed


class Followed(Node):
    """The actor's harness, with its request_log."""

    def __init__(self, **settings):
        self.ended = []
        self.request_log = RequestLog(self.ended.append)
        super().__init__(**settings)

    def handle(self, event):
        effects = super().handle(event)
        self.request_log.observe(self.now, event, effects)
        return effects

    @property
    def only(self) -> RequestEntry:
        (entry,) = self.ended
        assert len(self.request_log) == 0
        json.dumps(as_json(entry))
        json.dumps(line(entry))
        return entry


def finish(node, attempt=1, *, sender=("p0", "d0"), first=0):
    node.first(first, attempt=attempt, sender=sender[0])
    node.tokens(*range(first + 1, 5), attempt=attempt, sender=sender[1])


def test_a_request_that_goes_well_has_one_attempt_and_its_times():
    node = Followed()
    node.ask(tenant="alice", ttft_slo_s=3.0)
    node.advance(0.1)
    node.place(ttft_s=0.5, tbt_s=0.05)
    node.advance(1.0)
    node.first(queue_s=0.2, prefill_s=0.7)
    node.advance(2.0)
    node.tokens(1, 2, 3, 4)
    entry = node.only
    assert (entry.outcome, entry.tenant, entry.made, entry.ttft_slo_s) == ("length", "alice", 1, 3.0)
    assert (entry.cached, entry.completion_tokens) == ((4, 0, 0), 5)
    assert entry.duration_s == pytest.approx(3.1)
    (attempt,) = entry.attempts
    assert (attempt.prefill, attempt.decode, attempt.conductor, attempt.why) == ("p0", "d0", "k0", "length")
    assert (attempt.placed_s, attempt.first_s, attempt.ttft_s) == (pytest.approx(0.1), pytest.approx(1.1), pytest.approx(1.1))
    assert (attempt.predicted_ttft_s, attempt.predicted_tbt_s) == (0.5, 0.05)
    named = {span.name: (span.node, span.start_s, span.duration_s) for span in spans(entry)}
    assert named["queue"] == ("p0", pytest.approx(0.2), 0.2)
    assert named["prefill"] == ("p0", pytest.approx(0.4), 0.7)
    assert line(entry)["given_up"] == []


def test_durations_that_nodes_tell_are_laid_back_from_their_messages():
    node = Followed()
    node.ask()
    node.place()
    node.advance(1.0)
    cached = {"own": 4, "local": 0, "remote": 0}
    times = {"queue_s": 0.1, "prefill_s": 0.8, "prepare_s": 0.3, "load_s": 0.2}
    node.say("p0", FirstToken(request_id="r", attempt=1, index=0, token=0, **cached, **times))
    node.tokens(1, 2, 3)
    node.advance(2.0)
    told_by_decode = DecodeTimes(request_id="r", attempt=1, handoff_s=0.9, wait_s=0.4, decode_s=1.5, steps=4)
    node.say("d0", TokensDecoded(entries=(("r", 1, 4, (4,)),), times=(told_by_decode,)))
    named = {span.name: (round(span.start_s, 6), round(span.duration_s, 6)) for span in spans(node.only)}
    assert named == {
        "place": (0.0, 0.0),
        "queue": (0.1, 0.1),
        "prepare": (0.2, 0.3),
        "prefill": (0.5, 0.5),
        "load": (0.5, 0.2),
        "handoff": (0.2, 0.9),
        "wait for the batch": (1.1, 0.4),
        "decode": (1.5, 1.5),
    }


def test_each_attempt_says_why_it_was_given_up():
    node = Followed(stall_s=5.0)
    node.ask()
    node.place()
    node.fail(1)
    node.advance(0.05)
    node.place()
    node.down("p0")
    node.up("p0")
    node.advance(0.2)
    node.place()
    node.advance(6.0)
    node.place(to=("p9", "d0"))
    node.advance(1.0)
    node.place()
    finish(node, attempt=5)
    whys = [attempt.why for attempt in node.only.attempts]
    expected = ["p0: test", "p0 is down: test", "nothing came for too long", "p9 or d0 is not there", "length"]
    assert whys == expected
    assert line(node.only)["given_up"][0] == "1 p0>d0: p0: test"


def test_an_attempt_that_was_never_scheduled_names_no_nodes():
    entry = RequestEntry(request_id="r", arrived_at=0.0, made=2)
    entry.attempts = [Attempt(number=n, began_s=0.0, conductor="c0", why="c0 is down: test") for n in (1, 2)]
    assert line(entry)["given_up"] == ["1 not scheduled: c0 is down: test"]


@pytest.mark.parametrize(("how", "outcome"), [(ClientGone, CANCELLED), (StopFound, "stop")])
def test_a_client_that_wants_no_more_ends_it(how, outcome):
    node = Followed()
    node.ask()
    node.place()
    node.first()
    node.client("r", how())
    assert node.only.outcome == outcome
    assert node.only.attempts[-1].why == outcome


def test_a_request_that_is_refused_or_finds_nobody_is_told_of_too():
    node = Followed()
    node.ask()
    node.say("k0", Rejected(request_id="r", attempt=1, reason=RejectReason.TTFT, retry_after_s=3.0, predicted_s=40.0))
    assert (node.only.outcome, node.only.attempts[0].why) == ("ttft_slo", "ttft_slo")
    assert line(node.only)["predicted_ttft_s"] == 40.0
    node = Followed()
    node.drain()
    node.ask()
    assert (node.only.outcome, node.only.attempts) == ("overloaded", [])


def test_attempts_that_are_told_and_requests_that_are_followed_are_bounded():
    node = Followed()
    node.ask()
    for attempt in range(1, MAX_ATTEMPTS + 5):
        node.place()
        node.fail(attempt, full=True)
        node.advance(2.0)
    node.place()
    finish(node, attempt=MAX_ATTEMPTS + 5)
    entry = node.only
    assert (entry.made, len(entry.attempts)) == (MAX_ATTEMPTS + 5, MAX_ATTEMPTS)
    assert [attempt.number for attempt in entry.attempts][:2] == [1, 7]
    request_log = RequestLog(lambda _: None)
    for number in range(MAX_OPEN + 10):
        request_log._of(0.0, f"r{number}")
    assert len(request_log) == MAX_OPEN


def test_an_outcome_of_another_attempt_changes_nothing():
    node = Followed()
    node.ask()
    outcome = Outcome(
        ttft_s=9.0, predicted_ttft_s=0.0, tbt_s=9.0, predicted_tbt_s=0.0, max_tokens=5, output_tokens=1, ended=False
    )
    node.request_log._outcome(RequestEnded(request_id="r", attempt=7, outcome=outcome))
    node.place()
    finish(node)
    assert node.only.attempts[0].ttft_s == 0.0


def test_a_ring_of_traces_finds_a_call_by_each_of_its_names_and_forgets_the_oldest():
    traces = Traces()
    traces.name(["a", "a.1"], Names("a", "theirs", "f" * 32))
    for request_id in ("a", "a.1"):
        assert traces.end(RequestEntry(request_id=request_id, arrived_at=0.0)).client_id == "theirs"
    for wanted in ("a", "theirs", "f" * 32):
        assert [found["request_id"] for found in traces.find(wanted)] == ["a", "a.1"]
    assert [found["request_id"] for found in traces.find("a.1")] == ["a.1"]
    assert [found["request_id"] for found in traces.recent(0.0)] == ["a.1", "a"]
    for number in range(MAX_TRACES):
        traces.end(RequestEntry(request_id=f"b{number}", arrived_at=0.0))
    assert traces.find("a") == []
    assert traces.find("") == [], "what nearly all calls have not named is no name"
    for number in range(2 * MAX_FOUND):
        traces.name([f"c{number}"], Names(f"c{number}", "always the same", ""))
        traces.end(RequestEntry(request_id=f"c{number}", arrived_at=0.0))
    last = [f"c{number}" for number in range(MAX_FOUND, 2 * MAX_FOUND)]
    assert [found["request_id"] for found in traces.find("always the same")] == last


def test_a_filter_finds_what_failed_and_what_was_slow_of_all_that_is_remembered():
    traces = Traces(Slos(ttft_s=1.0, tbt_s=0.1))
    late = Attempt(number=1, began_s=0.0, conductor="c", ttft_s=0.9, predicted_ttft_s=0.3, tbt_s=0.05)
    choppy = Attempt(number=1, began_s=0.0, conductor="c", tbt_s=0.2)
    for name, outcome, fields in (
        ("good", "stop", {"first_s": 0.9}),
        ("cut", "length", {"first_s": 0.9, "tenant": "bob"}),
        ("gone", "cancelled", {}),
        ("beyond", "stop", {"first_s": 1.1, "tenant": "bob"}),
        ("own", "stop", {"first_s": 1.1, "ttft_slo_s": 2.0}),
        ("off", "stop", {"first_s": 9.0, "ttft_slo_s": 0.0}),
        ("choppy", "stop", {"first_s": 0.9, "attempts": [choppy]}),
        ("mispredicted", "stop", {"first_s": 0.9, "attempts": [late]}),
        ("refused", "ttft_slo", {"tenant": "bob"}),
        ("lost", "no_decode", {}),
    ):
        traces.end(RequestEntry(request_id=name, arrived_at=0.0, duration_s=1.0, outcome=outcome, **fields))

    def found(**wanted):
        return {each["request_id"] for each in traces.recent(5.0, Wanted(**wanted))}

    assert found(failed=True) == {"refused", "lost"}
    assert found(slow=True) == {"beyond", "choppy", "mispredicted"}
    assert found(tenant="bob") == {"cut", "beyond", "refused"}
    assert found(tenant="bob", slow=True) == {"beyond"}
    assert {each["ago_s"] for each in traces.recent(5.0)} == {4.0}


def test_trace_ids_are_those_of_w3c():
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    assert names_of("own", "theirs", parent) == Names("own", "theirs", trace_id, span_id, True)
    assert not names_of("own", "", parent[:-2] + "00").sampled
    none = ("", "x", "00-zz-1-1", parent.upper(), f"00-{'0' * 32}-{span_id}-01", f"00-{trace_id}-{'0' * 16}-01")
    assert {names_of("own", "theirs", each) for each in none} == {Names("own", "theirs")}


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_in_seeds_with_faults_every_request_is_accounted_for_as_it_ended(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    ended: list[tuple[str, RequestEntry]] = []
    lives: dict[tuple[str, int], RequestLog] = {}
    actors: dict[tuple[str, int], Any] = {}
    observed = Checkers.observed

    def observing(self: Checkers, spec: Any, incarnation: int, actor: Any, event: Any, effects: Any) -> None:
        observed(self, spec, incarnation, actor, event, effects)
        if spec.role == "gateway":
            name = spec.name
            actors[name, incarnation] = actor
            life = lives.setdefault((name, incarnation), RequestLog(lambda entry: ended.append((name, entry))))
            life.observe(self._watched.now, event, effects)

    monkeypatch.setattr(Checkers, "observed", observing)
    result = run_seed(seed)
    assert result.failure is None
    outcomes = Counter(entry.outcome for _, entry in ended)
    counts = sum((Counter(actor.counts) for actor in actors.values()), Counter[str]())
    finished = sum(value for name, value in counts.items() if name.startswith("requests_finished"))
    assert outcomes["stop"] + outcomes["length"] == finished > 0
    assert outcomes[CANCELLED] == counts["requests_cancelled"] > 0
    given_up = [attempt.why for _, entry in ended for attempt in entry.attempts if attempt.why != entry.outcome]
    assert given_up
    assert not [why for why in given_up if why.isidentifier() and why not in ("Started", "FromClient")]
    for _, entry in ended:
        assert all(span.duration_s >= -1e-9 for span in spans(entry)), spans(entry)
        json.dumps(as_json(entry))
    complete = [entry for _, entry in ended if entry.outcome == "length" and entry.attempts[-1].steps]
    assert complete
