"""How far the cost model is off, learnt from what nodes report, and how far each kind of prediction was off. PURE.

A correction is a factor for one kind of work on one node. One measurement is little evidence and an old one is none: the factor
is drawn towards 1 by both. So a node whose first work was slow, because everything was cold, is given another try.
"""

import math
from bisect import bisect_left, insort
from collections import deque

from mooncake_zmq.conductor.booking import Booking
from mooncake_zmq.core.messages import Measured, Outcome
from mooncake_zmq.core.shell import Tally

PRIOR_REPORTS = 0.5
"""How many reports the cost model itself counts as. One measurement has two thirds of the say, sixteen have 97 %."""
MOST_REPORTS = 16.0
"""More evidence than this is not kept: four seconds of reports, after which a change has shown."""
MOST_CHANGE = 4.0
"""One report counts as at most this many times off what was known: a single stall says little, however long it was."""
MOST_FACTOR = 1e6
"""No node is so slow, or so quick; a report that says so must not carry the estimates off to infinity, or to nothing."""
RECENT_OUTCOMES = 128.0
"""Requests that lateness and bias are means of."""
SPARE = 3.0
"""Of the mean lateness, which is that of the later half spread over all: about what one in a hundred exceeds."""
MOST_SPARE = 0.25
MOST_BIAS = 2.0
OVERHEAD_OUTCOMES = 64
"""Requests that the overhead is the median of."""
MOST_OVERHEAD_S = 0.05
PRIOR_OUTPUTS = 8.0
MOST_OUTPUTS = 256.0
MILLION = 1_000_000
KINDS = ("compute", "load", "transfer", "step", "output", "ttft", "tbt")
"""What is predicted: seconds, but for output, in tokens."""
COUNTERS = {
    kind: (
        f"predictions[kind={kind}]",
        f"prediction_error_millionths[kind={kind}]",
        f"prediction_actual_millionths[kind={kind}]",
    )
    for kind in KINDS
}


def factor_of(own_s: float, our_s: float, corrected: float) -> float:
    """How much slower a node is than our costs say: its own to ours, where it tells them, times what corrects those."""
    own = min(MOST_FACTOR, max(1 / MOST_FACTOR, own_s / our_s)) if own_s else 1.0
    return min(own * corrected, MOST_FACTOR)


class Accuracy:
    """How far predictions were off, by kind, in the actor's counters: how many, the sum of absolute errors and the sum of what
    came true, the sums in millionths of a second or of a token."""

    def __init__(self, counts: Tally) -> None:
        self._counts = counts

    def add(self, kind: str, actual: float, predicted: float) -> None:
        """One prediction came true, or did not."""
        count, error, came_true = COUNTERS[kind]
        self._counts.add(count)  # not by a name for `add`, which machine code calls through the interpreter
        self._counts.add(error, int(MILLION * abs(actual - predicted)))
        self._counts.add(came_true, int(MILLION * actual))

    def table(self) -> dict[str, tuple[int, float, float]]:
        """By kind: how many, mean absolute error, mean of what came true."""
        rows: dict[str, tuple[int, float, float]] = {}
        for kind, names in COUNTERS.items():
            count, error, actual = (self._counts.get(name, 0) for name in names)
            if count:
                rows[kind] = count, error / MILLION / count, actual / MILLION / count
        return rows

    def outcome(self, outcome: Outcome, expected_tokens: float | None) -> None:
        """A request brought at least its first token; `expected_tokens`: None if it is forgotten what was expected."""
        self.add("ttft", outcome.ttft_s, outcome.predicted_ttft_s)
        if outcome.output_tokens > 1:
            self.add("tbt", outcome.tbt_s, outcome.predicted_tbt_s)
        if outcome.ended and expected_tokens is not None:
            self.add("output", float(outcome.output_tokens), expected_tokens)


class RecentRatio:
    """The ratio of two sums over what came lately."""

    __slots__ = ("_part", "_whole")

    def __init__(self) -> None:
        self._part = self._whole = 0.0

    def add(self, part: float, whole: float) -> None:
        """Both are 0 or more."""
        self._part += part - self._part / RECENT_OUTCOMES
        self._whole += whole - self._whole / RECENT_OUTCOMES

    def value(self, unknown: float) -> float:
        """The ratio; `unknown` while nothing came."""
        return self._part / self._whole if self._whole else unknown


class Lateness:
    """How much later than promised first tokens came lately: a promise that is to be kept needs more time than that."""

    __slots__ = ("_late",)

    def __init__(self) -> None:
        self._late = RecentRatio()

    def add(self, actual_s: float, promised_s: float) -> None:
        """A first token came. One that took more than twice as long says something of its node, not of promises."""
        self._late.add(min(max(0.0, actual_s - promised_s), promised_s), promised_s)

    @property
    def factor(self) -> float:
        """What a promise is multiplied with before it is held against its bound."""
        return 1 + min(MOST_SPARE, SPARE * self._late.value(0.0))


class Bias:
    """What TBTs came to lately, of what was told: the factor that predictions are multiplied with before they are told. A step
    that is predicted well is still shorter than the longest tenth of a request's gaps, which TBT is the mean of.

    Requests are admitted without it: in doubt they may come, as their decode looks again when the prefill is done. Refusing by
    it costs 4 % of the goodput on 12P+4D at three times the public trace's rate."""

    __slots__ = ("_ratio",)

    def __init__(self) -> None:
        self._ratio = RecentRatio()

    def add(self, actual_s: float, predicted_s: float) -> None:
        """A request ended; `predicted_s`: before any bias. One that was off by more than a factor of two counts as that."""
        self._ratio.add(min(max(actual_s, predicted_s / MOST_BIAS), predicted_s * MOST_BIAS), predicted_s)

    @property
    def factor(self) -> float:
        """What a prediction is multiplied with. Of what is next to nothing the half may be nothing."""
        return min(max(self._ratio.value(1.0), 1 / MOST_BIAS), MOST_BIAS)


class Overhead:
    """The time to a first token that no work explains, messages and their processes: the median, over recent requests whose
    prefill was idle, of the time it took less the time that was predicted."""

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
    """Corrects predictions of TTFT and TBT by how those of recent requests came true."""

    __slots__ = ("_alone", "_crowded", "_overhead", "lateness")

    def __init__(self) -> None:
        self.lateness = Lateness()
        self._overhead = Overhead()
        self._alone, self._crowded = Bias(), Bias()
        """Apart: an idle decode begins a step at once, another one ends the step that runs first."""

    def ttft_s(self, predicted_s: float) -> float:
        """Return the corrected time to a first token."""
        return predicted_s + self._overhead.seconds

    def tbt_s(self, predicted_s: float, *, alone: bool) -> float:
        """Return the corrected TBT of a request that will probably be `alone` in its batch, or not."""
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
        """Take in what the node says of its recent work. Returns whether it is news: what a node measured fades in its reports
        (see `core.pace`), so of the same predicted seconds only a larger difference is."""
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
    """How long outputs become, by the magnitude of what was allowed them: the mean of those that ended by themselves."""

    def __init__(self, expected_tokens: int) -> None:
        self._expected = float(expected_tokens)
        self.typical = self._expected
        """Tokens that the requests placed lately were taken to have."""
        self._means: dict[int, tuple[float, float]] = {}
        """By bits of `max_tokens`: (mean, outputs it counts as)."""

    def expected(self, max_tokens: int) -> float:
        """Tokens that an output allowed `max_tokens` is taken to have."""
        known = self._means.get(max_tokens.bit_length())
        return min(float(max_tokens), known[0] if known else self._expected)

    def placed(self, expected: float) -> None:
        """A request was placed."""
        self.typical += (expected - self.typical) / 64

    def ended(self, max_tokens: int, output_tokens: int) -> None:
        """An output ended by itself."""
        mean, outputs = self._means.get(max_tokens.bit_length(), (self._expected, PRIOR_OUTPUTS))
        outputs = min(outputs + 1, MOST_OUTPUTS)
        self._means[max_tokens.bit_length()] = mean + (output_tokens - mean) / outputs, outputs
