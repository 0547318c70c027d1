"""Jobs of a prefill that wait for blocks which another prompt's computation makes, here or on another prefill. PURE.

A waiting job holds no place in the queue, no KV and no reservation. Its wait ends when the blocks stand in the own slab, when
the conductor that placed it says that they are at some cache-node or will not come, or when its time is over; it then queues
by the rank of its arrival and computes whatever it does not find.
"""

from collections.abc import Iterator

from mooncake_zmq.core.actor import CancelTimer, SetTimer
from mooncake_zmq.core.messages import WaitEnded
from mooncake_zmq.core.shell import Tally
from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.prefill.job import Job

MAX_EARLY = 256
WAITED = "coming"
"""Kind of the timers that end waits, with the request's id and attempt."""


class Waiting:
    """The waiting jobs of one prefill, in the order of their arrival."""

    def __init__(self, slots: Slots, counts: Tally) -> None:
        self._slots = slots
        self._counts = counts
        self._jobs: dict[str, Job] = {}
        self._early: dict[int, WaitEnded] = {}
        """By placement, ends of waits whose jobs have not come yet, the oldest first."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def begin(self, job: Job) -> SetTimer:
        """Add a job, whose state is `WAITING`."""
        self._jobs[job.request.request_id] = job
        self._counts.add("jobs_waited")
        return SetTimer((WAITED, job.request.request_id, job.request.attempt), job.request.coming_s)

    def is_needed(self, job: Job) -> bool:
        """Return whether a job that arrives has something to wait for."""
        request = job.request
        return 0 < request.coming_blocks <= len(request.keys) and not self._is_here(job)

    def came_early(self, message: WaitEnded) -> None:
        """Keep the end of a wait whose job is still on its way here."""
        self._early[message.booking] = message
        if len(self._early) > MAX_EARLY:
            del self._early[next(iter(self._early))]

    def ended_early(self, booking: int) -> WaitEnded | None:
        """Return the end of a placement's wait, if that came before its job."""
        return self._early.pop(booking, None)

    def remove(self, job: Job) -> CancelTimer:
        """Take a job out that ends, or whose wait is over."""
        del self._jobs[job.request.request_id]
        return CancelTimer((WAITED, job.request.request_id, job.request.attempt))

    def holds(self, job: Job) -> bool:
        """Return whether the job waits."""
        return self._jobs.get(job.request.request_id) is job

    def timed_out(self, request_id: str, attempt: int) -> Job | None:
        """Return the job whose time is over, if it still waits."""
        job = self._jobs.get(request_id)
        if job is None or job.request.attempt != attempt:
            return None
        self._counts.add("waits_ended[by=time]")
        return job

    def booked(self, conductor: str, booking: int, *, came: bool) -> Job | None:
        """Return the job of a conductor's placement, if it still waits."""
        jobs = (job for job in self._jobs.values() if job.request.booking == booking)
        job = next((job for job in jobs if job.request.conductor in ("", conductor)), None)
        if job is not None:
            self._counts.add("waits_ended[by=pool]" if came else "waits_ended[by=loss]")
        return job

    def placed_by(self, conductor: str) -> list[Job]:
        """Return the jobs whose waits this conductor, which is down, would have ended."""
        self._early.clear()
        lost = [job for job in self._jobs.values() if job.request.conductor == conductor]
        self._counts.add("waits_ended[by=loss]", len(lost))
        return lost

    def found(self) -> list[Job]:
        """Return the jobs whose blocks stand in the slab by now."""
        here = [job for job in self._jobs.values() if self._is_here(job)]
        self._counts.add("waits_ended[by=slab]", len(here))
        return here

    def _is_here(self, job: Job) -> bool:
        return self._slots.committed(job.request.keys[job.request.coming_blocks - 1]) is not None
