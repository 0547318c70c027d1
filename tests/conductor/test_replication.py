"""Demand is measured within bounds; hot prefixes are copied, surplus copies let go, and then there is quiet."""

import math
from collections import Counter

import pytest
from conductor_harness import Cluster, keys
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mooncake_zmq.conductor.prefix_index import PrefixIndex
from mooncake_zmq.conductor.recent import MOST_RECENT, RecentChains
from mooncake_zmq.conductor.replication import (
    ASK_AGAIN_S,
    MAX_WISHES,
    SHRUNK_PER_ROUND,
    WISH_S,
    WISHES_PER_NODE,
    Demand,
    Replication,
)
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.actor import Answered, Asked
from mooncake_zmq.core.asks import SetCopies
from mooncake_zmq.core.messages import ChangeReplica
from mooncake_zmq.core.shell import Tally

DOC = keys("doc", 20)


# --- demand


def per_s(demand, now, block_keys):
    return next((demand.per_s(now, chain) for chain in demand.chains() if chain.keys == tuple(block_keys)), 0.0)


def new_demand(**options):
    return Demand(**{"half_life_s": 30, "max_chains": 1000, "max_blocks": 500} | options)


@pytest.mark.parametrize("rate", [0.5, 1, 10])
def test_a_steady_rate_is_measured(rate):
    demand = new_demand()
    for number in range(int(300 * rate)):
        demand.count(number / rate, DOC)
    assert per_s(demand, 300, DOC) == pytest.approx(rate, rel=0.1)
    assert per_s(demand, 330, DOC) == pytest.approx(rate / 2, rel=0.1), "a half-life later"


def test_prompts_that_part_share_their_beginning():
    demand = new_demand()
    for number in range(40):
        demand.count(number, (*DOC, *keys(f"tail{number}", 5)))
    counts = {len(chain.keys): chain.count for chain in demand.chains() if chain.count > 20}
    assert set(counts) == {1, 2, 4, 8, 16}, "20 is found to within a factor of two"
    assert len(set(counts.values())) == 1


def test_a_shorter_chain_counts_for_every_prompt_that_goes_on_from_it():
    demand = new_demand()
    demand.count(0, DOC)
    for number in range(9):
        demand.count(0, (*DOC, *keys(f"tail{number}", 5)))
    assert next(chain.count for chain in demand.chains() if chain.keys == DOC) == 10


def test_what_nobody_asks_for_is_forgotten():
    demand = new_demand()
    demand.count(0, DOC)
    demand.forget_cold(59)
    assert demand
    demand.forget_cold(61)
    assert not demand


def test_at_the_limit_the_least_asked_for_go_and_beginnings_stay():
    demand = new_demand(max_chains=40)
    for number in range(500):
        demand.count(number / 10, DOC)
        demand.count(number / 10, keys(f"once{number}", 8))
        demand.check()
    assert per_s(demand, 50, DOC) > 3
    assert per_s(demand, 50, DOC[:1]) >= per_s(demand, 50, DOC)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 70), st.floats(0, 40)), max_size=60),
    st.integers(1, 30),
    st.integers(1, 64),
)
@settings(deadline=None)
def test_demand_is_bounded_whatever_is_asked(requests, max_chains, max_blocks):
    demand = new_demand(max_chains=max_chains, max_blocks=max_blocks)
    now = 0.0
    for document, blocks, pause in requests:
        now += pause
        before, forgotten = len(demand), demand.count(now, keys(f"d{document}", blocks))
        demand.check()
        assert len(demand) >= before - forgotten
        for chain in demand.chains():
            start = demand.own_start(chain.keys)
            assert start < len(chain.keys)
            assert not any(demand.own_start(chain.keys[:i]) >= i for i in range(1, len(chain.keys)))
    demand.forget_cold(now + 1000)
    assert not demand


# --- replication


class Pool:
    """Cache-nodes c0, c1 ... on hosts h0, h1 ... that do what they are asked, when told to; checked after every step."""

    def __init__(self, hosts=4, **options):
        options = {"replica_demand_per_s": 1.0, "replica_half_life_s": 10.0} | options
        self.counts = Tally()
        self.index = PrefixIndex(max_keys=100_000)
        self.replication = Replication(ConductorSettings(**options), self.index, self.counts)
        self.hosts = {f"c{i}": f"h{i}" for i in range(hosts)}
        self.readers = set(self.hosts.values())
        self.now = 0.0
        self.asked = []

    def copies(self, block_keys):
        return len(self.index.holders(block_keys))

    def request(self, block_keys):
        held = max(self.index.match(block_keys).values(), default=0)
        self.replication.demand.count(self.now, block_keys[:held])

    def load(self, per_s, seconds, *documents, obey=True):
        """Ask for each document `per_s` times a second, with a round every second; returns what was asked of the nodes."""
        asked = []
        for second in range(seconds):
            for document in documents:
                whole = math.floor((second + 1) * per_s) - math.floor(second * per_s)
                for _ in range(whole):
                    self.request(document)
            asked += self.round(obey=obey)
            self.now += 1
        return asked

    def round(self, obey=True):
        asked = []
        for block_keys, copies in self.replication.targets(self.now, self.hosts):
            assert 1 <= copies <= max(1, len(self.hosts))
            asked += self.change(block_keys, copies, obey=False)
        if obey:
            self.obey(asked)
        return asked

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


def test_a_hot_prefix_gets_copies_as_demand_grows_and_then_there_is_quiet():
    pool = Pool(4)
    pool.index.stored("c0", DOC)
    pool.load(0.5, 40, DOC)
    assert pool.copies(DOC) == 1
    pool.load(2.5, 60, DOC)
    assert pool.copies(DOC) == 3
    pool.load(50, 40, DOC)
    assert pool.copies(DOC) == 4
    assert pool.load(50, 60, DOC) == []
    assert all(message.sources for _, message in pool.asked), "no copy came and went"
    assert pool.counts["replicas_arrived"] == 3
    assert pool.replication.under_way(pool.now) == 0


def test_copies_follow_demand_down_to_one():
    pool = Pool(4)
    for node in pool.hosts:
        pool.index.stored(node, DOC)
    pool.load(10, 60, DOC)
    assert pool.copies(DOC) == 4
    pool.load(0.8, 80, DOC)
    assert pool.copies(DOC) == 2
    pool.load(0.2, 60, DOC)
    assert pool.copies(DOC) == 1
    assert pool.load(0.2, 60, DOC) == []


def test_a_prefix_that_is_new_to_this_conductor_is_not_called_cold():
    pool = Pool(4)
    for node in pool.hosts:
        pool.index.stored(node, DOC)
    assert pool.load(20, 9, DOC) == []


def test_nothing_is_asked_twice_of_nodes_that_do_not_answer():
    pool = Pool(4)
    pool.index.stored("c0", DOC)
    asked = pool.load(10, 100, DOC, obey=False)
    assert Counter(node for node, _ in asked) == {"c1": 1, "c2": 1, "c3": 1}
    assert pool.replication.under_way(pool.now) == 0
    assert pool.counts["replicas_missed"] == 3
    pool.load(10, int(ASK_AGAIN_S), DOC, obey=False)
    assert Counter(node for node, _ in pool.asked) == {"c1": 2, "c2": 2, "c3": 2}


def test_a_node_that_evicts_its_copies_does_not_fetch_them_over_and_over():
    pool = Pool(2)
    pool.index.stored("c0", DOC)
    for _ in range(100):
        pool.load(10, 1, DOC)
        pool.index.removed("c1", DOC)
    assert [node for node, _ in pool.asked] == ["c1"]


def test_another_host_is_asked_once_a_wish_is_given_up():
    pool = Pool(3)
    pool.index.stored("c0", DOC)
    (first,) = pool.change(DOC, 2, obey=False)
    pool.now += WISH_S - 1
    assert pool.change(DOC, 2) == []
    pool.now += 1
    (second,) = pool.change(DOC, 2)
    assert {first[0], second[0]} == {"c1", "c2"}


def test_a_copy_goes_where_the_least_is_drawn():
    pool = Pool(3)
    busy, hot = keys("busy", 20), keys("hot", 20)
    pool.index.stored("c0", hot)
    for node in ("c0", "c1"):
        pool.index.stored(node, busy)
    pool.load(1.5, 60, busy, hot)
    assert pool.index.holders(hot) == ["c0", "c2"]


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


def test_a_shared_beginning_stays_where_another_prompt_goes_on_from_it():
    pool = Pool(2)
    shared = keys("system", 8)
    one, two = (*shared, *keys("one", 8)), (*shared, *keys("two", 8))
    for node in pool.hosts:
        pool.index.stored(node, one)
    pool.index.stored("c1", two)
    pool.request(one)
    pool.request(two)
    ((node, message),) = pool.change(one, 1)
    assert message == ChangeReplica(keys=one[8:], sources=()), "what both share is no part of it"
    assert pool.copies(shared) == 2
    pool.change(shared, 1)
    assert pool.index.holders(one), "a copy that a longer chain needs is never let go"
    assert pool.index.holders(two) == ["c1"]
    assert node in pool.hosts


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
    asked = [wish for document in documents for wish in pool.change(document, 2, obey=False)]
    assert len(asked) == WISHES_PER_NODE
    assert pool.counts["replica_wishes_deferred"] == 20 - WISHES_PER_NODE
    pool.obey(asked)
    pool.replication.settle(pool.now)
    assert len([wish for document in documents for wish in pool.change(document, 2)]) == WISHES_PER_NODE


def test_at_the_limit_of_wishes_nothing_is_let_go_but_copies_are_still_made():
    pool = Pool(2)
    documents = [keys(f"d{i}", 1) for i in range(MAX_WISHES + 10)]
    for node in pool.hosts:
        for document in documents:
            pool.index.stored(node, document)
    asked = [wish for document in documents for wish in pool.change(document, 1)]
    assert len(asked) == MAX_WISHES // 2
    pool.index.stored("c0", DOC)
    assert pool.change(DOC, 2)
    pool.now += ASK_AGAIN_S
    assert pool.change(documents[-1], 1), "old wishes are forgotten"


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
        st.tuples(st.just("load"), st.sampled_from(sorted(TREE)), st.floats(0.05, 8), st.integers(1, 20)),
        st.tuples(st.just("store"), st.sampled_from(sorted(TREE)), st.integers(0, 4)),
        st.tuples(st.just("change"), st.sampled_from(sorted(TREE)), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.integers(1, 100)),
    ),
    max_size=25,
)


@given(st.integers(1, 5), st.booleans(), steps)
@example(5, True, [("store", "a", 0), ("store", "ac", 0), ("change", "ac", 5), ("load", "a", 4.0, 4)])
@settings(max_examples=200, deadline=None)
def test_in_any_life_no_block_is_lost_hosts_are_never_exceeded_and_it_goes_quiet(hosts, obey, life):
    pool = Pool(hosts)
    held = set()
    for what, *arguments in life:
        if what == "load":
            name, rate, seconds = arguments
            pool.load(rate, seconds, TREE[name], obey=obey)
        elif what == "store":
            name, node = arguments
            pool.index.stored(f"c{node % hosts}", TREE[name])
            held.add(name)
        elif what == "change":
            name, copies = arguments
            pool.change(TREE[name], copies, obey=obey)
        else:
            pool.now += arguments[0]
        pool.index.check()
        for name in held:
            assert all(1 <= pool.index.copies(block) <= hosts for block in TREE[name]), name
    pool.now += ASK_AGAIN_S  # what was asked in vain may be asked once more
    pool.load(3, 120, *TREE.values())
    pool.load(3, int(ASK_AGAIN_S), *TREE.values())  # and a copy that was let go is not asked back before that
    assert pool.load(3, 60, *TREE.values()) == []


def test_many_surplus_copies_are_let_go_over_several_rounds():
    pool = Pool(2, replica_half_life_s=100)
    documents = [keys(f"d{i}", 1) for i in range(100)]
    for node in pool.hosts:
        for document in documents:
            pool.index.stored(node, document)
    for document in documents:
        pool.request(document)
    pool.now += 101
    rounds = [len(pool.round()) for _ in range(5)]
    assert rounds == [SHRUNK_PER_ROUND, SHRUNK_PER_ROUND, SHRUNK_PER_ROUND, 100 - 3 * SHRUNK_PER_ROUND, 0]


# --- the conductor


def ask(cluster, seconds, per_s=4, obey=True):
    for _ in range(seconds * per_s):
        answer = cluster.schedule((*DOC, *keys(f"q{cluster.serial}", 2)))
        cluster.advance(1 / per_s)
        cluster.end(answer)
        done = len(cluster.wishes)
        for node, message in cluster.wishes[getattr(cluster, "obeyed", 0) :] if obey else ():
            cluster.announce(node, message.keys if message.sources else (), () if message.sources else message.keys)
        cluster.obeyed = done


def test_the_conductor_asks_for_copies_of_what_is_hot():
    cluster = Cluster(4, replica_half_life_s=10)
    cluster.announce("c2", DOC)
    ask(cluster, 60)
    assert Counter(node for node, message in cluster.wishes if message.keys == DOC) == {"c0": 1, "c1": 1, "c3": 1}
    assert cluster.conductor.counts["replica_wishes[change=more]"] == len(cluster.wishes)
    before = len(cluster.wishes)
    ask(cluster, 60)
    assert len(cluster.wishes) == before


def test_with_an_interval_of_0_nothing_is_measured():
    cluster = Cluster(4, replica_interval_s=0)
    cluster.announce("c2", DOC)
    ask(cluster, 60)
    assert cluster.wishes == []
    assert cluster.conductor.gauges(cluster.now)["cached_chains"] == 0


def test_a_conductor_that_nobody_asks_decides_nothing_and_stops_its_timer():
    cluster = Cluster(4, replica_half_life_s=10)
    for node in ("c0", "c1", "c2", "c3"):
        cluster.announce(node, DOC)
    ask(cluster, 60)
    cluster.advance(300)
    assert cluster.wishes == []
    assert cluster.timers == {}


def test_after_a_long_silence_demand_is_measured_anew():
    cluster = Cluster(4, replica_half_life_s=10)
    for node in ("c0", "c1", "c2", "c3"):
        cluster.announce(node, DOC)
    ask(cluster, 60)
    cluster.advance(60)
    ask(cluster, 9, per_s=1)
    assert cluster.wishes == []


def test_an_operator_can_ask_for_copies():
    cluster = Cluster(3)
    cluster.announce("c0", DOC)
    effects = cluster.conductor._copies.change(cluster.now, DOC, 2)
    assert [(effect.to, effect.message) for effect in effects] == [("c1", ChangeReplica(keys=DOC, sources=("c0",)))]
    assert cluster.conductor._copies.change(cluster.now, DOC, 2) == []
    cluster.down("c1")
    assert [effect.to for effect in cluster.conductor._copies.change(cluster.now, DOC, 2)] == ["c2"]


def test_retries_are_no_demand():
    cluster = Cluster(2)
    cluster.announce("c0", DOC)
    for attempt in range(2, 30):
        cluster.schedule(DOC, request_id="r", attempt=attempt)
    assert cluster.conductor.gauges(cluster.now)["cached_chains"] == 0


def test_more_blocks_than_a_message_may_name_are_refused():
    with pytest.raises(ValueError, match="replica_max_blocks"):
        ConductorSettings(replica_max_blocks=1 << 20)


# --- the operator


def test_an_operator_may_ask_for_copies_of_a_prefix_that_is_followed():
    cluster = Cluster(4)
    cluster.announce("c2", DOC)
    cluster.schedule((*DOC, *keys("question", 2)))
    shown = cluster.conductor.dump(cluster.now)["replication"]["chains"]
    assert (DOC[-1].hex(), len(DOC), ["c2"]) in [(chain["key"], chain["blocks"], chain["holders"]) for chain in shown]
    effects = cluster.handle(Asked("a1", SetCopies(DOC[-1].hex(), 3)))
    (answered,) = [effect for effect in effects if isinstance(effect, Answered)]
    assert answered.ask_id == "a1"
    assert answered.answer == {"blocks": len(DOC), "holders": ["c2"], "asked": [node for node, _ in cluster.wishes]}
    assert len(cluster.wishes) == 2
    assert {message.keys for _, message in cluster.wishes} == {DOC}


def test_without_rounds_an_operator_finds_the_prefixes_of_recent_prompts():
    cluster = Cluster(4, replica_interval_s=0)
    cluster.announce("c2", DOC)
    cluster.schedule((*DOC, *keys("question", 2)))
    assert cluster.conductor.dump(cluster.now)["replication"]["recent"] == [
        {"key": DOC[-1].hex(), "blocks": len(DOC), "holders": ["c2"]}
    ]
    cluster.handle(Asked("a1", SetCopies(DOC[-1].hex(), 2)))
    assert [message.keys for _, message in cluster.wishes] == [DOC]


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
    assert answered == Answered("a1", {"error": "that prefix is not known: see chains and recent in this conductor's dump"})
    assert cluster.wishes == []
