"""The work queued at a vLLM, and its speed: what the node reports as a prefill and as a decode. PURE.

vLLM computes prompts in the order of their arrival, a few at a time, beside the answers. So the time of a prompt counts from
the first token of the prompt before it, and the time of a token from the token before it.
"""

import math
from collections.abc import Iterable, Sequence

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import MAX_REPORTED, DecodeLoad, PrefillLoad, StartPrefill
from mooncake_zmq.core.order import Order
from mooncake_zmq.core.reports import queued_job
from mooncake_zmq.core.speed import COMPUTE_MEMORY_S, STEP_MEMORY_S, Speed
from mooncake_zmq.vllm_node.job import Job, JobState
from mooncake_zmq.vllm_node.settings import VllmSettings


class Load:
    """Measure and estimate the work of one vLLM."""

    def __init__(self, settings: VllmSettings, costs: Costs, block_tokens: int) -> None:
        self._settings = settings
        self._costs = costs
        self._block_tokens = block_tokens
        self._order = Order(settings.overtake, settings.priority_s)
        self._first_at = 0.0
        """When the latest first token arrived."""
        self.compute = Speed(memory_s=COMPUTE_MEMORY_S, half_life_s=settings.measured_half_life_s)
        self._prompts = Speed(memory_s=COMPUTE_MEMORY_S, half_life_s=math.inf)
        """Measures prompts up to their first tokens, loads included. Does not fade: an idle engine becomes no quicker."""
        self.step = Speed(memory_s=STEP_MEMORY_S, half_life_s=settings.measured_half_life_s)

    def rank(self, now: float, request: StartPrefill) -> float:
        """Return the rank of a request that arrives now, which is final."""
        return self._order.rank(now, self.compute.ratio(now) * self._compute_s(request), request.priority)

    def first(self, now: float, job: Job) -> None:
        """Record the first token of a job."""
        took_s = max(0.0, now - max(job.began_at, self._first_at))
        self._first_at = now
        if job.request.prompt_logprobs is not None:  # it takes longer and would distort the measure
            return
        self._prompts.add(now, took_s, self._prompt_s(job.request))
        if not job.taken_over:
            self.compute.add(now, took_s, self._compute_s(job.request))

    def stepped(self, now: float, job: Job, tokens: int, batch: Sequence[Job]) -> None:
        """Record later tokens of `job`, a member of `batch`."""
        if not job.made:  # the first tokens of a request that was taken over took no step
            return
        predicted_s = self._costs.step_s(len(batch), sum(each.context for each in batch))
        # Every member of a batch reports each step.
        self.step.add(now, (now - job.token_at) / len(batch), predicted_s * tokens / len(batch))

    def of_prompts(self, now: float, jobs: Sequence[Job], *, closed: bool) -> PrefillLoad:
        """Return the load report as a prefill."""
        waiting = sorted((job for job in jobs if not job.made), key=lambda job: (job.state is JobState.QUEUED, job.rank))
        left_s = [self._left_s(now, job) for job in waiting]
        if len(waiting) > MAX_REPORTED:
            left_s[MAX_REPORTED - 1] = sum(left_s[MAX_REPORTED - 1 :])
        queued = sum(job.state is JobState.QUEUED for job in waiting)
        return PrefillLoad(
            jobs=tuple(
                queued_job(now, booking=job.request.booking, rank=job.rank, left_s=left)
                for job, left in zip(waiting[:MAX_REPORTED], left_s, strict=False)
            ),
            overtake=self._settings.overtake,
            priority_s=self._settings.priority_s,
            room=max(0, self._settings.max_queued - queued),
            compute=self.compute.measured(now),
            draining=closed,
        )

    def under_way_s(self, now: float, jobs: Iterable[Job]) -> float:
        """Return how long the prompts that vLLM has begun, and that have no token yet, should take from their begin; inf if
        none was measured yet."""
        begun = [self._prompt_s(job.request) for job in jobs if job.state is JobState.PREFILLING]
        if not begun:
            return 0.0
        return self._prompts.ratio(now) * sum(begun) if self._prompts.known else math.inf

    def of_answers(self, now: float, jobs: Sequence[Job], *, closed: bool) -> DecodeLoad:
        """Return the load report as a decode."""
        settings = self._settings
        running = [job for job in jobs if job.made]
        held = sum(job.context for job in jobs)
        bookings = [job.request.booking for job in jobs if job.request.booking]
        return DecodeLoad(
            running=len(running),
            reserved=len(jobs) - len(running),
            free_tokens=max(0, settings.capacity_tokens - held),
            capacity_tokens=settings.capacity_tokens,
            context_tokens=sum(job.context for job in running),
            max_batch=settings.max_running,
            room=max(0, settings.max_running + settings.max_queued - len(jobs)),
            step=self.step.measured(now),
            bookings=tuple(bookings[:MAX_REPORTED]),
            draining=closed,
        )

    def _left_s(self, now: float, job: Job) -> float:
        whole_s = self.compute.ratio(now) * self._compute_s(job.request)
        return whole_s if job.state is JobState.QUEUED else max(0.0, whole_s - (now - max(job.began_at, self._first_at)))

    def _compute_s(self, request: StartPrefill) -> float:
        """Return the time of the cost model, given the reuse of the plan."""
        return self._costs.compute_s(len(request.tokens) // 4, self._reused(request))

    def _prompt_s(self, request: StartPrefill) -> float:
        """Return that time and the time to load what is reused."""
        return self._compute_s(request) + self._costs.load_s(self._reused(request))

    def _reused(self, request: StartPrefill) -> int:
        tokens = len(request.tokens) // 4
        if request.prompt_logprobs is not None:  # each of its tokens has to be computed
            return 0
        return min(request.reuse_blocks, (tokens - 1) // self._block_tokens) * self._block_tokens
