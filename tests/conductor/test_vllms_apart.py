"""A conductor among vLLMs that prefill and vLLMs that decode: a request is placed on one of each, by what each has to do."""

from conductor_harness import COSTS, Cluster, keys

from mooncake_zmq.core.messages import BlocksAnnounced, Placed, Rejected, RejectReason


class Apart(Cluster):
    """vLLMs p1, p2 that prefill, d1, d2 that decode and b that does both, as far as they are named, each on a host of its own
    with a cache-node s."""

    def __init__(self, *names, hosts=0, **settings):
        super().__init__(hosts, **settings)
        for name in names:
            self.up(f"s{name}", "cache-node", f"h{name}")
            self.join(name)

    def join(self, name, incarnation=1):
        part = {"p": "prefill", "d": "decode", "b": "both"}[name[0]]
        self.up(name, "vllm", f"h{name}", incarnation, part=part)
        self.prefill_load(name)
        self.decode_load(name)

    def pair(self, *arguments, **more):
        answer = self.schedule(*arguments, **more)
        assert isinstance(answer, Placed), answer
        return answer.prefill, answer.decode

    def shelve(self, node, stored):
        self.say(node, BlocksAnnounced(stored=tuple(stored), engine_blocks=True))


def test_one_prefills_and_another_decodes_and_load_spreads_over_both():
    cluster = Apart("p1", "p2", "d1", "d2")
    pairs = [cluster.pair(keys(prompt, 4)) for prompt in "abcd"]
    assert {prefill for prefill, _ in pairs} == {"p1", "p2"}
    assert {decode for _, decode in pairs} == {"d1", "d2"}


def test_the_store_that_the_prefill_writes_to_is_named_first():
    cluster = Apart("p1", "d1")
    assert cluster.schedule(keys("a", 4)).sources == ("sp1",)
    cluster.shelve("sd1", keys("b", 6))
    answer = cluster.schedule(keys("b", 8))
    assert (answer.prefill, answer.decode, answer.reuse_blocks, answer.sources) == ("p1", "d1", 6, ("sp1", "sd1"))


def test_one_that_does_both_takes_whole_requests_where_nobody_goes_on():
    cluster = Apart("p1", "d1", "b")
    pairs = {cluster.pair(keys(prompt, 4)) for prompt in "abcd"}
    assert pairs == {("p1", "d1"), ("b", "b")}
    cluster.decode_load("d1", draining=True)
    assert {cluster.pair(keys(prompt, 4)) for prompt in "ef"} == {("b", "b")}
    cluster.decode_load("d1", room=0)
    assert {cluster.pair(keys(prompt, 4)) for prompt in "gh"} == {("b", "b")}
    cluster.down("d1")
    assert {cluster.pair(keys(prompt, 4)) for prompt in "ij"} == {("b", "b")}
    cluster.join("d1", 2)
    assert ("p1", "d1") in {cluster.pair(keys(prompt, 4)) for prompt in "klm"}


def test_a_prefill_takes_whole_requests_while_no_decode_is_open():
    cluster = Apart("p1", "d1")
    assert cluster.pair(keys("a", 4)) == ("p1", "d1")
    cluster.decode_load("d1", draining=True)
    cluster.prefill_load("d1", draining=True)
    answer = cluster.schedule(keys("b", 4))
    assert (answer.prefill, answer.decode, answer.sources) == ("p1", "p1", ())
    cluster.down("d1")
    assert cluster.pair(keys("c", 4)) == ("p1", "p1")
    assert cluster.conductor.counts["stand_ins_placed"] == 2
    cluster.join("d1", 2)
    assert cluster.pair(keys("d", 4)) == ("p1", "d1")
    assert cluster.conductor.counts["stand_ins_placed"] == 2


def test_a_decode_takes_whole_requests_while_no_prefill_is_open():
    cluster = Apart("p1", "d1", "d2")
    cluster.prefill_load("p1", draining=True)
    cluster.decode_load("p1", draining=True)
    assert {cluster.pair(keys(prompt, 4)) for prompt in "abcd"} == {("d1", "d1"), ("d2", "d2")}
    cluster.down("p1")
    assert {cluster.pair(keys(prompt, 4)) for prompt in "efgh"} == {("d1", "d1"), ("d2", "d2")}
    assert cluster.conductor.counts["stand_ins_placed"] == 8
    cluster.join("p1", 2)
    assert {cluster.pair(keys(prompt, 4)) for prompt in "ijkl"} == {("p1", "d1"), ("p1", "d2")}


def test_a_stand_in_yields_to_a_vllm_that_does_both():
    cluster = Apart("p1", "b")
    assert {cluster.pair(keys(prompt, 4)) for prompt in "abcd"} == {("b", "b")}
    cluster = Apart("d1", "b")
    assert {cluster.pair(keys(prompt, 4)) for prompt in "abcd"} == {("b", "b")}
    assert "stand_ins_placed" not in cluster.conductor.counts


def test_a_request_whose_only_decode_has_failed_it_stays_with_its_prefill():
    cluster = Apart("p1", "d1")
    assert cluster.pair(keys("a", 4), exclude=("d1",)) == ("p1", "p1")
    assert cluster.pair(keys("a", 4), exclude=("p1",)) == ("p1", "d1")
    cluster = Apart("p1", "d1", "d2")
    assert cluster.pair(keys("a", 4), exclude=("d1",)) == ("p1", "d2")


def test_a_decode_that_is_full_makes_no_stand_in():
    cluster = Apart("p1", "d1")
    cluster.decode_load("d1", room=0, free=0)
    answer = cluster.schedule(keys("a", 4))
    assert isinstance(answer, Rejected)
    assert answer.reason is RejectReason.NO_ROOM


def test_without_any_vllm_that_is_open_nothing_is_placed():
    cluster = Apart("p1", "d1")
    for name in ("p1", "d1"):
        cluster.decode_load(name, draining=True)
        cluster.prefill_load(name, draining=True)
    answer = cluster.schedule(keys("a", 4))
    assert isinstance(answer, Rejected)
    assert answer.reason is RejectReason.NO_PREFILL


def test_stand_ins_are_no_further_prefills_or_decodes():
    cluster = Apart("p1", "d1", "b")
    gauges = cluster.conductor.gauges(cluster.now)
    assert (gauges["capacity_prefills"], gauges["capacity_decodes"]) == (2, 2)


def test_our_own_engine_and_vllms_never_go_on_with_each_other_s_kv():
    cluster = Apart("p1", "d1", hosts=1, tie_ratio=1e-9)
    assert {cluster.pair(keys(prompt, 4)) for prompt in "abcd"} == {("p1", "d1"), ("p0", "d0")}
    cluster.announce("c0", keys("ours", 6))
    cluster.shelve("sp1", keys("theirs", 6))
    ours, theirs = cluster.schedule(keys("ours", 8)), cluster.schedule(keys("theirs", 8))
    assert (ours.prefill, ours.decode, ours.reuse_blocks) == ("p0", "d0", 6)
    assert (theirs.prefill, theirs.decode, theirs.reuse_blocks) == ("p1", "d1", 6)
    cluster.decode_load("d0", draining=True)
    assert {cluster.pair(keys("theirs", 8), exclude=("p0",)) for _ in range(2)} == {("p1", "d1")}
    cluster.down("d1")
    assert cluster.pair(keys("theirs", 8)) == ("p1", "p1")


def test_each_is_judged_by_its_own_work():
    cluster = Apart("p1", "p2", "d1", "d2")
    cluster.prefill_load("p1", queued_s=3.0)
    cluster.decode_load("d2", running=10, context_tokens=4000)
    calm = cluster.schedule(keys("a", 4), max_tokens=20)
    assert (calm.prefill, calm.decode) == ("p2", "d1")
    cluster.down("p2")
    cluster.down("d1")
    busy = cluster.schedule(keys("a", 4), max_tokens=20)
    assert busy.ttft_s >= calm.ttft_s + 2.9
    assert busy.tbt_s > calm.tbt_s


def test_loading_the_kv_counts_between_first_and_second_token():
    cluster, whole = Apart("p1", "d1"), Apart("b")
    apart, together = (each.schedule(keys("a", 40), max_tokens=8) for each in (cluster, whole))
    tokens = 40 * 4  # at least
    assert apart.tbt_s >= together.tbt_s + COSTS.load_s(tokens)
    assert apart.ttft_s == together.ttft_s


def test_what_a_decode_holds_itself_places_nothing_on_it_while_a_prefill_is_open():
    cluster = Apart("p1", "d1")
    cluster.announce("d1", keys("a", 4))
    answer = cluster.schedule(keys("a", 5))
    assert (answer.prefill, answer.reuse_blocks) == ("p1", 0)


def test_bookings_go_with_either_of_the_two():
    for name in ("p1", "d1"):
        cluster = Apart("p1", "d1")
        cluster.pair(keys("a", 4))
        cluster.down(name)
        assert not cluster.conductor.gauges(cluster.now)["bookings"]
