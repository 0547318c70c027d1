"""Figures of a replay against a server: percentiles, goodput, errors by kind, and the lag of the client itself."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import click
import numpy as np

from mooncake_zmq.bench.client import Replayed
from mooncake_zmq.bench.client_stream import Seen
from mooncake_zmq.laboratory import rows, tables
from mooncake_zmq.laboratory.metrics import Spread, spread
from mooncake_zmq.laboratory.report import percent, written
from mooncake_zmq.laboratory.reports import commit, machine

LATE_S = 0.02
"""The client's own p99 lag from which on its times are doubtful."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """SLO bounds in seconds; None: no bound."""

    ttft_s: float | None = None
    tbt_s: float | None = None

    def met(self, seen: Seen) -> bool:
        """Return whether the request finished within both bounds, with all its tokens."""
        in_ttft = self.ttft_s is None or 0 <= seen.ttft_s <= self.ttft_s
        return seen.outcome == "finished" and not seen.short and in_ttft and (self.tbt_s is None or seen.tbt_s <= self.tbt_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The figures of one replay. Shares from 0 to 1, times in seconds; None: there was nothing to measure."""

    url: str
    model: str
    bounds: Bounds
    requests: int
    finished: int
    rejected: int
    failed: int
    short: int
    """Finished requests with fewer tokens than were asked for; not counted where an answer may end early."""
    repeated: int
    """Calls that were made again because the kept connection was closed while they were written."""
    errors: dict[str, int]
    """Failed and rejected requests, by kind."""
    examples: dict[str, str]
    """One error message of each kind."""
    within_slo: float
    """Share of all requests that met both bounds."""
    goodput_per_s: float
    requests_per_s: float
    """Finished requests per second, from the first arrival to the last end."""
    output_tokens_per_s: float
    prompt_tokens: int
    """Prompt tokens as the server reports them; if it reports none, as the trace has them."""
    output_tokens: int
    cached_tokens: int | None
    """Prompt tokens that the server found in its cache; None: it does not report them."""
    ttft_s: Spread | None
    tbt_s: Spread | None
    """The mean of a request's longest tenth of gaps."""
    gap_s: Spread | None
    """Gaps between a token and the next; 0 where several came together."""
    tpot_s: Spread | None
    e2e_s: Spread | None
    most_open: int
    held: int
    held_s: Spread | None
    """Waits of the requests that had to wait for another one to end."""
    late_s: Spread | None
    """How late this client sent its requests."""
    loop_lag_s: Spread | None
    """How late this client may have received bytes."""
    span_s: float
    client_cpu: float
    """Share of a core that the client used."""

    @property
    def doubtful(self) -> bool:
        """Return whether the client's own lag puts its times in doubt."""
        return any(found is not None and found.p99 > LATE_S for found in (self.late_s, self.loop_lag_s))


def result_of(replayed: Replayed, url: str, bounds: Bounds) -> Result:
    """Return the figures of a replay."""
    seen = replayed.seen
    finished = [each for each in seen if each.outcome == "finished"]
    started = [each for each in seen if each.token_s]
    bad = [each for each in seen if each.outcome != "finished"]
    good = sum(map(bounds.met, seen))
    span_s = max((_sent_s(each) + max(each.ended_s, 0.0) for each in seen), default=0.0)
    reporting = [each for each in finished if each.cached_tokens >= 0]
    return Result(
        url=url,
        model=replayed.model,
        bounds=bounds,
        requests=len(seen),
        finished=len(finished),
        rejected=sum(1 for each in seen if each.outcome == "rejected"),
        failed=sum(1 for each in seen if each.outcome == "failed"),
        short=sum(1 for each in seen if each.short),
        repeated=sum(each.repeats for each in seen),
        errors=dict(Counter(each.error for each in bad).most_common()),
        examples={each.error: each.said for each in reversed(bad) if each.said},
        within_slo=good / max(1, len(seen)),
        goodput_per_s=_rate(good, span_s),
        requests_per_s=_rate(len(finished), span_s),
        output_tokens_per_s=_rate(sum(each.tokens for each in seen), span_s),
        prompt_tokens=sum(each.prompt_tokens if each.prompt_tokens >= 0 else each.input_tokens for each in finished),
        output_tokens=sum(each.tokens for each in seen),
        cached_tokens=sum(each.cached_tokens for each in reporting) if reporting else None,
        ttft_s=spread_of([each.ttft_s for each in started]),
        tbt_s=spread_of([each.tbt_s for each in finished if len(each.token_s) > 1]),
        gap_s=spread_of(np.concatenate([np.diff(each.token_s) for each in started]).tolist() if started else []),
        tpot_s=spread_of([each.tpot_s for each in finished if each.tpot_s]),
        e2e_s=spread_of([each.ended_s for each in finished]),
        most_open=_most_open(seen),
        held=sum(1 for each in seen if each.held_s),
        held_s=spread_of([each.held_s for each in seen if each.held_s]),
        late_s=spread_of([each.late_s for each in seen if each.ended_s >= 0]),
        loop_lag_s=spread_of(replayed.loop_lag_s),
        span_s=span_s,
        client_cpu=_rate(replayed.cpu_s, replayed.wall_s),
    )


def spread_of(values_s: Sequence[float]) -> Spread | None:
    """Return mean and percentiles, or None without values."""
    return spread(values_s) if values_s else None


def figures(found: Spread | None, scale: float) -> str:
    """Return the figures as text, times `scale`."""
    return "-" if found is None else written(found, scale)


def _most_open(seen: Sequence[Seen]) -> int:
    changes = [(_sent_s(each), 1) for each in seen if each.ended_s >= 0]
    changes += [(_sent_s(each) + each.ended_s, -1) for each in seen if each.ended_s >= 0]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def _sent_s(seen: Seen) -> float:
    return seen.due_s + seen.held_s + seen.late_s


def _rate(count: float, span_s: float) -> float:
    return count / span_s if span_s else 0.0


COLUMNS = {
    "at_s": "due_s",
    "input_tokens": "input_tokens",
    "output_tokens": "output_tokens",
    "outcome": "outcome",
    "reason": "error",
    "ttft_s": "ttft_s",
    "tbt_s": "tbt_s",
    "end_s": "ended_s",
    "tpot_s": "tpot_s",
    "status": "status",
    "held_s": "held_s",
    "late_s": "late_s",
    "prompt_tokens": "prompt_tokens",
    "completion_tokens": "completion_tokens",
    "cached_tokens": "cached_tokens",
}
"""Columns of `--rows`, named as those of `mooncake-zmq sim` are, by the attributes of a `Seen`."""


def write_rows(rows_file: Path, replayed: Replayed) -> None:
    """Write a row for each request. Raises StudyError."""
    rows.write(rows_file, tuple(COLUMNS), rows.rows_of(replayed.seen, tuple(COLUMNS.values())))


def show(replayed: Replayed, url: str, bounds: Bounds, *, as_json: bool) -> int:
    """Print to standard output; return an exit code, 1 if no request was answered."""
    result = result_of(replayed, url, bounds)
    if as_json:
        click.echo(json.dumps(as_dict(result)))
    else:
        tables.show([tables.pairs(f"bench client  {result.url}, {result.model}", lines(result))])
    return 0 if result.finished else 1


def as_dict(result: Result) -> dict[str, Any]:
    """Return `{"bench": "client", "commit", "machine", and the fields of `Result`}`."""
    return {"bench": "client", "commit": commit(), "machine": machine(), **asdict(result)}


def lines(result: Result) -> list[tuple[str, str]]:
    """Return the (name, figure) pairs that are printed."""
    counts = f"{result.requests:,} ({result.finished:,}, {result.rejected:,}, {result.failed:,})"
    met = f"{result.goodput_per_s:.3f} ({percent(result.within_slo)})"
    cached = "not reported" if result.cached_tokens is None else f"{result.cached_tokens:,} ({_share(result)})"
    found = [
        ("requests (finished, rejected with 429, failed)", counts),
        *((f"  {kind or 'ended early'}", f"{count:,}") for kind, count in result.errors.items()),
        *([("finished with fewer tokens than asked for: no goodput", f"{result.short:,}")] if result.short else []),
        *([("sent again: a kept connection was closed", f"{result.repeated:,}")] if result.repeated else []),
        (f"goodput, requests/s within {_bounds(result.bounds)}", met),
        ("finished, requests/s; tokens/s", f"{result.requests_per_s:.3f}; {result.output_tokens_per_s:,.0f}"),
        ("tokens of prompts; of answers", f"{result.prompt_tokens:,}; {result.output_tokens:,}"),
        ("tokens of prompts from the cache", cached),
        ("TTFT mean, p50, p90, p99, s", figures(result.ttft_s, 1)),
        ("TBT (longest tenth) mean, p50, p90, p99, ms", figures(result.tbt_s, 1000)),
        ("gaps between tokens (0: came together) mean, p50, p90, p99, ms", figures(result.gap_s, 1000)),
        ("TPOT mean, p50, p90, p99, ms", figures(result.tpot_s, 1000)),
        ("E2E mean, p50, p90, p99, s", figures(result.e2e_s, 1)),
        ("streams open at most", f"{result.most_open:,}"),
        ("held back for a free stream; mean, p50, p90, p99, s", f"{result.held:,}; {figures(result.held_s, 1)}"),
        ("this client sent late by mean, p50, p90, p99, ms", figures(result.late_s, 1000)),
        ("this client's loop came late by mean, p50, p90, p99, ms", figures(result.loop_lag_s, 1000)),
        ("time, s; this client's share of a core", f"{result.span_s:.1f}; {percent(result.client_cpu)}"),
    ]
    return [*found, ("the client itself was late: its times are in doubt", "!")] if result.doubtful else found


def _share(result: Result) -> str:
    return percent((result.cached_tokens or 0) / max(1, result.prompt_tokens))


def _bounds(bounds: Bounds) -> str:
    ttft = "any TTFT" if bounds.ttft_s is None else f"TTFT <= {bounds.ttft_s:g} s"
    return f"{ttft}, {'any TBT' if bounds.tbt_s is None else f'TBT <= {1000 * bounds.tbt_s:g} ms'}"
