"""What gateways are told of the config's nodes: who is heard, and whose blocks."""

from conductor_harness import Cluster, keys
from msgspec import structs

from mooncake_zmq.conductor.roll_call import REPORT_AFTER_S
from mooncake_zmq.core.actor import CordonWanted, Send
from mooncake_zmq.core.messages import BlocksAnnounced, NodesReported

MEMBERS = ("c0", "d0", "p0")


class Told(Cluster):
    """Keeps what the gateways are told."""

    def __init__(self, hosts=0, **settings):
        self.told = {}
        super().__init__(hosts, **settings)

    def handle(self, event):
        effects = super().handle(event)
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, NodesReported):
                self.told.setdefault(effect.to, []).append(effect.message)
        return effects

    def news(self, gateway="g"):
        self.advance(REPORT_AFTER_S)
        return self.told[gateway][-1]


def test_a_gateway_hears_who_is_missing_until_all_are_there_with_their_blocks():
    cluster = Told(members=MEMBERS)
    assert cluster.news() == NodesReported(missing=MEMBERS)
    cluster.up("p0", "prefill", "h0")
    cluster.up("d0", "decode", "h0")
    assert cluster.news().missing == ("c0",)
    cluster.up("c0", "cache-node", "h0")
    cluster.announce("c0", keys("a", 3))
    assert cluster.news() == NodesReported(cache_nodes=("c0",), missing=("c0",)), "its blocks may be only some"
    cluster.say("c0", BlocksAnnounced(complete=True))
    assert cluster.news() == NodesReported(cache_nodes=("c0",))


def test_a_node_that_went_is_missing_until_it_has_told_of_its_blocks_anew():
    cluster = Told(hosts=1, members=MEMBERS)
    cluster.say("c0", BlocksAnnounced(complete=True))
    assert cluster.news().missing == ()
    cluster.down("c0")
    assert cluster.news() == NodesReported(missing=("c0",))
    cluster.up("c0", "cache-node", "h0", incarnation=2)
    assert cluster.news().missing == ("c0",)
    cluster.say("c0", BlocksAnnounced(complete=True))
    assert cluster.news().missing == ()


def test_a_gateway_that_comes_later_is_told_too():
    cluster = Told(hosts=1, members=MEMBERS)
    cluster.news()
    cluster.up("g2", "gateway", "h0")
    assert cluster.news("g2") == NodesReported(cache_nodes=("c0",), missing=("c0",))


def test_nodes_that_come_together_are_told_of_together():
    cluster = Told(hosts=8, members=MEMBERS)
    cluster.advance(1.0)
    assert len(cluster.told["g"]) == 1


def test_whether_it_rests_is_told_at_once_and_to_who_comes_later():
    cluster = Told(hosts=1, members=MEMBERS)
    cluster.news()
    before = cluster.told["g"][-1]
    cluster.handle(CordonWanted(True))
    assert cluster.told["g"][-1] == structs.replace(before, cordoned=True)
    cluster.up("g2", "gateway", "h0")
    assert cluster.news("g2").cordoned
    cluster.handle(CordonWanted(False))
    assert [cluster.told[gateway][-1] for gateway in ("g", "g2")] == [before, before]


def test_whether_it_rests_is_told_without_a_config_too():
    cluster = Told()
    cluster.handle(CordonWanted(True))
    cluster.up("g2", "gateway", "h0")
    assert cluster.news("g2").cordoned
    cluster.handle(CordonWanted(False))
    assert not cluster.news("g2").cordoned


def test_without_a_config_nothing_is_told():
    cluster = Told(hosts=2)
    cluster.advance(1.0)
    assert cluster.told == {}


def test_who_takes_nothing_new_is_told_at_once_and_to_who_comes_later():
    cluster = Told(hosts=2, members=(*MEMBERS, "d1"))
    before = cluster.news()
    cluster.decode_load("d0", draining=True)
    cluster.prefill_load("p0", draining=True)
    assert cluster.told["g"][-1] == structs.replace(before, closed=("d0", "p0"))
    cluster.up("g2", "gateway", "h0")
    assert cluster.news("g2").closed == ("d0", "p0")
    told = len(cluster.told["g"])
    cluster.decode_load("d0", draining=True)
    cluster.advance(1.0)
    assert len(cluster.told["g"]) == told, "it is known"
    cluster.decode_load("d0")
    assert cluster.told["g"][-1].closed == ("p0",)
    cluster.down("p0")
    assert cluster.news().closed == ()


def test_a_vllm_that_takes_nothing_new_is_one_of_them():
    cluster = Told(hosts=0, members=("v0",))
    cluster.up("v0", "vllm", "h0")
    cluster.prefill_load("v0", draining=True)
    cluster.decode_load("v0", draining=True)
    assert cluster.news().closed == ("v0",)


def test_who_takes_nothing_new_is_told_without_a_config_too():
    cluster = Told(hosts=1)
    cluster.decode_load("d0", draining=True)
    assert cluster.news().closed == ("d0",)
    cluster.down("d0")
    assert cluster.news().closed == ()


def test_a_decode_that_only_lends_takes_nothing_new():
    cluster = Told(hosts=2)
    cluster.decode_load("d1", room=0, max_batch=0, lendable=1000)
    assert cluster.news().closed == ("d1",)
    assert cluster.conductor.gauges(cluster.now)["capacity_decodes"] == 1
    cluster.decode_load("d1")
    assert cluster.news().closed == ()
    assert cluster.conductor.gauges(cluster.now)["capacity_decodes"] == 2
