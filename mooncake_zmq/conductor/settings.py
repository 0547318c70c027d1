"""The conductor's settings: SLOs, policies and limits. PURE."""

import math
from dataclasses import dataclass
from typing import Literal

from mooncake_zmq.core.messages import MAX_SECONDS

MAX_PIPELINE_STAGES = 17
"""The most stages: the first, and those that one message can name."""
Admission = Literal["none", "baseline", "early", "prediction"]
Policy = Literal["coming", "global", "local", "match", "load", "round-robin", "random"]

POSITIVE = (
    "correction_half_life_s",
    "tie_ratio",
    "expected_output_tokens",
    "booking_ttl_s",
    "max_keys",
    "max_bookings",
    "pipeline_stages",
    "pipeline_min_tokens",
    "pipeline_chunk_tokens",
)
NOT_NEGATIVE = (
    "ttft_slo_s",
    "tbt_slo_s",
    "report_grace_s",
    "engine_price",
    "waiting_share",
    "role_change_after_s",
    "longest_request",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductorSettings:
    """Holds the settings; times are in seconds. Costs are settings of `core.costs`."""

    members: tuple[str, ...] = ()
    """Nodes that gateways wait for before they report ready. Empty: the prefills, decodes and cache-nodes of the file."""
    longest_request: int = 0
    """The most tokens of prompt and output that decodes must be able to hold together: none of them changes its role without
    which they could not. 0: as many as gateways admit, by the model and the decodes of the file."""
    ttft_slo_s: float = 30.0
    """The longest predicted time to the first token that is still admitted; 0 or inf admits all. It is the paper's bound end
    to end."""
    tbt_slo_s: float = 1.0
    """The longest predicted gap between tokens that is still admitted; 0 or inf admits all. The default is far above a healthy
    step even on a CPU, so that only an overfull or stalled decode rejects; a GPU deployment sets 0.1 to 0.3 as the paper
    does."""
    admission: Admission = "prediction"
    """The policy by which requests are refused, as in the paper. none: never. baseline: at arrival by its prefill, and by its
    decode once the prefill is done. early: at arrival, by the present state of both. prediction: at arrival, by the predicted
    state of the decode when the prefill is done."""
    policy: Policy = "coming"
    """Which prefill takes a request. coming: like global, but KV that is being computed counts too: a prompt may wait for it.
    global: Algorithm 1 of the paper, over the pools of all hosts. local: the same without fetching between hosts. match: the
    longest prefix. load: the shortest queue. round-robin: in turn. random: by a digest of the request id."""
    kvcache_balancing_threshold: float | Literal["auto"] = "auto"
    """Algorithm 1: a prefill fetches from another host only if the best match is at least this many times its own match (1 or
    more, a ratio). At a match of 0 the ratio is infinite if any node holds a block, and 1 if none does. "auto": whenever
    fetching is predicted to be quicker. Recomputed blocks enter the pool just as fetched ones do, so only time is to be
    weighed, which the conductor predicts for each node; a slower fetch is left out at any threshold."""
    engine_price: float = 0.25
    """The seconds of a prompt's own time to its first token that one second of prefill engine time is worth. Waiting for KV
    that is being computed costs the former and saves the latter, which all requests share once engines are busy."""
    waiting_share: float = 0.25
    """A request that would miss its SLO on an idle cluster too is refused only if it would wait for more than this share of
    its own work (of its own step): waiting cannot make that shorter."""
    correction_half_life_s: float = 10.0
    """The half-life of a node's measurements: an idle node's predictions return to the cost model."""
    tie_ratio: float = 0.05
    """Predictions within this share of the best are ties, and ties rotate. The estimates err by more than this, and one shared
    leading block of a long prompt must not outweigh spreading."""
    expected_output_tokens: int = 512
    """The output tokens that a request is expected to produce. They determine how long it stays, and, up to its own
    max_tokens, the room that its decode must have besides the prompt. The paper's mean is 343; a decode that runs short
    preempts, so a larger value leaves KV unused."""
    booking_ttl_s: float = 120.0
    """A booking that no gateway ends is dropped after this: long after its prefill, when reports have taken its place."""
    report_grace_s: float = 0.25
    """A placed request that no load report names after this is taken to be gone. It covers the way from the conductor over the
    gateway to the node. A request that a report names is counted by reports from then on."""
    max_keys: int = 2_000_000
    """The most keys in the prefix index; beyond it the ones not looked up for longest are evicted and counted. At 145 bytes
    per key: 290 MB."""
    max_bookings: int = 65_536
    """The most bookings; beyond it the oldest is dropped and counted. It allows 500 requests per second for a whole
    booking_ttl_s."""
    role_change_after_s: float = 0.0
    """The time for which the load must be unbalanced before a node that `may_become` the other of prefill and decode is asked
    to change, one node at a time, with a pause of twice as long after each change. 0: only when the operator asks. Draining
    and restarting takes a node away for half a minute or more and empties its memory: this is a gain if it takes a twentieth
    of the time for which a load stays as it is, and a loss at a tenth. Needs both SLOs, which loads are shares of."""
    role_change_ratio: float = 1.5
    """The load is unbalanced if a role has this many times the load that the other one would have with one node fewer (1 or
    more)."""
    pipeline_stages: int = 1
    """The most prefills that compute one long prompt together, each some of the layers (chunked pipeline parallelism); 1 for
    none. Above 1 prefills connect to each other, and each needs room in its slab for the whole prompt."""
    pipeline_min_tokens: int = 8192
    """Prompts with fewer tokens to compute are left to one prefill. From about this size filling the pipeline is a small part
    of the time."""
    pipeline_chunk_tokens: int = 512
    """The prefills' chunk_tokens, from which the conductor predicts the time to fill and drain a pipeline."""

    def __post_init__(self) -> None:
        for name in POSITIVE + NOT_NEGATIVE:
            value = getattr(self, name)
            if math.isnan(value) or value < 0 or (name in POSITIVE and value == 0):
                raise ValueError(f"{name} must be {'positive' if name in POSITIVE else '0 or more'}, not {value}")
        if MAX_SECONDS < self.tbt_slo_s < math.inf:
            raise ValueError(f"tbt_slo_s must be at most {MAX_SECONDS:g}, or inf, not {self.tbt_slo_s:g}")
        if self.kvcache_balancing_threshold != "auto" and not self.kvcache_balancing_threshold >= 1:
            raise ValueError(f"kvcache_balancing_threshold must be 1 or more, or auto, not {self.kvcache_balancing_threshold}")
        if not self.role_change_ratio >= 1:
            raise ValueError(f"role_change_ratio must be 1 or more, not {self.role_change_ratio}")
        if self.role_change_after_s and not (0 < self.ttft_slo_s < math.inf and 0 < self.tbt_slo_s < math.inf):
            raise ValueError("role_change_after_s needs ttft_slo_s and tbt_slo_s: loads are shares of them")
        if self.pipeline_stages > MAX_PIPELINE_STAGES:
            raise ValueError(f"pipeline_stages must be at most {MAX_PIPELINE_STAGES}, what one message may name")
        if self.tie_ratio >= 1:
            raise ValueError(f"tie_ratio must be below 1, not {self.tie_ratio}")
        if self.booking_ttl_s <= self.report_grace_s:
            raise ValueError("booking_ttl_s must be above report_grace_s")
