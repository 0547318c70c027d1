"""The ends of a prefill's jobs: gateway and decode are notified, and everything held for them is freed. PURE."""

from collections.abc import Mapping

from mooncake_zmq.core.actor import CancelTimer, CancelWork, CloseSequence, Effect, Send
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import AttemptFailed, HandoffFailed, clip
from mooncake_zmq.core.reports import Reports
from mooncake_zmq.prefill.job import Job, JobEvent, JobState
from mooncake_zmq.prefill.jobs import Jobs
from mooncake_zmq.prefill.queue import JobQueue
from mooncake_zmq.prefill.reuse import Reuse
from mooncake_zmq.prefill.slab import Slab
from mooncake_zmq.prefill.waiting import Waiting

DEADLINE = "deadline"
"""Kind of the timers that end jobs; they carry request and attempt."""


class Ends:
    """End the jobs of one prefill."""

    def __init__(
        self,
        *,
        slab: Slab,
        jobs: Jobs,
        queue: JobQueue[Job],
        waiting: Waiting,
        reuse: Reuse,
        reports: Reports,
        counts: Tally,
    ) -> None:
        self._slab = slab
        self._jobs = jobs
        self._queue = queue
        self._waiting = waiting
        self._reuse = reuse
        self._reports = reports
        self._counts = counts

    def fail(
        self,
        now: float,
        job: Job,
        reason: str,
        *,
        full: bool = False,
        avoid: str = "",
        notify_decode: bool = True,
        refused_for_s: float | None = None,
        stuck: bool = False,
    ) -> list[Effect]:
        """End a job whose requests have to be placed again."""
        self._counts.add("jobs_failed" if refused_for_s is None else "jobs_refused_by_decode")
        effects = attempts_failed(
            job.gateway, job.choices, reason, full=full, avoid=avoid, refused_for_s=refused_for_s, stuck=stuck
        )
        if notify_decode and job.is_begun:
            effects.append(_handoff_of(job, reason))
        return effects + self.end(now, job)

    def drop(self, now: float, job: Job, reason: str) -> list[Effect]:
        """End a job that its gateway cancelled. The decode is notified as well: the gateway's message may have arrived there
        before our reservation, which would then stay, unused, until the deadline."""
        job.choices.pop(job.request.request_id, None)  # its gateway knows already
        effects = attempts_failed(job.gateway, job.choices, reason, full=True)
        if job.is_begun:
            effects.append(_handoff_of(job, reason))
        return effects + self.end(now, job)

    def end(self, now: float, job: Job) -> list[Effect]:
        """Free everything that a job holds; slots that a chunk in flight still writes, once that has ended."""
        effects: list[Effect] = [self._waiting.remove(job)] if self._waiting.holds(job) else []
        if job.sampling_id:
            effects.append(CancelWork(job.sampling_id))
            job.sampling_id = 0
        self._jobs.move(job, JobEvent.END)
        request = job.request
        if self._jobs.remove(job):
            effects.append(CancelTimer((DEADLINE, request.request_id, request.attempt)))
        effects += self._reports.hurry(now)
        if job.group is not None:
            effects += job.group.dismiss()
        if job.state is JobState.ABANDONED:
            return [*effects, CancelWork(job.chunk_work)]
        self._queue.leave(job)
        effects += self._reuse.end(job)
        if job.sequence is not None:
            effects.append(CloseSequence(job.sequence))
            job.sequence = None
        self._slab.let_go(job.held_slots)
        return effects


def attempts_failed(
    gateway: str,
    choices: Mapping[str, int],
    reason: str,
    *,
    full: bool,
    avoid: str = "",
    refused_for_s: float | None = None,
    stuck: bool = False,
) -> list[Effect]:
    """Return the messages to a gateway for failed attempts, by request."""
    return [
        Send(
            gateway,
            AttemptFailed(
                request_id=request_id,
                attempt=attempt,
                reason=clip(reason),
                full=full,
                avoid=avoid,
                refused=refused_for_s is not None,
                retry_after_s=refused_for_s or 0.0,
                stuck=stuck,
            ),
        )
        for request_id, attempt in choices.items()
    ]


def handoff_failed(decode: str, request_id: str, attempt: int, reason: str) -> Send:
    """Return the message to a decode for a handoff that will not take place."""
    return Send(decode, HandoffFailed(request_id=request_id, attempt=attempt, reason=clip(reason)))


def _handoff_of(job: Job, reason: str) -> Send:
    return handoff_failed(job.request.decode, job.request.request_id, job.request.attempt, reason)
