"""One coupled instance: prefill and decode of the same requests on one engine, as vLLM v0.5.1 schedules them. PURE.

Prompts go first: a step of prefill stalls the decodes. With chunked prefill, as in Sarathi-Serve, a step takes one token of
every request that decodes and fills its budget with prompt tokens. Decode steps between two events are one run, computed at
once; an arrival ends a run at its next border. Out of KV memory, the youngest request is preempted and its KV recomputed later.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.laboratory.coupled_memory import KvMemory
from mooncake_zmq.laboratory.gaps import longest_tenth_s
from mooncake_zmq.laboratory.study import Arrival, RequestRecord

Mixed = Literal["overlap", "add"]
TOO_LONG = "longer than the KV memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledSettings:
    """The settings that vLLM leaves to its operator, and the assumptions of a model of it."""

    token_budget: int = 512
    """Tokens of a step with chunked prefill: the default of v0.5.1."""
    prefill_tokens: int = 131_072
    """Prompt tokens of one prefill step: by default the longest sequence of the model, here 128 k."""
    max_requests: int = 256
    """Requests that run at a time: the default of v0.5.1."""
    mixed: Mixed = "overlap"
    """A step with chunks and decodes takes the longer of the chunks' compute and of reading the weights, or both added up."""
    routing: Literal["least", "match"] = "least"
    """Routing: to the instance with the fewest unfinished requests, or to the longest match among those nearly as idle."""
    match_slack: int = 2
    """Requests above the fewest that an instance may have and still be routed to for its match."""

    def __post_init__(self) -> None:
        for name in ("token_budget", "prefill_tokens", "max_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.mixed not in ("overlap", "add"):
            raise ValueError(f"mixed is overlap or add, not {self.mixed!r}")
        if self.routing not in ("least", "match"):
            raise ValueError(f"routing is least or match, not {self.routing!r}")
        if self.match_slack < 0:
            raise ValueError(f"match_slack must be 0 or more, not {self.match_slack}")


@dataclass(slots=True, eq=False)
class Job:
    """A request in an instance. `kv`: tokens whose KV its last prefill makes; `since`: the step it then joined the decodes."""

    arrival: Arrival
    record: RequestRecord
    order: int
    kv: int
    ids: tuple[int, ...] = ()
    computed: int = 0
    made: int = 0
    """Output tokens, up to its last prefill."""
    since: int = 0
    lead_s: float = 0.0
    """How much later than the instance's last token its own came: its next gap is shorter by this."""
    last_s: float = 0.0
    pieces: list[NDArray[np.float64]] = field(default_factory=list)
    """Its gaps before it was preempted."""


class GapLog:
    """The gaps between an instance's decode steps, by step; those before the oldest running request are dropped."""

    def __init__(self) -> None:
        self.steps = 0
        self._first = 0
        self._gaps: NDArray[np.float64] = np.empty(4096)

    def extend(self, count: int, first_s: float, next_s: float, slope_s: float, oldest: int) -> None:
        """Add `count` gaps: first_s, next_s + slope_s, next_s + 2 slope_s, ... No gap before step `oldest` is read again."""
        at = self.steps - self._first
        if at + count > len(self._gaps):
            kept = self._gaps[oldest - self._first : at].copy()
            self._first, at = oldest, len(kept)
            self._gaps = np.empty(max(4096, 2 * (at + count)))
            self._gaps[:at] = kept
        self._gaps[at] = first_s
        if count > 1:
            self._gaps[at + 1 : at + count] = next_s + slope_s * np.arange(1, count)
        self.steps += count

    def since(self, step: int) -> NDArray[np.float64]:
        """Return a copy of the gaps from `step` on."""
        return self._gaps[step - self._first : self.steps - self._first].copy()


@dataclass(slots=True)
class _Run:
    """A run of decode steps of base_s, base_s + slope_s, ... from began_s on."""

    began_s: float
    count: int
    base_s: float
    slope_s: float

    def until(self, count: int) -> float:
        return self.began_s + count * self.base_s + self.slope_s * count * (count - 1) / 2

    def cut(self, now: float) -> None:
        """End at the first border at or after `now`."""
        passed_s, half = now - self.began_s, self.slope_s / 2
        linear = self.base_s - half
        root = passed_s / linear if half <= 0 else (math.sqrt(linear**2 + 4 * half * passed_s) - linear) / (2 * half)
        count = max(1, math.floor(root))
        while count < self.count and self.until(count) < now:
            count += 1
        self.count = min(self.count, count)


class Instance:
    """An instance: it takes requests, and at `ends_s`, which is infinite while it is idle, its caller calls `end`."""

    def __init__(self, name: str, costs: Costs, memory: KvMemory, settings: CoupledSettings, *, chunked: bool) -> None:
        self.name = name
        self.memory = memory
        self.unfinished = 0
        self.assigned = 0
        self.ends_s = math.inf
        self.prefill_busy_s = self.decode_busy_s = 0.0
        self.waiting: deque[Job] = deque()
        self._costs = costs
        self._settings = settings
        self._chunked = chunked
        self._partial: list[Job] = []
        self._chunks: list[tuple[Job, int]] = []
        self._batch: list[tuple[int, int, Job]] = []
        self._context = 0
        self._log = GapLog()
        self._last_token_s = 0.0
        self._run: _Run | None = None
        self._began_s = 0.0
        self._compute_s = 0.0
        self.ended = 0

    @property
    def step_s(self) -> float:
        """The time that a decode step would take now."""
        return self._costs.step_s(len(self._batch), self._context) if self._batch else 0.0

    def ahead_s(self, now: float) -> float:
        """Return the compute that prompts still take: those that wait, without hits, and what is left of those begun."""
        left_s = sum(self._costs.compute_s(job.kv, 0) for job in self.waiting)
        for job in self._partial or [job for job, _ in self._chunks]:
            left_s += self._costs.compute_s(job.kv, job.computed)
        return left_s - (min(self._compute_s, now - self._began_s) if self._chunks else 0.0)

    def check_idle(self) -> None:
        """Assert that no request and no memory is left after all have ended."""
        self.memory.check()
        assert self.unfinished == 0 == len(self._batch) == len(self._partial) == len(self.waiting)
        assert self._context == 0 == self.memory.used

    def add(self, now: float, job: Job) -> None:
        """Take a request; the present run continues to its next border."""
        self.unfinished += 1
        self.assigned += 1
        self.waiting.append(job)
        if self.ends_s == math.inf:
            self._start(now)
        elif self._run is not None:
            self._run.cut(now)
            self.ends_s = self._run.until(self._run.count)

    def end(self, now: float) -> None:
        """End the present step or run, and begin the next."""
        if self._run is not None:
            self._end_run(now, self._run)
        else:
            self._end_prefill(now)
        self._start(now)

    def _start(self, now: float) -> None:
        self._began_s, self._run, self.ends_s = now, None, math.inf
        while self.ends_s == math.inf and (self.waiting or self._batch or self._partial):
            chunks = self._next_chunks() if self._chunked else self._next_prompts()
            if chunks:
                self._start_prefill(now, chunks)
            elif self._batch:
                self._start_run(now)
            else:
                self._fail(now, self.waiting.popleft())

    def _next_prompts(self) -> list[tuple[Job, int]]:
        chosen: list[tuple[Job, int]] = []
        tokens = 0
        while (job := self._admissible(len(chosen))) is not None:
            left = job.kv - self.memory.hit(job.arrival.hash_ids, job.kv)
            if chosen and tokens + left > self._settings.prefill_tokens:
                break
            self._admit(job)
            chosen.append((job, left))
            tokens += left
        return chosen

    def _next_chunks(self) -> list[tuple[Job, int]]:
        self._make_room()
        budget = self._settings.token_budget - len(self._batch)
        chosen: list[tuple[Job, int]] = []
        for begun in self._partial:
            if budget > 0:
                chosen.append((begun, min(budget, begun.kv - begun.computed)))
                budget -= chosen[-1][1]
        while budget > 0 and (job := self._admissible(len(self._partial))) is not None:
            self._admit(job)
            self._partial.append(job)
            chosen.append((job, min(budget, job.kv - job.computed)))
            budget -= chosen[-1][1]
        return chosen

    def _admissible(self, admitted: int) -> Job | None:
        """Return the head of the queue, if it may run beside the running requests: vLLM lets none overtake it."""
        if not self.waiting or len(self._batch) + admitted >= self._settings.max_requests:
            return None
        job = self.waiting[0]
        job.ids = tuple(self.memory.shared(job.arrival.hash_ids, job.arrival.input_tokens))
        growth = len(self._batch) if self._chunked else 0
        return job if self.memory.fits(job.ids, job.kv + growth) else None

    def _admit(self, job: Job) -> None:
        self.waiting.popleft()
        job.computed = self.memory.hit(job.arrival.hash_ids, job.kv)
        self.memory.take(job.ids, job.kv)
        record = job.record
        if record.queue_s < 0:
            record.queue_s, record.prefill_s = self._began_s - record.at_s, 0.0
            record.hit_own = job.computed
        record.attempts += 1

    def _start_prefill(self, now: float, chunks: list[tuple[Job, int]]) -> None:
        costs, self._chunks = self._costs, chunks
        self._compute_s = 0.0
        for job, tokens in chunks:
            spent_s = costs.compute_s(job.computed + tokens, job.computed)
            self._compute_s += spent_s
            if job.made:
                job.record.wasted_prefill_s += spent_s
            else:
                job.record.prefill_s += spent_s
        duration_s = self._compute_s
        if self._chunked and self._batch:
            decode_s = costs.step_s(len(self._batch), self._context)
            overlapped_s = min(costs.decode_step_s, self._compute_s) if self._settings.mixed == "overlap" else 0.0
            duration_s += decode_s - overlapped_s
        self.ends_s = now + duration_s

    def _end_prefill(self, now: float) -> None:
        self.prefill_busy_s += self._compute_s
        self.decode_busy_s += max(0.0, now - self._began_s - self._compute_s)
        if self._chunked and self._batch:
            self._decoded(now, 1, now - self._last_token_s, 0.0, 0.0)
        for job, tokens in self._chunks:
            job.computed += tokens
            if job.computed == job.kv:
                if self._chunked:
                    self._partial.remove(job)
                self._join(now, job)
        self._chunks = []

    def _join(self, now: float, job: Job) -> None:
        """Let a request whose prefill made its next token join the decodes."""
        self.memory.mark_computed(job.ids)
        if job.made:
            job.pieces.append(np.array([now - job.last_s]))
        else:
            job.record.ttft_s = now - job.record.at_s
        job.made += 1
        if not self._batch:
            self._last_token_s = now
        job.since, job.lead_s, job.last_s = self._log.steps, now - self._last_token_s, now
        if job.made >= job.arrival.output_tokens:
            self._finish(now, job)
            return
        self._context += job.kv
        heappush(self._batch, (job.since + job.arrival.output_tokens - job.made, job.order, job))

    def _start_run(self, now: float) -> None:
        self._make_room()
        batch = len(self._batch)
        if not batch:
            return
        count = min(self._batch[0][0] - self._log.steps, self.memory.room // batch)
        base_s = self._costs.step_s(batch, self._context)
        self._run = _Run(now, count, base_s, self._costs.decode_context_s * batch)
        self.ends_s = self._run.until(count)

    def _end_run(self, now: float, run: _Run) -> None:
        self.decode_busy_s += now - run.began_s
        first_s = run.began_s + run.base_s - self._last_token_s
        self._decoded(now, run.count, first_s, run.base_s, run.slope_s)

    def _decoded(self, now: float, count: int, first_s: float, base_s: float, slope_s: float) -> None:
        batch = len(self._batch)
        oldest = min(job.since for _, _, job in self._batch)
        self._log.extend(count, first_s, base_s, slope_s, oldest)
        self._context += count * batch
        self.memory.grow(count * batch)
        self._last_token_s = now
        while self._batch and self._batch[0][0] <= self._log.steps:
            job = heappop(self._batch)[2]
            self._leave(job)
            self._finish(now, job)

    def _make_room(self) -> None:
        """Preempt the youngest until each of the others has room for its next token."""
        while self._batch and self.memory.room < len(self._batch):
            youngest = max(self._batch, key=lambda each: each[1])
            self._batch.remove(youngest)
            heapify(self._batch)
            job = youngest[2]
            made = self._log.steps - job.since
            self._leave(job)
            self.memory.release(job.ids, job.kv + made)
            job.kv += made + 1
            job.made += made
            job.last_s = max(job.last_s, self._last_token_s)
            self.waiting.appendleft(job)

    def _leave(self, job: Job) -> None:
        """Take a request out of the decodes: its gaps are its own now."""
        gaps = self._log.since(job.since)
        if len(gaps):
            gaps[0] -= job.lead_s
            job.pieces.append(gaps)
        self._context -= job.kv + self._log.steps - job.since

    def _finish(self, now: float, job: Job) -> None:
        record = job.record
        self.memory.release(job.ids, job.kv + self._log.steps - job.since)
        record.outcome, record.end_s = "finished", now - record.at_s
        if job.pieces:
            record.first_gap_s = float(job.pieces[0][0])
        record.tbt_s = longest_tenth_s(np.concatenate(job.pieces)) if job.pieces else 0.0
        job.pieces = []
        self._end_one()

    def _fail(self, now: float, job: Job) -> None:
        job.record.outcome, job.record.reason, job.record.end_s = "failed", TOO_LONG, now - job.record.at_s
        self._end_one()

    def _end_one(self) -> None:
        self.unfinished -= 1
        self.ended += 1
