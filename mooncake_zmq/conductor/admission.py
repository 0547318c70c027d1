"""Early rejection: a request predicted to miss its SLO is refused before any KV is allocated. PURE functions.

Waiting makes a queue shorter, and nothing else: a request that would miss its SLO even alone is refused only for what waiting
would improve. One whose client holds tokens is never refused for its SLO.
"""

import math

from mooncake_zmq.conductor.choices import DecodeChoice, PrefillChoice
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.messages import Schedule

MIN_RETRY_S = 1.0
"""Retry-After is in whole seconds."""
MAX_RETRY_S = 60.0
"""Predictions do not reach further."""
NO_NODE_RETRY_S = 5.0
"""A node that restarts is back within seconds."""


def bound_s(own: float | None, deployment: float) -> float:
    """The SLO that holds for a request; inf: none. `own`: its own, None to take the deployment's; 0 is none."""
    slo_s = deployment if own is None else own
    return slo_s if slo_s > 0 else math.inf


def late_prefill(settings: ConductorSettings, schedule: Schedule, prefill: PrefillChoice, ttft_s: float) -> float | None:
    """When to try again, if the first token would come too late; None to admit."""
    if settings.admission == "none" or schedule.begun:
        return None
    left_s = bound_s(schedule.ttft_slo_s, settings.ttft_slo_s) - schedule.waited_s
    if ttft_s <= left_s:
        return None
    waits_s = ttft_s - prefill.work_s
    if prefill.work_s < left_s:
        return bounded(min(ttft_s - left_s, waits_s))
    excess_s = waits_s - settings.patience * prefill.work_s
    return bounded(excess_s) if excess_s > 0 else None


def slow_decode(settings: ConductorSettings, schedule: Schedule, decode: DecodeChoice, expected_tokens: float) -> float | None:
    """When to try again, if the later tokens would come too slowly; None to admit."""
    if settings.admission in ("none", "baseline") or schedule.begun:
        return None
    slo_s = bound_s(schedule.tbt_slo_s, settings.tbt_slo_s)
    if decode.tbt_s <= slo_s:
        return None
    crowd_s = decode.tbt_s - decode.alone_s
    excess_s = crowd_s - settings.patience * decode.alone_s if decode.alone_s >= slo_s else decode.tbt_s - slo_s
    if excess_s <= 0 or crowd_s <= 0:
        return None
    leavers = math.ceil(decode.batch * min(1.0, excess_s / crowd_s))
    return bounded(leavers * expected_tokens * decode.alone_s / max(1.0, decode.batch))


def promised_tbt_s(settings: ConductorSettings, schedule: Schedule) -> float:
    """What the decode holds its step against when the prefill is done; 0: it does not."""
    if settings.admission == "none" or schedule.begun:
        return 0.0
    slo_s = bound_s(schedule.tbt_slo_s, settings.tbt_slo_s)
    return slo_s if math.isfinite(slo_s) else 0.0


def deadline(settings: ConductorSettings, schedule: Schedule, now: float) -> float:
    """When the first token is due by the request's SLO; inf: it has none, or its client holds tokens already."""
    if settings.admission == "none" or schedule.begun:
        return math.inf
    return now + bound_s(schedule.ttft_slo_s, settings.ttft_slo_s) - schedule.waited_s


def bounded(delay_s: float) -> float:
    """A usable Retry-After."""
    return min(MAX_RETRY_S, max(MIN_RETRY_S, delay_s))
