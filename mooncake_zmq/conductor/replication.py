"""How many copies a prefix should have: hot ones are copied before they are needed, surplus ones of cold go first. PURE.

The source is Mooncake's hot-spot replication (the end of Algorithm 1 in arXiv 2407.00079; FAST'25, Fig. 11: the hottest blocks
end up on nearly every prefill node). There it is a side effect: whoever is sent a request away from its best match fetches the
blocks and keeps them. `routing` does that too, but it is late (the fetch is part of that request's time to the first token),
starts only once the holder's queue is long, and never takes a copy back. Here demand is measured instead: copies are made off
every request's path, where the least is asked for so far, and a copy that demand no longer pays for is the first to go.

A *chain* is a leading run of blocks, named by its last key: that digest covers all before it. Counted at each `Schedule` are
the runs of 1, 2, 4, 8 ... blocks, the longest run that anyone holds, and every shorter one already followed: a shared prefix
is found to within a factor of two wherever the prompts part, and exactly where a known document ends.
"""

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mooncake_zmq.conductor.prefix_index import PrefixIndex
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.conductor.sources import MAX_SOURCES
from mooncake_zmq.core.messages import ChangeReplica
from mooncake_zmq.core.shell import Tally
from mooncake_zmq.kv.block_hash import Key

WISH_S = 30.0
"""A copy not announced after this does not come: the node had no room or no time. The node gives up after as long."""
ASK_AGAIN_S = 120.0
"""A node is not asked the same again for this long, whatever became of it: one that evicts its copies need not fetch them over
and over, and one that lets go does so when it needs the room."""
WISHES_PER_NODE = 4
"""Copies under way to one node, which works on a few at a time and leaves the rest."""
MAX_WISHES = 256
"""Wishes remembered; at the limit nothing is asked. Wishes to let go take half of them at most."""
SHRUNK_PER_ROUND = 32
"""Chains for which surplus copies are looked for in one round, about 0.2 ms each; the others have their turn later."""
SURPLUS_RATIO = 2.0
"""Copies are surplus once demand is this far below what asks for them: no copy comes and goes with the noise, and a half-life
of silence, in which another conductor may be the one that is asked, takes none away."""
MOST_LONGER = 16
"""A chain that more chains followed go on from keeps its copies: looking through all of them would take too long."""
LOOKUPS_AT_ONCE = 1500
"""Keys looked up before a round pauses, about 0.3 ms."""
COUNTED_PER_S = 100.0
"""Requests that are counted one by one; of more, every so many stands for those before it."""
FORGOTTEN_COUNT = 0.25
"""A chain whose count has decayed to this is not followed any more."""


def is_prefix(one: Sequence[Key], other: Sequence[Key]) -> bool:
    """Whether the chain `one` is the beginning of `other`, or all of it."""
    return len(one) <= len(other) and one[-1] == other[len(one) - 1]


@dataclass(slots=True)
class Chain:
    """`count`: requests that wanted it, each halved for every half-life it is old, as of `at`."""

    keys: tuple[Key, ...]
    since: float
    at: float
    count: float = 0.0
    shrunk_at: float = -math.inf
    """When surplus copies of it were last looked for."""


class Demand:
    """How often each of a bounded number of chains is asked for."""

    def __init__(self, *, half_life_s: float, max_chains: int, max_blocks: int) -> None:
        self._half_life_s = half_life_s
        self._max_chains = max_chains
        self._max_blocks = max_blocks
        self._chains: dict[Key, Chain] = {}
        self._credit = COUNTED_PER_S
        self._credit_at = 0.0
        self._skipped = 0

    def __len__(self) -> int:
        return len(self._chains)

    def follows(self, chain: Chain) -> bool:
        """Whether this chain is followed still."""
        return self._chains.get(chain.keys[-1]) is chain

    def count(self, now: float, keys: Sequence[Key]) -> int:
        """A request wants `keys`, the leading run that somebody holds. Returns how many chains were forgotten for lack of
        room."""
        keys = tuple(keys[: self._max_blocks])
        if not keys or not self._is_counted(now):
            return 0
        weight, self._skipped = 1 + self._skipped, 0
        marks = {1 << power for power in range(len(keys).bit_length())} | {len(keys)}
        new = [blocks for blocks in sorted(marks) if keys[blocks - 1] not in self._chains]
        forgotten = self._make_room(now, len(new))
        for blocks in new[: self._max_chains]:
            self._chains[keys[blocks - 1]] = Chain(keys[:blocks], now, now)
        for key in self._chains.keys() & keys:  # in any order: each counts for itself
            chain = self._chains[key]
            chain.count = self._decayed(now, chain) + weight
            chain.at = now
        return forgotten

    def per_s(self, now: float, chain: Chain) -> float:
        """Requests per second. Half the truth a half-life after the first, closer to it later."""
        return self._decayed(now, chain) * math.log(2) / self._half_life_s

    def is_known(self, now: float, chain: Chain) -> bool:
        """Whether it was followed for long enough to call it cold."""
        return now - chain.since >= self._half_life_s

    def chains(self) -> list[Chain]:
        """All that are followed, longest first."""
        return sorted(self._chains.values(), key=lambda chain: (-len(chain.keys), chain.keys[-1]))

    def chain(self, key: Key) -> Chain | None:
        """The chain followed that ends with `key`."""
        return self._chains.get(key)

    def own_start(self, keys: Sequence[Key]) -> int:
        """Where the part of `keys` begins that it shares with no shorter chain followed."""
        return next((i for i in range(len(keys) - 1, 0, -1) if keys[i - 1] in self._chains), 0)

    def longer(self, keys: Sequence[Key]) -> list[Chain]:
        """The chains followed that go on from `keys`."""
        return [chain for chain in self._chains.values() if len(chain.keys) > len(keys) and is_prefix(keys, chain.keys)]

    def forget_cold(self, now: float) -> None:
        """Follow no longer what hardly anybody asks for."""
        self._chains = {key: chain for key, chain in self._chains.items() if self._decayed(now, chain) > FORGOTTEN_COUNT}

    def clear(self) -> None:
        """Begin anew."""
        self._chains.clear()

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._chains) <= self._max_chains
        for key, chain in self._chains.items():
            assert chain.keys[-1] == key
            assert len(chain.keys) <= self._max_blocks

    def _is_counted(self, now: float) -> bool:
        self._credit = min(COUNTED_PER_S, self._credit + (now - self._credit_at) * COUNTED_PER_S)
        self._credit_at = now
        if self._credit < 1:
            self._skipped += 1
            return False
        self._credit -= 1
        return True

    def _make_room(self, now: float, wanted: int) -> int:
        """Where `wanted` more do not fit, keep only the half most asked for; of equals the shorter, which others go on from."""
        before = len(self._chains)
        if before + wanted <= self._max_chains:
            return 0
        ranked = sorted(self._chains.values(), key=lambda chain: (-self._decayed(now, chain), len(chain.keys), chain.keys[-1]))
        kept = ranked[: max(0, min(self._max_chains // 2, self._max_chains - wanted))]
        self._chains = {chain.keys[-1]: chain for chain in kept}
        return before - len(kept)

    def _decayed(self, now: float, chain: Chain) -> float:
        return chain.count * math.exp2((chain.at - now) / self._half_life_s)


@dataclass(slots=True, eq=False)
class Wish:
    """What `node` was asked at time `at`: to hold a copy of these keys, or, if not `more`, to let its own of them go first."""

    node: str
    keys: tuple[Key, ...]
    at: float
    more: bool
    settled: bool = False
    """A copy that arrived, or was given up."""

    def is_under_way(self, now: float) -> bool:
        return self.more and not self.settled and now - self.at < WISH_S


class Replication:
    """Turns demand into wishes, and remembers the wishes so that nothing is asked twice."""

    def __init__(self, settings: ConductorSettings, index: PrefixIndex, counts: Tally) -> None:
        """`index`: what is held, kept up to date by the conductor; `counts`: its counters."""
        self.demand = Demand(
            half_life_s=settings.replica_half_life_s,
            max_chains=settings.replica_max_chains,
            max_blocks=settings.replica_max_blocks,
        )
        self._per_copy = settings.replica_demand_per_s
        self._index = index
        self._counts = counts
        self._wishes: deque[Wish] = deque()
        """In the order of asking."""
        self._asked: dict[str, dict[Key, Wish]] = {}
        """By node and block, what was asked last."""
        self._drawn: dict[str, float] = {}
        """Blocks per second that hot chains draw from each node's copies, as of the last round."""

    def dump(self, now: float, limit: int) -> list[dict[str, Any]]:
        """JSON-able: the chains that are asked for most, with who holds them whole."""
        hottest = sorted(self.demand.chains(), key=lambda chain: -self.demand.per_s(now, chain))[:limit]
        return [
            {
                "key": chain.keys[-1].hex(),
                "blocks": len(chain.keys),
                "per_s": self.demand.per_s(now, chain),
                "holders": self._index.holders(chain.keys),
            }
            for chain in hottest
        ]

    def under_way(self, now: float) -> int:
        """Copies asked for that were neither seen to arrive nor given up."""
        return sum(wish.is_under_way(now) for wish in self._wishes)

    def targets(self, now: float, hosts: Mapping[str, str]) -> list[tuple[tuple[Key, ...], int]]:
        """Chains that should have more or fewer copies, with the number. Longest first: a copy of a chain is one of each of
        its beginnings. `hosts`: the host of each cache-node."""
        return [target for target in self.round(now, hosts) if target is not None]

    def round(self, now: float, hosts: Mapping[str, str]) -> Iterator[tuple[tuple[Key, ...], int] | None]:
        """The same piece by piece: None is a pause, after about `LOOKUPS_AT_ONCE`. What is found is as of `now`."""
        self.settle(now)
        yield None
        self.demand.forget_cold(now)
        chains = self.demand.chains()
        yield None
        yield from self._weigh(now, chains)
        fewer: list[tuple[Chain, int]] = []
        limit = len(set(hosts.values()))
        lookups = 0
        for chain in chains:
            if not self.demand.follows(chain):
                continue
            per_s = self.demand.per_s(now, chain)
            wanted, most = self._copies_for(per_s, limit), self._copies_for(per_s * SURPLUS_RATIO, limit)
            if per_s < self._per_copy and self._index.copies(chain.keys[-1]) <= most:
                continue
            kept, coming = self._standing(now, chain.keys, hosts)
            lookups += 2 * len(chain.keys)
            if len(kept) + len(coming) < wanted:
                yield chain.keys, wanted
                yield None
            elif len(kept) > most and self.demand.is_known(now, chain):
                fewer.append((chain, most))
            if lookups > LOOKUPS_AT_ONCE:
                lookups = 0
                yield None
        fewer.sort(key=lambda entry: entry[0].shrunk_at)
        for chain, most in fewer[:SHRUNK_PER_ROUND]:
            chain.shrunk_at = now
            yield chain.keys, most
            yield None

    def change(
        self, now: float, keys: tuple[Key, ...], copies: int, *, hosts: Mapping[str, str], readers: Collection[str]
    ) -> list[tuple[str, ChangeReplica]]:
        """What to ask of whom so that `copies` hosts, at least one, hold `keys`. Nothing where it was asked already.

        `hosts`: the host of each cache-node. `readers`: hosts with a prefill: only they are given copies.
        """
        self._forget_old(now)
        kept, coming = self._standing(now, keys, hosts)
        have = kept | coming
        if len(have) < copies:
            return self._ask_for(now, keys, copies - len(have), hosts, {host for host in readers if host not in have})
        if len(kept) > max(1, copies):
            return self._let_go(now, keys, len(kept) - max(1, copies), hosts, readers)
        return []

    def settle(self, now: float) -> None:
        """Take note of which copies arrived and which will not, and forget what was asked long ago."""
        for wish in self._wishes:
            if not wish.more or wish.settled:
                continue
            arrived = self._index.holds(wish.node, wish.keys[-1]) and wish.node in self._index.holders(wish.keys)
            wish.settled = arrived or now - wish.at >= WISH_S
            if wish.settled:
                self._counts.add("replicas_arrived" if arrived else "replicas_missed")
        self._forget_old(now)

    def forget(self, node: str) -> None:
        """Nothing asked of this node counts any more."""
        self._asked.pop(node, None)
        self._wishes = deque(wish for wish in self._wishes if wish.node != node)

    def check(self, now: float) -> None:
        """Assert the invariants."""
        self.demand.check()
        assert len(self._wishes) <= MAX_WISHES
        remembered = {id(wish) for wish in self._wishes}
        for node, asked in self._asked.items():
            assert all(wish.node == node and id(wish) in remembered for wish in asked.values())
            assert self._under_way_to(now, node) <= WISHES_PER_NODE

    def _copies_for(self, per_s: float, hosts: int) -> int:
        return max(1, min(hosts, 1 + int(per_s / self._per_copy)))

    def _standing(self, now: float, keys: tuple[Key, ...], hosts: Mapping[str, str]) -> tuple[set[str], set[str]]:
        """(hosts that hold all of `keys` and were not asked to let go, further hosts that were asked for a copy)."""
        kept = {hosts[node] for node in self._kept_by(keys)}
        coming = {hosts[node] for node in self._asked if (wish := self._last(node, keys)) and wish.is_under_way(now)}
        return kept, coming - kept

    def _kept_by(self, keys: tuple[Key, ...]) -> list[str]:
        return [node for node in self._index.holders(keys) if not self._is_going(node, keys)]

    def _is_going(self, node: str, keys: tuple[Key, ...]) -> bool:
        """Whether `node` was asked to let any of `keys` go."""
        asked = self._asked.get(node)
        return asked is not None and any(not wish.more for key in keys if (wish := asked.get(key)))

    def _last(self, node: str, keys: tuple[Key, ...]) -> Wish | None:
        """What was asked last of `node` about the chain `keys`, be it as part of a longer one."""
        return self._asked.get(node, {}).get(keys[-1])

    def _under_way_to(self, now: float, node: str) -> int:
        return sum(wish.node == node and wish.is_under_way(now) for wish in self._wishes)

    def _weigh(self, now: float, chains: Sequence[Chain]) -> Iterator[None]:
        self._drawn = {}
        lookups = 0
        for chain in chains:
            per_s = self.demand.per_s(now, chain)
            if per_s < self._per_copy:
                continue
            nodes = self._kept_by(chain.keys)
            blocks = len(chain.keys) - self.demand.own_start(chain.keys)
            for node in nodes:
                self._drawn[node] = self._drawn.get(node, 0.0) + per_s * blocks / len(nodes)
            lookups += 3 * len(chain.keys)
            if lookups > LOOKUPS_AT_ONCE:
                lookups = 0
                yield

    def _ask_for(
        self, now: float, keys: tuple[Key, ...], count: int, hosts: Mapping[str, str], free: set[str]
    ) -> list[tuple[str, ChangeReplica]]:
        """Copies on `count` of the hosts in `free`: first what a node was to let go, then where the least is drawn."""
        holders = self._index.holders(keys)
        if not holders:
            return []
        going = {node for node in holders if self._is_going(node, keys)}
        order = sorted(hosts, key=lambda node: (node not in going, self._drawn.get(node, 0.0), self._index.held_by(node), node))
        asked: list[tuple[str, ChangeReplica]] = []
        for node in order:
            host = hosts[node]
            if host not in free or len(asked) == count:
                continue
            last = self._last(node, keys)
            if last is not None and last.more and node not in going:
                continue
            if len(self._wishes) >= MAX_WISHES or self._under_way_to(now, node) >= WISHES_PER_NODE:
                self._counts.add("replica_wishes_deferred")
                continue
            sources = [holder for holder in holders if hosts[holder] != host]
            if not sources:
                continue
            sources.sort(key=lambda holder: (self._drawn.get(holder, 0.0), holder))
            free.discard(host)
            self._remember(Wish(node, keys, now, more=True))
            own = len(keys) - self.demand.own_start(keys)
            self._drawn[node] = self._drawn.get(node, 0.0) + self._per_copy * own
            asked.append((node, ChangeReplica(keys=keys, sources=tuple(sources[:MAX_SOURCES]))))
        return asked

    def _let_go(
        self, now: float, keys: tuple[Key, ...], count: int, hosts: Mapping[str, str], readers: Collection[str]
    ) -> list[tuple[str, ChangeReplica]]:
        """`count` copies fewer, of those that no longer chain goes on from: first where nobody reads them at home, then where
        the pool holds the most. What shorter chains share of `keys` is theirs, and stays.

        Every block keeps a copy. A longer chain that is not followed may end up with its blocks on two nodes: a shorter hit."""
        longer = self.demand.longer(keys)
        if len(longer) > MOST_LONGER:
            return []
        needed = {node for chain in longer for node in self._kept_by(chain.keys)}
        spare = [node for node in self._kept_by(keys) if node not in needed]
        spare.sort(key=lambda node: (hosts[node] in readers, -self._index.held_by(node), node))
        own = keys[self.demand.own_start(keys) :]
        asked: list[tuple[str, ChangeReplica]] = []
        for node in spare[:count]:
            if len(self._wishes) >= MAX_WISHES // 2:
                self._counts.add("replica_wishes_deferred")
                break
            self._remember(Wish(node, own, now, more=False))
            asked.append((node, ChangeReplica(keys=own, sources=())))
        return asked

    def _remember(self, wish: Wish) -> None:
        self._wishes.append(wish)
        asked = self._asked.setdefault(wish.node, {})
        for key in wish.keys:
            asked[key] = wish
        self._counts.add(f"replica_wishes[change={'more' if wish.more else 'fewer'}]")

    def _forget_old(self, now: float) -> None:
        while self._wishes and now - self._wishes[0].at >= ASK_AGAIN_S:
            wish = self._wishes.popleft()
            asked = self._asked[wish.node]
            for key in wish.keys:
                if asked.get(key) is wish:
                    del asked[key]
