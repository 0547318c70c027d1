"""Peers of two protocols: what they speak with each other, and which changes of the protocol are additions."""

import copy
import json
from pathlib import Path

import pytest
from protocol_schema import changes, schema

from mooncake_zmq.core.actor import PeerUp, Received
from mooncake_zmq.core.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    CancelRequest,
    Hello,
    PlaceElsewhere,
    SlotRef,
    TokensDecoded,
    decode_envelope,
    encode,
    protocols,
)
from mooncake_zmq.core.routes import Member
from mooncake_zmq.core.session import Session, SessionSettings

FORMER = json.loads((Path(__file__).parent / "protocol_schema.json").read_text())
MEMBERS = {"decode": Member(("decode",), "h"), "gateway": Member(("gateway",), "h")}
OLD, NEW, NEXT = (22, 22), (22, 23), (23, 24)


def greeted(decode, gateway):
    """A decode and a gateway of these protocols, what the gateway got, and the versions of the frames to each."""
    sessions = {
        name: Session(
            me=name,
            incarnation=1,
            hello=Hello(protocol=0, role=name, host="h", model="m", tokenizer="t", layout="l"),
            peers=MEMBERS,
            settings=SessionSettings(),
            now=0.0,
            protocols=spoken,
        )
        for name, spoken in (("decode", decode), ("gateway", gateway))
    }
    for session in sessions.values():
        session.start(0.0)
    got, versions = carry(sessions)
    return sessions, got, versions


def carry(sessions):
    got, versions, left = [], {name: [] for name in sessions}, True
    while left:
        left = []
        for session in sessions.values():
            session.flush(0.0)
            left += session.outgoing
            session.outgoing.clear()
        for to, frame in left:
            versions[to].append(decode_envelope(frame).version)
            got += [(to, event) for event in sessions[to].receive(0.0, frame)]
    return got, versions


@pytest.mark.parametrize(
    ("decode", "gateway", "common"), [(NEW, NEW, 23), (NEW, OLD, 22), (OLD, NEW, 22), (OLD, OLD, 22), (NEXT, NEW, 23)]
)
def test_two_peers_speak_the_newest_protocol_that_both_speak_and_begin_in_the_oldest(decode, gateway, common):
    sessions, got, versions = greeted(decode, gateway)
    assert {to: event.hello.protocol for to, event in got if isinstance(event, PeerUp)} == dict.fromkeys(MEMBERS, common)
    assert {session.refusals.get(name) for name, session in sessions.items()} == {None}
    assert (versions["gateway"][0], versions["decode"][0]) == (decode[0], gateway[0])
    for name, session in sessions.items():
        assert [peer["protocol"] for peer in session.dump()["peers"].values()] == [common], name
        session.send(
            0.0,
            next(iter(MEMBERS.keys() - {name})),
            TokensDecoded(entries=()) if name == "decode" else CancelRequest(request_id="r", attempt=1),
        )
    got, versions = carry(sessions)
    assert ("gateway", Received("decode", TokensDecoded(entries=()))) in got
    assert {*versions["gateway"], *versions["decode"]} == {common}


def test_a_message_that_the_peer_lacks_is_not_sent_and_counted():
    for gateway, arrives in ((NEW, True), (OLD, False)):
        sessions, _, _ = greeted(NEW, gateway)
        moved = PlaceElsewhere(attempts=(("r", 1),))
        sessions["decode"].send(0.0, "gateway", moved)
        got, _ = carry(sessions)
        assert (("gateway", Received("decode", moved)) in got) == arrives
        assert sessions["decode"].counts.get("unspoken[message=PlaceElsewhere]", 0) == (not arrives)


def test_peers_without_a_common_protocol_refuse_each_other():
    sessions, got, _ = greeted((24, 24), NEW)
    assert got == []
    assert sessions["gateway"].counts == {"dropped[reason=version]": 1}
    assert sessions["decode"].counts == {"dropped[reason=version]": 1}


def test_a_field_that_the_peer_lacks_is_left_out_of_a_message_and_of_its_parts(monkeypatch):
    ref = SlotRef(node="n", incarnation=1, slot=2, generation=4, checksum=5)
    whole = encode(ref)
    monkeypatch.setattr(protocols, "SINCE", {"SlotRef.checksum": PROTOCOL_VERSION})
    assert encode(ref) == whole
    assert protocols.without_newer_fields((ref,), OLDEST_PROTOCOL) == [["n", 1, 2, 4]]
    assert encode(ref, OLDEST_PROTOCOL) == b"\x94\xa1n\x01\x02\x04"


# --- the rule


def test_this_protocol_only_adds_to_the_former_one():
    """A change that this names breaks a rolling upgrade. If it must be, `OLDEST_PROTOCOL` becomes `PROTOCOL_VERSION`."""
    if OLDEST_PROTOCOL == PROTOCOL_VERSION:
        pytest.skip("this protocol is declared to break with the former one")
    assert (FORMER["protocol"], OLDEST_PROTOCOL) == (PROTOCOL_VERSION - 1, PROTOCOL_VERSION - 1)
    assert list(changes(FORMER, schema(), protocols.SINCE)) == []


def changed(change):
    other = copy.deepcopy(FORMER) | {"protocol": FORMER["protocol"] + 1}
    change(other["records"])
    return list(changes(FORMER, other, {"Added": other["protocol"], "SlotRef.more": other["protocol"]}))


def test_each_change_that_is_no_addition_is_named():
    ref = {**FORMER["records"]["SlotRef"]["fields"]}
    swapped = dict([*list(ref.items())[1::-1], *list(ref.items())[2:]])
    record = {"tag": "New", "fields": {}}
    for change, sentence in (
        (lambda records: records.pop("Goodbye"), "Goodbye is gone: a peer of protocol 22 may send it"),
        (lambda records: records.update(New=record), "New is new: SINCE must say that it exists since protocol 23"),
        (lambda records: records["SlotRef"].update(fields=swapped), "SlotRef.node has become incarnation: fields are added"),
        (lambda records: records["SlotRef"]["fields"].pop("checksum"), "SlotRef.checksum is gone"),
        (lambda records: records["SlotRef"]["fields"].update(slot=["int(ge=0)", True]), "SlotRef.slot was int(ge=0, le="),
        (lambda records: records["SlotRef"]["fields"].update(more=["int()", True]), "SlotRef.more is new and has no default"),
        (lambda records: records["SlotRef"]["fields"].update(other=["int()", False]), "SlotRef.other is new: SINCE must say"),
    ):
        (found,) = changed(change)
        assert found.startswith(sentence)


def test_what_is_added_and_declared_is_no_such_change():
    assert changed(lambda records: records.update(Added={"tag": "Added", "fields": {}})) == []
    assert changed(lambda records: records["SlotRef"]["fields"].update(more=["int()", False])) == []
