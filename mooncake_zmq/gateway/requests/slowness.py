"""Numbers that are worse than they should be in the last minute, though all nodes may be there: faults, refusals, missed
SLOs, and TTFT far above its prediction. PURE."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake_zmq.gateway.requests.history import (
    MINUTE,
    PREDICTED,
    SLO_MET,
    SLO_MISSED,
    STEP_S,
    STEPS,
    Step,
    added,
    faults,
    of,
    refusals,
)

FAR, FAR_S = 2.0, 0.25
"""TTFT is far above its prediction if its mean is this many times the predicted mean, and this many seconds above it."""
FEW = 3
"""Number of predictions below which their mean is not judged."""
MISSED_SHARE = 0.01
"""Share of requests beyond their SLO above which the SLO counts as missed."""
ACTIONS = {
    "failed": 'the filter "failed" of the web page names them; MooncakeRequestsFail in docs/operating.md, Alarms',
    "refused": "ttft_slo: more prefills; tbt_slo, no_room: more decodes; MooncakeRefuses in docs/operating.md, Alarms",
    "ttft_slo": 'the filter "slow" of the web page shows where the time went. queue: more prefills; load: network or SSD',
    "tbt_slo": 'more decodes, or a smaller decode batch; the filter "slow" of the web page shows which decode',
    "predicted": "other load on the machines, or mooncake-zmq profile; MooncakePredictionsOff in docs/operating.md, Alarms",
}
"""Things to look at, by the number that is bad."""


@dataclass(frozen=True, slots=True)
class Slow:
    """A number that is worse than it should be: which one, in words, since when, and what to look at."""

    number: str
    text: str
    since_s: float
    action: str


def slow(steps: Sequence[Step]) -> list[Slow]:
    """Return the numbers that are bad in the last minute, the worst kind first. `steps`: of all gateways, the oldest first."""
    minute = added(steps[-MINUTE:])
    found = [(name, text, bad) for name, look, bad in CHECKS if (text := look(minute))]
    return [Slow(name, text, _since_s(steps, bad), ACTIONS[name]) for name, text, bad in found]


def sentence(each: Slow) -> str:
    """Return number and duration as a part of a sentence."""
    return f"{each.text}, {lasts(each.since_s)}{' or longer' * (each.since_s >= STEPS * STEP_S)}"


def lasts(seconds: float) -> str:
    """Return a duration in words."""
    for unit, size_s in (("days", 86_400), ("hours", 3_600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"for {seconds / size_s:.0f} {unit}"
    return f"for {seconds:.0f} s"


def _since_s(steps: Sequence[Step], bad: Callable[[Step], object]) -> float:
    """Return how long a number has been bad, without a good minute between."""
    first = good = 0
    for age, step in enumerate(reversed(steps), 1):
        if bad(step):
            first, good = age, 0
        else:
            good += 1
        if good >= MINUTE:
            break
    return first * STEP_S


def _failed(step: Step) -> str:
    counts = faults(step)
    return f"{_requests(sum(counts.values()))} failed in the last minute ({_listed(counts)})" if counts else ""


def _refused(step: Step) -> str:
    counts = refusals(step)
    return f"{_requests(sum(counts.values()))} {_were(counts)} refused in the last minute ({_listed(counts)})" if counts else ""


def _missed(what: str, words: str) -> Callable[[Step], str]:
    def look(step: Step) -> str:
        missed, met = of(step, SLO_MISSED).get(what, 0), of(step, SLO_MET).get(what, 0)
        text = f"{words} missed its SLO in {missed} of {_requests(missed + met)} of the last minute"
        return text if missed > MISSED_SHARE * (missed + met) else ""

    return look


def _mispredicted(step: Step) -> str:
    count, predicted_us, actual_us = (step.get(name, 0) for name in PREDICTED)
    if count < FEW or actual_us <= FAR * predicted_us or actual_us - predicted_us <= FAR_S * 1e6 * count:
        return ""
    return f"TTFT was {actual_us / count / 1e6:.2f} s where {predicted_us / count / 1e6:.2f} s was predicted"


def _is_far(step: Step) -> bool:
    _, predicted_us, actual_us = (step.get(name, 0) for name in PREDICTED)
    return actual_us > FAR * predicted_us


def _requests(count: int) -> str:
    return f"{count} request{'s' * (count != 1)}"


def _were(counts: dict[str, int]) -> str:
    return "was" if sum(counts.values()) == 1 else "were"


def _listed(counts: dict[str, int]) -> str:
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count}" for name, count in most[:3])


CHECKS: Sequence[tuple[str, Callable[[Step], str], Callable[[Step], object]]] = (
    ("failed", _failed, faults),
    ("refused", _refused, refusals),
    ("ttft_slo", _missed("ttft", "TTFT"), _missed("ttft", "TTFT")),
    ("tbt_slo", _missed("tbt", "TBT"), _missed("tbt", "TBT")),
    ("predicted", _mispredicted, _is_far),
)
"""Name, sentence of a minute (empty: all is well) and judgement of a single step, of each number."""
