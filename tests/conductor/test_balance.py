"""Change of role: when the load is lopsided, which node changes, and what a conductor does until it has."""

import math

import pytest
from conductor_harness import Cluster

from mooncake_zmq.conductor.admission import Admission
from mooncake_zmq.conductor.balance import BALANCE, CHANGE_TIMEOUT, QUIET, Loads, Lopsided
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.actor import Answered, Asked, Send
from mooncake_zmq.core.commands import SetRole
from mooncake_zmq.core.messages import ChangeRole, Placed, Rejected

AFTER_S = 10.0


@pytest.mark.parametrize(
    ("loads", "short"),
    [
        (Loads(prefill=1.0, decode=0.2, prefills=2, decodes=2), "prefill"),
        (Loads(prefill=0.2, decode=1.0, prefills=2, decodes=2), "decode"),
        (Loads(prefill=0.7, decode=0.0, prefills=2, decodes=2), None),  # in no need, however idle the others are
        (Loads(prefill=1.0, decode=0.4, prefills=2, decodes=2), None),  # the decode that stayed would have 0.8
        (Loads(prefill=1.0, decode=0.4, prefills=2, decodes=8), "prefill"),
        (Loads(prefill=1.0, decode=1.0, prefills=2, decodes=2), None),
        (Loads(prefill=9.0, decode=0.0, prefills=2, decodes=1), None),  # the last one stays
        (Loads(prefill=0.1, busy=0.9, decode=1.0, prefills=4, decodes=2), None),  # it waits little, but has no time to give
        (Loads(prefill=0.1, busy=1.0, decode=0.1, prefills=4, decodes=2), None),  # well used, and in no need
        (Loads(prefill=math.inf, decode=0.9, prefills=0, decodes=2), "prefill"),
    ],
)
def test_a_role_is_short_if_the_other_with_one_fewer_has_far_less_to_do(loads: Loads, short: str | None) -> None:
    assert loads.short(1.5) == short


def test_a_shortage_has_to_last_and_begins_anew_when_it_turns() -> None:
    lopsided = Lopsided(AFTER_S, 1.5)
    prefill, decode = (Loads(prefill=p, decode=d, prefills=3, decodes=3) for p, d in ((1.0, 0.1), (0.1, 1.0)))
    assert [lopsided.see(at, prefill) for at in (0.0, 9.9, 10.0)] == [None, None, "prefill"]
    assert [lopsided.see(at, decode) for at in (11.0, 20.0)] == [None, None]
    assert lopsided.see(21.0, Loads(prefill=0.5, decode=0.5, prefills=3, decodes=3)) is None
    assert [lopsided.see(at, decode) for at in (22.0, 31.0, 32.0)] == [None, None, "decode"]


class Changing(Cluster):
    """Three hosts with prefill, decode and cache-node, of which all but those on the first may change."""

    def __init__(self, **settings):
        settings = {"role_change_after_s": AFTER_S, "ttft_slo_s": 10.0, "tbt_slo_s": 1.0} | settings
        super().__init__(3, admission="none", **settings)
        self.asked = []
        self.crowded = "prefill"
        for name, role, other in (("p", "prefill", "decode"), ("d", "decode", "prefill")):
            for host in (1, 2):
                self.up(f"{name}{host}", role, f"h{host}", incarnation=2, may_become=other)

    def handle(self, event):
        effects = super().handle(event)
        if hasattr(self, "asked"):
            self.asked += [(e.to, e.message.role) for e in effects if isinstance(e, Send) and isinstance(e.message, ChangeRole)]
        return effects

    def load(self, but=()):
        """Everybody reports: one role has more than it can do, the other nearly nothing."""
        for host in range(3):
            if f"p{host}" in self.conductor._prefills.by_name and f"p{host}" not in but:
                self.prefill_load(f"p{host}", queued_s=20.0 + host if self.crowded == "prefill" else 0.0)
            if f"d{host}" in self.conductor._decodes.by_name and f"d{host}" not in but:
                running = 100 + host if self.crowded == "decode" else 3 - host
                self.decode_load(f"d{host}", running=running, max_batch=100)

    def serve(self, seconds, but=()):
        for _ in range(round(seconds)):
            self.load(but)
            self.answer = self.schedule(tokens=1000)
            self.advance(1.0)

    def request_role(self, node, role):
        (answered,) = [e for e in self.handle(Asked("1", SetRole(node, role))) if isinstance(e, Answered)]
        return answered.answer

    @property
    def counts(self):
        return self.conductor.counts


def test_the_idlest_node_that_may_is_asked_once_the_load_stayed_lopsided() -> None:
    cluster = Changing()
    cluster.serve(AFTER_S - 1)
    assert cluster.asked == []
    cluster.serve(4)
    assert cluster.asked == [("d2", "prefill")]
    cluster = Changing()
    cluster.crowded = "decode"
    cluster.serve(AFTER_S + 3)
    assert [role for _, role in cluster.asked] == ["decode"]
    assert cluster.asked[0][0] in ("p1", "p2"), "p0 may not change"


def test_by_default_nobody_is_asked() -> None:
    assert ConductorSettings().role_change_after_s == 0
    cluster = Changing(role_change_after_s=0.0)
    cluster.serve(10 * AFTER_S)
    assert cluster.asked == []
    assert BALANCE not in cluster.timers


def test_nothing_is_placed_on_the_node_from_then_on_whatever_it_still_reports() -> None:
    cluster = Changing()
    cluster.serve(AFTER_S + 3)
    assert cluster.asked == [("d2", "prefill")]
    for _ in range(20):
        cluster.load()  # d2 has not heard yet: it does not say that it drains
        placed = cluster.schedule(tokens=1000)
        assert isinstance(placed, Placed)
        assert placed.decode != "d2"


def test_one_changes_at_a_time_and_after_it_there_is_quiet() -> None:
    cluster = Changing()
    cluster.serve(3 * AFTER_S)
    assert cluster.asked == [("d2", "prefill")]
    cluster.down("d2")
    cluster.serve(3)
    cluster.up("d2", "prefill", "h2", incarnation=3, may_become="decode")
    assert cluster.counts["role_changes_ended[how=done]"] == 1
    cluster.serve(QUIET * AFTER_S - 1)
    assert len(cluster.asked) == 1
    cluster.serve(AFTER_S + 3)
    assert cluster.asked[1:] == [("d1", "prefill")]
    cluster.down("d1")
    cluster.up("d1", "prefill", "h1", incarnation=3, may_become="decode")
    cluster.serve(10 * AFTER_S)
    assert len(cluster.asked) == 2, "d0 stays: it may not, and it is the last"


def test_nobody_is_asked_while_somebody_drains() -> None:
    cluster = Changing()
    cluster.load()
    for _ in range(30):
        cluster.serve(1, but=("d1",))
        cluster.decode_load("d1", draining=True)
    assert cluster.asked == []


def test_a_change_that_does_not_come_about_is_forgotten_and_the_node_used_again() -> None:
    cluster = Changing()
    cluster.serve(AFTER_S + 3)
    cluster.crowded = "nobody"
    cluster.serve(CHANGE_TIMEOUT * AFTER_S + 2)
    assert cluster.counts["role_changes_ended[how=forgotten]"] == 1
    cluster.load()
    decodes = {cluster.schedule(tokens=1000).decode for _ in range(30)}
    assert "d2" in decodes


def test_a_node_that_comes_back_as_it_was_is_told_again_in_the_same_life_only() -> None:
    cluster = Changing()
    cluster.serve(AFTER_S + 3)
    cluster.down("d2")
    cluster.up("d2", "decode", "h2", incarnation=2, may_become="prefill")
    assert cluster.asked == [("d2", "prefill")] * 2
    cluster.down("d2")
    cluster.up("d2", "decode", "h2", incarnation=3, may_become="prefill")
    assert cluster.counts["role_changes_ended[how=undone]"] == 1
    assert len(cluster.asked) == 2


def test_a_node_that_drained_and_takes_requests_again_is_used_again() -> None:
    """Its operator cordoned it, which undid the change, and ended the cordon."""
    cluster = Changing()
    cluster.serve(AFTER_S + 3)
    assert cluster.asked == [("d2", "prefill")]
    cluster.crowded = "nobody"
    for draining in (False, True):
        cluster.decode_load("d2", draining=draining)
        assert cluster.conductor.gauges(cluster.now)["role_changes"] == 1
    cluster.load()
    assert cluster.counts["role_changes_ended[how=undone]"] == 1
    assert "d2" in {cluster.schedule(tokens=1000).decode for _ in range(30)}


def test_a_conductor_that_nobody_asks_does_nothing() -> None:
    cluster = Changing()
    cluster.serve(3)
    for _ in range(100):
        cluster.load()
        cluster.advance(1.0)
    assert cluster.asked == []
    assert BALANCE not in cluster.timers
    assert cluster.conductor.gauges(cluster.now)["prefill_load"] == 0


def test_refused_requests_show_the_need_too() -> None:
    cluster = Changing()
    cluster.conductor._placement._admission = Admission(ConductorSettings(ttft_slo_s=1e-3, tbt_slo_s=1.0))
    cluster.serve(AFTER_S + 3)
    assert isinstance(cluster.answer, Rejected)
    assert cluster.asked == [("d2", "prefill")]


def test_the_operator_is_told_what_happens_and_why_not() -> None:
    cluster = Changing(role_change_after_s=0.0, ttft_slo_s=0.0)
    assert "is not there" in cluster.request_role("nobody", "decode")["error"]
    assert "may not become a decode" in cluster.request_role("p0", "decode")["error"]
    assert "may not become a decode" in cluster.request_role("c0", "decode")["error"]
    assert cluster.request_role("p1", "prefill")["happens"] == "nothing: that is its role"
    cluster.prefill_load("p1", jobs=[(0, 0.0, 1.0), (0, 0.0, 1.0)])
    assert "finishes 2 requests" in cluster.request_role("p1", "decode")["happens"]
    assert "becomes a decode" in cluster.request_role("p1", "decode")["happens"]
    assert "p1 is about to become a decode" in cluster.request_role("p2", "decode")["error"]
    assert "p1 is about to become a decode" in cluster.request_role("p1", "prefill")["error"], "it is no prefill for long"
    assert cluster.asked == [("p1", "decode")], "said once: the session repeats it"
    assert cluster.conductor.gauges(cluster.now)["role_changes"] == 1
    cluster.down("p1")
    cluster.up("p1", "decode", "h1", incarnation=3, may_become="prefill")
    assert cluster.conductor.gauges(cluster.now)["role_changes"] == 0
    cluster.down("p0")
    assert "the only prefill" in cluster.request_role("p2", "decode")["error"]


@pytest.mark.parametrize("bad", [{"role_change_ratio": 0.9}, {"ttft_slo_s": 0.0}, {"tbt_slo_s": math.inf}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="role_change"):
        ConductorSettings(role_change_after_s=60.0, **bad)


def test_a_node_that_rests_is_not_asked_for_another_role():
    cluster = Changing(role_change_after_s=0.0)
    cluster.load()
    cluster.prefill_load("p1", draining=True)
    assert "takes requests again" in cluster.request_role("p1", "decode")["error"]
    assert cluster.asked == []
    cluster.prefill_load("p1")
    assert not cluster.conductor._prefills.by_name["p1"].draining


def lends_only(cluster, *names):
    for name in names:
        cluster.decode_load(name, room=0, max_batch=0, lendable=1000)


def test_a_decode_that_only_lends_replaces_none_that_serves():
    cluster = Changing()
    cluster.down("d1")
    for _ in range(round(2 * AFTER_S)):
        lends_only(cluster, "d0")
        cluster.serve(1, but=("d0",))
    assert cluster.asked == []
    assert "only decode" in cluster.request_role("d2", "prefill")["error"]


def test_decodes_that_only_lend_do_not_hide_that_those_that_serve_are_short():
    cluster = Changing()
    cluster.crowded = "decode"
    lends_only(cluster, "d1", "d2")
    cluster.serve(1, but=("d1", "d2"))
    assert cluster.conductor.gauges(cluster.now)["decode_load"] >= 1
    cluster.serve(AFTER_S + 3, but=("d1", "d2"))
    assert [role for _, role in cluster.asked] == ["decode"]


def test_what_only_lends_changes_its_role_for_an_operator_and_else_for_none():
    cluster = Changing()
    lends_only(cluster, "d2")
    cluster.serve(AFTER_S + 3, but=("d2",))
    assert cluster.asked == [("d1", "prefill")]
    cluster = Changing(role_change_after_s=0.0)
    lends_only(cluster, "d2")
    assert "becomes a prefill" in cluster.request_role("d2", "prefill")["happens"]


def holding(cluster, tokens=1000, lends=1000):
    """Have three decodes report so much KV, of which each lends so much."""
    for name in ("d0", "d1", "d2"):
        cluster.decode_load(name, free=tokens, capacity=tokens, borrows=True, lendable=lends, lends=lends)


@pytest.mark.parametrize(("longest", "changes"), [(0, True), (1536, True), (1537, False), (1 << 20, False)])
def test_no_decode_is_taken_without_which_the_others_hold_no_request_that_gateways_admit(longest, changes):
    cluster = Changing(role_change_after_s=0.0, longest_request=longest)
    holding(cluster)
    answer = cluster.request_role("d2", "prefill")
    assert ("happens" in answer) == changes
    if not changes:
        assert "without it decodes hold requests of 1,536 tokens at most" in answer["error"]
        assert cluster.asked == []


def test_a_decode_that_adds_nothing_to_the_longest_request_may_be_taken():
    cluster = Changing(role_change_after_s=0.0, longest_request=1 << 20)
    holding(cluster, lends=0)
    assert "happens" in cluster.request_role("d2", "prefill")
    cluster = Changing(role_change_after_s=0.0, longest_request=1 << 20)
    cluster.decode_load("d2", capacity=2_000_000)
    assert "2" in cluster.request_role("d2", "prefill")["error"]
    assert "happens" in cluster.request_role("d1", "prefill")


@pytest.mark.parametrize(("longest", "asked"), [(0, [("d1", "prefill")]), (1 << 20, [])])
def test_a_lopsided_load_takes_no_decode_that_is_needed_either(longest, asked):
    cluster = Changing(longest_request=longest)
    cluster.load = lambda but: [cluster.prefill_load(f"p{host}", queued_s=20.0) for host in range(3)] and holding(cluster)
    cluster.serve(AFTER_S + 3)
    assert cluster.asked == asked
