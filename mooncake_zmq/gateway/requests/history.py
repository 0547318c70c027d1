"""The last five minutes of gateways in numbers: requests and tokens per second, TTFT, gaps between tokens, refusals and
failures. PURE.

A step holds by how much counters rose within five seconds. Steps of several gateways add up.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

STEP_S = 5.0
STEPS = 60
"""Steps kept: five minutes."""
RATE_STEPS = 2
"""Steps over which a rate is taken."""
MINUTE = 12
"""Steps over which all other numbers are taken."""
TTFT_BOUNDS_S: Sequence[float] = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
GAP_BOUNDS_S: Sequence[float] = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
"""Upper ends of the buckets of both histograms, as vLLM has them."""
TTFT, GAP = "ttft", "gap"
BOUNDS: Mapping[str, Sequence[float]] = {TTFT: TTFT_BOUNDS_S, GAP: GAP_BOUNDS_S}
BUCKETS: Mapping[str, Sequence[tuple[float, str]]] = {
    name: [(end, f"{name}[le={end:g}]") for end in (*bounds, float("inf"))] for name, bounds in BOUNDS.items()
}
"""Upper end and counter of each bucket, the lowest first."""
TOKENS = "tokens"
SLO_MET, SLO_MISSED = "requests_slo_met", "requests_slo_missed"
"""Counters of requests that ended within or beyond an SLO, by what it is on."""
GROUPS = tuple(
    f"{name}["
    for name in (TTFT, GAP, SLO_MET, SLO_MISSED, "requests_rejected", "requests_failed", "edge_rejected", "tenant_limited")
)
PREDICTED = tuple(f"{name}[of=ttft]" for name in ("predictions", "predicted_microseconds", "actual_microseconds"))
SINGLE = ("requests", "requests_refused", TOKENS, *PREDICTED)
"""Counters that a step holds: those of `SINGLE`, and all whose names begin as in `GROUPS`."""
CALLERS_FAULT = ("constraint_stuck",)
"""Codes of failures that the request itself causes."""
Step = Mapping[str, int]


class History:
    """The last steps of one gateway."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=STEPS)
        self._before: dict[str, int] = {}

    def sample(self, counts: Mapping[str, float]) -> None:
        """End a step. `counts`: all counters of the gateway, tokens and histograms among them, see `histogram`."""
        now = {name: int(value) for name, value in counts.items() if name in SINGLE or name.startswith(GROUPS)}
        rises = {name: value - self._before.get(name, 0) for name, value in now.items()}
        self._steps.append({name: rise for name, rise in rises.items() if rise})
        self._before = now

    @property
    def steps(self) -> list[Step]:
        """The steps, the oldest first."""
        return list(self._steps)


def histogram(name: str, counts: Sequence[int]) -> dict[str, int]:
    """Return a histogram as counters: `ttft[le=0.5]` counts the values of the bucket that ends there. The last has no end."""
    return {key: count for (_, key), count in zip(BUCKETS[name], counts, strict=True) if count}


def merged(histories: Sequence[Sequence[Step]]) -> list[Step]:
    """Return the steps of several gateways added up; their last steps belong together."""
    longest = max(map(len, histories), default=0)
    whole: list[Counter[str]] = [Counter() for _ in range(longest)]
    for steps in histories:
        for total, step in zip(whole[longest - len(steps) :], steps, strict=True):
            total.update(step)
    return list(whole)


def added(steps: Sequence[Step]) -> Counter[str]:
    """Return the sum of some steps."""
    total: Counter[str] = Counter()
    for step in steps:
        total.update(step)
    return total


def numbers(steps: Sequence[Step]) -> dict[str, Any]:
    """Return the numbers of the page's tiles, each with its value now and its history, for JSON."""
    return {
        name: {"now": value(added(steps[-span:]), span * STEP_S), "past": [value(step, STEP_S) for step in steps]}
        for name, (value, span) in NUMBERS.items()
    }


def _per_second(name: str) -> Callable[[Step, float], float]:
    return lambda step, seconds: round(step.get(name, 0) / seconds, 2)


def _quantile(name: str, share: float) -> Callable[[Step, float], float | None]:
    return lambda step, _seconds: quantile(step, name, share)


def quantile(step: Step, name: str, share: float) -> float | None:
    """Return the value below which this share of a histogram's values is, interpolated within its bucket; None without values.
    Of the last bucket, which has no end, it is the lower end."""
    buckets = [(end, step[key]) for end, key in BUCKETS[name] if key in step]
    whole = sum(count for _, count in buckets)
    if not whole:
        return None
    bounds = BOUNDS[name]
    passed = 0
    for end, count in buckets:
        if passed + count >= share * whole:
            begin = max((bound for bound in (0.0, *bounds) if bound < end), default=0.0)
            inside = begin if end == float("inf") else begin + (end - begin) * (share * whole - passed) / count
            return round(inside, 5)
        passed += count
    return buckets[-1][0]


def refusals(step: Step) -> dict[str, int]:
    """Return the calls and requests that were refused, by reason."""
    more = {"limited": sum(of(step, "tenant_limited").values()), "overloaded": step.get("requests_refused", 0)}
    return of(step, "requests_rejected") | of(step, "edge_rejected") | {why: count for why, count in more.items() if count}


def failures(step: Step) -> dict[str, int]:
    """Return the requests that ended in an error which is no refusal, by code."""
    rejected = of(step, "requests_rejected")
    return {code: count for code, count in of(step, "requests_failed").items() if code not in rejected}


def faults(step: Step) -> dict[str, int]:
    """Return the failures that the request itself did not cause, by code."""
    return {code: count for code, count in failures(step).items() if code not in CALLERS_FAULT}


def of(step: Step, base: str) -> dict[str, int]:
    """Return the counters of a name by the value of their one label."""
    return {key.partition("=")[2][:-1]: count for key, count in step.items() if key.startswith(f"{base}[")}


def _a_minute(counted: Callable[[Step], Mapping[str, int]]) -> Callable[[Step, float], float]:
    return lambda step, seconds: round(60 * sum(counted(step).values()) / seconds, 1)


NUMBERS: Mapping[str, tuple[Callable[[Step, float], float | None], int]] = {
    "requests_per_s": (_per_second("requests"), RATE_STEPS),
    "tokens_per_s": (_per_second(TOKENS), RATE_STEPS),
    "ttft_p50_s": (_quantile(TTFT, 0.5), MINUTE),
    "ttft_p99_s": (_quantile(TTFT, 0.99), MINUTE),
    "gap_p50_s": (_quantile(GAP, 0.5), MINUTE),
    "gap_p99_s": (_quantile(GAP, 0.99), MINUTE),
    "refused_per_min": (_a_minute(refusals), MINUTE),
    "failed_per_min": (_a_minute(faults), MINUTE),
}
