"""Reused blocks of a prefill: own hits, the pool's leased blocks, and blocks that could not be loaded. PURE."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

from mooncake_zmq.core.actor import Effect
from mooncake_zmq.core.actor_parts import Ids, Tally
from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import BlockLoad, ChunkComputed, StageComputed
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.node.client import PoolClient
from mooncake_zmq.prefill.job import Job, JobState
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.prefill.slab import Slab
from mooncake_zmq.prefill.workload import Workload

MAX_FORGONE = 256
"""Most requests remembered whose reused blocks could not be read; beyond that the oldest are forgotten."""
PREPARING = JobState.PREPARING
LEASE_ENDED = "lease ended before the prefix was loaded"


class Reusing(Protocol):
    """A job or a stage that begins with blocks which it does not compute."""

    @property
    def prefix(self) -> list[SlotRef]:
        """Reused blocks, in order, the own hits first."""

    @property
    def own_slots(self) -> list[int]:
        """Slab slots of the own hits."""

    @property
    def lease_id(self) -> int | None:
        """Lease under which the other blocks are read."""


class Reuse:
    """Manage everything that the jobs of one prefill reuse, and own their leases."""

    def __init__(
        self,
        *,
        settings: PrefillSettings,
        layout: BlockLayout,
        slab: Slab,
        pool: PoolClient,
        workload: Workload,
        ids: Ids,
        counts: Tally,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._slab = slab
        self._pool = pool
        self._workload = workload
        self._ids = ids
        self._counts = counts
        self._leases: dict[int, Job] = {}
        """Jobs by the lease requested or held for each."""
        self._forgone: OrderedDict[str, None] = OrderedDict()
        """Requests whose reused blocks could not be read, here or by the decode: their next attempt here computes them.
        Otherwise blocks that are intact but unreachable, and hence not reported, would fail one attempt after another."""

    def own_hits(self, keys: Sequence[bytes]) -> list[int]:
        """Return the slots of the leading run of these blocks in the slab, if reuse is allowed."""
        return self._slab.slots.leading_run(keys if self._settings.own_reuse else ())

    def begin(self, now: float, job: Job) -> list[Effect]:
        """Pin a job's own hits and lease more from the pool."""
        request = job.request
        scored = request.prompt_logprobs is not None  # each of its tokens has to be computed
        reusable = () if scored else request.keys[: (job.length - 1) // self._layout.block_tokens]
        own = self.own_hits(reusable)
        self._slab.slots.pin(own)
        job.own_slots += own
        job.prefix += self._slab.refs(own)
        forgone = request.request_id in self._forgone
        self._forgone.pop(request.request_id, None)
        job.computes_anew = forgone or scored
        wanted = () if forgone else reusable[len(job.prefix) :]
        if job.group is not None:
            job.group.keys = () if forgone else reusable
        promised = bool(wanted) and len(job.prefix) < request.reuse_blocks
        if not wanted or not (self._pool.node is not None or (promised and not job.waited)):
            job.leased = True
            return []
        job.lease_id = self._ids.new()
        self._leases[job.lease_id] = job
        return self._pool.lease(
            now,
            job.lease_id,
            wanted,
            job.sources,
            fetch=promised,  # from other hosts, or from this host's SSD
            compute_s=self._workload.block_s(now),
            wait_s=self._workload.spared_s(now, request, job.length, len(job.prefix)),
        )

    def take(self, lease_id: int, sources: tuple[SlotRef, ...], remote: int) -> list[Effect]:
        """Reuse the leased blocks, of which the last `remote` came from other hosts; none if the pool did not answer."""
        job = self._leases.get(lease_id)
        if job is None or job.state is not PREPARING or job.leased:
            return self._pool.release(lease_id)
        job.leased = True
        job.estimate = None
        sources = sources[: (job.length - 1) // self._layout.block_tokens - len(job.prefix)]  # no more than requested
        remote = min(remote, len(sources))
        job.prefix += sources
        job.remote_blocks += remote
        job.local_blocks += len(sources) - remote
        return []

    def pool_lost(self, job: Job) -> None:
        """Stop waiting for the answer of a pool that is gone. To be called after the pool's client was notified."""
        if job.lease_id is not None and not job.leased and not self._pool.wants(job.lease_id):
            job.leased, job.estimate = True, None

    def drop_expired(self, now: float, job: Job) -> None:
        """Count the leased blocks of a job as a miss if their lease has ended or nearly so."""
        if len(job.prefix) > len(job.own_slots) and self._pool.reading_time_s(now, job.lease_id) <= 0:
            del job.prefix[len(job.own_slots) :]
            job.local_blocks = job.remote_blocks = 0
            self._counts.add("prefix_leases_expired")

    def time_s(self, now: float, reusing: Reusing) -> float:
        """Return how long loading the reused blocks may take; 0 if their lease has ended or nearly so."""
        most_s = self._settings.work_deadline_s
        leased = len(reusing.prefix) > len(reusing.own_slots)
        return min(most_s, self._pool.reading_time_s(now, reusing.lease_id)) if leased else most_s

    def loads(self, reusing: Reusing, layers: range) -> tuple[BlockLoad, ...]:
        """Return the loads of these layers of all reused blocks."""
        size = self._layout.block_tokens
        return tuple(BlockLoad(i, ref, layers.start, layers.stop, size) for i, ref in enumerate(reusing.prefix))

    def take_computed(self, job: Job) -> list[SlotRef]:
        """Reuse blocks that other jobs have computed here in the meantime: those from the next chunk on that are in the slab
        replace the slots reserved for them. Returns these blocks."""
        request, first = job.request, job.computed // self._layout.block_tokens
        reusable = (job.length - 1) // self._layout.block_tokens
        if job.group is not None or request.prompt_logprobs is not None or first >= reusable:
            return []
        if self._slab.slots.committed(request.keys[first]) is None:
            return []
        slots = self._slab.slots.leading_run(request.keys[first:reusable])
        refs, place = self._slab.refs(slots), first - len(job.prefix)
        self._slab.slots.pin(slots)
        self._slab.release(job.new_slots[place : place + len(slots)])
        job.reuse_computed(first, place, slots, refs, self._layout)
        self._counts.add("blocks_found_while_queued", len(slots))
        return refs

    def not_loaded(
        self, sources: Mapping[int, SlotRef], result: ChunkComputed | StageComputed
    ) -> tuple[str, bool, list[Effect]]:
        """Handle reused blocks, read from `sources`, that were not loaded. Returns the reason for the failure, whether some
        were merely unreachable, and the reports of corrupt copies, which must not be found again."""
        refs = [sources[block] for block in result.corrupt if block in sources]
        unreached = len(result.failed) - len(result.corrupt)
        self._counts.add("prefix_blocks_unreached", unreached)
        reason = "a reused block did not verify" if refs else "a reused block was not reached"
        return reason, unreached > 0, self.corrupt(refs)

    def forgo(self, job: Job) -> None:
        """Have the next attempt of this request compute the blocks that this one could not load."""
        self._forgone[job.request.request_id] = None
        if len(self._forgone) > MAX_FORGONE:
            self._forgone.popitem(last=False)

    def corrupt(self, refs: Sequence[SlotRef]) -> list[Effect]:
        """Forget blocks that did not verify, here or at the decode that read them, and report them to the pool."""
        self._counts.add("prefix_blocks_corrupt", len(refs))
        self._slab.forget(refs)
        return self._pool.report_corrupt(refs)

    def end(self, job: Job) -> list[Effect]:
        """Release the lease of a job that ended."""
        if job.lease_id is None:
            return []
        del self._leases[job.lease_id]
        return self._pool.release(job.lease_id, spare=job.spare)

    def check(self, jobs: Sequence[Job]) -> None:
        """Assert that the leases are those of these jobs."""
        assert {id(job) for job in self._leases.values()} == {id(job) for job in jobs if job.lease_id is not None}
