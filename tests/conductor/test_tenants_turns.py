"""The wait that the conductor predicts for a tenant is the one by the turns that prefills really use, however much another
tenant has queued."""

from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest
from conductor_harness import COSTS, Cluster

from mooncake_zmq.conductor.prefills import _dues_by_turns
from mooncake_zmq.core.messages import Placed, Rejected, RejectReason
from mooncake_zmq.prefill.queue import JobQueue

CHUNK = 512
SHORT, LONG = 200, 2000
SLO_S = 30.0


def work_s(tokens):
    return COSTS.compute_s(tokens, 0)


def flooded(jobs=20, tenant="alice", slo_s=SLO_S):
    """A cluster with one prefill, in whose queue a tenant has these jobs of 10 s each."""
    cluster = Cluster(1, ttft_slo_s=slo_s)
    queued = [(0, -1.0, 10.0, tenant)] * jobs
    cluster.prefill_load("p0", jobs=queued, chunk_tokens=CHUNK)
    return cluster


def test_a_tenant_is_not_refused_for_another_ones_queue():
    placed = flooded().schedule(tokens=SHORT, tenant="bob")
    assert isinstance(placed, Placed)
    assert placed.ttft_s <= 2 * work_s(SHORT) + work_s(CHUNK)


@pytest.mark.parametrize("tenant", ["alice", ""])
def test_a_tenant_is_refused_for_its_own_queue(tenant):
    refused = flooded(tenant=tenant).schedule(tokens=SHORT, tenant=tenant)
    assert isinstance(refused, Rejected)
    assert refused.reason is RejectReason.TTFT


def test_each_job_of_a_tenant_adds_its_work_twice_while_another_one_floods():
    cluster = flooded(jobs=50, slo_s=0)
    predicted = [cluster.schedule(tokens=LONG, tenant="bob").ttft_s for _ in range(5)]
    each = [after - before for before, after in zip(predicted, predicted[1:], strict=False)]
    assert each == pytest.approx([2 * work_s(LONG)] * 4)
    assert predicted[0] == pytest.approx(2 * work_s(LONG))


def test_a_flood_of_bookings_counts_as_one_of_reports_does():
    cluster = Cluster(1, ttft_slo_s=0)
    for _ in range(100):
        cluster.schedule(tokens=LONG, tenant="alice")
    alices, bobs = (cluster.schedule(tokens=LONG, tenant=name).ttft_s for name in ("alice", "bob"))
    assert bobs == pytest.approx(2 * work_s(LONG), rel=0.01)
    assert alices > 50 * bobs


def test_a_short_prompt_goes_before_another_tenants_late_one_and_is_not_refused_for_it():
    cluster = Cluster(1, ttft_slo_s=SLO_S)
    cluster.prefill_load("p0", overtake=8.0, chunk_tokens=CHUNK)
    while isinstance(cluster.schedule(tokens=16 * LONG, tenant="alice"), Placed):
        pass
    assert isinstance(cluster.schedule(tokens=SHORT, tenant="bob"), Placed)


@dataclass(eq=False)
class Job:
    order: int
    tenant: str
    left_s: float
    rank: float = 0.0
    arrived_at: float = 0.0


@pytest.mark.parametrize("seed", range(30))
def test_the_ends_are_those_of_a_prefills_own_turns(seed):
    """But for a chunk of each tenant, in which turns are taken."""
    random, chunk_s = Random(seed), 0.25
    tenants = "abc"[: random.randint(1, 3)]
    jobs = [Job(number, random.choice(tenants), random.uniform(0.1, 5.0)) for number in range(random.randint(1, 30))]
    queue, now, ends = JobQueue[Job](4, 2), 0.0, {}
    predicted = dict(
        _dues_by_turns(0.0, [(0.0, job.left_s, job.order, job.tenant) for job in jobs], [(j.order, 0.0) for j in jobs])
    )
    for job in jobs:
        queue.arrive(job)
    while len(queue):
        while queue.activate() is not None:
            pass
        job = queue.first(lambda _: True)
        took_s = min(chunk_s, job.left_s)
        now, job.left_s = now + took_s, job.left_s - took_s
        queue.charge(job, took_s)
        if not job.left_s:
            queue.leave(job)
            ends[job.order] = now
    present = Counter(job.tenant for job in jobs)
    assert predicted == pytest.approx(ends, abs=chunk_s * len(present) + 1e-9)
