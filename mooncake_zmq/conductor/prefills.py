"""The prefills' queues: what each reported last, worked off as time passes, and what was sent there that it cannot know yet.
PURE.

A booking's number says exactly which of our placements a report counts: one that it names is the report's from then on; one it
named before and no more is computed; one it never named is kept apart until it is older than the way there takes.
"""

from bisect import insort
from collections.abc import Iterable

import numpy as np

from mooncake_zmq.conductor.columns import Cells, Columns, Floats
from mooncake_zmq.conductor.corrections import Accuracy, Correction
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import MAX_REPORTED, PrefillLoad

Job = tuple[float, float, int]
"""Rank, as a time; seconds of work left; number of the booking, 0 if it is not known."""
NO_LIMIT = float(1 << 40)


class PrefillNode:
    """One prefill: its jobs in order of rank, as of `as_of`."""

    __slots__ = (
        "as_of",
        "compute",
        "draining",
        "host",
        "jobs",
        "load",
        "name",
        "named",
        "overtake",
        "priority_s",
        "room",
        "slot",
        "unseen",
    )

    def __init__(self, name: str, host: str, half_life_s: float) -> None:
        self.name = name
        self.host = host
        self.slot = 0
        self.jobs: list[Job] = []
        self.as_of = 0.0
        self.unseen: dict[int, tuple[float, Job]] = {}
        """Bookings that no report has named yet: when each was made, and its job."""
        self.named: dict[int, None] = {}
        """Bookings that the last report named."""
        self.overtake = 0.0
        self.priority_s = 0.0
        self.room = NO_LIMIT
        self.draining = False
        self.compute = Correction(half_life_s)
        self.load = Correction(half_life_s)

    @property
    def closed(self) -> bool:
        """It takes nothing new, or could not queue it."""
        return self.draining or self.room <= len(self.unseen)

    def settle(self, now: float) -> None:
        """Work off the front of the queue, a second per second."""
        elapsed, self.as_of = now - self.as_of, now
        done = 0
        for rank, left, number in self.jobs:
            if left > elapsed:
                self.jobs[done] = rank, left - elapsed, number
                break
            elapsed -= left
            done += 1
        del self.jobs[:done]


class Prefills(Columns[PrefillNode]):
    """All prefills. `work_s` as of `as_of`; `compute` the correction; `load_token_s` corrected; `closed` 0, or inf if it takes
    nothing; `home` the bits of the cache-nodes on its host, `last` the turn it was chosen in."""

    work_s: Floats
    as_of: Floats
    compute: Floats
    load_token_s: Floats
    closed: Floats
    last: Floats
    overtake: Floats
    priority_s: Floats

    def __init__(self, settings: ConductorSettings, costs: Costs, accuracy: Accuracy) -> None:
        self._half_life_s = settings.correction_half_life_s
        self._grace_s = settings.report_grace_s
        self._load_token_s = costs.load_s(1)
        self._accuracy = accuracy
        self._latest_rank = -np.inf
        self._ordered = 0
        """Nodes where later jobs may overtake."""
        self._ranks = Cells(np.inf)
        self._lefts = Cells(0.0)
        self._dirty: dict[str, None] = {}
        """Nodes whose cells do not tell their jobs; cells are needed only where jobs overtake."""
        super().__init__(
            work_s=0.0,
            as_of=0.0,
            compute=1.0,
            load_token_s=self._load_token_s,
            closed=0.0,
            last=0.0,
            overtake=0.0,
            priority_s=0.0,
        )

    def join(self, name: str, host: str) -> None:
        """A conversation began."""
        node = PrefillNode(name, host, self._half_life_s)
        self.insert(node)
        for cells in (self._ranks, self._lefts):
            cells.insert(node.slot)

    def leave(self, node: PrefillNode) -> None:
        """A conversation ended."""
        for cells in (self._ranks, self._lefts):
            cells.delete(node.slot)
        self._dirty.pop(node.name, None)
        self._ordered -= node.overtake > 0
        self.delete(node)

    # --- what is told

    def report(self, now: float, node: PrefillNode, load: PrefillLoad) -> list[tuple[int, float]]:
        """The node's own figures. Returns the bookings that it names, with when each will be computed, and with `now` those
        that are computed by now."""
        self._correct(now, node, load)
        node.room, node.draining = float(load.room), load.draining
        self._set_order(node, load)
        if not (load.jobs or node.jobs or node.named or node.unseen):
            node.as_of = self.as_of[node.slot] = now
            self._set_closed(node)
            return []
        named = dict.fromkeys(job.booking for job in load.jobs if job.booking)
        horizon = now - self._grace_s
        node.unseen = {n: (at, job) for n, (at, job) in node.unseen.items() if n not in named and at > horizon}
        complete = len(load.jobs) < MAX_REPORTED
        computed = [(number, now) for number in node.named if number not in named] if complete else []
        node.named = named
        jobs: list[Job] = [(now + job.rank_s, job.left_s, job.booking) for job in load.jobs]
        jobs += [job for _, job in node.unseen.values()]
        jobs.sort()
        node.jobs, node.as_of = jobs, now
        self._retell(node)
        return computed + self._dues(now, jobs, named)

    def book(self, now: float, node: PrefillNode, job: Job) -> None:
        """A job was sent there."""
        node.settle(now)
        insort(node.jobs, job)
        node.unseen[job[2]] = now, job
        self._retell(node)

    def unbook(self, now: float, node: PrefillNode, number: int) -> None:
        """A job ended, or will never come; one that a report named is left to the reports."""
        if node.unseen.pop(number, None) is not None:
            node.settle(now)
            node.jobs = [job for job in node.jobs if job[2] != number]
            self._retell(node)

    def close(self, node: PrefillNode) -> None:
        """It was asked to leave: it takes nothing new."""
        node.draining = True
        self._set_closed(node)

    # --- what is asked

    def wait_s(self, now: float, work_s: Floats, priority: int) -> Floats:
        """By slot: how long a job of `work_s` would wait there for those ahead of it."""
        if not self._ordered and not priority and self._latest_rank <= now:
            return self.queued_s(now)
        self._fill_cells()
        ranks = now + self.overtake * work_s + self.priority_s * priority
        ahead = (self._lefts.rows * (self._ranks.rows <= ranks)).sum(axis=0)
        waiting: Floats = np.maximum(ahead - (now - self.as_of), 0.0)
        return waiting

    def rank(self, now: float, node: PrefillNode, work_s: float, priority: int) -> float:
        """The node's rule of order, see `core.order`."""
        return now + node.overtake * work_s + node.priority_s * priority

    def queued_s(self, now: float) -> Floats:
        """By slot: all work that is there."""
        queued: Floats = np.maximum(self.work_s - (now - self.as_of), 0.0)
        return queued

    def check(self, now: float) -> None:
        """The columns tell what the nodes do."""
        assert [node.name for node in self.nodes] == sorted(self.by_name)
        assert self._ordered == sum(node.overtake > 0 for node in self.nodes)
        for slot, node in enumerate(self.nodes):
            assert node.slot == slot
            assert self.by_name[node.name] is node
            assert node.jobs == sorted(node.jobs)
            assert abs(self.work_s[slot] - sum(job[1] for job in node.jobs)) < 1e-6
            assert self.as_of[slot] == node.as_of
            assert (self.closed[slot] > 0) == node.closed
            assert not node.unseen.keys() & node.named.keys()
        self._fill_cells()
        for slot, node in enumerate(self.nodes):
            count = len(node.jobs)
            assert list(self._ranks.rows[:count, slot]) == [job[0] for job in node.jobs]
            assert list(self._lefts.rows[:count, slot]) == [job[1] for job in node.jobs]
            assert not self._lefts.rows[count:, slot].any()

    # --- leaves

    def _correct(self, now: float, node: PrefillNode, load: PrefillLoad) -> None:
        for kind, correction, measured in (("compute", node.compute, load.compute), ("load", node.load, load.load)):
            before = correction.factor
            if correction.report(now, measured):
                self._accuracy.add(kind, measured.seconds, before * measured.predicted_s)
        self.compute[node.slot] = node.compute.factor
        self.load_token_s[node.slot] = self._load_token_s * node.load.factor

    def _set_order(self, node: PrefillNode, load: PrefillLoad) -> None:
        if (node.overtake, node.priority_s) != (load.overtake, load.priority_s):
            self._ordered += (load.overtake > 0) - (node.overtake > 0)
            node.overtake, node.priority_s = load.overtake, load.priority_s
            self.overtake[node.slot], self.priority_s[node.slot] = load.overtake, load.priority_s

    def _dues(self, now: float, jobs: Iterable[Job], named: dict[int, None]) -> list[tuple[int, float]]:
        dues: list[tuple[int, float]] = []
        at = now
        for _, left, number in jobs:
            at += left
            if number in named:
                dues.append((number, at))
        return dues

    def _retell(self, node: PrefillNode) -> None:
        slot, jobs = node.slot, node.jobs
        self.work_s[slot] = sum([job[1] for job in jobs])
        self.as_of[slot] = node.as_of
        if jobs and jobs[-1][0] > self._latest_rank:
            self._latest_rank = jobs[-1][0]
        self._dirty[node.name] = None
        self._set_closed(node)

    def _set_closed(self, node: PrefillNode) -> None:
        self.closed[node.slot] = np.inf if node.closed else 0.0

    def _fill_cells(self) -> None:
        for name in self._dirty:
            node = self.by_name[name]
            count = len(node.jobs)
            self._ranks.reach(count)
            self._lefts.reach(count)
            for cells, empty, position in ((self._ranks, np.inf, 0), (self._lefts, 0.0, 1)):
                column = cells.rows[:, node.slot]
                column[:count] = [job[position] for job in node.jobs]
                column[count:] = empty
        self._dirty.clear()
