"""In which order a node's effects are carried out, by what its peers and works may see of one another."""

import pytest

from mooncake_zmq.core.actor import (
    CancelTimer,
    CloseSequence,
    Fence,
    OpenSequence,
    Send,
    SetTimer,
    Start,
    Started,
    TimerFired,
    Transmit,
)
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import CancelRequest, Hello, decode, decode_envelope
from mooncake_zmq.core.node import Node
from mooncake_zmq.core.routes import Member
from mooncake_zmq.core.session import Session, SessionSettings
from mooncake_zmq.core.work import ProbeProcess

OPEN, FENCE = OpenSequence(1, 4), Fence(((0, 1),))
START = Start(1, ProbeProcess("p", 1), 1.0)
CLOSE, SET, CANCEL = CloseSequence(2), SetTimer(("a",), 1.0), CancelTimer(("a",))
SAY = Send("p", CancelRequest(request_id="r", attempt=1))


class Scripted:
    """Says the same whatever happens."""

    def __init__(self, effects):
        self.counts = Tally()
        self.effects = effects

    def handle(self, now, event):
        return self.effects if isinstance(event, TimerFired) else []


def node_of(name, role, effects):
    members = {"g": Member(("gateway",), "h"), "p": Member(("prefill",), "h")}
    hello = Hello(protocol=1, role=role, host="h", model="m", tokenizer="t", layout="l")
    session = Session(me=name, incarnation=1, hello=hello, peers=members, settings=SessionSettings(), now=0.0)
    return Node(Scripted(effects), session)


def carry(nodes, sender, outers):
    """Over a wire that loses nothing."""
    for outer in outers:
        if isinstance(outer, Transmit) and outer.to == nodes[1 - sender].session.me:
            carry(nodes, 1 - sender, nodes[1 - sender].receive(0.2, outer.frame))


def said(effects):
    """The kinds of what comes of these effects at a node whose peer is up; sends as the messages in their frames."""
    speaker, _ = nodes = node_of("g", "gateway", effects), node_of("p", "prefill", [])
    for at, node in enumerate(nodes):
        carry(nodes, at, node.start(0.0, Started()))
    for at, node in enumerate(nodes):
        carry(nodes, at, node.tick(0.2))
    assert "p" in speaker.session.up_peers
    found = []
    for outer in speaker.handle(0.2, TimerFired(("x",))):
        bodies = decode_envelope(outer.frame).bodies if isinstance(outer, Transmit) else ()
        found += [type(decode(body)).__name__ for body in bodies] or [outer]
    return found


@pytest.mark.parametrize(
    ("effects", "order"),
    [
        ([CLOSE, SAY], ["CancelRequest", CLOSE]),
        ([SAY, SET, CANCEL, CLOSE], ["CancelRequest", SET, CANCEL, CLOSE]),
        ([CLOSE, SAY, FENCE], [CLOSE, FENCE, "CancelRequest"]),
        ([SAY, OPEN, SET], [OPEN, "CancelRequest", SET]),
        ([SAY, OPEN, START, CLOSE], [OPEN, START, "CancelRequest", CLOSE]),
        ([SAY], ["CancelRequest"]),
    ],
)
def test_what_peers_wait_for_leaves_behind_all_that_they_may_look_for_and_before_memory_is_given_back(effects, order):
    assert said(effects) == order
