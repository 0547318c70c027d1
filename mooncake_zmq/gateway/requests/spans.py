"""A request that ended as a tree of spans, as tracing systems keep them: the same facts as `/trace/ID`. PURE."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mooncake_zmq.gateway.requests.request_log import CANCELLED, Attempt, RequestEntry, spans
from mooncake_zmq.gateway.requests.traces import Names

WELL = ("stop", "length", CANCELLED)
"""Outcomes that are not errors."""
CALLER = -1
Value = str | int | float | Sequence[str]


@dataclass(frozen=True, slots=True)
class Branch:
    """One span. `parent`: index of its parent in the tree, or `CALLER`. `failed`: the reason, if it failed."""

    name: str
    parent: int
    start_s: float
    """Start, in seconds since the request arrived."""
    duration_s: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    failed: str = ""


def tree(entry: RequestEntry, names: Names, *, gateway: str) -> list[Branch]:
    """Return the spans of the request, its attempts, and the nodes' work for each."""
    failed = "" if entry.outcome in WELL else entry.outcome
    request = _of_request(entry, names, gateway)
    branches = [Branch("request", CALLER, 0.0, entry.duration_s, request, failed)]
    places: dict[int, int] = {}
    for attempt in entry.attempts:
        places[attempt.number] = len(branches)
        branches.append(_of_attempt(entry, attempt))
    for span in spans(entry):
        attributes: dict[str, Value] = {"mooncake.node": span.node, "mooncake.attempt": span.attempt}
        branches.append(Branch(span.name, places[span.attempt], span.start_s, max(0.0, span.duration_s), attributes))
    return branches


def _of_request(entry: RequestEntry, names: Names, gateway: str) -> dict[str, Value]:
    own, local, remote = entry.cached
    values: dict[str, Value | None] = {
        "gen_ai.request.model": entry.model,
        "gen_ai.request.max_tokens": entry.max_tokens,
        "gen_ai.usage.input_tokens": entry.prompt_tokens,
        "gen_ai.usage.output_tokens": entry.completion_tokens,
        "gen_ai.response.finish_reasons": (entry.outcome,),
        "gen_ai.latency.time_to_first_token": entry.first_s,
        "mooncake.request_id": entry.request_id,
        "mooncake.client_request_id": names.client_id or None,
        "mooncake.tenant": entry.tenant or None,
        "mooncake.gateway": gateway,
        "mooncake.cached_tokens.own": own,
        "mooncake.cached_tokens.local": local,
        "mooncake.cached_tokens.remote": remote,
        "mooncake.attempts": entry.made,
    }
    return dict(_known(values))


def _of_attempt(entry: RequestEntry, attempt: Attempt) -> Branch:
    ended_s = entry.duration_s if attempt.ended_s is None else attempt.ended_s
    values: dict[str, Value | None] = {
        "mooncake.attempt": attempt.number,
        "mooncake.conductor": attempt.conductor,
        "mooncake.prefill": attempt.prefill or None,
        "mooncake.decode": attempt.decode or None,
        "mooncake.stages": attempt.stages or None,
        "mooncake.computed_of_cached": attempt.computed_of_cached or None,
        "mooncake.cached_parts": attempt.cached_parts or None,
        "mooncake.recomputed": attempt.recomputed or None,
        "mooncake.ttft_s": attempt.ttft_s,
        "mooncake.tbt_s": attempt.tbt_s,
        "mooncake.predicted_ttft_s": attempt.predicted_ttft_s,
        "mooncake.predicted_tbt_s": attempt.predicted_tbt_s,
        "mooncake.tokens": attempt.tokens,
        "mooncake.why": attempt.why or None,
    }
    failed = "" if attempt.why in WELL else attempt.why
    return Branch("attempt", 0, attempt.began_s, max(0.0, ended_s - attempt.began_s), dict(_known(values)), failed)


def _known(values: Mapping[str, Value | None]) -> Iterator[tuple[str, Value]]:
    return ((name, value) for name, value in values.items() if value is not None)
