"""The prefills' queues: what each prefill last reported, less the work done since, and the jobs sent to it since that it may
not have received yet. PURE.

A booking's number identifies the placements that a report includes. One that the report names is updated by reports from then
on; one named before and no longer is computed; one never named is kept until it is older than the way to the node takes.

A queue is kept as the times at which its jobs will be done by rank. These do not change as time passes, so nodes without news
need no work. A prefill with jobs of several tenants computes them by turns (`prefill.queue`): a job waits for its own tenant's
jobs by rank, and each other tenant gets as much time meanwhile, if it has so much work.
"""

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from typing import Final

from mooncake_zmq.conductor.corrections import Accuracy, Correction, factor_of
from mooncake_zmq.conductor.ranking import Ranking
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import MAX_REPORTED, PrefillLoad

Job = tuple[float, float, int, str]
"""Rank, as a time; seconds of work left; number of the booking, 0 if unknown; tenant."""
NO_LIMIT: Final = 1 << 40
EVERYONE: Final = 1
"""The mark that every prefill has."""
GRAINS: Final = 64
"""Factors are ranked in steps of 1 / GRAINS, rounded down, so that slowly fading corrections do not change the order at each
report."""


class PrefillNode:
    """One prefill: its jobs in order of rank, each with the time at which it will be done."""

    __slots__ = (
        "chunk_s",
        "chunk_tokens",
        "closed",
        "compute",
        "draining",
        "ends",
        "factor",
        "floor_at",
        "home",
        "homes",
        "host",
        "last",
        "load",
        "load_token_s",
        "marks",
        "meets",
        "name",
        "named",
        "numbers",
        "overtake",
        "priority_s",
        "ranks",
        "room",
        "spare",
        "stays",
        "tenant",
        "tenants",
        "unseen",
        "vllm",
    )

    def __init__(
        self, name: str, host: str, *, half_life_s: float, load_token_s: float, vllm: bool, stays: bool, spare: bool
    ) -> None:
        self.name = name
        self.host = host
        self.vllm = vllm
        self.stays = stays
        """Whether it decodes what it prefills, and only that; vLLMs may."""
        self.spare = spare
        """Whether it is a vLLM that decodes what others prefill; it also prefills while no other vLLM is open for that."""
        self.ranks: list[float] = []
        self.ends: list[float] = []
        self.numbers: list[int] = []
        self.tenants: list[str] = []
        self.tenant: str | None = ""
        """The tenant of all its jobs; None if they are of several."""
        self.unseen: dict[int, tuple[float, float, float, str]] = {}
        """Bookings that no report has named yet, with the time each was made, its rank, its work and its tenant."""
        self.named: dict[int, None] = {}
        """The bookings that the last report named."""
        self.overtake = 0.0
        self.priority_s = 0.0
        self.chunk_tokens = 0
        self.chunk_s = 0.0
        """The seconds of a chunk, by the cost model."""
        self.room = NO_LIMIT
        self.draining = False
        self.meets = False
        """Whether it computes the head of a prompt while the tail is fetched."""
        self.closed = False
        """Whether it receives no new jobs: it drains, its queue is full, or it is a spare that is not needed."""
        self.compute = Correction(half_life_s)
        self.load = Correction(half_life_s)
        self.factor = 1.0
        """The ratio of the node's compute costs, corrected, to the configured costs."""
        self.floor_at = 0.0
        """The earliest time at which it is free for a job without negative priority: jobs with a rank in the past are ahead of
        such a job."""
        self.load_token_s = load_token_s
        """Seconds to load a token, corrected."""
        self.last = 0
        """The number of the turn in which it was last chosen."""
        self.home = -1
        """The bit of the cache-node on its host, the first by name; -1 if there is none."""
        self.homes = 0
        """The mask of all cache-nodes on its host; for a vLLM, of its own bit and those of its host's stores."""
        self.marks = EVERYONE
        """`homes` shifted by one bit, with `EVERYONE`."""

    def queued_s(self, now: float) -> float:
        """Return the seconds of all queued work."""
        return max(0.0, self.ends[-1] - now) if self.ends else 0.0

    def ahead_s(self, now: float, rank: float) -> float:
        """Return the seconds of work ahead of a job of this rank, where all jobs are of its tenant."""
        ahead = bisect_right(self.ranks, rank)
        return max(0.0, self.ends[ahead - 1] - now) if ahead else 0.0

    def wait_s(self, now: float, rank: float, tenant: str, work_s: float) -> float:
        """Return the seconds that a job of this rank and tenant waits until its `work_s` are done. A vLLM knows no tenants."""
        if self.tenant == tenant or self.vllm:
            return self.ahead_s(now, rank)
        own_s, begins = 0.0, now
        others_s: dict[str, float] = {}
        for job_rank, end, whose in zip(self.ranks, self.ends, self.tenants, strict=True):
            left_s, begins = max(0.0, end - begins), max(begins, end)
            if whose != tenant:
                others_s[whose] = others_s.get(whose, 0.0) + left_s
            elif job_rank <= rank:
                own_s += left_s
        return own_s + _others_turns_s(max(own_s + work_s, self.chunk_s / 2), others_s.values())

    def rank(self, now: float, work_s: float, priority: int) -> float:
        """Return the rank of a job by the node's queue order, see `core.order`."""
        return now + self.overtake * work_s + self.priority_s * priority

    def settle(self, now: float) -> None:
        """Remove finished jobs from the queue."""
        if self.ends and self.ends[0] <= now:
            done = bisect_right(self.ends, now)
            del self.ranks[:done], self.ends[:done], self.numbers[:done], self.tenants[:done]

    def behind_s(self, now: float, rank: float) -> float:
        """Return the seconds of the longest job that a job of this rank would go before; 0 if there is none."""
        ends, longest = self.ends, 0.0
        for place in range(bisect_right(self.ranks, rank), len(ends)):
            begins = max(now, ends[place - 1]) if place else now
            longest = max(longest, ends[place] - begins)
        return longest


class Prefills:
    """All prefills, by name, by host, and in the orders that a search follows."""

    def __init__(self, settings: ConductorSettings, costs: Costs, accuracy: Accuracy) -> None:
        self.nodes: list[PrefillNode] = []
        """All prefills, in name order."""
        self.by_name: dict[str, PrefillNode] = {}
        self.by_host: dict[str, list[PrefillNode]] = {}
        self.quickest: Ranking[PrefillNode] = Ranking()
        """The open prefills by their factor, rounded down."""
        self.freest: Ranking[PrefillNode] = Ranking()
        """The open prefills by `floor_at`."""
        self._spares_needed = True
        """Whether no vLLM other than spares is open for prompts."""
        self.turns: dict[PrefillNode, None] = {}
        """All prefills, the one chosen longest ago first, and equals in name order."""
        self.meeting: set[PrefillNode] = set()
        """The prefills that compute the head of a prompt while its tail is fetched."""
        self.least_load_s = costs.load_s(1)
        """A lower bound of the seconds in which any prefill loads a token."""
        self._unchecked = 0
        self._turn = 0
        self._half_life_s = settings.correction_half_life_s
        self._grace_s = settings.report_grace_s
        self._load_token_s = costs.load_s(1)
        self._token_s = costs.prefill_token_s
        self._costs = costs
        self._accuracy = accuracy

    def join(self, name: str, host: str, *, vllm: bool = False, stays: bool = False, spare: bool = False) -> PrefillNode:
        """Add a prefill."""
        node = PrefillNode(
            name,
            host,
            half_life_s=self._half_life_s,
            load_token_s=self._load_token_s,
            vllm=vllm,
            stays=stays or spare,
            spare=spare,
        )
        insort(self.nodes, node, key=lambda each: each.name)
        self.by_name[name] = node
        self.by_host.setdefault(host, []).append(node)
        self.turns[node] = None
        self.least_load_s = min(self.least_load_s, node.load_token_s)
        self.turns = dict.fromkeys(sorted(self.turns, key=lambda each: (each.last, each.name)))
        self.quickest.set(node, 1.0)
        self.freest.set(node, 0.0)
        self._open_or_close(node)
        return node

    def leave(self, node: PrefillNode) -> None:
        """Remove a prefill."""
        self.nodes.remove(node)
        del self.by_name[node.name], self.turns[node]
        mine = self.by_host[node.host]
        mine.remove(node)
        if not mine:
            del self.by_host[node.host]
        self.meeting.discard(node)
        self.quickest.remove(node)
        self.freest.remove(node)
        self._call_spares()

    # --- reports

    def report(self, now: float, node: PrefillNode, load: PrefillLoad) -> list[tuple[int, float]]:
        """Take in a node's report. Return the bookings that it names with the time at which each will be computed, and with
        `now` those that have been computed."""
        self._correct(now, node, load)
        node.room, node.draining = load.room, load.draining
        node.overtake, node.priority_s = load.overtake, load.priority_s
        if node.meets != load.meets:
            node.meets = load.meets
            self.meeting ^= {node}
        if node.chunk_tokens != load.chunk_tokens:
            node.chunk_tokens, node.chunk_s = load.chunk_tokens, self._costs.compute_s(load.chunk_tokens, 0)
        if not (load.jobs or node.ends or node.named or node.unseen):
            self._open_or_close(node)
            return []
        named = dict.fromkeys([job.booking for job in load.jobs if job.booking])
        complete = len(load.jobs) < MAX_REPORTED
        dues = [(number, now) for number in node.named if number not in named] if complete else []
        node.named = named
        jobs: list[Job] = [(now + job.rank_s, job.left_s, job.booking, job.tenant) for job in load.jobs]
        if node.unseen:
            horizon = now - self._grace_s
            node.unseen = {n: job for n, job in node.unseen.items() if n not in named and job[0] > horizon}
            jobs += [(rank, work_s, number, tenant) for number, (_, rank, work_s, tenant) in node.unseen.items()]
        jobs.sort()
        node.ranks, node.numbers = [job[0] for job in jobs], [job[2] for job in jobs]
        node.tenants = [job[3] for job in jobs]
        _set_tenant(node)
        node.ends = ends = []
        end = now
        for _, left_s, number, _ in jobs:
            end += left_s
            ends.append(end)
            if number in named:
                dues.append((number, end))
        if node.tenant is None and dues and not node.vllm:
            dues = _dues_by_turns(now, jobs, dues)
        self._retell(now, node)
        return dues

    def book(self, now: float, node: PrefillNode, work_s: float, priority: int, number: int, tenant: str) -> None:
        """Add a job that was sent to a prefill."""
        rank = node.rank(now, work_s, priority)
        node.settle(now)
        ends, place = node.ends, bisect_right(node.ranks, rank)
        node.ranks.insert(place, rank)
        node.numbers.insert(place, number)
        node.tenants.insert(place, tenant)
        if node.tenant != tenant:
            _set_tenant(node)
        ends.insert(place, (ends[place - 1] if place else now) + work_s)
        for later in range(place + 1, len(ends)):
            ends[later] += work_s
        node.unseen[number] = now, rank, work_s, tenant
        self._retell(now, node)

    def unbook(self, now: float, node: PrefillNode, number: int) -> None:
        """Remove a job that ended or will never arrive; one that a report named is left to the reports."""
        if node.unseen.pop(number, None) is None:
            return
        node.settle(now)
        if number in node.numbers:
            place = node.numbers.index(number)
            ends = node.ends
            end = ends[place - 1] if place else now
            left_s = ends[place] - end
            del node.numbers[place], node.ranks[place], node.tenants[place], ends[place]
            if node.tenant is None:
                _set_tenant(node)
            for later in range(place, len(ends)):
                ends[later] = end = max(end, ends[later] - left_s)  # differences are rounded
        self._retell(now, node)

    def chosen(self, node: PrefillNode) -> None:
        """Note that a prefill was chosen: it goes to the end of the turns."""
        self._turn += 1
        node.last = self._turn
        del self.turns[node]
        self.turns[node] = None

    def close(self, node: PrefillNode) -> None:
        """Close a node for new jobs because it was asked to drain."""
        node.draining = True
        self._open_or_close(node)

    # --- queries

    def has_other(self, node: PrefillNode, without: tuple[str, ...]) -> bool:
        """Return whether another node of this kind, vLLM or not, does not drain; those in `without` do not count."""
        others = [each for each in self.nodes if each is not node and each.vllm == node.vllm and each.name not in without]
        return any([not each.draining for each in others])

    def shortest_queue_s(self, now: float) -> float:
        """Return the seconds of the shortest queue."""
        return min([node.queued_s(now) for node in self.nodes], default=0.0)

    def check(self, now: float) -> None:
        """Assert that the orders match the state of the nodes."""
        assert [node.name for node in self.nodes] == sorted(self.by_name)
        assert self.meeting == {node for node in self.nodes if node.meets}
        assert list(self.turns) == sorted(self.nodes, key=lambda node: (node.last, node.name))
        self.quickest.check()
        self.freest.check()
        opened = {node.name for node in self.nodes if not node.closed}
        floors = {entry.name: entry.figure for entry in self.freest.entries}
        factors = {entry.name: entry.figure for entry in self.quickest.entries}
        assert floors.keys() == factors.keys() == opened
        for node in self.nodes:
            assert self.by_name[node.name] is node
            assert self.least_load_s <= node.load_token_s
            assert node in self.by_host[node.host]
            assert node.ranks == sorted(node.ranks)
            assert node.ends == sorted(node.ends)
            assert len(node.ranks) == len(node.ends) == len(node.numbers) == len(node.tenants)
            assert node.tenant is None or all(tenant == node.tenant for tenant in node.tenants)
            unneeded = node.spare and any(other.vllm and not (other.spare or other.draining) for other in self.nodes)
            assert node.closed == (node.draining or unneeded or node.room <= len(node.unseen))
            assert not node.unseen.keys() & node.named.keys()
            if not node.closed:
                assert factors[node.name] == _grain(node.factor)
                assert floors[node.name] == node.floor_at
            assert max(0.0, node.floor_at - now) <= node.ahead_s(now, now)

    # --- leaves

    def _correct(self, now: float, node: PrefillNode, load: PrefillLoad) -> None:
        before = node.compute.factor
        if node.compute.report(now, load.compute):
            self._accuracy.add("compute", load.compute.seconds, before * load.compute.predicted_s)
        factor = factor_of(load.token_s, self._token_s, node.compute.factor)
        if factor != node.factor:
            node.factor = factor
            if not node.closed:
                self.quickest.set(node, _grain(node.factor))
        before = node.load.factor
        if node.load.report(now, load.load):
            self._accuracy.add("load", load.load.seconds, before * load.load.predicted_s)
        node.load_token_s = self._load_token_s * node.load.factor
        self._unchecked += 1
        if node.load_token_s < self.least_load_s or self._unchecked > len(self.nodes):
            self._unchecked = 0
            self.least_load_s = min([each.load_token_s for each in self.nodes])

    def _retell(self, now: float, node: PrefillNode) -> None:
        node.floor_at = node.ends[bisect_right(node.ranks, now) - 1] if node.ranks and node.ranks[0] <= now else 0.0
        self._open_or_close(node)
        if not node.closed:
            self.freest.set(node, node.floor_at)

    def _call_spares(self) -> None:
        """Open the spares when no other vLLM is open for prompts, and close them when one is."""
        needed = not any(node.vllm and not (node.spare or node.draining) for node in self.nodes)
        if needed != self._spares_needed:
            self._spares_needed = needed
            for node in self.nodes:
                if node.spare:
                    self._open_or_close(node)

    def _open_or_close(self, node: PrefillNode) -> None:
        if node.vllm and not node.spare:
            self._call_spares()
        closed = node.draining or node.room <= len(node.unseen) or (node.spare and not self._spares_needed)
        if closed == node.closed:
            return
        node.closed = closed
        if closed:
            self.quickest.remove(node)
            self.freest.remove(node)
        else:
            self.quickest.set(node, _grain(node.factor))
            self.freest.set(node, node.floor_at)


def _set_tenant(node: PrefillNode) -> None:
    names = dict.fromkeys(node.tenants)
    node.tenant = None if len(names) > 1 else next(iter(names), "")


def _others_turns_s(turn_s: float, others_s: Iterable[float]) -> float:
    """Return the seconds that other tenants, of so much work each, get until one has got `turn_s`: tenants share a prefill's
    time equally."""
    return sum([min(work_s, turn_s) for work_s in others_s])


def _dues_by_turns(now: float, jobs: Sequence[Job], dues: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the dues of a prefill that has jobs of several tenants."""
    whole_s: dict[str, float] = {}
    so_far_s: dict[str, float] = {}
    ends: dict[int, float] = {}
    for _, left_s, _, tenant in jobs:
        whole_s[tenant] = whole_s.get(tenant, 0.0) + left_s
    for _, left_s, number, tenant in jobs:
        so_far_s[tenant] = own_s = so_far_s.get(tenant, 0.0) + left_s
        others_s = [work_s for other, work_s in whole_s.items() if other != tenant]
        ends[number] = now + own_s + _others_turns_s(own_s, others_s)
    return [(number, ends.get(number, due)) for number, due in dues]


def _grain(factor: float) -> float:
    return math.floor(factor * GRAINS) / GRAINS
