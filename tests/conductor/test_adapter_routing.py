"""A request for an adapter goes to vLLMs that list it, in whatever part of it they compute."""

from conductor_harness import Cluster, keys

from mooncake_zmq.core.messages import AdaptersListed, Placed, Rejected, RejectReason, RequestEnded


class Vllms(Cluster):
    """vLLMs by name and part; no other engines."""

    def __init__(self, **parts):
        super().__init__(0)
        for name, part in parts.items():
            self.up(name, "vllm", name, part=part)
            self.prefill_load(name)
            self.decode_load(name)

    def lists(self, **adapters):
        for node, names in adapters.items():
            self.say(node, AdaptersListed(adapters=tuple(names.split())))

    def nodes(self, adapter, count=6, **more):
        """The nodes that so many different prompts go to."""
        placed = [self.schedule(keys(f"{adapter}{self.serial}", 3), adapter=adapter, **more) for _ in range(count)]
        assert all(isinstance(each, Placed) for each in placed), placed
        return {node for each in placed for node in (each.prefill, each.decode)}


def test_requests_go_where_their_adapter_is_listed():
    cluster = Vllms(v0="both", v1="both", v2="both")
    cluster.lists(v0="poet", v1="poet sql", v2="")
    assert cluster.nodes("sql") == {"v1"}
    assert cluster.nodes("poet", 12) <= {"v0", "v1"}
    assert "v2" in cluster.nodes("", 12), "without an adapter all can answer"


def test_a_node_that_has_listed_nothing_yet_gets_no_request_for_what_another_lists():
    cluster = Vllms(v0="both", v1="both", v2="both")
    cluster.lists(v0="poet", v1="")
    assert cluster.nodes("poet", 12) == {"v0"}


def test_what_no_node_lists_may_go_to_any():
    cluster = Vllms(v0="both", v1="both")
    cluster.lists(v0="poet", v1="")
    assert cluster.nodes("sql", 12) == {"v0", "v1"}


def test_an_excluded_node_with_the_adapter_is_better_than_another_without():
    cluster = Vllms(v0="both", v1="both")
    cluster.lists(v0="poet", v1="")
    assert cluster.nodes("poet", exclude=("v0",)) == {"v0"}


def test_a_list_that_changes_is_followed_and_a_node_that_comes_back_lists_anew():
    cluster = Vllms(v0="both", v1="both")
    cluster.lists(v0="poet", v1="")
    cluster.lists(v0="", v1="poet")
    assert cluster.nodes("poet") == {"v1"}
    cluster.down("v0")
    cluster.up("v0", "vllm", "v0", incarnation=2)
    cluster.prefill_load("v0")
    cluster.decode_load("v0")
    assert cluster.nodes("poet", 12) == {"v1"}
    cluster.lists(v0="poet")
    assert "v0" in cluster.nodes("poet", 12)


def test_both_parts_of_a_request_are_computed_where_the_adapter_is():
    cluster = Vllms(p0="prefill", p1="prefill", d0="decode", d1="decode")
    cluster.lists(p0="poet", p1="", d0="", d1="poet")
    assert cluster.nodes("poet") == {"p0", "d1"}


def test_without_a_decode_that_has_it_the_prefill_answers_alone():
    cluster = Vllms(p0="prefill", d0="decode")
    cluster.lists(p0="poet", d0="")
    assert cluster.nodes("poet") == {"p0"}


def test_if_the_nodes_that_have_it_drain_the_request_waits_as_for_a_node():
    cluster = Vllms(v0="both", v1="both")
    cluster.lists(v0="poet", v1="")
    cluster.prefill_load("v0", draining=True)
    cluster.decode_load("v0", draining=True)
    answer = cluster.schedule(keys("x", 3), adapter="poet")
    assert isinstance(answer, Rejected)
    assert answer.reason is RejectReason.NO_PREFILL


def test_a_node_that_has_listed_nothing_is_tried_before_those_that_lack_what_is_asked_for():
    cluster = Vllms(v0="both", v1="both")
    cluster.lists(v0="")
    assert cluster.nodes("poet") == {"v1"}


def test_the_only_vllm_with_an_adapter_is_not_closed_for_silence():
    cluster = Vllms(v0="both", v1="both")
    cluster.lists(v0="poet", v1="")
    for _ in range(3):
        placed = cluster.schedule(keys(f"s{cluster.serial}", 3), adapter="poet")
        assert placed.prefill == "v0"
        cluster.say("g", RequestEnded(request_id=placed.request_id, attempt=1, outcome=None, stalled=True))
        for node in ("v0", "v1"):
            cluster.prefill_load(node)
            cluster.decode_load(node)
    assert cluster.conductor._suspects.shuts(cluster.now, "v0")
    assert cluster.nodes("poet") == {"v0"}
