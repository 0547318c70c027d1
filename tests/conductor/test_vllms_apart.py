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
        if part != "decode":
            self.prefill_load(name)
        if part != "prefill":
            self.decode_load(name)

    def pair(self, *arguments, **more):
        answer = self.schedule(*arguments, **more)
        assert isinstance(answer, Placed), answer
        return answer.prefill, answer.decode

    def shelve(self, node, stored):
        self.say(node, BlocksAnnounced(stored=tuple(stored), shelf=True))


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


def test_without_a_decode_or_a_prefill_nothing_is_placed():
    for name, reason in (("p1", RejectReason.NO_DECODE), ("d1", RejectReason.NO_PREFILL)):
        answer = Apart(name).schedule(keys("a", 4))
        assert isinstance(answer, Rejected)
        assert answer.reason is reason


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
    assert isinstance(cluster.schedule(keys("theirs", 8)), Rejected)


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


def test_what_one_says_of_a_part_that_is_not_its_own_is_passed_over():
    cluster = Apart("p1", "d1")
    cluster.decode_load("p1")
    cluster.prefill_load("d1")
    cluster.announce("d1", keys("a", 4))
    assert cluster.conductor.counts["unexpected[message=DecodeLoad]"] == 1
    assert cluster.conductor.counts["unexpected[message=PrefillLoad]"] == 1
    assert cluster.conductor.counts["unexpected[message=BlocksAnnounced]"] == 1
    assert cluster.schedule(keys("a", 4)).reuse_blocks == 0


def test_bookings_go_with_either_of_the_two():
    for name in ("p1", "d1"):
        cluster = Apart("p1", "d1")
        cluster.pair(keys("a", 4))
        cluster.down(name)
        assert not cluster.conductor.gauges(cluster.now)["bookings"]
