"""An observer of the nodes of a run, which records facts that no message has: the time of every decode step, the engine time of
each request, the loads that nodes report. It never changes the run.

The times of one work's steps are made once for all its members, which keep them as long as they are open.
"""

from collections import deque
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.actor import Effect, Event, Send, Start, WorkDone, WorkProgress
from mooncake_zmq.core.messages import (
    BlocksLeased,
    DecodeLoad,
    HandoffBlocks,
    LeaseBlocks,
    PrefillLoad,
    ReserveDecode,
    TokensDecoded,
)
from mooncake_zmq.core.work import ChunkComputed, ComputeChunk, StepDecoded
from mooncake_zmq.laboratory.machine import ModelledMachine, StepRun
from mooncake_zmq.simulation.world import Observe, Process


@lru_cache(256)
def _made(steps: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the number of steps made after each step, and how often the growth was added until then."""
    made = np.arange(1.0, steps + 1)
    return made, made * (made - 1) / 2


def step_times(run: StepRun) -> NDArray[np.float64]:
    """Return the times at which the tokens of these steps were sampled."""
    made, growths = _made(run.steps)
    times: NDArray[np.float64] = run.begin_s + made * run.first_s + run.growth_s * growths
    return times


class Recorder:
    """The observer of one run. `ttft_slo_s`, `tbt_slo_s`: the SLOs of which loads are shares; `delay_s`: of a message."""

    def __init__(self, *, ttft_slo_s: float, tbt_slo_s: float, with_disk: bool, delay_s: float) -> None:
        self.times: dict[str, deque[NDArray[np.float64]]] = {}
        """The arrival times of tokens at the gateway if each step were reported at once, in order, by decode."""
        self.engine_s: dict[str, float] = {}
        """Engine time of prefills since its last first token, by open request."""
        self.from_disk: dict[str, int] = {}
        """Blocks that its host's pool had to read from its SSD, by open request."""
        self._with_disk = with_disk
        self._delay_s = delay_s
        self._slo_s = {"prefill": ttft_slo_s, "decode": tbt_slo_s}
        self._loads: dict[str, dict[str, PrefillLoad | DecodeLoad]] = {"prefill": {}, "decode": {}}
        self._chunks: dict[tuple[str, int], str] = {}
        self._leases: dict[tuple[str, int], str] = {}
        """The request that waits for the answer, by prefill and lease."""
        self._disk_blocks: dict[str, int] = {}
        """Blocks read from its SSD for leases so far, by cache-node."""

    def watch(self, process: Process[ModelledMachine]) -> Observe | None:
        """Return the observer of a process, from the beginning of each of its incarnations."""
        for loads in self._loads.values():
            loads.pop(process.name, None)
        if process.spec.role == "decode":
            self.times[process.name] = deque()
            return partial(self._decode_did, process)
        if process.spec.role == "cache-node" and process.spec.disk_slots:
            return partial(self._pool_did, process)
        return partial(self._prefill_did, process.name) if process.spec.role == "prefill" else None

    def mean_load(self, role: str) -> float:
        """Return the mean of the last reported loads of all nodes of a role, as a share of its SLO."""
        loads, slo_s = self._loads[role].values(), self._slo_s[role]
        return sum([_load_s(load) / slo_s for load in loads]) / len(loads) if loads else 0.0

    def _decode_did(self, process: Process[ModelledMachine], event: Event, effects: list[Effect]) -> None:
        if type(event) is WorkDone:
            if type(event.result) is StepDecoded:
                self._steps_did(process, effects)
            return
        for effect in effects:
            if type(effect) is Send and type(effect.message) is DecodeLoad:
                self._loads["decode"][process.name] = effect.message

    def _steps_did(self, process: Process[ModelledMachine], effects: list[Effect]) -> None:
        assert process.current is not None
        run = process.current.machine.last_run
        assert run is not None
        times = step_times(run) + self._delay_s
        for effect in effects:
            if type(effect) is Send and type(effect.message) is TokensDecoded:
                self.times[process.name].append(times)

    def _prefill_did(self, name: str, event: Event, effects: list[Effect]) -> None:
        if type(event) is WorkProgress:
            return
        if type(event) is WorkDone and type(event.result) is ChunkComputed:
            served = self._chunks.pop((name, event.work_id), "")
            if served in self.engine_s:
                self.engine_s[served] += event.result.elapsed_s
        request, lease_id = "", 0
        for effect in effects:
            if type(effect) is Send:
                message = effect.message
                if type(message) is PrefillLoad:
                    self._loads["prefill"][name] = message
                elif type(message) is HandoffBlocks:
                    request = message.request_id  # the request of the chunk that is begun next
                elif type(message) is LeaseBlocks:
                    lease_id = message.lease_id  # the lease of the request that reserves memory in its decode next
                elif type(message) is ReserveDecode:
                    if lease_id and self._with_disk:
                        self._leases[name, lease_id] = message.request_id
                    lease_id = 0
            elif type(effect) is Start and type(effect.work) is ComputeChunk:
                self._chunks[name, effect.work_id] = request

    def _pool_did(self, process: Process[ModelledMachine], event: Event, effects: list[Effect]) -> None:
        """Count the blocks that a pool read from its SSD for a lease, when it answers the lease."""
        for effect in effects:
            if type(effect) is Send and type(effect.message) is BlocksLeased:
                assert process.current is not None
                counted = process.current.actor.counts.get("lookup_blocks[result=disk]", 0)
                blocks = min(counted - self._disk_blocks.get(process.name, 0), len(effect.message.slots))
                self._disk_blocks[process.name] = self._disk_blocks.get(process.name, 0) + blocks
                request = self._leases.pop((effect.to, effect.message.lease_id), "")
                if blocks and request in self.engine_s:
                    self.from_disk[request] = blocks


def _load_s(load: PrefillLoad | DecodeLoad) -> float:
    return sum([job.left_s for job in load.jobs]) if isinstance(load, PrefillLoad) else load.step_s
