"""The table of a prefill's jobs, and the only place where their states change. PURE."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from mooncake_zmq.core.actor_parts import Lifecycle, Tally
from mooncake_zmq.prefill.job import NEXT_STATE, Job, JobEvent, JobState


class Jobs:
    """Hold the live job of each request, in order of arrival, and the ended jobs whose slots a chunk still writes."""

    def __init__(self, transitions: Tally) -> None:
        self._live: OrderedDict[str, Job] = OrderedDict()
        self._abandoned: list[Job] = []
        self._states = Lifecycle("prefill job", NEXT_STATE, transitions)

    def __len__(self) -> int:
        return len(self._live) + len(self._abandoned)

    def __iter__(self) -> Iterator[Job]:
        return iter([*self._live.values(), *self._abandoned])

    @property
    def live(self) -> list[Job]:
        """All jobs but the abandoned ones."""
        return list(self._live.values())

    def add(self, job: Job) -> None:
        """Add a job that arrives; its request has no other."""
        self._live[job.request.request_id] = job

    def of(self, request_id: str) -> Job | None:
        """Return the live job of a request."""
        return self._live.get(request_id)

    def attempt(self, request_id: str, attempt: int) -> Job | None:
        """Return the live job of one attempt of a request."""
        job = self._live.get(request_id)
        return job if job is not None and job.request.attempt == attempt else None

    def handed_to(self, decode: str, request_id: str, attempt: int) -> Job | None:
        """Return the live job of an attempt that is handed off to this decode."""
        job = self.attempt(request_id, attempt)
        return job if job is not None and job.request.decode == decode else None

    def wanted_by(self, request_id: str, attempt: int) -> Job | None:
        """Return the job that has this attempt of a request, or an older one, among its choices."""
        own = self._live.get(request_id)
        jobs = (own, *self._live.values()) if own is not None else self._live.values()
        return next((job for job in jobs if job.choices.get(request_id, attempt + 1) <= attempt), None)

    def move(self, job: Job, event: JobEvent) -> None:
        """Change the state of a job by an event."""
        job.estimate = None
        job.state = self._states.after(job.state, event)

    def remove(self, job: Job) -> bool:
        """Remove a job that ended; an abandoned one, once its chunk has ended. Returns whether it was live until now."""
        was_live = self._live.get(job.request.request_id) is job
        if was_live:
            del self._live[job.request.request_id]
        if job.state is JobState.ABANDONED:
            self._abandoned.append(job)
        elif job in self._abandoned:
            self._abandoned.remove(job)
        return was_live

    def check(self) -> None:
        for job in self:
            assert job.state is not JobState.ENDED
            assert (job.state is JobState.ABANDONED) == (job in self._abandoned)
            assert job.is_begun or not (job.own_slots or job.new_slots or job.sequence)

    def dump(self, now: float) -> list[dict[str, Any]]:
        """Return the state of each job, for debugging."""
        return [
            {
                "request": job.request.request_id,
                "attempt": job.request.attempt,
                "state": job.state.value,
                "age_s": now - job.arrived_at,
                "tokens": job.length,
                "computed": job.computed,
                "decode": job.request.decode,
                "lease": job.lease_id,
            }
            for job in self
        ]
