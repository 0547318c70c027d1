"""Early rejection: a request that is predicted to miss its SLO is refused before any KV is allocated. PURE.

Waiting only shortens a queue. A request that would miss its SLO even on an idle cluster is therefore refused only for the
excess that waiting would remove. A request whose client already has tokens is never refused for its SLO.
"""

import math
from typing import Final

from mooncake_zmq.conductor.choices import NO_LIMIT, DecodeChoice, Limits, PrefillChoice
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.messages import Schedule
from mooncake_zmq.core.tenant_room import left_free

MIN_RETRY_S: Final = 1.0
"""The shortest Retry-After, which is given in whole seconds."""
MAX_RETRY_S: Final = 60.0
"""The longest Retry-After: predictions do not reach further."""
NO_NODE_RETRY_S: Final = 5.0
"""Retry-After when a role has no node: a node that restarts is back within seconds."""


class Admission:
    """Applies the admission policy of the settings."""

    def __init__(self, settings: ConductorSettings) -> None:
        self._refuses = settings.admission != "none"
        self._looks_at_decodes = settings.admission not in ("none", "baseline")
        self._ttft_s, self._tbt_s = _bound_s(settings.ttft_slo_s), _bound_s(settings.tbt_slo_s)
        """The SLOs of the deployment, for requests that name none."""
        self._waiting_share = settings.waiting_share

    def limits(self, schedule: Schedule) -> Limits:
        """Return the request's own SLOs, or the deployment's where it names none; 0 means none."""
        if not self._refuses or schedule.begun:
            return Limits(may_refuse=False, ttft_s=NO_LIMIT, tbt_s=NO_LIMIT, waited_s=0.0)
        ttft_s, tbt_s = schedule.ttft_slo_s, schedule.tbt_slo_s
        return Limits(
            may_refuse=True,
            ttft_s=self._ttft_s if ttft_s is None else _bound_s(ttft_s),
            tbt_s=self._tbt_s if tbt_s is None else _bound_s(tbt_s),
            waited_s=schedule.waited_s,
            others_ttft_s=self._ttft_s,
            others_tbt_s=self._tbt_s,
        )

    def late_prefill_s(self, limits: Limits, prefill: PrefillChoice, ttft_s: float) -> float:
        """Return after how many seconds to try again, if the first token would come too late; 0 to admit."""
        left_s = limits.ttft_s - limits.waited_s
        if ttft_s <= left_s:
            return 0.0
        waits_s = ttft_s - prefill.work_s
        if prefill.work_s < left_s:
            return bounded(min(ttft_s - left_s, waits_s))
        excess_s = waits_s - self._waiting_share * prefill.work_s
        return bounded(excess_s) if excess_s > 0 else 0.0

    def slow_decode_s(self, limits: Limits, decode: DecodeChoice, expected_tokens: float) -> float:
        """Return after how many seconds to try again, if the later tokens would come too slowly; 0 to admit. A tenant leaves
        to others a share of the time by which a step may be longer than for a request alone."""
        slo_s = limits.tbt_s
        if not self._looks_at_decodes:
            return 0.0
        limit_s = slo_s
        if decode.tenant_s:
            limit_s -= left_free(decode.tenant_s, slo_s - decode.alone_s)
        if decode.tbt_s <= limit_s:
            return 0.0
        batching_s = decode.tbt_s - decode.alone_s
        excess_s = batching_s - self._waiting_share * decode.alone_s if decode.alone_s >= slo_s else decode.tbt_s - limit_s
        if excess_s <= 0 or batching_s <= 0:
            return 0.0
        leavers = math.ceil(decode.batch * min(1.0, excess_s / batching_s))
        return bounded(leavers * expected_tokens * decode.alone_s / max(1.0, decode.batch))


def bounded(delay_s: float) -> float:
    """Return a delay within the limits of Retry-After."""
    return min(MAX_RETRY_S, max(MIN_RETRY_S, delay_s))


def _bound_s(slo_s: float) -> float:
    return slo_s if slo_s > 0 else NO_LIMIT
