"""Corrections of the cost model, learnt from what nodes report, and the errors of each kind of prediction. PURE.

A correction is a factor for one kind of work on one node. One measurement is little evidence and an old one is none, so the
factor is drawn towards 1 by both: a node whose first work was slow because its caches were cold is tried again.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from typing import Final

from mooncake_zmq.conductor.booking import Booking
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import Measured, Outcome

PRIOR_REPORTS: Final = 0.5
"""The number of reports that the cost model itself counts as. One measurement has a weight of two thirds, sixteen have 97
%."""
MOST_REPORTS: Final = 16.0
"""The most evidence kept, in reports: about four seconds of them, after which a change has taken effect."""
MOST_CHANGE: Final = 4.0
"""The largest ratio to the known factor that one report counts as: a single stall is little evidence, however long it was."""
MOST_FACTOR: Final = 1e6
"""The bounds of a factor (this and its inverse), so that an absurd report cannot make estimates infinite or zero."""
RECENT_OUTCOMES: Final = 128.0
"""The number of requests over which lateness and bias are averaged."""
SPARE: Final = 3.0
"""The multiple of the mean lateness that is held in reserve: about one request in a hundred is later."""
MOST_SPARE: Final = 0.25
MOST_BIAS: Final = 2.0
OVERHEAD_OUTCOMES: Final = 64
"""The number of requests that the overhead is the median of."""
MOST_OVERHEAD_S: Final = 0.05
PRIOR_OUTPUTS: Final = 8.0
MOST_OUTPUTS: Final = 256.0
MILLION: Final = 1_000_000
KINDS = ("compute", "load", "transfer", "step", "output", "ttft", "tbt")
"""The kinds of predictions: in seconds, and for output in tokens."""
COUNTERS = {
    kind: (
        f"predictions[kind={kind}]",
        f"prediction_error_millionths[kind={kind}]",
        f"prediction_actual_millionths[kind={kind}]",
    )
    for kind in KINDS
}


def factor_of(own_s: float, our_s: float, corrected: float) -> float:
    """Return how much slower a node is than the configured costs: the ratio of its own cost to the configured one, where it
    reports it, times the correction."""
    own = min(MOST_FACTOR, max(1 / MOST_FACTOR, own_s / our_s)) if own_s else 1.0
    return min(own * corrected, MOST_FACTOR)


class Accuracy:
    """Counts prediction errors in the actor's counters, by kind: the number of predictions, the sum of absolute errors and the
    sum of actual values, the sums in millionths of a second or of a token."""

    def __init__(self, counts: Tally) -> None:
        self._counts = counts

    def add(self, kind: str, actual: float, predicted: float) -> None:
        """Count one prediction and its actual value."""
        count, error, came_true = COUNTERS[kind]
        self._counts.add(count)  # not through an alias of `add`, which compiled code would call by the interpreter
        self._counts.add(error, int(MILLION * abs(actual - predicted)))
        self._counts.add(came_true, int(MILLION * actual))

    def table(self) -> dict[str, tuple[int, float, float]]:
        """Return by kind the number of predictions, the mean absolute error and the mean actual value."""
        rows: dict[str, tuple[int, float, float]] = {}
        for kind, names in COUNTERS.items():
            count, error, actual = (self._counts.get(name, 0) for name in names)
            if count:
                rows[kind] = count, error / MILLION / count, actual / MILLION / count
        return rows

    def outcome(self, outcome: Outcome, expected_tokens: float | None) -> None:
        """Count the predictions of a request that produced at least one token; `expected_tokens` is None if its booking is
        gone."""
        self.add("ttft", outcome.ttft_s, outcome.predicted_ttft_s)
        if outcome.output_tokens > 1:
            self.add("tbt", outcome.tbt_s, outcome.predicted_tbt_s)
        if outcome.ended and expected_tokens is not None:
            self.add("output", float(outcome.output_tokens), expected_tokens)


class RecentRatio:
    """The ratio of two sums over recent values."""

    __slots__ = ("_part", "_whole")

    def __init__(self) -> None:
        self._part = self._whole = 0.0

    def add(self, part: float, whole: float) -> None:
        """Add one value, of 0 or more, to each sum."""
        self._part += part - self._part / RECENT_OUTCOMES
        self._whole += whole - self._whole / RECENT_OUTCOMES

    def value(self, unknown: float) -> float:
        """Return the ratio, or `unknown` while there are no values."""
        return self._part / self._whole if self._whole else unknown


class Lateness:
    """Measures how much later than promised recent first tokens came; a promise needs this much reserve to be kept."""

    __slots__ = ("_late",)

    def __init__(self) -> None:
        self._late = RecentRatio()

    def add(self, actual_s: float, promised_s: float) -> None:
        """Record one first token. If it took more than twice the promised time, that is a property of its node, so it counts
        as twice."""
        self._late.add(min(max(0.0, actual_s - promised_s), promised_s), promised_s)

    @property
    def factor(self) -> float:
        """The factor for a promised time before it is compared with its bound."""
        return 1 + min(MOST_SPARE, SPARE * self._late.value(0.0))


class Bias:
    """The ratio of recent TBTs to their predictions: the factor by which reported predictions are multiplied. Even where a
    step is predicted well, TBT is the mean of the longest tenth of a request's gaps.

    Admission does not use it: in doubt a request is admitted, as its decode checks again when the prefill is done. Refusing by
    it costs 4 % of the goodput on 12P+4D at three times the public trace's rate.
    """

    __slots__ = ("_ratio",)

    def __init__(self) -> None:
        self._ratio = RecentRatio()

    def add(self, actual_s: float, predicted_s: float) -> None:
        """Record a request that ended; `predicted_s` is the prediction before any bias. An error beyond a factor of two counts
        as two."""
        self._ratio.add(min(max(actual_s, predicted_s / MOST_BIAS), predicted_s * MOST_BIAS), predicted_s)

    @property
    def factor(self) -> float:
        """The factor for a prediction, bounded since half of a tiny time may be noise."""
        return min(max(self._ratio.value(1.0), 1 / MOST_BIAS), MOST_BIAS)


class Overhead:
    """The time to a first token that no work explains, such as messages and process switches: the median, over recent requests
    with an idle prefill, of the actual time minus the predicted one."""

    __slots__ = ("_recent", "_sorted", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, actual_s: float, predicted_s: float) -> None:
        """Take in one request; `predicted_s`: without any overhead."""
        excess_s = actual_s - predicted_s
        self._recent.append(excess_s)
        insort(self._sorted, excess_s)
        if len(self._recent) > OVERHEAD_OUTCOMES:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self.seconds = min(max(0.0, self._sorted[len(self._sorted) >> 1]), MOST_OVERHEAD_S)


class Hindsight:
    """Corrects predictions of TTFT and TBT by the errors of recent requests."""

    __slots__ = ("_alone", "_crowded", "_overhead", "lateness")

    def __init__(self) -> None:
        self.lateness = Lateness()
        self._overhead = Overhead()
        self._alone, self._crowded = Bias(), Bias()
        """Biases for idle and for busy decodes: an idle decode begins a step at once, a busy one first ends its current
        step."""

    def ttft_s(self, predicted_s: float) -> float:
        """Return the corrected time to a first token."""
        return predicted_s + self._overhead.seconds

    def tbt_s(self, predicted_s: float, *, alone: bool) -> float:
        """Return the corrected TBT of a request that will probably be `alone` in its batch, or share it."""
        return predicted_s * (self._alone if alone else self._crowded).factor

    def outcome(self, outcome: Outcome, booking: Booking | None) -> None:
        """Take in a request that has at least its first token."""
        self.lateness.add(outcome.ttft_s, outcome.predicted_ttft_s)
        if booking is None:
            return
        if booking.idle:
            self._overhead.add(outcome.ttft_s, booking.ttft_s)
        if outcome.output_tokens > 1:
            (self._alone if booking.alone else self._crowded).add(outcome.tbt_s, booking.tbt_s)


class Correction:
    """One node's factor for one kind of work."""

    __slots__ = ("_at", "_half_life_s", "_last", "_ratio", "_reports", "factor")

    def __init__(self, half_life_s: float) -> None:
        self.factor = 1.0
        self._half_life_s = half_life_s
        self._ratio = 1.0
        self._reports = 0.0
        self._at = -math.inf
        self._last = (0.0, 0.0)

    def report(self, now: float, measured: Measured) -> bool:
        """Take in a node's report of its recent work, and return whether it is new information. A node's measurement fades
        from report to report (see `core.speed`), so for the same predicted seconds only a larger difference is new."""
        seconds, predicted_s = measured.seconds, measured.predicted_s
        if not self._reports and predicted_s <= 0:
            return False
        evidence = self._reports * math.exp2((self._at - now) / self._half_life_s) if self._reports else 0.0
        last_s, last_predicted_s = self._last
        further = abs(seconds - predicted_s) > abs(last_s - predicted_s)
        news = predicted_s > 0 and (predicted_s != last_predicted_s or further)
        self._last = seconds, predicted_s
        if news:
            ratio = min(max(seconds / predicted_s, self.factor / MOST_CHANGE), self.factor * MOST_CHANGE, MOST_FACTOR)
            self._ratio = (evidence * self._ratio + ratio) / (evidence + 1)
            self._reports = evidence = min(evidence + 1, MOST_REPORTS)
            self._at = now
        self.factor = (evidence * self._ratio + PRIOR_REPORTS) / (evidence + PRIOR_REPORTS)
        return news


class OutputLengths:
    """Predicts output lengths, by the magnitude of `max_tokens`: the mean of the outputs that ended by themselves."""

    def __init__(self, expected_tokens: int) -> None:
        self._expected = float(expected_tokens)
        self.typical = self._expected
        """The mean of the output tokens expected of recently placed requests."""
        self._means: dict[int, tuple[float, float]] = {}
        """By the bit length of `max_tokens`: the mean, and the number of outputs that it counts as."""

    def expected(self, max_tokens: int) -> float:
        """Return the expected tokens of an output that is allowed `max_tokens`."""
        known = self._means.get(max_tokens.bit_length())
        return min(float(max_tokens), known[0] if known else self._expected)

    def placed(self, expected: float) -> None:
        """Take the expected output of a placed request into the mean."""
        self.typical += (expected - self.typical) / 64

    def ended(self, max_tokens: int, output_tokens: int) -> None:
        """Take in the length of an output that ended by itself."""
        mean, outputs = self._means.get(max_tokens.bit_length(), (self._expected, PRIOR_OUTPUTS))
        outputs = min(outputs + 1, MOST_OUTPUTS)
        self._means[max_tokens.bit_length()] = mean + (output_tokens - mean) / outputs, outputs
