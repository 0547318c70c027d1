"""A conductor among vLLM nodes: prefill and decode of a request in one, where its beginning can be reused."""

from conductor_harness import Cluster, keys

from mooncake_zmq.core.messages import BlocksAnnounced, Placed, Rejected


class Vllms(Cluster):
    """`count` vLLM nodes v0, v1 ..., each on a host of its own with a cache-node."""

    def __init__(self, count=2, *, hosts=0, **settings):
        super().__init__(hosts, **settings)
        for i in range(count):
            self.up(f"v{i}", "vllm", f"w{i}")
            self.up(f"s{i}", "cache-node", f"w{i}")
            self.prefill_load(f"v{i}")
            self.decode_load(f"v{i}")

    def shelve(self, node, stored=(), removed=()):
        self.say(node, BlocksAnnounced(stored=tuple(stored), removed=tuple(removed), engine_blocks=True))


def where(answer):
    assert isinstance(answer, Placed), answer
    assert answer.prefill == answer.decode
    assert not answer.stages
    return answer.prefill


def test_prefill_and_decode_are_one_node_and_load_spreads():
    cluster = Vllms(3)
    assert {where(cluster.schedule(keys(name, 4))) for name in "abc"} == {"v0", "v1", "v2"}


def test_equal_prompts_go_to_one_vllm_which_shares_what_it_computes():
    cluster = Vllms(3)
    answers = [cluster.schedule(keys("a", 8)) for _ in range(3)]
    assert len({where(answer) for answer in answers}) == 1
    assert [answer.reuse_blocks for answer in answers] == [0, 8, 8]
    assert not any(answer.coming_blocks for answer in answers), "the engine does that itself"


def test_a_request_goes_where_vllm_itself_has_its_beginning():
    cluster = Vllms()
    for node in ("v1", "v0"):
        prompt = keys(node, 8)
        cluster.announce(node, prompt[:6])
        answer = cluster.schedule(prompt)
        assert where(answer) == node
        assert answer.reuse_blocks == 6
        assert not answer.sources
        cluster.end(answer)
    cluster.announce("v1", removed=keys("v1", 6))
    assert cluster.schedule(keys("v1", 8)).reuse_blocks == 0


def test_a_request_goes_where_the_host_s_store_has_its_beginning():
    cluster = Vllms(tie_ratio=1e-9)
    cluster.shelve("s1", keys("a", 6))
    answer = cluster.schedule(keys("a", 8))
    assert (where(answer), answer.reuse_blocks, answer.sources) == ("v1", 6, ())
    cluster.end(answer)
    cluster.down("s1")
    assert cluster.schedule(keys("a", 8)).reuse_blocks == 0
    cluster.up("s1", "cache-node", "w1", 2)
    cluster.shelve("s1", keys("a", 3))
    assert cluster.schedule(keys("a", 8)).reuse_blocks == 3


def test_what_the_store_of_another_host_has_is_named_where_loading_it_is_quicker():
    cluster = Vllms(3)
    cluster.shelve("s1", keys("a", 6))
    cluster.shelve("s2", keys("a", 4))
    answer = cluster.schedule(keys("a", 8), exclude=("v1",))
    if where(answer) == "v2":
        assert (answer.reuse_blocks, answer.sources) == (6, ("s1",))
    cluster.end(answer)
    answer = cluster.schedule(keys("a", 8), exclude=("v1", "v2"))
    assert (where(answer), answer.reuse_blocks, answer.sources) == ("v0", 6, ("s1", "s2"))
    cold = cluster.schedule(keys("b", 8), exclude=("v1", "v2"))
    assert (where(cold), cold.reuse_blocks, cold.sources) == ("v0", 0, ())
    assert answer.ttft_s < cold.ttft_s, "what is loaded is not computed"
    cluster.down("s1")
    assert cluster.schedule(keys("a", 8), exclude=("v1", "v2")).sources == ("s2",)


def test_what_one_kind_of_engine_holds_the_other_does_not_reuse():
    cluster = Vllms(1, hosts=1, tie_ratio=1e-9)
    cluster.up("v9", "vllm", "h0")
    cluster.prefill_load("v9")
    cluster.announce("c0", keys("ours", 6))
    cluster.shelve("c0", keys("theirs", 6))
    ours, theirs = cluster.schedule(keys("ours", 8)), cluster.schedule(keys("theirs", 8))
    assert (ours.prefill, ours.decode, ours.reuse_blocks) == ("p0", "d0", 6)
    assert (where(theirs), theirs.reuse_blocks) == ("v9", 6)


def test_copies_are_made_of_what_pools_hold_alone():
    cluster = Vllms(2, hosts=2)
    cluster.announce("v0", keys("a", 4))
    cluster.shelve("s0", keys("a", 4))
    assert cluster.conductor._copies.change(cluster.now, keys("a", 4), 2) == []
    cluster.announce("c0", keys("a", 4))
    (request,) = cluster.conductor._copies.change(cluster.now, keys("a", 4), 2)
    assert request.message.sources == ("c0",)


def test_one_that_takes_nothing_new_gets_nothing():
    cluster = Vllms()
    cluster.prefill_load("v0", draining=True)
    cluster.decode_load("v0", draining=True)
    assert {where(cluster.schedule(keys("a", 2))) for _ in range(3)} == {"v1"}
    cluster.prefill_load("v1", room=0)
    assert isinstance(cluster.schedule(keys("a", 2)), Rejected)


def test_one_that_leaves_takes_its_bookings_and_blocks_along():
    cluster = Vllms(1)
    cluster.announce("v0", keys("a", 4))
    where(cluster.schedule(keys("a", 4)))
    cluster.down("v0")
    assert isinstance(cluster.schedule(keys("a", 4)), Rejected)
    assert not cluster.conductor.gauges(cluster.now)["bookings"]
    cluster.up("v0", "vllm", "w0", 2)
    assert cluster.schedule(keys("a", 4)).reuse_blocks == 0


def test_an_excluded_one_is_avoided_while_another_is_there():
    cluster = Vllms()
    assert {where(cluster.schedule(keys("a", 2), exclude=("v1",))) for _ in range(3)} == {"v0"}
