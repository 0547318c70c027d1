"""Coupled instances behind a router, the baselines of the paper: vLLM v0.5.1, with a prefix cache, chunked prefill, or both.

A model, not vLLM: same arrivals, costs and records as the replay through our own actors, its own loop of events. Every node is
an instance. The prefix cache is each node's own KV memory. Not modelled: the host's work between steps, blocks of 16 tokens,
the cache's reuse of generated tokens (a trace does not name them), slow kernels of that version.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from heapq import heappop, heappush

from mooncake_zmq.laboratory.coupled_instance import CoupledSettings, Instance, Job
from mooncake_zmq.laboratory.coupled_memory import KvMemory
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.study import COUPLED_SECTION, Arrival, RequestRecord, RunResult, Setup

SAMPLE_S = 30.0
PREFIX_CACHE = ("vllm-prefix", "vllm-both")
CHUNKED = ("vllm-chunked", "vllm-both")
REPORT_EVERY = 100


def run(setup: Setup, arrivals: Sequence[Arrival], progress: Callable[[float], None]) -> RunResult:
    """Replay `arrivals` on `setup.prefill + setup.decode` coupled instances. Raises StudyError for a bad setting."""
    began_s = time.process_time()
    settings = read_settings(setup)
    cluster = _Cluster(setup, settings)
    result = cluster.replay(arrivals, progress)
    result.cpu_s = time.process_time() - began_s
    return result


def read_settings(setup: Setup) -> CoupledSettings:
    """Return the defaults for the policy and hardware, changed by the overrides of `coupled.*`; those of the actors mean
    nothing here."""
    known = {each.name for each in fields(CoupledSettings)}
    given: dict[str, float | int | str | bool] = {"max_requests": setup.hardware.max_batch}
    if setup.policy in PREFIX_CACHE:
        given["routing"] = "match"
    for dotted, value in setup.overrides.items():
        name = dotted.removeprefix(COUPLED_SECTION)
        if name == dotted:
            continue
        if name not in known:
            raise StudyError(f"{dotted} is no setting: coupled has {', '.join(sorted(known))}")
        if isinstance(value, str) != (name in ("mixed", "routing")) or isinstance(value, float):
            raise StudyError(f"{dotted} cannot be {value!r}")
        given[name] = value
    try:
        return CoupledSettings(**given)  # type: ignore[arg-type]  # checked right above, by name
    except ValueError as error:
        raise StudyError(f"{COUPLED_SECTION}{error}") from None


class _Cluster:
    """The router and its instances, between two events."""

    def __init__(self, setup: Setup, settings: CoupledSettings) -> None:
        self._setup = setup
        self._settings = settings
        self._caching = setup.policy in PREFIX_CACHE
        self._instances = [self._instance(f"vllm-{at}") for at in range(setup.prefill + setup.decode)]
        self._ends: list[tuple[float, int]] = []
        self._now = 0.0
        self._events = 0
        self._ended = 0
        self._loads: list[tuple[float, float, float]] = []

    def _instance(self, name: str) -> Instance:
        setup = self._setup
        memory = KvMemory(setup.hardware.decode_tokens, setup.block_tokens, caching=self._caching)
        return Instance(name, setup.hardware.costs, memory, self._settings, chunked=setup.policy in CHUNKED)

    def replay(self, arrivals: Sequence[Arrival], progress: Callable[[float], None]) -> RunResult:
        records: list[RequestRecord] = []
        for order, arrival in enumerate(sorted(arrivals, key=lambda each: each.at_s)):
            at_s = arrival.at_s / self._setup.speed
            self._until(at_s)
            record = RequestRecord(at_s=at_s, input_tokens=arrival.input_tokens, output_tokens=arrival.output_tokens)
            records.append(record)
            self._place(at_s, Job(arrival, record, order, kv=arrival.input_tokens))
            if order % REPORT_EVERY == 0:
                progress(self._ended / max(1, len(arrivals)))
        self._until(float("inf"))
        for each in self._instances:
            each.check_idle()
        progress(self._ended / max(1, len(arrivals)))
        return RunResult(
            setup=self._setup,
            requests=records,
            prefill_busy_s={each.name: each.prefill_busy_s for each in self._instances},
            decode_busy_s={each.name: each.decode_busy_s for each in self._instances},
            loads=self._loads,
            virtual_s=self._now,
            events=self._events,
        )

    def _until(self, now: float) -> None:
        """Handle all that ends before or at `now`."""
        while self._ends and self._ends[0][0] <= now:
            at_s, index = heappop(self._ends)
            instance = self._instances[index]
            if at_s == instance.ends_s:
                self._sample(at_s)
                self._now, before = at_s, instance.ended
                instance.end(at_s)
                self._events += 1
                self._ended += instance.ended - before
                self._expect(index)

    def _expect(self, index: int) -> None:
        ends_s = self._instances[index].ends_s
        if ends_s != float("inf"):
            heappush(self._ends, (ends_s, index))

    def _place(self, now: float, job: Job) -> None:
        self._sample(now)
        self._now = now
        index = self._choose(job.arrival)
        instance = self._instances[index]
        job.record.prefill = job.record.decode = instance.name
        before_s, before = instance.ends_s, instance.ended
        instance.add(now, job)
        self._events += 1
        self._ended += instance.ended - before
        if instance.ends_s != before_s:
            self._expect(index)

    def _choose(self, arrival: Arrival) -> int:
        fewest = min(each.unfinished for each in self._instances)
        slack = self._settings.match_slack if self._settings.routing == "match" else 0
        near = [at for at, each in enumerate(self._instances) if each.unfinished <= fewest + slack]
        return min(near, key=lambda at: self._rank(self._instances[at], arrival))

    def _rank(self, instance: Instance, arrival: Arrival) -> tuple[int, int, int]:
        hit = instance.memory.hit(arrival.hash_ids, arrival.input_tokens) if self._settings.routing == "match" else 0
        return -hit, instance.unfinished, instance.assigned

    def _sample(self, now: float) -> None:
        """Sample the load up to `now`, as shares of the SLOs, whenever another SAMPLE_S has passed."""
        due_s = (len(self._loads) + 1) * SAMPLE_S
        while due_s <= now:
            count = len(self._instances)
            ahead_s = sum(each.ahead_s(due_s) for each in self._instances)
            step_s = sum(each.step_s for each in self._instances)
            load = (due_s, ahead_s / count / self._setup.ttft_slo_s, step_s / count / self._setup.tbt_slo_s)
            self._loads.append(load)
            due_s += SAMPLE_S
