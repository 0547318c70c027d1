"""Who talks to whom: one table for the live mesh and the simulated one."""

from itertools import product

import pytest

from mooncake_zmq.core.messages import AskState, Report, SetCordon, Watch
from mooncake_zmq.core.roles import ROLES
from mooncake_zmq.core.routes import SAYS, are_connected, may_connect


@pytest.mark.parametrize(("one", "other"), list(product(ROLES, ROLES)))
@pytest.mark.parametrize("there", ["a", "b"])
def test_both_sides_agree_that_they_talk(one, other, there):
    assert are_connected(one, "a", other, there) == are_connected(other, there, one, "a")


def test_each_role_talks_to_some_other_and_hosts_apart_talk_less():
    for role in ROLES:
        assert any(are_connected(role, "a", other, "a") for other in ROLES)
    assert are_connected("prefill", "a", "cache-node", "a")
    assert not are_connected("prefill", "a", "cache-node", "b")


def test_those_with_nothing_to_say_keep_no_conversation():
    silent = [("conductor", "conductor"), ("gateway", "gateway"), ("decode", "decode"), ("gateway", "cache-node")]
    assert not any(are_connected(one, "a", other, "a") for one, other in silent)


def test_gateways_look_at_everybody_where_there_is_watching_and_nobody_else_does():
    assert all(are_connected("gateway", "a", role, "b", watched=True) for role in ROLES)
    assert not are_connected("conductor", "a", "conductor", "a", watched=True)
    watchers = {pair for pair, kinds in SAYS.items() if Watch in kinds or AskState in kinds}
    assert watchers == {("gateway", role) for role in ROLES}
    assert {pair for pair, kinds in SAYS.items() if Report in kinds} == {(role, "gateway") for role in ROLES}
    assert {pair for pair, kinds in SAYS.items() if SetCordon in kinds} == {("gateway", role) for role in ROLES}


def test_a_decode_is_told_of_every_pool_that_a_handoff_may_name():
    assert are_connected("decode", "a", "cache-node", "b")


def test_decodes_talk_among_themselves_only_where_they_lend() -> None:
    assert are_connected("decode", "a", "decode", "b", lending=True)
    assert may_connect(("decode", "prefill"), "a", ("decode",), "b", lending=True)
    assert not are_connected("prefill", "a", "prefill", "b", lending=True)


def test_prefills_talk_among_themselves_only_where_there_are_pipelines() -> None:
    assert not are_connected("prefill", "a", "prefill", "b")
    assert are_connected("prefill", "a", "prefill", "b", pipelines=True)
    assert are_connected("prefill", "a", "prefill", "a", pipelines=True)
    assert not are_connected("decode", "a", "decode", "b", pipelines=True)
