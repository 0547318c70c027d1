"""Whether a gateway that cordons is at the address that it shares, and when it turns away who comes."""

import errno
from unittest.mock import Mock, call

import pytest
from structlog.testing import capture_logs

from mooncake_zmq.core.messages import Hello, Report
from mooncake_zmq.core.watch import EVERY_S, PeerReport
from mooncake_zmq.gateway.http.reuse_port import (
    DECIDE_S,
    FRESH_S,
    LEAVE_S,
    LISTENING,
    MOST_LEAVE_S,
    MOST_SILENT_S,
    SharedAddress,
)
from mooncake_zmq.gateway.requests.cluster_snapshot import Listed, Seen

LISTED = [Listed(name, "gateway", "h") for name in ("g0", "g1", "g2")]
HERE = ((LISTENING, 1.0),)
SERVES, CORDONED = Report(uptime_s=1.0, gauges=HERE), Report(uptime_s=1.0, gauges=HERE, draining=True, cordoned=True)
STARTS, OLD = Report(uptime_s=1.0, gauges=((LISTENING, 0.0),)), Report(uptime_s=1.0)
PEER = Hello(protocol=1, role="gateway", host="h", model="m", tokenizer="t", layout="l")


class Address:
    def __init__(self, *others):
        self.acceptor = Mock(connections=set())
        self.listen = Mock(return_value="listener")
        self.deserted = False
        self.now = 100.0
        self.turns_away = False
        self.shared = SharedAddress(self.acceptor, others or ("g1",), self.listen, lambda: self.deserted)

    def mind(self, *, cordoned=True, age=0.0, up=True, silent=(), **reports):
        """What it does at the acceptor."""
        self.acceptor.reset_mock()
        heard = {name: PeerReport(self.now - age, 1, report) for name, report in reports.items()}
        peers = dict.fromkeys([*reports, *silent], PEER) if up else {}
        seen = Seen(now=self.now, gateway="g0", status="ok", model="toy", listed=LISTED, peers=peers, last_reports=heard)
        self.turns_away = self.shared.mind(cordoned, lambda: seen)
        return self.acceptor.mock_calls


LEAVES, ENTERS = [call.leave()], [call.enter("listener")]


def test_it_leaves_while_another_serves_there_and_comes_back_when_it_serves_itself():
    address = Address()
    assert address.mind(cordoned=False, g1=SERVES) == []
    assert address.mind(g1=SERVES) == LEAVES
    assert address.mind(g1=SERVES) == []
    assert address.mind(cordoned=False, g1=SERVES) == ENTERS
    assert address.mind(cordoned=False, g1=SERVES) == []


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"g1": CORDONED},
        {"g1": STARTS},
        {"g1": OLD},
        {"g1": SERVES, "up": False},
        {"g1": SERVES, "age": MOST_SILENT_S + 1.0},
        {"g2": SERVES},
    ],
)
def test_where_nobody_else_serves_it_stays_or_comes_back(others):
    address = Address()
    assert address.mind(**others) == []
    assert address.mind(g1=SERVES) == LEAVES
    assert address.mind(**others) == ENTERS
    assert address.mind(g1=SERVES) == LEAVES


def test_it_leaves_the_address_to_nobody_whose_report_is_late():
    address = Address()
    assert address.mind(g1=SERVES, age=FRESH_S + 0.1) == []
    assert address.mind(g1=SERVES) == LEAVES
    assert address.mind(g1=SERVES, age=FRESH_S + 0.1) == [], "who has one report lost still serves"


def test_it_comes_back_at_once_where_nobody_listens_whatever_was_said_before():
    address = Address()
    assert address.mind(g1=SERVES) == LEAVES
    address.deserted = True  # killed
    assert address.mind(g1=SERVES) == ENTERS
    address.deserted = False  # it listens itself
    address.now += 1.0
    assert address.mind(g1=SERVES, age=1.0) == []
    assert address.mind(g1=STARTS) == []
    assert address.mind(g1=SERVES) == LEAVES


def test_who_comes_is_served_until_those_let_in_last_have_said_what_they_want():
    address = Address()
    address.mind(g1=SERVES)
    assert not address.turns_away
    address.now += LEAVE_S - 0.1
    address.mind(g1=SERVES)
    assert not address.turns_away
    address.now += 0.2
    address.mind(g1=SERVES)
    assert address.turns_away
    address.mind(cordoned=False, g1=SERVES)
    assert not address.turns_away


def test_a_connection_whose_client_is_slow_to_send_its_call_is_served_but_not_without_end():
    address = Address()
    address.mind(g1=SERVES)
    address.acceptor.connections = {Mock(cycle=None)}
    address.now += MOST_LEAVE_S - 0.1
    address.mind(g1=SERVES)
    assert not address.turns_away
    address.now += 0.2
    address.mind(g1=SERVES)
    assert address.turns_away


def test_a_gateway_that_is_missing_for_a_moment_is_waited_for_before_calls_are_refused():
    address = Address("g1", "g2")
    address.mind(g1=CORDONED)
    assert not address.turns_away
    address.now += DECIDE_S
    address.mind(g1=CORDONED)
    assert address.turns_away


def test_before_it_turns_away_who_comes_it_hears_the_others_but_not_for_long():
    address = Address("g1", "g2")
    address.mind(g1=STARTS, silent=["g2"])
    assert not address.turns_away
    address.now += EVERY_S
    address.mind(g1=STARTS, g2=CORDONED)
    assert address.turns_away
    address.now += DECIDE_S
    address.mind(cordoned=False)
    address.mind(silent=["g1"])
    assert not address.turns_away
    address.now += MOST_SILENT_S - 0.1
    address.mind(silent=["g1"])
    assert not address.turns_away, "g1 is connected: it may be busy, and serve"
    address.mind()
    assert address.turns_away, "nobody is connected"
    address.now += 0.2
    address.mind(silent=["g1"])
    assert address.turns_away


def test_what_another_reported_before_the_cordon_is_no_reason_to_refuse_calls():
    address = Address()
    address.mind(g1=STARTS, age=1.0)
    assert not address.turns_away, "it may serve by now"
    address.now += EVERY_S
    assert address.mind(g1=SERVES) == LEAVES
    assert not address.turns_away


def test_the_address_stays_left_to_one_that_is_too_busy_to_report():
    address = Address()
    assert address.mind(g1=SERVES) == LEAVES
    address.now += LEAVE_S + 0.1
    assert address.mind(g1=SERVES, age=MOST_SILENT_S - 0.1) == []
    assert address.turns_away, "who is connected still; new clients go to g1"


def test_an_address_that_is_taken_is_tried_again_and_told_of_once():
    address = Address()
    address.mind(g1=SERVES)
    address.listen.side_effect = OSError(errno.EMFILE, "Too many open files")
    with capture_logs() as logs:
        assert address.mind(cordoned=False) == address.mind(cordoned=False) == []
    assert [line["event"] for line in logs] == ["address_not_shared"]
    address.listen.side_effect = None
    assert address.mind(cordoned=False) == ENTERS
    address.mind(g1=SERVES)
    address.listen.side_effect = OSError("again")
    with capture_logs() as logs:
        address.mind(cordoned=False)
    assert len(logs) == 1
