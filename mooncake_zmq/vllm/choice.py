"""The choice between loading KV and computing it, by the recent times of both. PURE.

Steps of the engine are measured in any case. Loads are measured while blocks are loaded; while they are not, a probe loads some
now and then, so that measures from bad moments do not count for ever. Sizes that have not been measured twice are loaded, and
so are more blocks than twice the largest measured: small loads say little about large ones, which are measured once they are
loaded.
"""

import math
import sys
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy

LATEST = 5
"""Durations kept for each magnitude."""
SLOWER = 1.25
"""Loaded blocks are computed instead once loading takes more than so many times as long; computed ones are loaded again once
loading takes no longer."""
KNOWN_LOADS = 2.0
"""Loads of up to so many times the blocks of the largest measured one can be predicted."""
PROBE_SHARE = 0.05
"""Largest cost of probes, as a share of the time that computing instead has saved."""
MOST_STEPS = 64
"""Most steps under way, more than any engine has; the end of an older one is ignored."""
MOST_LOADS = 4096
"""Most loads under way; missing reports of ranks on an older one are not waited for."""
MILLION = 1_000_000


class Verdict(Enum):
    """A decision on blocks that the pool has. PROBE: they are loaded for measurement, although that seems slower."""

    LOAD = auto()
    LEAVE = auto()
    PROBE = auto()


class Speed:
    """Seconds by size: a line through the measured median of each power of two, extended beyond the last one."""

    def __init__(self, known: float = math.inf) -> None:
        """`known`: nothing is predicted for sizes above so many times the largest measured one."""
        self._known = known
        self._latest: dict[int, deque[tuple[float, int]]] = {}
        """By the bit length of the size: seconds per unit, and the size."""
        self._medians: dict[int, tuple[int, float]] = {}

    def add(self, size: int, took_s: float) -> None:
        bits = size.bit_length()
        latest = self._latest.setdefault(bits, deque(maxlen=LATEST))
        latest.append((took_s / size, size))
        if len(latest) > 1:
            rate, median_size = sorted(latest)[(len(latest) - 1) // 2]  # of two the quicker: one bad moment does not count
            self._medians[bits] = (median_size, rate * median_size)

    def expected_s(self, size: int) -> float | None:
        """Return the expected seconds for a size; None if nothing, or nothing as large, has been measured twice."""
        points = sorted(self._medians.values())
        if not points or size > self._known * points[-1][0]:
            return None
        sizes, seconds = [0, *(each for each, _ in points)], [0.0, *(each_s for _, each_s in points)]
        return float(numpy.interp(size, sizes, seconds)) + max(0, size - sizes[-1]) * _rise(points)


def _rise(points: list[tuple[int, float]]) -> float:
    """Return the seconds per unit beyond the last point: the slope from the first to the last, since neighbours differ by
    chance. It is at most proportional, and proportional if there is only one point."""
    (first, first_s), (last, last_s) = points[0], points[-1]
    rate = last_s / last
    return rate if first == last else min(rate, max(0.0, (last_s - first_s) / (last - first)))


@dataclass(slots=True)
class Choice:
    """Choose by measured times. `step_tokens`: most tokens that the engine computes in one step. `counts`: microseconds that
    steps and loads took, and by how much they differed from the expectation."""

    step_tokens: int = sys.maxsize
    counts: Counter[str] = field(default_factory=Counter)
    _loads: Speed = field(default_factory=lambda: Speed(KNOWN_LOADS))
    _steps: Speed = field(default_factory=Speed)
    _under_way: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By step: when it was planned, and its tokens."""
    _parts: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By load, until all ranks have reported: how many have, and the seconds of the slowest."""
    _number: int = 0
    _ended_at: float = 0.0
    _saved_s: dict[int, float] = field(default_factory=dict)
    """By the bit length of sizes that are computed instead: seconds saved since the last probe."""

    def verdict(self, blocks: int, tokens: int, of_tokens: int) -> Verdict:
        """Decide on `blocks` with the KV of `tokens`, out of `of_tokens` that are computed otherwise."""
        at_once = min(of_tokens, self.step_tokens)
        load_s, step_s = self._loads.expected_s(blocks), self._steps.expected_s(at_once)
        if load_s is None or step_s is None:
            return Verdict.LOAD
        compute_s = step_s * tokens / at_once
        bits = blocks.bit_length()
        if load_s <= compute_s * (1.0 if bits in self._saved_s else SLOWER):
            self._saved_s.pop(bits, None)
            return Verdict.LOAD
        return self._probe_or_leave(bits, load_s - compute_s)

    def load_took(self, blocks: int, took_s: float) -> None:
        """Record the time in which all of these blocks were loaded."""
        self._measure("load", self._loads, blocks, took_s)

    def part_took(self, number: int, blocks: int, took_s: float, ranks: int) -> None:
        """Record one rank's time of a load, which takes as long as the slowest rank's; inf if blocks were missing."""
        reported, slowest_s = self._parts.pop(number, (0, 0.0))
        reported, slowest_s = reported + 1, max(slowest_s, took_s)
        if reported < ranks:
            self._parts[number] = (reported, slowest_s)
            if len(self._parts) > MOST_LOADS:
                del self._parts[next(iter(self._parts))]
        elif slowest_s < math.inf:
            self.load_took(blocks, slowest_s)

    def step_begins(self, now: float, tokens: int) -> int:
        """Record the begin of a step that computes `tokens` and return its number; 0 if it computes none."""
        if not tokens:
            return 0
        self._number += 1
        self._under_way[self._number] = (now, tokens)
        self._under_way.pop(self._number - MOST_STEPS, None)
        return self._number

    def step_ended(self, now: float, number: int) -> None:
        """Record the end of a step. Steps end in order; one planned during another began when that ended."""
        planned_at, tokens = self._under_way.pop(number, (now, 0))
        if tokens:
            began_at, self._ended_at = max(planned_at, self._ended_at), now
            self._measure("step", self._steps, tokens, now - began_at)

    def _probe_or_leave(self, bits: int, loss_s: float) -> Verdict:
        saved_s = self._saved_s.get(bits, 0.0)
        if PROBE_SHARE * saved_s >= loss_s:
            self._saved_s[bits] = 0.0
            return Verdict.PROBE
        self._saved_s[bits] = saved_s + loss_s
        return Verdict.LEAVE

    def _measure(self, what: str, measured: Speed, size: int, took_s: float) -> None:
        expected_s = measured.expected_s(size)
        if expected_s is not None:
            self.counts[f"{what}_us"] += int(MILLION * took_s)
            self.counts[f"{what}_error_us"] += int(MILLION * abs(took_s - expected_s))
        measured.add(size, took_s)
