"""What the searches choose without looking at every node is what looking at every node chooses."""

import random

import pytest
from conductor_harness import BLOCK, COSTS, Cluster, keys

from mooncake_zmq.conductor import batches, placement, ranking
from mooncake_zmq.conductor.batches import Batches
from mooncake_zmq.conductor.routing import Router
from mooncake_zmq.core.actor import Received
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import (
    BlocksAnnounced,
    CacheLoad,
    DecodeLoad,
    Measured,
    PrefillLoad,
    QueuedJob,
    RequestEnded,
    Schedule,
    SourceRate,
)

TIE = 1.05
PARTS = ("both", "prefill", "decode")
GPU = Costs(
    prefill_token_s=1.147e-4,
    prefill_square_s=7.181e-10,
    decode_step_s=0.0203,
    decode_request_s=0.0004,
    decode_context_s=3e-8,
    kv_bytes_per_token=327_680,
    load_bytes_per_s=128e9,
    transfer_bytes_per_s=87e9,
)


class AllPrefills(Router):
    """Looks at every prefill too, and compares."""

    compared = 0

    def _least_ttft(self, plan, barred):
        found = super()._least_ttft(plan, barred)
        times = [
            (self._planner.ttft_s(plan, node), node.last, node.name, node)
            for node in self._prefills.nodes
            if not node.closed and node.name not in barred
        ]
        limit = TIE * min([time_s for time_s, *_ in times], default=0.0)
        tied = [entry[1:] for entry in times if entry[0] <= limit]
        assert found is (min(tied)[2] if tied else None)
        AllPrefills.compared += 1
        return found


class AllDecodes(Batches):
    """Likewise; with no limit on how many ties are compared."""

    compared = 0

    def choose(self, now, joining, candidates, host, exclude, without=()):
        found = super().choose(now, joining, candidates, host, exclude, without)
        for barred in (exclude, ()):
            gaps = [
                (self._look_at(joining, node), node)  # gaps are kept, so each is predicted once
                for node in self._decodes.nodes
                if node.candidates is candidates and not node.draining and node.name not in barred
            ]
            least = min([gap_s for gap_s, _ in gaps], default=float("inf"))
            if least < float("inf"):
                tied = [node for gap_s, node in gaps if gap_s <= TIE * least]
                handover = joining.handover
                held = {node: 0 if handover is None else handover.held(node) for node in tied}
                best = min(tied, key=lambda node: (node.host != host, -held[node], -node.free, node.name))
                assert found is not None
                assert found.node is best
                promised = self.promise(joining, best)
                assert (found.tbt_s, found.batch, found.alone_s) == (promised.tbt_s, promised.batch, promised.alone_s)
                break
        else:
            assert found is None
        AllDecodes.compared += 1
        return found


class Life:
    """A cluster of many nodes that all differ."""

    def __init__(self, chance, hosts, overtake, costs, vllms=False, meets=False, **settings):
        """`vllms`: beside our own engines there is one on each host, of all parts. `meets`: most prefills compute the head of a
        prompt while its tail is fetched."""
        self.meets = meets
        self.chance = chance
        self.vllms = vllms
        self.overtake = overtake
        self.cluster = Cluster(0, costs=costs, **settings)
        self.pools = [i for i in range(hosts) if i % 7 != 5]
        self.hosts = hosts
        for i in range(hosts):
            self.cluster.up(f"p{i}", "prefill", f"h{i}")
            self.cluster.up(f"d{i}", "decode", f"h{i}")
            if vllms:
                self.cluster.up(f"v{i}", "vllm", f"h{i}", part=PARTS[i % 3])
            if i in self.pools:
                self.cluster.up(f"c{i}", "cache-node", f"h{i}")
        self.docs = [keys("sys", 2) + keys(f"doc{d}", chance.randrange(1, 30)) for d in range(12)]
        self.placed = []

    def say(self, sender, message):
        return self.cluster.conductor.handle(self.cluster.now, Received(sender, message))

    def step(self, number):
        chance = self.chance
        i = chance.randrange(self.hosts)
        pool = chance.choice(self.pools)
        if self.vllms and chance.random() < 0.4:
            self.vllm_step(i, pool)
        match chance.choices(("prefill", "decode", "blocks", "links", "ask"), (35, 20, 12, 5, 28))[0]:
            case "prefill":
                self.say(f"p{i}", self.prefill_load())
            case "decode":
                self.say(f"d{i}", self.decode_load())
            case "blocks":
                doc = chance.choice(self.docs)
                some = chance.randrange(len(doc) + 1)
                disk = doc[some + 2 : some + 4] if chance.random() < 0.3 else ()
                self.say(f"c{pool}", BlocksAnnounced(stored=doc[:some], removed=doc[some : some + 2], on_disk=disk))
            case "links":
                rate = SourceRate(source="c0", block_s=chance.uniform(0.001, 0.2), pending_blocks=chance.randrange(3))
                self.say(f"c{pool}", CacheLoad(sources=(rate,)))
            case "ask":
                self.ask(number)
        self.cluster.now += chance.choice((0.0, 0.01, 0.05, 0.2))
        self.cluster.conductor.check(self.cluster.now)

    def vllm_step(self, i, pool):
        doc, part = self.chance.choice(self.docs), PARTS[i % 3]
        some = self.chance.randrange(len(doc) + 1)
        self.say(f"c{pool}", BlocksAnnounced(stored=doc[:some], removed=doc[some : some + 2], engine_blocks=True))
        if part != "decode":
            self.say(f"v{i}", self.prefill_load())
            self.say(f"v{i}", BlocksAnnounced(stored=doc[: some // 2], removed=doc[some // 2 : some]))
        if part != "prefill":
            self.say(f"v{i}", self.decode_load())

    def prefill_load(self):
        chance, latest = self.chance, 1.0 if self.overtake else 0.0
        return PrefillLoad(
            jobs=tuple(
                QueuedJob(booking=0, rank_s=chance.uniform(-3, latest), left_s=chance.uniform(0, 2))
                for _ in range(chance.choice((0, 0, 1, 2)))
            ),
            overtake=self.overtake,
            priority_s=2.0,
            room=chance.choice((64, 64, 1)),
            compute=Measured(seconds=10 * chance.uniform(0.7, 1.4), predicted_s=10.0),
            draining=chance.random() < 0.03,
            meets=self.meets and chance.random() < 0.9,
        )

    def decode_load(self):
        chance = self.chance
        running = chance.randrange(30)
        return DecodeLoad(
            running=running,
            reserved=0,
            free_tokens=chance.choice((100_000, 4_000)),
            capacity_tokens=200_000,
            context_tokens=3000 * running,
            max_batch=24,
            room=40,
            step=Measured(seconds=0.03 * chance.uniform(0.9, 1.1), predicted_s=0.03),
            draining=chance.random() < 0.03,
        )

    def ask(self, number):
        chance = self.chance
        prompt = (*chance.choice(self.docs), *keys(f"q{number}", 1))
        schedule = Schedule(
            request_id=f"r{number}",
            attempt=1,
            keys=prompt,
            tokens=len(prompt) * BLOCK + chance.randrange(1, 200),
            max_tokens=chance.randrange(1, 400),
            exclude=tuple(f"{chance.choice('pd')}{chance.randrange(self.hosts)}" for _ in range(chance.choice((0, 0, 2)))),
            priority=chance.choice((0, 0, 1, -1)),
        )
        self.say("g", schedule)
        self.placed.append(number)
        if chance.random() < 0.6:
            ended = self.placed.pop(chance.randrange(len(self.placed)))
            self.say("g", RequestEnded(request_id=f"r{ended}", attempt=1))


@pytest.mark.parametrize("policy", ["global", "local"])
@pytest.mark.parametrize("overtake", [0.0, 1.0])
@pytest.mark.parametrize("costs", [COSTS, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("meets", [False, True])
def test_a_search_finds_what_looking_at_all_finds(monkeypatch, costs, overtake, policy, meets):
    monkeypatch.setattr(placement, "Router", AllPrefills)
    monkeypatch.setattr(placement, "Batches", AllDecodes)
    monkeypatch.setattr(batches, "MOST_TIES", 1 << 40)
    before = AllPrefills.compared, AllDecodes.compared
    for seed, hosts in ((1, 3), (2, 9), (3, 40)):
        life = Life(random.Random(seed), hosts, overtake, costs, meets=meets, ttft_slo_s=20, tbt_slo_s=0.2, policy=policy)
        for number in range(300):
            life.step(number)
    assert AllPrefills.compared > before[0] + 200
    assert AllDecodes.compared > before[1] + 100


@pytest.mark.parametrize("costs", [COSTS, GPU], ids=["cpu", "gpu"])
def test_a_search_finds_it_among_vllms_too(monkeypatch, costs):
    monkeypatch.setattr(placement, "Router", AllPrefills)
    monkeypatch.setattr(placement, "Batches", AllDecodes)
    monkeypatch.setattr(batches, "MOST_TIES", 1 << 40)
    pairs = set()
    for seed, hosts in ((1, 3), (2, 9), (3, 30)):
        life = Life(random.Random(seed), hosts, 0.0, costs, vllms=True, ttft_slo_s=20, tbt_slo_s=0.2)
        for number in range(300):
            life.step(number)
            pairs |= {(b.placed.prefill[0], b.placed.decode[0]) for b in life.cluster.conductor._bookings.all()}
    assert pairs == {("p", "d"), ("v", "v")}


def test_a_decode_that_joins_slow_ones_is_found(monkeypatch):
    """No bound learnt from those who were there holds for it."""
    monkeypatch.setattr(placement, "Batches", AllDecodes)
    cluster = Cluster(3, costs=GPU)
    for number in range(30):
        for name in ("d0", "d1", "d2"):
            step = Measured(seconds=0.2 + number / 1000, predicted_s=0.05)
            cluster.decode_load(name, running=0, max_batch=24, room=24, step=step)
        cluster.advance(0.25)
    cluster.up("d3", "decode", "h3")
    assert cluster.schedule(tokens=1000).decode != "d3"  # nothing is known of its room
    cluster.decode_load("d3", running=0, max_batch=24, room=24)
    assert cluster.schedule(tokens=1000).decode == "d3"
    cluster.conductor.check(cluster.now)


def test_most_nodes_are_not_looked_at(monkeypatch):
    """Of 200 prefills and decodes a decision weighs a few, whoever is idle, busy or holds the prompt."""
    cluster = Cluster(0)
    for i in range(200):
        for name, role in (("p", "prefill"), ("d", "decode"), ("c", "cache-node")):
            cluster.up(f"{name}{i}", role, f"h{i}")
    weighed = []
    planner = cluster.conductor._placement.planner
    ttft_s = type(planner).ttft_s
    monkeypatch.setattr(type(planner), "ttft_s", lambda self, plan, node: (weighed.append(node), ttft_s(self, plan, node))[1])
    decode_s = Batches.gap_s
    monkeypatch.setattr(Batches, "gap_s", lambda self, joining, node: (weighed.append(node), decode_s(self, joining, node))[1])
    doc = keys("doc", 20)
    for i in range(100):
        cluster.announce(f"c{i}", doc[:2])
    for number in range(150):
        weighed.clear()
        prompt = doc if number % 2 else keys(str(number), 4)
        cluster.schedule(prompt)
        assert len(weighed) < 30


def test_a_ranking_knows_the_latest_figure_of_each():
    chance, ranks = random.Random(1), ranking.Ranking()
    figures = {}
    nodes = [Life.__new__(Life) for _ in range(20)]
    for i, node in enumerate(nodes):
        node.name = f"n{i:02}"
    for _ in range(500):
        node = chance.choice(nodes)
        if chance.random() < 0.2:
            ranks.remove(node)
            figures.pop(node.name, None)
        else:
            figures[node.name] = chance.randrange(5)
            ranks.set(node, figures[node.name])
        ranks.check()
        assert [(each.figure, each.name) for each in ranks.entries] == sorted((f, n) for n, f in figures.items())
