"""A prefill as the first stage of pipelines: it starts the other stages and handles their answers. PURE."""

from collections.abc import Sequence

from mooncake_zmq.core.actor import Effect
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import StageDone, StageFailed, StageReady
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.prefill.computing import Computing
from mooncake_zmq.prefill.ends import Ends
from mooncake_zmq.prefill.handoff import Handoff
from mooncake_zmq.prefill.job import Job, JobEvent, JobState
from mooncake_zmq.prefill.jobs import Jobs
from mooncake_zmq.prefill.pipeline import Group
from mooncake_zmq.prefill.reuse import Reuse
from mooncake_zmq.prefill.slab import Slab


class Leading:
    """Lead the pipelines of one prefill's jobs. Each job's `Group` records what its stages have done."""

    def __init__(
        self,
        *,
        layout: BlockLayout,
        slab: Slab,
        jobs: Jobs,
        reuse: Reuse,
        handoff: Handoff,
        computing: Computing,
        ends: Ends,
        counts: Tally,
    ) -> None:
        self._layout = layout
        self._slab = slab
        self._jobs = jobs
        self._reuse = reuse
        self._handoff = handoff
        self._computing = computing
        self._ends = ends
        self._counts = counts

    def gather(self, now: float, job: Job, group: Group) -> list[Effect]:
        """Start the other stages once the slab has room. They do not wait for room, so stages cannot wait for each other in
        a circle."""
        slots = self._slab.slots
        if group.room + len(job.own_slots) > slots.capacity:
            slots.unpin(job.cut_prefix(0))
        if group.room > slots.available:
            return []
        job.new_slots = group.take_room(self._slab)
        self._jobs.move(job, JobEvent.GATHER)
        self._counts.add("pipelines")
        return group.ask(max(0.0, job.arrived_at + job.request.deadline_s - now))

    def on_ready(self, now: float, sender: str, message: StageReady) -> list[Effect]:
        """Take note that a stage has room and some of the reused blocks; once all have, plan the chunks."""
        job = self._led(sender, message)
        if job is None or job.group is None or job.state is not JobState.GATHERING:
            return []
        if not job.group.on_ready(sender, message.blocks):
            return []
        self._reuse.drop_expired(now, job)
        common = job.group.common_blocks(len(job.prefix))
        self._slab.slots.unpin(job.cut_prefix(common))
        self._slab.release(job.new_slots[:common])
        del job.new_slots[:common]
        job.group.plan(common * self._layout.block_tokens)
        return [self._computing.open(job), *self._handoff.prefix(job)]

    def on_done(self, now: float, sender: str, message: StageDone) -> list[Effect]:
        """Take note that a stage has computed a chunk; the last chunk of the last stage ends the computation."""
        job = self._led(sender, message)
        if job is None or job.group is None or job.state is JobState.HANDING_OFF:
            return []
        tokens: Sequence[int] = [message.token or 0, *(token for token, _ in message.others)]
        if not job.group.expects(sender, message) or not self._layout.has_token(max(tokens)):
            return self._ends.fail(now, job, f"{sender} computed something else", avoid=sender)
        effects = job.group.on_done(sender, message)
        if not job.group.finished:
            return effects
        assert message.token is not None
        job.checksums = job.group.checksums()
        return effects + self._handoff.finish(now, job, ((message.token, message.logprob), *message.others))

    def on_failed(self, now: float, sender: str, message: StageFailed) -> list[Effect]:
        """Fail a job one of whose stages failed."""
        job = self._led(sender, message)
        if job is None or job.state is JobState.HANDING_OFF:
            return []
        if message.unreached:
            self._reuse.forgo(job)
        avoid = sender if message.full else ""
        return self._ends.fail(now, job, f"{sender}: {message.reason}", full=message.full, avoid=avoid, stuck=message.stuck)

    def _led(self, stage: str, message: StageReady | StageDone | StageFailed) -> Job | None:
        """Return the job in whose pipeline `stage` is a later one."""
        job = self._jobs.attempt(message.request_id, message.attempt)
        return job if job is not None and stage in job.request.stages else None
