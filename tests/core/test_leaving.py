"""When a node drains, and as what its process begins anew."""

import pytest

from mooncake_zmq.core.actor import Drained
from mooncake_zmq.core.leaving import Leaving
from mooncake_zmq.core.messages import PROTOCOL_VERSION, ChangeRole, Hello
from mooncake_zmq.core.shell import Tally
from mooncake_zmq.core.talk import may_talk, talks

PEERS = {
    name: Hello(protocol=PROTOCOL_VERSION, role=role, host="h", model="m", tokenizer="t", layout="l")
    for name, role in (("k", "conductor"), ("g", "gateway"))
}
TO_DECODE = ChangeRole(role="decode")


def test_a_node_that_was_asked_finishes_and_becomes_the_other() -> None:
    leaving = Leaving("decode", Tally())
    assert leaving.drained(idle=True) == []
    assert leaving.change("k", TO_DECODE, PEERS)
    assert leaving.draining
    assert leaving.drained(idle=False) == []
    assert leaving.drained(idle=True) == [Drained("decode")]
    assert not leaving.change("k", TO_DECODE, PEERS), "said twice it is as if said once"
    assert leaving.drained(idle=True) == [Drained("decode")]


@pytest.mark.parametrize(
    ("may_become", "sender", "role"), [("", "k", "decode"), ("decode", "k", "cache-node"), ("decode", "g", "decode")]
)
def test_what_is_not_permitted_is_counted_and_changes_nothing(may_become: str, sender: str, role: str) -> None:
    counts = Tally()
    leaving = Leaving(may_become, counts)
    assert not leaving.change(sender, ChangeRole(role=role), PEERS)
    assert not leaving.draining
    assert counts == {"role_changes_refused": 1}


def test_an_operator_who_wants_it_gone_outranks_a_change() -> None:
    leaving = Leaving("decode", Tally())
    leaving.change("k", TO_DECODE, PEERS)
    leaving.drain()
    assert leaving.drained(idle=True) == [Drained()]
    assert not leaving.change("k", TO_DECODE, PEERS)
    assert leaving.drained(idle=True) == [Drained()]


def test_links_cover_all_roles_that_a_process_may_have() -> None:
    both, other_host = ("prefill", "decode"), "b"
    assert not talks("decode", "a", "decode", other_host)
    assert may_talk(both, "a", both, other_host)
    assert may_talk(both, "a", ("decode",), other_host)
    assert not may_talk(("decode",), "a", ("decode",), other_host)
    assert may_talk(("decode",), "a", both, other_host) == may_talk(both, other_host, ("decode",), "a")


def test_who_rests_takes_nothing_and_does_not_end() -> None:
    counts = Tally()
    leaving = Leaving("decode", counts)
    leaving.rest(True)
    assert leaving.draining
    assert leaving.drained(idle=True) == []
    assert not leaving.change("k", TO_DECODE, PEERS)
    assert counts == {"role_changes_refused": 1}
    leaving.rest(False)
    assert not leaving.draining
    assert leaving.change("k", TO_DECODE, PEERS)


def test_who_leaves_is_not_kept_by_an_end_of_its_rest() -> None:
    leaving = Leaving("", Tally())
    leaving.rest(True)
    leaving.drain()
    leaving.rest(False)
    assert leaving.draining
    assert leaving.drained(idle=True) == [Drained()]
