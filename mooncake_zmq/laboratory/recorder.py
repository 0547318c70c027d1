"""Looks on at the nodes of a run and writes down what no message tells: the time of every decode step, which engine time served
which request, the loads that nodes report. Never changes what happens.

A step is kept once for all its members, in columns; a request keeps the rows of the steps it was in.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.actor import Effect, Event, Send, Start, WorkDone
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

ROWS_KEPT = 1 << 17
"""Rows of steps after which those that no open request needs are dropped."""


class StepRows:
    """Decode steps of all decodes, one row for those of one work."""

    def __init__(self) -> None:
        self.first = 0
        """Number of the first row that is kept."""
        self._runs = array("d")
        """Begin, first step's time and growth of each row, one row after the other."""
        self._steps = array("q")

    @property
    def next(self) -> int:
        """Number of the next row."""
        return self.first + len(self._steps)

    def add(self, run: StepRun) -> int:
        """A work ended; returns its row."""
        self._runs.extend((run.begin_s, run.first_s, run.growth_s))
        self._steps.append(run.steps)
        return self.next - 1

    def forget_before(self, row: int) -> None:
        """Nobody asks for earlier rows any more."""
        gone = max(0, row - self.first)
        del self._runs[: 3 * gone], self._steps[:gone]
        self.first = max(self.first, row)

    def times(self, rows: Sequence[int], last_steps: int) -> NDArray[np.float64]:
        """When the tokens of these rows were sampled; of the last row only so many count."""
        at = np.array(rows, np.int64) - self.first
        steps = np.frombuffer(self._steps, np.int64)[at]
        steps[-1] = last_steps
        stops = steps.cumsum()
        made = np.arange(1, stops[-1] + 1) - (stops - steps).repeat(steps)
        begin, first, growth = np.frombuffer(self._runs, np.float64).reshape(-1, 3)[at.repeat(steps)].T
        times: NDArray[np.float64] = begin + made * first + growth * (made * (made - 1) / 2)
        return times


def longest_tenth_s(times: NDArray[np.float64]) -> float:
    """TBT of a request by its tokens' times: counted as the gateway does, and as for the baselines."""
    return gaps.longest_tenth_s(times[1:] - times[:-1])


class Recorder:
    """Of one run. `ttft_slo_s`, `tbt_slo_s`: what loads are shares of."""

    def __init__(self, *, ttft_slo_s: float, tbt_slo_s: float, with_disk: bool) -> None:
        self.rows = StepRows()
        self.told: dict[str, deque[int]] = {}
        """By decode: rows whose tokens are on their way to the gateway, in order."""
        self.engine_s: dict[str, float] = {}
        """By open request: engine time of prefills since its last first token."""
        self.from_disk: dict[str, int] = {}
        """By open request: blocks that its host's pool had to read from its SSD."""
        self.open_rows: Callable[[], Iterable[int]] = lambda: ()
        """First rows of the open requests."""
        self._with_disk = with_disk
        self._slo_s = {"prefill": ttft_slo_s, "decode": tbt_slo_s}
        self._loads: dict[str, dict[str, float]] = {"prefill": {}, "decode": {}}
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
        loads = self._loads[role]
        return sum(loads.values()) / len(loads) if loads else 0.0

    def _decode_did(self, process: Process[ModelledMachine], event: Event, effects: list[Effect]) -> None:
        if type(event) is WorkDone and isinstance(event.result, StepDecoded):
            assert process.life is not None
            run = process.life.machine.last_run
            assert run is not None
            row = -1
            for effect in effects:
                if type(effect) is Send and isinstance(effect.message, TokensDecoded):
                    row = self._add(run) if row < 0 else row
                    self.told[process.name].append(row)
            return
        for effect in effects:
            if type(effect) is Send and isinstance(effect.message, DecodeLoad):
                self._loads["decode"][process.name] = effect.message.step_s / self._slo_s["decode"]

    def _add(self, run: StepRun) -> int:
        rows = self.rows
        if rows.next - rows.first >= ROWS_KEPT:
            waiting = [told[0] for told in self.told.values() if told]
            rows.forget_before(min([*self.open_rows(), *waiting], default=rows.next))
        return rows.add(run)

    def _prefill_did(self, name: str, event: Event, effects: list[Effect]) -> None:
        if type(event) is WorkDone:
            served = self._chunks.pop((name, event.work_id), "")
            if isinstance(event.result, ChunkComputed) and served in self.engine_s:
                self.engine_s[served] += event.result.elapsed_s
        request, lease_id = "", 0
        for effect in effects:
            if type(effect) is Send:
                message = effect.message
                if isinstance(message, HandoffBlocks):
                    request = message.request_id  # of the chunk that is begun next
                elif isinstance(message, LeaseBlocks):
                    lease_id = message.lease_id  # for the request that asks its decode for room next
                elif isinstance(message, ReserveDecode):
                    if lease_id and self._with_disk:
                        self._leases[name, lease_id] = message.request_id
                    lease_id = 0
                elif isinstance(message, PrefillLoad):
                    left_s = sum([job.left_s for job in message.jobs])
                    self._loads["prefill"][name] = left_s / self._slo_s["prefill"]
            elif type(effect) is Start and isinstance(effect.work, ComputeChunk):
                self._chunks[name, effect.work_id] = request

    def _pool_did(self, process: Process[ModelledMachine], event: Event, effects: list[Effect]) -> None:
        """A pool counts what it read from its SSD when it answers a lease."""
        for effect in effects:
            if type(effect) is Send and isinstance(effect.message, BlocksLeased):
                assert process.life is not None
                counted = process.life.actor.counts.get("lookup_blocks[result=disk]", 0)
                blocks = min(counted - self._disk_blocks.get(process.name, 0), len(effect.message.slots))
                self._disk_blocks[process.name] = self._disk_blocks.get(process.name, 0) + blocks
                request = self._leases.pop((effect.to, effect.message.lease_id), "")
                if blocks and request in self.engine_s:
                    self.from_disk[request] = blocks
