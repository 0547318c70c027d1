"""Looks on at the nodes of a run and writes down what no message tells: the time of every decode step, which engine time served
which request, the loads that nodes report. Never changes what happens.

The times of one work's steps are made once for all its members, who keep them as long as they are open.
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
from mooncake_zmq.laboratory import gaps
from mooncake_zmq.laboratory.machine import ModelledMachine, StepRun
from mooncake_zmq.simulation.world import Observe, Process


@lru_cache(256)
def _made(steps: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Steps made after each of so many, and how often each was longer than the first."""
    made = np.arange(1.0, steps + 1)
    return made, made * (made - 1) / 2


def step_times(run: StepRun) -> NDArray[np.float64]:
    """When the tokens of these steps were sampled."""
    made, growths = _made(run.steps)
    times: NDArray[np.float64] = run.begin_s + made * run.first_s + run.growth_s * growths
    return times


def longest_tenth_s(times: NDArray[np.float64]) -> float:
    """TBT of a request by its tokens' times: counted as the gateway does, and as for the baselines."""
    return gaps.longest_tenth_s(times[1:] - times[:-1])


class Recorder:
    """Of one run. `ttft_slo_s`, `tbt_slo_s`: what loads are shares of; `delay_s`: of a message."""

    def __init__(self, *, ttft_slo_s: float, tbt_slo_s: float, with_disk: bool, delay_s: float) -> None:
        self.told: dict[str, deque[NDArray[np.float64]]] = {}
        """By decode, in order: when the tokens of steps, told to the gateway, would be there if each were told at once."""
        self.engine_s: dict[str, float] = {}
        """By open request: engine time of prefills since its last first token."""
        self.from_disk: dict[str, int] = {}
        """By open request: blocks that its host's pool had to read from its SSD."""
        self._with_disk = with_disk
        self._delay_s = delay_s
        self._slo_s = {"prefill": ttft_slo_s, "decode": tbt_slo_s}
        self._loads: dict[str, dict[str, PrefillLoad | DecodeLoad]] = {"prefill": {}, "decode": {}}
        self._chunks: dict[tuple[str, int], str] = {}
        self._leases: dict[tuple[str, int], str] = {}
        """By prefill and lease: the request that waits for its answer."""
        self._disk_blocks: dict[str, int] = {}
        """By cache-node: what it had read from its SSD for leases so far."""

    def watch(self, process: Process[ModelledMachine]) -> Observe | None:
        """Who looks on at a process, from the beginning of each of its lives."""
        for loads in self._loads.values():
            loads.pop(process.name, None)
        if process.spec.role == "decode":
            self.told[process.name] = deque()
            return partial(self._decode_did, process)
        if process.spec.role == "cache-node" and process.spec.disk_slots:
            return partial(self._pool_did, process)
        return partial(self._prefill_did, process.name) if process.spec.role == "prefill" else None

    def mean_load(self, role: str) -> float:
        """Of all nodes of a role, as they last told, as a share of its SLO."""
        loads, slo_s = self._loads[role].values(), self._slo_s[role]
        return sum([_load_s(told) / slo_s for told in loads]) / len(loads) if loads else 0.0

    def _decode_did(self, process: Process[ModelledMachine], event: Event, effects: list[Effect]) -> None:
        if type(event) is WorkDone:
            if type(event.result) is StepDecoded:
                self._steps_did(process, effects)
            return
        for effect in effects:
            if type(effect) is Send and type(effect.message) is DecodeLoad:
                self._loads["decode"][process.name] = effect.message

    def _steps_did(self, process: Process[ModelledMachine], effects: list[Effect]) -> None:
        assert process.life is not None
        run = process.life.machine.last_run
        assert run is not None
        times = step_times(run) + self._delay_s
        for effect in effects:
            if type(effect) is Send and type(effect.message) is TokensDecoded:
                self.told[process.name].append(times)

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
                    request = message.request_id  # of the chunk that is begun next
                elif type(message) is LeaseBlocks:
                    lease_id = message.lease_id  # for the request that asks its decode for room next
                elif type(message) is ReserveDecode:
                    if lease_id and self._with_disk:
                        self._leases[name, lease_id] = message.request_id
                    lease_id = 0
            elif type(effect) is Start and type(effect.work) is ComputeChunk:
                self._chunks[name, effect.work_id] = request

    def _pool_did(self, process: Process[ModelledMachine], event: Event, effects: list[Effect]) -> None:
        """A pool counts what it read from its SSD when it answers a lease."""
        for effect in effects:
            if type(effect) is Send and type(effect.message) is BlocksLeased:
                assert process.life is not None
                counted = process.life.actor.counts.get("lookup_blocks[result=disk]", 0)
                blocks = min(counted - self._disk_blocks.get(process.name, 0), len(effect.message.slots))
                self._disk_blocks[process.name] = self._disk_blocks.get(process.name, 0) + blocks
                request = self._leases.pop((effect.to, effect.message.lease_id), "")
                if blocks and request in self.engine_s:
                    self.from_disk[request] = blocks


def _load_s(told: PrefillLoad | DecodeLoad) -> float:
    return sum([job.left_s for job in told.jobs]) if isinstance(told, PrefillLoad) else told.step_s
