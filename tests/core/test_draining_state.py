"""When a node drains, and as what its process begins anew."""

import math

import pytest

from mooncake_zmq.core.actor import Drained, Send, SetTimer
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.drain import MOVE, MOVE_AGAIN_S, Drain
from mooncake_zmq.core.messages import MAX_MOVED, PROTOCOL_VERSION, ChangeRole, Hello, PlaceElsewhere
from mooncake_zmq.core.routes import are_connected, may_connect
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.vllm_node.settings import VllmSettings

PEERS = {
    name: Hello(protocol=PROTOCOL_VERSION, role=role, host="h", model="m", tokenizer="t", layout="l")
    for name, role in (("k", "conductor"), ("g", "gateway"))
}
TO_DECODE = ChangeRole(role="decode")


def test_a_node_that_was_asked_finishes_and_becomes_the_other() -> None:
    drain = Drain("decode", Tally())
    assert drain.drained(idle=True) == []
    assert drain.change("k", TO_DECODE, PEERS)
    assert drain.draining
    assert drain.drained(idle=False) == []
    assert drain.drained(idle=True) == [Drained("decode")]
    assert not drain.change("k", TO_DECODE, PEERS), "said twice it is as if said once"
    assert drain.drained(idle=True) == [Drained("decode")]


@pytest.mark.parametrize(
    ("may_become", "sender", "role"), [("", "k", "decode"), ("decode", "k", "cache-node"), ("decode", "g", "decode")]
)
def test_what_is_not_permitted_is_counted_and_changes_nothing(may_become: str, sender: str, role: str) -> None:
    counts = Tally()
    drain = Drain(may_become, counts)
    assert not drain.change(sender, ChangeRole(role=role), PEERS)
    assert not drain.draining
    assert counts == {"role_changes_refused": 1}


def test_an_operator_who_wants_it_gone_outranks_a_change() -> None:
    drain = Drain("decode", Tally())
    drain.change("k", TO_DECODE, PEERS)
    drain.drain()
    assert drain.drained(idle=True) == [Drained()]
    assert not drain.change("k", TO_DECODE, PEERS)
    assert drain.drained(idle=True) == [Drained()]


def test_an_operator_who_cordons_it_outranks_a_change() -> None:
    counts = Tally()
    drain = Drain("decode", counts)
    drain.change("k", TO_DECODE, PEERS)
    drain.set_cordon(True)
    assert (drain.draining, drain.drained(idle=True)) == (True, [])
    drain.set_cordon(False)
    assert not drain.draining
    assert counts == {"role_changes_begun": 1, "role_changes_undone": 1}


@pytest.mark.parametrize("settings", [PrefillSettings, DecodeSettings, VllmSettings])
@pytest.mark.parametrize("grace_s", [-0.1, math.inf, math.nan])
def test_a_grace_that_is_no_time_is_refused(settings: type, grace_s: float) -> None:
    with pytest.raises(ValueError, match="drain_grace_s must be 0 or more, and finite"):
        settings(drain_grace_s=grace_s)
    assert settings(drain_grace_s=0.0).drain_grace_s == 0.0


def test_each_gateway_is_asked_about_its_own_attempts_and_about_as_many_as_a_message_takes() -> None:
    drain = Drain("", Tally())
    drain.drain()
    many = [("g", f"r{number}", 1) for number in range(MAX_MOVED + 1)]
    *asked, timer = drain.move([*many, ("g2", "s", 3)])
    sent = {
        send.to: send.message.attempts for send in asked if isinstance(send, Send) and isinstance(send.message, PlaceElsewhere)
    }
    assert (len(sent["g"]), sent["g2"]) == (MAX_MOVED, (("s", 3),))
    assert timer == SetTimer(MOVE, MOVE_AGAIN_S)
    assert drain.move([]) == [], "with nothing left it asks no more"
    assert drain.move([], left=True) == [timer]


def test_links_cover_all_roles_that_a_process_may_have() -> None:
    both, other_host = ("prefill", "decode"), "b"
    assert not are_connected("decode", "a", "decode", other_host)
    assert may_connect(both, "a", both, other_host)
    assert may_connect(both, "a", ("decode",), other_host)
    assert not may_connect(("decode",), "a", ("decode",), other_host)
    assert may_connect(("decode",), "a", both, other_host) == may_connect(both, other_host, ("decode",), "a")


def test_who_rests_takes_nothing_and_does_not_end() -> None:
    counts = Tally()
    drain = Drain("decode", counts)
    drain.set_cordon(True)
    assert drain.draining
    assert drain.drained(idle=True) == []
    assert not drain.change("k", TO_DECODE, PEERS)
    assert counts == {"role_changes_refused": 1}
    drain.set_cordon(False)
    assert not drain.draining
    assert drain.change("k", TO_DECODE, PEERS)


def test_who_leaves_is_not_kept_by_an_end_of_its_rest() -> None:
    drain = Drain("", Tally())
    drain.set_cordon(True)
    drain.drain()
    drain.set_cordon(False)
    assert drain.draining
    assert drain.drained(idle=True) == [Drained()]
