"""Requests and histories of the other gateways: asked for while a client looks, and missing ones are named."""

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest
from scripted_actor import ScriptedActor, hello

from mooncake_zmq.core.messages import StateReported
from mooncake_zmq.gateway.http import peer_gateways
from mooncake_zmq.gateway.http.peer_gateways import PeerGateways, part_of, query_of, wanted_of
from mooncake_zmq.gateway.requests.cluster_snapshot import Listed
from mooncake_zmq.gateway.requests.request_log import RequestEntry
from mooncake_zmq.gateway.requests.traces import Wanted

LISTED = [Listed("gw", "gateway", "h"), Listed("gw-1", "gateway", "h")]


@dataclass
class Two:
    """A gateway whose peer answers from its own state, or with `answer`."""

    answer: bytes | None = None
    silent: bool = False
    asked: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.one, self.other = ScriptedActor(listed=LISTED), ScriptedActor(listed=LISTED)
        self.one.up["gw-1"] = hello("gateway")
        self.one.edge.clock = self.other.edge.clock = lambda: 100.0
        self.one.ask_state = self.ask_state

    def ask_state(self, node, ask_id, on_answer, part=""):
        self.asked.append(f"{node} {part}")
        if not self.silent:
            state = self.other.edge.overview.part(part) if self.answer is None else self.answer
            on_answer(StateReported(ask_id=ask_id, state=state))

    def requests(self, query=""):
        return self.one.call("GET", f"/cluster/requests{query}").json()


def ended(actor, name, *, at, outcome="stop", tenant="", first_s=0.1):
    entry = RequestEntry(request_id=name, arrived_at=at - 1, duration_s=1.0, outcome=outcome, tenant=tenant, first_s=first_s)
    actor.edge.ended.add(entry)


def names(found):
    return [(each["request_id"], each["gateway"], each["ago_s"]) for each in found["recent"]]


def test_requests_of_all_gateways_are_in_one_list_the_newest_first():
    two = Two()
    ended(two.one, "a", at=90.0)
    ended(two.other, "b", at=95.0)
    ended(two.one, "c", at=98.0)
    assert names(two.requests()) == [("c", "gw", 2.0), ("b", "gw-1", 5.0), ("a", "gw", 10.0)]
    assert two.requests()["silent"] == []


def test_a_filter_is_applied_by_each_gateway_to_all_that_it_remembers():
    two = Two()
    ended(two.one, "lost", at=90.0, outcome="attempts_exhausted", tenant="bob")
    ended(two.other, "refused", at=91.0, outcome="ttft_slo", tenant="alice")
    for number in range(100):
        ended(two.one, f"good-{number}", at=99.0)
    assert [name for name, *_ in names(two.requests("?failed=1"))] == ["refused", "lost"]
    assert [name for name, *_ in names(two.requests("?failed=1&tenant=alice"))] == ["refused"]
    assert len(names(two.requests())) == 24
    assert two.asked == ["gw-1 requests?failed=1", "gw-1 requests?failed=1&tenant=alice", "gw-1 requests?"]


def test_a_gateway_that_is_silent_or_down_is_named(monkeypatch):
    monkeypatch.setattr(peer_gateways, "ANSWER_S", 0.01)
    two = Two(silent=True)
    ended(two.one, "a", at=90.0)
    assert two.requests()["silent"] == ["gw-1"]
    assert [name for name, *_ in names(two.requests())] == ["a"]
    del two.one.up["gw-1"]
    assert two.requests()["silent"] == ["gw-1"]


@pytest.mark.parametrize("answer", [b"", b"{", b'{"a":1}', b"[1]"])
def test_an_answer_that_is_no_list_of_requests_counts_as_none(answer):
    two = Two(answer=answer)
    assert two.requests()["silent"] == ["gw-1"]
    assert two.one.call("GET", "/cluster").status_code == 200


def test_numbers_are_of_all_gateways():
    two = Two()
    for actor, requests in ((two.one, 10), (two.other, 20)):
        actor.actor_counts["requests"] = requests
        actor.edge.sample()
    two.one.call("GET", "/cluster")
    now = [100.0]
    two.one.edge.clock = lambda: now[0]
    now[0] += 1.0
    assert two.one.call("GET", "/cluster").json()["numbers"]["requests_per_s"]["past"] == [6.0]
    assert two.asked == ["gw-1 history"], "once for each step"
    now[0] += peer_gateways.FRESH_S
    two.silent = True
    assert two.one.call("GET", "/cluster").json()["numbers"]["requests_per_s"]["past"] == [2.0], "an old history does not count"


@pytest.mark.parametrize("wanted", [Wanted(), Wanted(failed=True), Wanted(slow=True, tenant="a b&c")])
def test_a_filter_survives_its_query(wanted):
    assert wanted_of(query_of(wanted)) == wanted


def test_a_long_query_is_no_bug():
    assert wanted_of("failed=1" + "&x=1" * 4000) == Wanted(failed=True)


def test_a_part_of_the_state_is_steps_or_the_requests_of_a_filter():
    asked = []
    assert msgspec.json.decode(part_of("history", [{"requests": 1}], lambda _: [])) == [{"requests": 1}]
    assert part_of("requests?slow=1", [], lambda wanted: asked.append(wanted) or []) == b"[]"
    assert asked == [Wanted(slow=True)]


def test_alone_it_asks_none():
    def never(*_):
        raise AssertionError

    peers = PeerGateways([], type("", (), {"ask_state": never})(), there=dict, new_id=int, clock=float)
    peers.refresh()
    assert (peers.histories(), asyncio.run(peers.requests(Wanted()))) == ([], ([], []))
