"""When a node drains, and as what its process begins anew."""

import pytest

from mooncake_zmq.core.actor import Drained
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.drain import Drain
from mooncake_zmq.core.messages import PROTOCOL_VERSION, ChangeRole, Hello
from mooncake_zmq.core.routes import are_connected, may_connect

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
