"""The figures of a run: shares, percentiles, hits, errors. PURE.

Shares count every request that arrived: one that was rejected or failed misses its SLOs. Percentiles count the requests that
have the figure: TTFT of requests with a first token, TBT of finished ones with two tokens or more.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_zmq.laboratory.clairvoyant import computed_tokens, least_ttft_s
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.study import RequestRecord, RunResult

TARGET = 0.9
"""The attainment target: share of the requests that must meet their SLOs."""
TIERS = ("own", "dram", "disk", "remote")


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles in seconds; 0 if there are no values."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class PredictionError:
    """The error of predictions. `percent`: the mean absolute error as a percentage of the mean of the actual values."""

    count: int
    mean_absolute: float
    mean_true: float
    percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run in figures. Shares from 0 to 1, times in seconds."""

    requests: int
    finished: int
    rejected: int
    failed: int
    within_slo: float
    """Share of all requests that finished with TTFT and TBT within their bounds."""
    within_ttft: float
    within_tbt: float
    admitted_within_slo: float
    """Share of the requests that were not rejected."""
    goodput_per_s: float
    """Requests a second, from the first arrival to the last end, that met both."""
    target: float
    attained: bool
    """Whether within_slo is `target` or more."""
    ttft_s: Spread
    tbt_s: Spread
    first_gap_s: Spread
    """Between the first and the second token of those that finished with two or more."""
    hits: dict[str, float]
    """Hits by tier, as a share of all prompt tokens of requests that were prefilled."""
    hit_ratio: float
    possible_ratio: float
    """Hits of a clairvoyant with endless memory, as the same share; see `clairvoyant`."""
    hits_of_possible: float
    """Hits as a share of the clairvoyant's; 1 if these are 0."""
    computed_tokens: int
    """Prompt tokens computed for requests that were prefilled; the next field has the least, which the clairvoyant would
    compute for these."""
    least_tokens: int
    regret: float
    """The ratio of the two."""
    least_ttft_s: float
    """Mean TTFT that the clairvoyant would have on machines that are idle whenever a request comes."""
    prefill_gpu_s: float
    """Engine time of prefill, per request that was prefilled."""
    decode_gpu_s: float
    """Engine time of decode steps, in all."""
    reasons: dict[str, int]
    """Why requests were rejected or failed."""
    wasted_prefills: int
    wasted_prefill_s: float
    errors: dict[str, PredictionError]
    virtual_s: float
    wall_s: float
    cpu_s: float
    peak_mib: float
    events: int


def summarize(result: RunResult) -> Summary:
    """Return the figures of a run."""
    requests, setup = result.requests, result.setup
    started = [each for each in requests if each.ttft_s >= 0]
    finished = [each for each in requests if each.outcome == "finished"]
    rejected = sum(1 for each in requests if each.outcome == "rejected")
    ttft = [each for each in finished if each.ttft_s <= setup.ttft_slo_s]
    tbt = [each for each in finished if each.tbt_s <= setup.tbt_slo_s]
    good = sum(1 for each in ttft if each.tbt_s <= setup.tbt_slo_s)
    hits = _hits(started)
    foreseen = [each for each in started if each.possible >= 0]
    computed = sum(map(computed_tokens, foreseen))
    asked, possible = sum(each.input_tokens for each in foreseen), sum(each.possible for each in foreseen)
    return Summary(
        requests=len(requests),
        finished=len(finished),
        rejected=rejected,
        failed=len(failures(result)),
        within_slo=_ratio(good, len(requests)),
        within_ttft=_ratio(len(ttft), len(requests)),
        within_tbt=_ratio(len(tbt), len(requests)),
        admitted_within_slo=_ratio(good, len(requests) - rejected),
        goodput_per_s=_ratio(good, _span_s(requests)),
        target=TARGET,
        attained=good >= TARGET * len(requests),
        ttft_s=spread([each.ttft_s for each in started]),
        tbt_s=spread([each.tbt_s for each in finished if each.output_tokens > 1]),
        first_gap_s=spread([each.first_gap_s for each in finished if each.first_gap_s >= 0]),
        hits=hits,
        hit_ratio=sum(hits.values()),
        possible_ratio=_ratio(possible, asked),
        hits_of_possible=(asked - computed) / possible if possible else 1.0,
        computed_tokens=computed,
        least_tokens=asked - possible,
        regret=_ratio(computed, asked - possible),
        least_ttft_s=_ratio(sum(least_ttft_s(each, setup.hardware.costs) for each in foreseen), len(foreseen)),
        prefill_gpu_s=_ratio(sum(result.prefill_busy_s.values()), len(started)),
        decode_gpu_s=sum(result.decode_busy_s.values()),
        reasons=dict(sorted(Counter(each.reason for each in requests if each.reason).items())),
        wasted_prefills=sum(1 for each in requests if each.wasted_prefill_s > 0),
        wasted_prefill_s=sum(each.wasted_prefill_s for each in requests),
        errors=_errors(result),
        virtual_s=result.virtual_s,
        wall_s=result.wall_s,
        cpu_s=result.cpu_s,
        peak_mib=result.peak_mib,
        events=result.events,
    )


def failures(result: RunResult) -> list[RequestRecord]:
    """Return the requests that failed."""
    return [each for each in result.requests if each.outcome == "failed"]


def served(result: RunResult) -> RunResult:
    """Return the run. Raises StudyError where a request failed, as the others' times say nothing then."""
    if failed := failures(result):
        raise StudyError(f"{len(failed)} of {len(result.requests)} requests failed, the first: {failed[0].reason}")
    return result


def share_within(result: RunResult, ttft_s: float, tbt_s: float) -> float:
    """Return the share of all requests that finished within both bounds, which may differ from the run's own."""
    good = sum(1 for r in result.requests if r.outcome == "finished" and r.ttft_s <= ttft_s and r.tbt_s <= tbt_s)
    return _ratio(good, len(result.requests))


def spread(values_s: Sequence[float]) -> Spread:
    """Return mean and percentiles."""
    if not values_s:
        return Spread(0.0, 0.0, 0.0, 0.0)
    values = np.array(values_s)
    p50, p90, p99 = (float(each) for each in np.percentile(values, (50, 90, 99)))
    return Spread(float(values.mean()), p50, p90, p99)


def _hits(prefilled: Sequence[RequestRecord]) -> dict[str, float]:
    asked = sum(each.input_tokens for each in prefilled)
    return {tier: _ratio(sum(getattr(each, f"hit_{tier}") for each in prefilled), asked) for tier in TIERS}


def _errors(result: RunResult) -> dict[str, PredictionError]:
    """Return the errors that the run kept, and, if not among them, those of TTFT and TBT, of the predicted requests that have
    the actual value."""
    kept = {name: _error(*figures) for name, figures in result.errors.items()}
    for name in ("ttft", "tbt"):
        pairs = [(getattr(each, f"predicted_{name}_s"), getattr(each, f"{name}_s")) for each in result.requests]
        known = [(predicted, came) for predicted, came in pairs if predicted >= 0 and came >= 0]
        if known and f"{name}_s" not in kept:
            count = len(known)
            kept[f"{name}_s"] = _error(count, sum(abs(a - b) for a, b in known) / count, sum(b for _, b in known) / count)
    return kept


def _error(count: int, mean_absolute: float, mean_true: float) -> PredictionError:
    return PredictionError(count, mean_absolute, mean_true, 100 * _ratio(mean_absolute, mean_true))


def _span_s(requests: Sequence[RequestRecord]) -> float:
    if not requests:
        return 0.0
    return max(each.at_s + max(each.end_s, 0.0) for each in requests) - min(each.at_s for each in requests)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
