"""A gateway calls itself ready once its conductor has heard everybody and everything, or once it has waited for long enough."""

from dataclasses import replace

from actor_harness import LAYOUT, Harness

from mooncake_zmq.core.actor import PeerUp
from mooncake_zmq.core.messages import Hello, NodesReported
from mooncake_zmq.gateway.requests.readiness import WAIT, missing_roles
from mooncake_zmq.gateway.requests.requests import Requests, RequestsSettings


def hello(role, part="both"):
    return Hello(protocol=1, role=role, host="h0", model="m", tokenizer="t", layout="l", part=part)


def missing(*roles, parts=()):
    return missing_roles([*map(hello, roles), *(hello("vllm", part) for part in parts)])


class Gateway(Harness):
    def __init__(self, *peers, **settings):
        base = RequestsSettings(conductors=("k0", "k1"), ready_wait_s=10.0)
        super().__init__(Requests(name="me", host="h0", incarnation=1, settings=replace(base, **settings), layout=LAYOUT))
        for name in peers:
            self.up(name)

    @property
    def ready(self):
        return self.actor.cluster.ready

    def hears(self, conductor="k0", *, missing=(), cache_nodes=("c0", "c1")):
        self.say(conductor, NodesReported(cache_nodes=cache_nodes, missing=missing))


def test_it_is_ready_once_the_conductor_has_heard_all():
    gateway = Gateway("k0", "p0", "d0")
    assert not gateway.ready
    gateway.hears(missing=("c1",), cache_nodes=("c0",))
    assert not gateway.ready
    assert gateway.actor.cluster.missing == ("c1",)
    gateway.hears()
    assert gateway.ready
    assert gateway.actor.cluster.cache_nodes == ("c0", "c1")


def test_it_waits_for_as_long_as_set_from_when_it_could_first_serve():
    gateway = Gateway("k0", "p0", ready_wait_s=3.0)
    gateway.hears(missing=("c1", "d0"))
    assert WAIT not in gateway.timers
    gateway.up("d0")
    gateway.advance(2.9)
    assert not gateway.ready
    gateway.hears(missing=("c1",))
    gateway.advance(0.2)
    assert gateway.ready
    assert gateway.actor.counts["ready_waits_over"] == 1


def test_what_another_conductor_hears_counts_only_once_that_one_is_in_use():
    gateway = Gateway("k0", "k1", "p0", "d0")
    gateway.hears("k1")
    assert not gateway.ready
    gateway.down("k0")
    gateway.up("p1")
    assert gateway.ready


def test_a_conductor_that_rests_does_not_say_who_is_there_unless_it_is_alone():
    gateway = Gateway("k0", "k1", "p0")
    gateway.say("k0", NodesReported(cache_nodes=("c0",), missing=("d0",), cordoned=True))
    gateway.hears("k1", missing=("d0", "c1"), cache_nodes=("c0",))
    assert gateway.actor.cluster.missing == ("d0", "c1")
    gateway.down("k1")
    assert gateway.actor.cluster.missing == ("d0",)


def test_who_takes_nothing_new_is_known_by_the_conductor_that_is_asked():
    gateway = Gateway("k0", "k1", "p0", "d0")
    gateway.say("k0", NodesReported(closed=("d0",)))
    gateway.say("k1", NodesReported(closed=("p0",)))
    assert gateway.actor.cluster.closed == ("d0",)
    gateway.down("k0")
    assert gateway.actor.cluster.closed == ("p0",)
    gateway.down("k1")
    assert (gateway.actor.cluster.closed, gateway.actor.cluster.cache_nodes) == ((), None)


def test_what_a_former_conversation_told_counts_no_more():
    gateway = Gateway("k0", "p0")
    gateway.hears()
    gateway.down("k0")
    gateway.up("k0")
    gateway.up("d0")
    assert not gateway.ready
    gateway.hears()
    assert gateway.ready


def test_a_node_lost_later_makes_it_no_less_ready():
    gateway = Gateway("k0", "p0", "d0")
    gateway.hears()
    gateway.hears(missing=("c1",), cache_nodes=("c0",))
    assert gateway.ready
    assert gateway.actor.cluster.missing == ("c1",)
    gateway.advance(20.0)
    assert "ready_waits_over" not in gateway.actor.counts


def test_vllms_alone_can_serve():
    gateway = Gateway("k0", "v0")
    gateway.hears()
    assert gateway.ready
    assert missing("conductor", "vllm") == []
    assert missing("vllm") == ["conductor"]
    assert missing("conductor", "decode") == ["prefill"]
    assert missing() == ["conductor", "prefill", "decode"]


def test_vllms_of_one_part_can_serve_without_the_other_which_they_stand_in_for():
    gateway = Gateway("k0", "k1")
    gateway.hears()
    assert not gateway.ready
    gateway.handle(PeerUp("v0", 1, hello("vllm", "decode")))
    assert gateway.ready
    assert missing("conductor", parts=["prefill", "prefill"]) == []
    assert missing("conductor", "prefill", parts=["decode"]) == []
    assert missing("conductor", "prefill") == ["decode"], "ours go on with what ours began"
    assert missing(parts=["both"]) == ["conductor"]
