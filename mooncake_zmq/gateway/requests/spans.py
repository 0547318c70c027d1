"""A request that ended as a tree of spans, as tracing systems keep them: the same facts as `/trace/ID`. PURE."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mooncake_zmq.gateway.requests.request_log import CANCELLED, Account, Attempt, spans
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


def tree(account: Account, names: Names, *, model: str, gateway: str) -> list[Branch]:
    """Return the spans of the request, its attempts, and the nodes' work for each."""
    failed = "" if account.outcome in WELL else account.outcome
    request = _of_request(account, names, model, gateway)
    branches = [Branch("request", CALLER, 0.0, account.duration_s, request, failed)]
    places: dict[int, int] = {}
    for attempt in account.attempts:
        places[attempt.number] = len(branches)
        branches.append(_of_attempt(account, attempt))
    for span in spans(account):
        attributes: dict[str, Value] = {"mooncake.node": span.node, "mooncake.attempt": span.attempt}
        branches.append(Branch(span.name, places[span.attempt], span.start_s, max(0.0, span.duration_s), attributes))
    return branches


def _of_request(account: Account, names: Names, model: str, gateway: str) -> dict[str, Value]:
    own, local, remote = account.cached
    values: dict[str, Value | None] = {
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": account.max_tokens,
        "gen_ai.usage.input_tokens": account.prompt_tokens,
        "gen_ai.usage.output_tokens": account.completion_tokens,
        "gen_ai.response.finish_reasons": (account.outcome,),
        "gen_ai.latency.time_to_first_token": account.first_s,
        "mooncake.request_id": account.request_id,
        "mooncake.client_request_id": names.client_id or None,
        "mooncake.tenant": account.tenant or None,
        "mooncake.gateway": gateway,
        "mooncake.cached_tokens.own": own,
        "mooncake.cached_tokens.local": local,
        "mooncake.cached_tokens.remote": remote,
        "mooncake.attempts": account.made,
    }
    return dict(_known(values))


def _of_attempt(account: Account, attempt: Attempt) -> Branch:
    ended_s = account.duration_s if attempt.ended_s is None else attempt.ended_s
    values: dict[str, Value | None] = {
        "mooncake.attempt": attempt.number,
        "mooncake.conductor": attempt.conductor,
        "mooncake.prefill": attempt.prefill or None,
        "mooncake.decode": attempt.decode or None,
        "mooncake.stages": attempt.stages or None,
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
