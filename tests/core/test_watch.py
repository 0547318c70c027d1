"""Who may be told how a node is, for how long, and how little of it is kept; by two nodes that really speak."""

import json

from hypothesis import example, given
from hypothesis import strategies as st

from mooncake_zmq.core.actor import CordonWanted, Started, Transmit
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import (
    MAX_LEVELS,
    AskState,
    Hello,
    PrefillLoad,
    Report,
    SetCordon,
    StateReported,
    Watch,
    decode,
    encode,
)
from mooncake_zmq.core.node import Node
from mooncake_zmq.core.routes import Member
from mooncake_zmq.core.session import Session, SessionSettings
from mooncake_zmq.core.transfer_stats import TransferStats
from mooncake_zmq.core.watch import EVERY_S, MAX_WATCHERS, WATCH_S, Looking, Watchers, report
from mooncake_zmq.kv.layout import BlockLayout


def full_report(**levels):
    return report(uptime_s=1.0, draining=False, moved=(), refused={}, **({"counts": {}, "gauges": {}} | levels))


def test_a_watcher_is_told_at_once_each_second_and_not_after_its_end():
    watchers = Watchers(Tally())
    watchers.ask(0.0, "g", 2.5)
    told = [at / 10 for at in range(100) if watchers.due(at / 10)]
    assert told == [0.0, 1.0, 2.0]
    assert len(watchers) == 0


def test_who_asks_again_is_told_no_more_often():
    watchers = Watchers(Tally())
    told = 0
    for at in range(40):
        watchers.ask(at / 10, "g", 10.0)
        told += len(watchers.due(at / 10))
    assert told == 4 * EVERY_S


def test_so_many_watch_and_one_more_is_counted_until_one_ends():
    counts = Tally()
    watchers = Watchers(counts)
    for number in range(MAX_WATCHERS + 3):
        watchers.ask(0.0, f"g{number}", 5.0)
    assert len(watchers) == MAX_WATCHERS
    assert counts == {"watches_refused": 3}
    watchers.ask(1.0, "g0", 9.0)
    watchers.ask(6.0, "late", 5.0)
    assert watchers.due(6.0) == ["g0", "late"]


def test_a_gateway_asks_everybody_who_is_up_while_somebody_looks_and_anew_in_a_new_life():
    looking = Looking()
    looking.look(0.0, 60.0)
    assert [peer for peer, _ in looking.to_ask(0.0, {"p": 1, "d": 1})] == ["p", "d"]
    assert looking.to_ask(1.0, {"p": 1, "d": 1}) == []
    assert [peer for peer, _ in looking.to_ask(2.0, {"p": 2, "d": 1})] == ["p"]
    assert [peer for peer, _ in looking.to_ask(WATCH_S / 2, {"p": 2, "d": 1})] == ["d"]


def test_of_those_who_are_gone_nothing_is_kept_and_of_those_not_asked_nothing_is_heard():
    looking = Looking()
    looking.look(0.0, 60.0)
    looking.receive_report(0.0, "p", full_report())
    assert looking.reports == {}
    looking.to_ask(0.0, {"p": 1})
    assert looking.awaits({"p": 1})
    looking.receive_report(0.0, "p", full_report())
    assert not looking.awaits({"p": 1})
    assert looking.awaits({"p": 2})
    looking.to_ask(1.0, {})
    assert looking.reports == {}


LEVELS = st.dictionaries(st.text(min_size=1), st.floats() | st.integers() | st.booleans())


@given(
    uptime_s=st.floats(allow_nan=False),
    counts=LEVELS,
    gauges=LEVELS,
    moved=st.lists(st.integers(min_value=0), max_size=3),
    refused=st.dictionaries(st.text(min_size=1, max_size=64), st.text()),
)
@example(uptime_s=1e9, counts={}, gauges={}, moved=[1 << 60], refused={str(n): "x" * 1000 for n in range(100)})
def test_whatever_a_node_has_counted_its_report_is_read(uptime_s, counts, gauges, moved, refused):
    """An invalid message is dropped by whoever receives it, and its sender never learns of it."""
    stats = TransferStats("me", BlockLayout(layers=1, kv_heads=1, head_dim=1, block_tokens=4))
    for number, size in enumerate(moved):
        stats._add("pull", f"p{number}", size)
    told = report(uptime_s=uptime_s, draining=False, moved=stats.totals(), refused=refused, counts=counts, gauges=gauges)
    assert decode(encode(told)) == told


def test_a_report_is_bounded_and_says_what_it_has_no_room_for():
    gauges = {f"g{number:04}": 1.0 for number in range(MAX_LEVELS - 10)}
    counts = {f"c{number:04}": 1.0 for number in range(50)} | {"x" * 1000: 1.0}
    told = full_report(gauges=gauges, counts=counts)
    assert (len(told.gauges), len(told.counts), told.left_off) == (MAX_LEVELS - 10, 10, 41)
    assert len(encode(told)) < 100_000


class Counting:
    """An actor that knows nothing of being watched."""

    def __init__(self):
        self.counts = Tally(seen=3)
        self.events = []

    def handle(self, now, event):
        self.events.append(event)
        return []

    def check(self, now):
        pass

    def gauges(self, now):
        return {"cached_blocks": 7.0}

    def dump(self, now):
        return {"key": b"\x01"}


MEMBERS = {"g": Member(("gateway",), "h"), "p": Member(("prefill",), "h"), "d": Member(("decode",), "h")}


class Pair:
    """Two of `MEMBERS`, with a wire between them that loses nothing."""

    def __init__(self, *names):
        self.now = 0.0
        self.nodes = {}
        self.answers = []
        """(sender, answer) of states that any of them asked for."""
        for name in names:
            hello = Hello(protocol=1, role=MEMBERS[name].roles[0], host="h", model="m", tokenizer="t", layout="l")
            settings = SessionSettings()
            session = Session(me=name, incarnation=1, hello=hello, peers=MEMBERS, settings=settings, now=0.0)
            self.nodes[name] = Node(Counting(), session, on_state=lambda *answer: self.answers.append(answer))
        for name, node in self.nodes.items():
            self.carry(name, node.start(0.0, Started()))

    def carry(self, sender, outers):
        for outer in outers:
            assert isinstance(outer, Transmit)
            if outer.to in self.nodes:
                self.carry(outer.to, self.nodes[outer.to].receive(self.now, outer.frame))

    def run(self, seconds):
        for _ in range(round(seconds / 0.2)):
            self.now += 0.2
            for name, node in self.nodes.items():
                self.carry(name, node.tick(self.now))


def test_a_gauge_that_is_a_truth_value_is_told_as_a_number():
    told = report(uptime_s=1.0, draining=False, counts={}, gauges={"ssd_writable": True}, moved=(), refused={})
    assert decode(encode(told)) == told
    assert told.gauges == (("ssd_writable", 1.0),)


def test_a_node_reports_and_its_actor_hears_nothing_of_it():
    pair = Pair("g", "p")
    pair.run(1.0)
    before = [node.actor.events.copy() for node in pair.nodes.values()]
    pair.carry("g", pair.nodes["g"].look(pair.now, 3.0))
    heard = pair.nodes["g"].looking.reports["p"]
    assert (heard.at, heard.incarnation) == (pair.now, 1)
    assert dict(heard.report.gauges) == {"cached_blocks": 7.0}
    assert dict(heard.report.counts) == {"seen": 3.0}
    pair.nodes["p"].actor.counts.add("seen")
    pair.run(2.0)
    assert dict(pair.nodes["g"].looking.reports["p"].report.counts) == {"seen": 4.0}
    assert [node.actor.events for node in pair.nodes.values()] == before
    pair.run(2 * WATCH_S)
    assert len(pair.nodes["p"].watchers) == 0


def test_who_is_no_gateway_may_not_ask():
    pair = Pair("p", "d")
    pair.run(1.0)
    for message in (
        Watch(for_s=5.0),
        AskState(ask_id=1),
        Report(uptime_s=1.0),
        StateReported(ask_id=1),
        SetCordon(cordoned=True),
    ):
        pair.nodes["d"].session.send(pair.now, "p", message)
    pair.carry("d", pair.nodes["d"].tick(pair.now))
    pair.run(1.0)
    assert len(pair.nodes["p"].watchers) == 0
    assert pair.nodes["p"].session.counts["dropped[reason=not_of_its_role]"] == 5
    assert not pair.nodes["p"].cordoned


def test_all_of_a_nodes_state_comes_once_when_it_is_asked_for():
    pair = Pair("g", "p")
    pair.run(1.0)
    pair.carry("g", pair.nodes["g"].ask_state(pair.now, "p", 7))
    ((sender, answer),) = pair.answers
    assert (sender, answer.ask_id) == ("p", 7)
    assert json.loads(answer.state)["actor"] == {"key": "01"}


def test_a_part_of_a_state_is_what_a_node_that_has_parts_sends_for_it():
    pair = Pair("g", "p")
    pair.run(1.0)
    pair.nodes["p"]._part = lambda name: json.dumps(name).encode()
    for part, state in (("history", "history"), ("", {"key": "01"})):
        pair.carry("g", pair.nodes["g"].ask_state(pair.now, "p", 7, part))
        given = json.loads(pair.answers[-1][1].state)
        assert (given if part else given["actor"]) == state


def test_a_state_that_no_message_takes_is_told_to_be_too_long():
    pair = Pair("g", "p")
    pair.run(1.0)
    pair.nodes["p"].actor.dump = lambda now: {"much": "x" * (2 << 20)}
    pair.carry("g", pair.nodes["g"].ask_state(pair.now, "p", 7))
    ((_, answer),) = pair.answers
    assert "more than a message takes" in answer.error


def test_a_node_that_changes_its_role_tells_that_it_drains_until_that_is_undone():
    pair = Pair("p")
    for name, drains in (("role_changes_begun", True), ("role_changes_undone", False), ("role_changes_begun", True)):
        pair.nodes["p"].actor.counts.add(name)
        assert pair.nodes["p"].report(pair.now).draining == drains


def test_who_is_to_rest_hears_it_once_and_tells_until_it_is_undone():
    pair = Pair("g", "p")
    pair.run(1.0)
    pair.carry("g", pair.nodes["g"].look(pair.now, 30.0))
    for cordoned in (True, True, False):
        pair.carry("g", pair.nodes["g"].set_cordon(pair.now, "p", cordoned))
        pair.run(1.5)
        told = pair.nodes["g"].looking.reports["p"].report
        assert (told.cordoned, told.draining) == (cordoned, cordoned)
    asked = [event for event in pair.nodes["p"].actor.events if isinstance(event, CordonWanted)]
    assert asked == [CordonWanted(True), CordonWanted(False)]


def test_a_gateway_that_is_to_rest_itself_needs_nobody_for_it():
    pair = Pair("g")
    for cordoned in (True, True, False):
        assert pair.nodes["g"].set_cordon(pair.now, "g", cordoned) == []
        assert pair.nodes["g"].report(pair.now).cordoned == cordoned
    asked = [event for event in pair.nodes["g"].actor.events if isinstance(event, CordonWanted)]
    assert asked == [CordonWanted(True), CordonWanted(False)]


def test_a_rest_that_its_process_defers_is_told_once_it_is_so_and_may_be_undone_before():
    pair = Pair("g")
    node = pair.nodes["g"]
    node.defer_cordon()
    for _ in range(2):
        node.set_cordon(pair.now, "g", True)
        told = node.report(pair.now)
        assert (told.draining, told.cordoned, node.cordon_wanted) == (True, False, True)
        node.set_cordon(pair.now, "g", False)
        assert not node.report(pair.now).draining
    node.set_cordon(pair.now, "g", True)
    assert not [event for event in node.actor.events if isinstance(event, CordonWanted)]
    node.handle(pair.now, CordonWanted(True))
    assert node.report(pair.now).cordoned
    node.set_cordon(pair.now, "g", True)
    node.set_cordon(pair.now, "g", False)
    told = node.report(pair.now)
    assert (told.draining, told.cordoned) == (False, False)
    asked = [event for event in node.actor.events if isinstance(event, CordonWanted)]
    assert asked == [CordonWanted(True), CordonWanted(False)]


def test_loads_go_where_they_went_before():
    pair = Pair("g", "p")
    pair.run(1.0)
    pair.nodes["p"].session.send(pair.now, "g", PrefillLoad())
    pair.carry("p", pair.nodes["p"].tick(pair.now))
    pair.run(1.0)
    assert pair.nodes["g"].session.counts["dropped[reason=not_of_its_role]"] == 1
