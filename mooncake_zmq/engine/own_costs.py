"""The costs of an engine on this machine, measured while its process starts, where the configuration states none. The
measurement never runs beside requests."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.engine.spec import Engine

FEW_TOKENS, TOKENS = 8, 128
"""Tokens of the first and of the later measurements. The weights are read once a chunk, which dominates for few tokens: they
only show whether more would take too long."""
MOST_S = 4.0
"""Seconds; a prefill that may take longer is not tried."""
ENOUGH_S = 0.1
"""Seconds of a prefill that is measured well enough; a quicker engine is measured with longer ones."""
STEPS = 4
SCHEDSTAT = "/proc/thread-self/schedstat"


def unhindered_s() -> float:
    """Return a clock that stops while this thread is ready to run but has no core: other processes of a host start beside
    it."""
    try:
        with open(SCHEDSTAT) as file:
            waited_s = int(file.read().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):  # a kernel without these statistics
        waited_s = 0.0
    return time.perf_counter() - waited_s


@dataclass(frozen=True, slots=True)
class Clocks:
    """The two clocks of a measurement. `passed` times a work. `computed` is a lower bound: the kernel reports waits late, so a
    reported wait may be longer than a short work."""

    passed: Callable[[], float] = unhindered_s
    computed: Callable[[], float] = time.thread_time

    def timed_s(self, work: Callable[[], object]) -> float:
        began, computed_s = self.passed(), self.computed()
        work()
        return max(self.passed() - began, self.computed() - computed_s)


def measured(engine: Engine, costs: Costs, *, most_tokens: int, clocks: Clocks | None = None) -> Costs:
    """Return `costs`, with prefill and decode each scaled to this engine's speed. `most_tokens`: of a chunk. Of equal works the
    quickest counts."""
    timed_s = (clocks or Clocks()).timed_s
    most_tokens = max(1, min(most_tokens, engine.spec.max_positions - STEPS - 1))
    sequence = engine.new_sequence(most_tokens + STEPS + 1)

    def prefill_s(tokens: int) -> float:
        sequence.set_length(0)
        return timed_s(lambda: engine.prefill(sequence, np.zeros(tokens, np.int32)))

    try:
        tokens = min(FEW_TOKENS, most_tokens)
        prefill_s(tokens)  # the first one runs with cold caches
        took_s = prefill_s(tokens)
        if took_s * TOKENS < MOST_S * tokens:
            tokens = min(TOKENS, most_tokens)
            while (took_s := prefill_s(tokens)) < ENOUGH_S and tokens < most_tokens:
                tokens = min(2 * tokens, most_tokens)
            took_s = min(took_s, prefill_s(tokens))
        step_s = min(timed_s(lambda: engine.decode([sequence], np.zeros(1, np.int32))) for _ in range(STEPS))
    finally:
        sequence.close()
    return costs.scaled(prefill=took_s / costs.compute_s(tokens, 0), decode=step_s / costs.step_s(1, tokens))
