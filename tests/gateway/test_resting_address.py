"""Whether a gateway that rests is at the address that it shares."""

from unittest.mock import Mock, call

import pytest

from mooncake_zmq.core.messages import Hello, Report
from mooncake_zmq.core.watch import STALE_S, Heard
from mooncake_zmq.gateway.cluster import Listed, Seen
from mooncake_zmq.gateway.shared_address import SharedAddress

LISTED = [Listed(name, "gateway", "h") for name in ("g0", "g1", "g2")]
SERVES, RESTS = Report(uptime_s=1.0), Report(uptime_s=1.0, draining=True, resting=True)


def seen(*, now=100.0, up=True, **reports):
    peer = Hello(protocol=1, role="gateway", host="h", model="m", tokenizer="t", layout="l")
    heard = {name: Heard(100.0, 1, report) for name, report in reports.items()}
    peers = dict.fromkeys(reports, peer) if up else {}
    return Seen(now=now, gateway="g0", status="ok", model="toy", listed=LISTED, peers=peers, heard=heard)


class Address:
    def __init__(self, others=("g1",)):
        self.door = Mock()
        self.listen = Mock(return_value="listener")
        self.shared = SharedAddress(self.door, others, self.listen)

    def mind(self, *, resting, **reports):
        """What it does at the door."""
        self.door.reset_mock()
        self.shared.mind(resting, lambda: seen(**reports))
        return self.door.mock_calls


LEAVES, ENTERS = [call.leave()], [call.enter("listener")]


def test_it_leaves_while_another_serves_there_and_comes_back_when_it_serves_itself():
    address = Address()
    assert address.mind(resting=False, g1=SERVES) == []
    assert address.mind(resting=True, g1=SERVES) == LEAVES
    assert address.mind(resting=True, g1=SERVES) == []
    assert address.mind(resting=False, g1=SERVES) == ENTERS
    assert address.mind(resting=False, g1=SERVES) == []


@pytest.mark.parametrize(
    "others", [{}, {"g1": RESTS}, {"g1": SERVES, "up": False}, {"g1": SERVES, "now": 101.0 + STALE_S}, {"g2": SERVES}]
)
def test_where_nobody_else_serves_it_stays_or_comes_back(others):
    address = Address()
    assert address.mind(resting=True, **others) == []
    assert address.mind(resting=True, g1=SERVES) == LEAVES
    assert address.mind(resting=True, **others) == ENTERS
    assert address.mind(resting=True, g1=SERVES) == LEAVES


def test_an_address_that_is_taken_is_tried_again():
    address = Address()
    address.mind(resting=True, g1=SERVES)
    address.listen.return_value = None
    assert address.mind(resting=False) == []
    address.listen.return_value = "listener"
    assert address.mind(resting=False) == ENTERS
