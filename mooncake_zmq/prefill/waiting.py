"""Jobs of a prefill that wait for blocks which another prompt's computation creates, here or on another prefill. PURE.

A waiting job holds no place in the queue, no KV and no reservation. Its wait ends when the blocks are in the own slab, when the
conductor that placed it reports that they are at some cache-node or will not come, or at a timeout. It then queues by the rank
of its arrival and computes every block that it does not find.
"""

from collections.abc import Iterable, Iterator, Sequence

from mooncake_zmq.core.actor import CancelTimer, Effect, SetTimer
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import WaitEnded
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.prefill.job import Job, JobEvent, JobState
from mooncake_zmq.prefill.jobs import Jobs
from mooncake_zmq.prefill.queue import JobQueue

MAX_EARLY, MAX_VAIN = 256, 8192
WAITED = "coming"
"""Kind of the timers that end waits; they carry request and attempt."""


class Waiting:
    """Hold the waiting jobs of one prefill, in the order of their arrival."""

    def __init__(self, slots: Slots, jobs: Jobs, queue: JobQueue[Job], counts: Tally) -> None:
        self._slots = slots
        self._table = jobs
        self._queue = queue
        self._counts = counts
        self._jobs: dict[str, Job] = {}
        self._early: dict[int, tuple[str, WaitEnded]] = {}
        """Ends of waits that arrived before their jobs, with their senders, by placement, the oldest first."""
        self._vain: dict[Key, None] = {}
        """Keys of blocks that are computed behind other tokens, so that they do not come; the latest is the last."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def begin(self, job: Job) -> SetTimer:
        """Add a job that arrives."""
        job.state = JobState.WAITING
        self._jobs[job.request.request_id] = job
        self._counts.add("jobs_waited")
        return SetTimer((WAITED, job.request.request_id, job.request.attempt), job.request.coming_s)

    def is_needed(self, job: Job, *, can_end: bool) -> bool:
        """Return whether an arriving job has to wait: not if nothing would end its wait or find the blocks, nor if the end
        of its wait arrived first or the blocks do not come."""
        request = job.request
        sender, early = self._early.get(request.booking, ("", None))
        if early is not None and request.conductor in ("", sender):
            del self._early[request.booking]
            job.sources = early.sources or job.sources
            job.waited = True
            return False
        waits = can_end and 0 < request.coming_blocks <= len(request.keys) and not self._is_here(job)
        return waits and not self._is_vain(job)

    def end(self, job: Job) -> list[Effect]:
        """End the wait of a job, which queues from now on."""
        timer, job.waited = self.remove(job), True
        self._table.move(job, JobEvent.RELEASED)
        self._queue.arrive(job)
        return [timer]

    def end_found(self, computed: Iterable[Key]) -> list[Effect]:
        """End the waits of the jobs whose blocks are in the slab by now, where those of `computed` came just now."""
        if self._vain:
            for key in computed:
                self._vain.pop(key, None)
        return self._end_all(self.found())

    def end_vain(self, keys: Sequence[Key]) -> list[Effect]:
        """End the waits for blocks that are not computed under their keys, now and when more prompts arrive; not where another
        job computes them."""
        for key in keys:
            self._vain.pop(key, None)
            self._vain[key] = None
        while len(self._vain) > MAX_VAIN:
            del self._vain[next(iter(self._vain))]
        jobs = [job for job in self._jobs.values() if self._is_vain(job)]
        self._counts.add("waits_ended[by=loss]", len(jobs))
        return self._end_all(jobs)

    def end_timed_out(self, request_id: str, attempt: int) -> list[Effect]:
        """End the wait of a job at its timeout."""
        job = self._jobs.get(request_id)
        if job is None or job.request.attempt != attempt:
            return []
        self._counts.add("waits_ended[by=time]")
        return self.end(job)

    def on_ended(self, _now: float, sender: str, message: WaitEnded) -> list[Effect]:
        """End the wait for a placement, or remember that for a job which has not arrived yet."""
        jobs = (job for job in self._jobs.values() if job.request.booking == message.booking)
        job = next((job for job in jobs if job.request.conductor in ("", sender)), None)
        if job is None:
            self._came_early(sender, message)
            return []
        self._counts.add("waits_ended[by=pool]" if message.sources else "waits_ended[by=loss]")
        job.sources = message.sources or job.sources
        return self.end(job)

    def peer_down(self, peer: str) -> list[Effect]:
        """End the waits that this peer would have ended, if it was a conductor."""
        self._early = {booking: early for booking, early in self._early.items() if early[0] != peer}
        lost = [job for job in self._jobs.values() if job.request.conductor == peer]
        self._counts.add("waits_ended[by=loss]", len(lost))
        return self._end_all(lost)

    def remove(self, job: Job) -> CancelTimer:
        """Remove a job that ends, or whose wait has ended."""
        del self._jobs[job.request.request_id]
        return CancelTimer((WAITED, job.request.request_id, job.request.attempt))

    def holds(self, job: Job) -> bool:
        """Return whether the job waits."""
        return self._jobs.get(job.request.request_id) is job

    def found(self) -> list[Job]:
        """Return the jobs whose blocks are in the slab by now."""
        here = [job for job in self._jobs.values() if self._is_here(job)]
        self._counts.add("waits_ended[by=slab]", len(here))
        return here

    def _came_early(self, sender: str, message: WaitEnded) -> None:
        self._early[message.booking] = (sender, message)
        if len(self._early) > MAX_EARLY:
            del self._early[next(iter(self._early))]

    def _end_all(self, jobs: Iterable[Job]) -> list[Effect]:
        return [effect for job in jobs for effect in self.end(job)]

    def _is_vain(self, job: Job) -> bool:
        """Return whether nothing computes the last block that a job waits for under its key, as far as is known here."""
        block = job.request.coming_blocks - 1
        key = job.request.keys[block]
        return key in self._vain and not any(each is not job and each.computes(block, key) for each in self._table.live)

    def _is_here(self, job: Job) -> bool:
        return self._slots.committed(job.request.keys[job.request.coming_blocks - 1]) is not None
