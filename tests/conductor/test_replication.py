"""Copies that an operator asks for are made, surplus ones let go, and nothing is asked twice."""

from collections import Counter

from conductor_harness import Cluster, keys
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.conductor.prefix_index import PrefixIndex
from mooncake_zmq.conductor.recent import MOST_RECENT, RecentChains
from mooncake_zmq.conductor.replication import (
    ASK_AGAIN_S,
    COPY_REQUEST_S,
    MAX_REQUESTS,
    REQUESTS_PER_NODE,
    Replication,
)
from mooncake_zmq.core.actor import Answered, Asked
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.commands import SetCopies
from mooncake_zmq.core.messages import ChangeReplica

DOC = keys("doc", 20)


class Pool:
    """Cache-nodes c0, c1 ... on hosts h0, h1 ... that do what they are asked, when told to; checked after every step."""

    def __init__(self, hosts=4):
        self.counts = Tally()
        self.index = PrefixIndex(max_keys=100_000)
        self.replication = Replication(self.index, self.counts)
        self.hosts = {f"c{i}": f"h{i}" for i in range(hosts)}
        self.readers = set(self.hosts.values())
        self.now = 0.0
        self.asked = []

    def copies(self, block_keys):
        return len(self.index.holders(block_keys))

    def change(self, block_keys, copies, obey=True):
        asked = self.replication.change(self.now, block_keys, copies, hosts=self.hosts, readers=self.readers)
        self.replication.check(self.now)
        for node, message in asked:
            assert isinstance(message, ChangeReplica)
            assert message.keys
            for source in message.sources:
                assert self.hosts[source] != self.hosts[node]
                assert source in self.index.holders(message.keys)
        self.asked += asked
        if obey:
            self.obey(asked)
        return asked

    def obey(self, asked):
        for node, message in asked:
            if message.sources:
                self.index.stored(node, message.keys)
            else:
                self.index.removed(node, message.keys)


def test_nothing_is_asked_twice_of_nodes_that_do_not_answer_or_evict_their_copies():
    pool = Pool(4)
    pool.index.stored("c0", DOC)
    for second in range(0, int(ASK_AGAIN_S), 5):
        pool.now = float(second)
        pool.change(DOC, 4, obey=False)
        pool.index.stored("c1", DOC)
        pool.index.removed("c1", DOC)
    assert Counter(node for node, _ in pool.asked) == {"c1": 1, "c2": 1, "c3": 1}
    assert pool.replication.under_way(pool.now) == 0
    pool.now = ASK_AGAIN_S
    pool.change(DOC, 4, obey=False)
    assert Counter(node for node, _ in pool.asked) == {"c1": 2, "c2": 2, "c3": 2}


def test_another_host_is_asked_once_a_wish_is_given_up():
    pool = Pool(3)
    pool.index.stored("c0", DOC)
    (first,) = pool.change(DOC, 2, obey=False)
    pool.now += COPY_REQUEST_S - 1
    assert pool.change(DOC, 2) == []
    pool.now += 1
    (second,) = pool.change(DOC, 2)
    assert {first[0], second[0]} == {"c1", "c2"}


def test_only_hosts_with_a_prefill_are_given_copies_and_others_lose_theirs_first():
    pool = Pool(4)
    pool.readers = {"h0", "h2"}
    pool.index.stored("c1", DOC)
    pool.change(DOC, 4)
    assert pool.index.holders(DOC) == ["c0", "c1", "c2"]
    pool.change(DOC, 2)
    assert pool.index.holders(DOC) == ["c0", "c2"]


def test_two_cache_nodes_of_one_host_hold_one_copy():
    pool = Pool(2)
    pool.hosts["c9"] = "h1"
    pool.index.stored("c1", DOC)
    pool.change(DOC, 5)
    assert pool.index.holders(DOC) == ["c0", "c1"]


def test_a_copy_to_be_let_go_is_asked_back_before_any_other():
    pool = Pool(4)
    for node in ("c1", "c2"):
        pool.index.stored(node, DOC)
    ((going, _),) = pool.change(DOC, 1, obey=False)
    assert pool.change(DOC, 1) == [], "it is remembered"
    ((back, message),) = pool.change(DOC, 2)
    assert back == going
    assert message.sources
    pool.change(DOC, 1, obey=False)
    assert [node for node, _ in pool.asked][-1] == going


def test_a_copy_of_a_chain_is_a_copy_of_its_beginnings():
    pool = Pool(2)
    pool.index.stored("c0", DOC)
    (one,) = pool.change(DOC, 2, obey=False)
    assert one[1].keys == DOC
    assert pool.change(DOC[:8], 2) == []


def test_a_node_is_asked_for_a_few_copies_at_a_time():
    pool = Pool(2)
    documents = [keys(f"d{i}", 4) for i in range(20)]
    for document in documents:
        pool.index.stored("c0", document)
    asked = [request for document in documents for request in pool.change(document, 2, obey=False)]
    assert len(asked) == REQUESTS_PER_NODE
    assert pool.counts["requested_copies_deferred"] == 20 - REQUESTS_PER_NODE
    pool.obey(asked)
    assert len([request for document in documents for request in pool.change(document, 2, obey=False)]) == REQUESTS_PER_NODE


def test_at_the_limit_of_wishes_nothing_is_let_go_but_copies_are_still_made():
    pool = Pool(2)
    documents = [keys(f"d{i}", 1) for i in range(MAX_REQUESTS + 10)]
    for node in pool.hosts:
        for document in documents:
            pool.index.stored(node, document)
    asked = [request for document in documents for request in pool.change(document, 1)]
    assert len(asked) == MAX_REQUESTS // 2
    pool.index.stored("c0", DOC)
    assert pool.change(DOC, 2)
    pool.now += ASK_AGAIN_S
    assert pool.change(documents[-1], 1), "old copy_requests are forgotten"


def test_what_nobody_holds_cannot_be_copied_and_the_last_copy_stays():
    pool = Pool(3)
    assert pool.change(DOC, 3) == []
    pool.index.stored("c1", DOC)
    assert pool.change(DOC, 0) == []
    assert pool.change(DOC, 1) == []


def test_a_node_that_leaves_takes_its_wishes_along():
    pool = Pool(2)
    pool.index.stored("c0", DOC)
    pool.change(DOC, 2, obey=False)
    pool.replication.forget("c1")
    assert pool.replication.under_way(pool.now) == 0
    assert pool.change(DOC, 2), "its next life is asked anew"


TREE = {
    "a": keys("a", 12),
    "ab": (*keys("a", 12), *keys("b", 6)),
    "ac": (*keys("a", 5), *keys("c", 9)),
    "d": keys("d", 3),
}
steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.sampled_from(sorted(TREE)), st.integers(0, 4)),
        st.tuples(st.just("change"), st.sampled_from(sorted(TREE)), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.integers(1, 100)),
    ),
    max_size=25,
)


@given(st.integers(1, 5), st.booleans(), steps)
@settings(max_examples=200)
def test_whatever_is_asked_no_block_is_lost_and_hosts_are_never_exceeded(hosts, obey, life):
    pool = Pool(hosts)
    held = set()
    for what, *arguments in life:
        if what == "store":
            name, node = arguments
            pool.index.stored(f"c{node % hosts}", TREE[name])
            held.add(name)
        elif what == "change":
            name, copies = arguments
            pool.change(TREE[name], copies, obey=obey)
            assert pool.change(TREE[name], copies, obey=obey) == [], "asked already"
        else:
            pool.now += arguments[0]
        pool.index.check()
        for name in held:
            assert all(1 <= pool.index.copies(block) <= hosts for block in TREE[name]), name


# --- the conductor


def test_an_operator_can_ask_for_copies():
    cluster = Cluster(3)
    cluster.announce("c0", DOC)
    effects = cluster.conductor._copies.change(cluster.now, DOC, 2)
    assert [(effect.to, effect.message) for effect in effects] == [("c1", ChangeReplica(keys=DOC, sources=("c0",)))]
    assert cluster.conductor._copies.change(cluster.now, DOC, 2) == []
    cluster.down("c1")
    assert [effect.to for effect in cluster.conductor._copies.change(cluster.now, DOC, 2)] == ["c2"]


# --- the operator


def test_an_operator_may_ask_for_copies_of_a_prefix_that_was_asked_for():
    cluster = Cluster(4)
    cluster.announce("c2", DOC)
    cluster.schedule((*DOC, *keys("question", 2)))
    assert cluster.conductor.dump(cluster.now)["replication"]["recent"] == [
        {"key": DOC[-1].hex(), "blocks": len(DOC), "holders": ["c2"]}
    ]
    effects = cluster.handle(Asked("a1", SetCopies(DOC[-1].hex(), 3)))
    (answered,) = [effect for effect in effects if isinstance(effect, Answered)]
    assert answered.ask_id == "a1"
    assert answered.answer == {"blocks": len(DOC), "holders": ["c2"], "asked": [node for node, _ in cluster.copy_requests]}
    assert len(cluster.copy_requests) == 2
    assert {message.keys for _, message in cluster.copy_requests} == {DOC}


def test_recent_chains_are_the_latest_and_no_more_than_so_many():
    recent = RecentChains(max_blocks=3)
    chains = [keys(f"d{i}", 5) for i in range(MOST_RECENT + 10)]
    for chain in chains:
        recent.add(chain, 5)
        recent.add(chains[0], 2)
        recent.check()
    assert len(recent) == MOST_RECENT
    assert recent.get(chains[0][1]) == chains[0][:2], "asked for again and again"
    assert recent.get(chains[5][2]) is None
    assert recent.get(chains[-1][2]) == chains[-1][:3]


def test_copies_of_an_unknown_prefix_are_answered_with_an_error():
    cluster = Cluster(2)
    (answered,) = cluster.handle(Asked("a1", SetCopies("0" * 32, 2)))
    assert answered == Answered("a1", {"error": "that prefix is not known: see recent in this conductor's dump"})
    assert cluster.copy_requests == []
