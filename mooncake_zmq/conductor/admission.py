"""Early rejection: a request predicted to miss its SLO is refused before any KV is allocated. PURE functions.

An idle node is never refused: waiting would make nothing faster, and only work corrects a measurement that was too slow. A
resumed request is never refused for its SLO: its client already holds tokens.
"""

import math

from mooncake_zmq.conductor.routing import DecodeOption, PrefillChoice
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import RejectReason

MIN_RETRY_S = 1.0
"""Retry-After is in whole seconds."""
MAX_RETRY_S = 60.0
"""Predictions do not reach further."""
NO_NODE_RETRY_S = 5.0
"""A node that restarts is back within seconds."""


def refusal(
    settings: ConductorSettings, costs: Costs, *, attempt: int, prefill: PrefillChoice, decode: DecodeOption
) -> tuple[RejectReason, float] | None:
    """Why this pair may not take the request, and when to try again; None to admit."""
    if attempt > 1:
        return None
    if _exceeds(prefill.ttft_s, settings.ttft_slo_s) and prefill.queue_s > 0:
        return RejectReason.TTFT, retry_after_ttft(settings, prefill)
    if _exceeds(decode.tbt_s, settings.tbt_slo_s) and decode.batch > 0:
        return RejectReason.TBT, retry_after_tbt(settings, costs, decode)
    return None


def retry_after_ttft(settings: ConductorSettings, prefill: PrefillChoice) -> float:
    """The queue shrinks by a second per second: until the estimate is back under the SLO, or the queue empty."""
    return bounded(min(prefill.ttft_s - settings.ttft_slo_s, prefill.queue_s))


def retry_after_tbt(settings: ConductorSettings, costs: Costs, decode: DecodeOption) -> float:
    """Until enough requests have left, if each decodes for a uniform time and they began evenly spread."""
    per_request_s = decode.tbt_s * costs.decode_request_s / costs.step_s(decode.batch + 1, 0)
    excess_s = decode.tbt_s - settings.tbt_slo_s
    leavers = min(decode.batch, math.ceil(excess_s / per_request_s)) if per_request_s > 0 else decode.batch
    return bounded(leavers * _departure_s(settings, decode))


def retry_after_room(settings: ConductorSettings, decodes: list[DecodeOption]) -> float:
    """No decode has room: until the first request leaves one; without any decode, until one may be back."""
    if not decodes:
        return NO_NODE_RETRY_S
    return bounded(min(_departure_s(settings, decode) for decode in decodes))


def bounded(delay_s: float) -> float:
    """A usable Retry-After."""
    return min(MAX_RETRY_S, max(MIN_RETRY_S, delay_s))


def _departure_s(settings: ConductorSettings, decode: DecodeOption) -> float:
    """Mean time between two requests leaving this decode."""
    return settings.expected_output_tokens * decode.tbt_s / max(1, decode.batch)


def _exceeds(predicted_s: float, slo_s: float) -> bool:
    return 0 < slo_s < predicted_s
