"""Algorithm 1 of the Mooncake paper for all prefills at once: who computes, which blocks are reused, where from. PURE.

For every prefill the time to the first token is predicted: the work queued ahead, then computing what is not reused while the
rest is loaded. Where another host holds more of the prompt, fetching that is weighed against computing it. The smallest wins;
of near ties the one chosen longest ago, so that load and blocks spread. The other policies are what the paper compares with.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from mooncake_zmq.conductor.columns import Floats
from mooncake_zmq.conductor.prefills import PrefillNode, Prefills
from mooncake_zmq.conductor.prefix_index import PrefixIndex
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.conductor.transfers import Transfers
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import Schedule

MAX_SOURCES = 4
"""Cache-nodes named in one plan: the one to fetch from, and three more should it be gone or have evicted."""


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """`work_s`: fetch, load and compute. `sources`: the bits of the cache-nodes to fetch from
    what the host misses of `reuse_blocks`, none to fetch nothing; `fetch_s`: of `work_s`, what moves between hosts."""

    node: PrefillNode
    reuse_blocks: int
    sources: tuple[int, ...]
    queue_s: float
    work_s: float
    fetch_s: float
    home: int
    stages: tuple[PrefillNode, ...] = ()
    """Those that compute the later layers, see `pipeline`."""
    share_s: float = 0.0
    """What each of them and `node` compute, if there are any."""

    @property
    def ttft_s(self) -> float:
        """Predicted time to the first token."""
        return self.queue_s + self.work_s


@dataclass(slots=True)
class Plans:
    """By slot of the prefills; `fetches` None: none does. `source`: the bit that all would fetch from."""

    local: Floats | None
    queue_s: Floats
    work_s: Floats
    ttft_s: Floats
    fetches: NDArray[np.bool_] | None = None
    best: int = 0
    source: int = -1
    fetch_s: Floats | None = None
    holders: int = 0
    digest: int = 0
    """Of the request id, for a choice at random."""


def reusable_blocks(*, tokens: int, keys: int, block_tokens: int) -> int:
    """Blocks that may be reused at most: complete ones, leaving at least one token to compute."""
    return max(0, min(keys, (tokens - 1) // block_tokens))


class Router:
    """Chooses the prefill. Owns where each prefill's blocks are (`home`) and who was chosen last."""

    def __init__(
        self,
        settings: ConductorSettings,
        costs: Costs,
        *,
        block_tokens: int,
        prefills: Prefills,
        index: PrefixIndex,
        transfers: Transfers,
    ) -> None:
        self._settings = settings
        self._costs = costs
        self._block_tokens = block_tokens
        self._prefills = prefills
        self._index = index
        self._transfers = transfers
        self._tie = 1 + (settings.tie_ratio if settings.policy in ("global", "local", "load") else 0.0)
        self._turn = 0.0
        self._homes = np.zeros((1, 0), np.intp)
        """Rows: the bits of the cache-nodes on each prefill's host; most hosts have one."""
        self._pooled = np.zeros(0, np.bool_)
        """Prefills whose host has a cache-node."""
        self._runs = np.zeros(1)
        self._on_disk = np.zeros(1)
        self._named = np.zeros(1)
        """The turn in which a cache-node was last named first as a source, by bit."""
        self._order = np.zeros(1)
        """Below 1, in the order of the cache-nodes' names: decides between those named equally long ago."""

    def settle_homes(self, bits: dict[str, list[int]]) -> None:
        """Who is there has changed. `bits`: those of the cache-nodes, by host."""
        self._transfers.widen(self._index.width)
        width, nowhere = self._transfers.width, self._transfers.nowhere
        most = max((len(each) for each in bits.values()), default=1)
        rows = [[nowhere] * most if node.host not in bits else bits[node.host] for node in self._prefills.nodes]
        rows = [row + row[:1] * (most - len(row)) for row in rows]
        self._homes = np.array(rows, np.intp).reshape(-1, most).T.copy()
        self._pooled = self._homes[0] != nowhere
        self._runs, self._on_disk = np.zeros(width), np.zeros(width)
        self._named = np.concatenate((self._named, np.zeros(max(0, width - len(self._named)))))
        self._order = np.zeros(width)
        for place, bit in enumerate(sorted((bit for each in bits.values() for bit in each), key=self._index.name_of)):
            self._order[bit] = place / width

    def forget_source(self, bit: int) -> None:
        """Its cache-node left."""
        self._named[bit : bit + 1] = 0.0

    def plan(self, now: float, schedule: Schedule) -> Plans:
        """What each prefill would do with this prompt, and how long it would take."""
        limit = reusable_blocks(tokens=schedule.tokens, keys=len(schedule.keys), block_tokens=self._block_tokens)
        keys = schedule.keys if limit == len(schedule.keys) else schedule.keys[:limit]
        self._runs.fill(0.0)
        best, holders = self._index.runs(keys, self._runs)
        if not best:
            local, work = None, self._work(schedule.tokens, 0)
        else:
            self._index.touch(keys[:best])
            local = self._at_home(self._runs)
            work = self._work(schedule.tokens, local)
            if self._index.disk_blocks(keys[:best], self._on_disk):
                work = work + self._promote_s(now, local)
        plans = Plans(local, work, work, work, best=best, holders=holders)
        if self._settings.policy == "random":
            plans.digest = xxhash.xxh3_64_intdigest(schedule.request_id.encode())
        if local is not None and self._fetches and len(local) and local[local.argmin()] < best:
            self._weigh_fetching(now, schedule.tokens, plans, local)
        plans.queue_s = self._prefills.wait_s(now, plans.work_s, schedule.priority)
        plans.ttft_s = plans.queue_s + plans.work_s
        return plans

    def choose(self, plans: Plans, barred: Sequence[str]) -> PrefillChoice | None:
        """By the policy; prefills in `barred` never."""
        score = self._score(plans) + self._prefills.closed
        for name in barred:
            node = self._prefills.by_name.get(name)
            if node is not None:
                score[node.slot] = np.inf
        if not len(score):
            return None
        least = float(score[score.argmin()])
        if least == math.inf:
            return None
        tied = (score <= least * self._tie).nonzero()[0]
        slot = int(tied[0]) if len(tied) == 1 else int(tied[self._prefills.last[tied].argmin()])
        return self._chosen(plans, slot)

    def chosen(self, choice: PrefillChoice) -> None:
        """It was placed."""
        self._turn += 1
        self._prefills.last[choice.node.slot] = self._turn
        if choice.sources:
            self._named[choice.sources[0]] = self._turn

    # --- leaves

    @property
    def _fetches(self) -> bool:
        return self._settings.policy == "global"

    def _score(self, plans: Plans) -> Floats:
        """By slot; the smallest is chosen."""
        match self._settings.policy:
            case "match":
                return np.zeros(len(plans.ttft_s)) if plans.local is None else -plans.local
            case "load":
                return plans.queue_s
            case "round-robin":
                return self._prefills.last
            case "random":
                count = len(plans.ttft_s)
                return ((np.arange(count) + plans.digest % max(1, count)) % max(1, count)).astype(np.float64)
            case _:
                return plans.ttft_s

    def _chosen(self, plans: Plans, slot: int) -> PrefillChoice:
        fetches = plans.fetches is not None and bool(plans.fetches[slot])
        local = 0 if plans.local is None else int(plans.local[slot])
        return PrefillChoice(
            node=self._prefills.nodes[slot],
            reuse_blocks=plans.best if fetches else local,
            sources=self._sources(plans, slot) if fetches else (),
            queue_s=float(plans.queue_s[slot]),
            work_s=float(plans.work_s[slot]),
            fetch_s=float(plans.fetch_s[slot]) if fetches and plans.fetch_s is not None else 0.0,
            home=int(self._homes[0, slot]),
        )

    def _at_home(self, by_bit: Floats) -> Floats:
        homes = self._homes
        found: Floats = by_bit[homes[0]] if len(homes) == 1 else by_bit[homes].max(axis=0)
        return found

    def _work(self, tokens: int, blocks: Floats | int) -> Floats:
        """Computing and loading overlap, so the longer of the two."""
        costs, prefills = self._costs, self._prefills
        a, b = costs.prefill_token_s, costs.prefill_square_s
        whole = (a + b * tokens) * tokens
        if isinstance(blocks, int) and not blocks:
            return prefills.compute * whole
        prefix = blocks * self._block_tokens
        work: Floats = np.maximum(prefills.compute * (whole - (a + b * prefix) * prefix), prefills.load_token_s * prefix)
        return work

    def _promote_s(self, now: float, local: Floats) -> Floats:
        rates = self._transfers.disk_s(now)
        seconds = self._at_home(self._on_disk * rates)
        self._on_disk.fill(0.0)
        return np.where(local > 0, seconds, 0.0)

    def _weigh_fetching(self, now: float, tokens: int, plans: Plans, local: Floats) -> None:
        """Beyond Algorithm 1: where even the estimate says that computing is quicker, nothing is fetched."""
        plans.source = source = self._first_source(plans.holders, plans.best)
        rates, behind = self._transfers.block_s(now, source), self._transfers.behind_s(now, source)
        rate = rates if isinstance(rates, float) else rates[self._homes[0]]
        fetch_s = (plans.best - local) * rate
        fetched_s = self._work(tokens, plans.best) + fetch_s + behind[self._homes[0]]
        fetches = (fetched_s < plans.work_s) & self._pooled & (local < plans.best)
        threshold = self._settings.kvcache_balancing_threshold
        if threshold != "auto":
            fetches &= (local == 0) if threshold == np.inf else (local * threshold <= plans.best)
        plans.fetches, plans.fetch_s = fetches, fetch_s
        plans.work_s = np.where(fetches, fetched_s, plans.work_s)

    def _first_source(self, holders: int, best: int) -> int:
        """Of those that hold the longest run the one named longest ago."""
        if not holders & (holders - 1):
            return holders.bit_length() - 1
        at = (self._runs == best).nonzero()[0]
        return int(at[(self._named[at] + self._order[at]).argmin()])

    def _sources(self, plans: Plans, slot: int) -> tuple[int, ...]:
        """The one to fetch from, and further cache-nodes of other hosts that hold more than the prefill's own: the longest
        first."""
        runs, home = self._runs, self._homes[:, slot].tolist()
        better = (runs > (0.0 if plans.local is None else plans.local[slot])).nonzero()[0]
        if len(better) > 1:
            better = better[np.lexsort((self._named[better] + self._order[better], -runs[better]))]
        others = [bit for bit in better[: MAX_SOURCES + len(home)].tolist() if bit not in home and bit != plans.source]
        return (plans.source, *others[: MAX_SOURCES - 1])
