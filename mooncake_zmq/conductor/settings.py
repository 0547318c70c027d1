"""The conductor's settings: its SLOs, its rules, its limits. PURE."""

import math
from dataclasses import dataclass
from typing import Literal

MAX_PIPELINE_STAGES = 17
"""The first, and those that a message names."""
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
    "patience",
    "role_change_after_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductorSettings:
    """Times in seconds. What things cost stands in `core.costs`."""

    members: tuple[str, ...] = ()
    """Nodes whose coming gateways wait for before they say that they are ready. Empty: the prefills, decodes and cache-nodes of
    the file."""
    ttft_slo_s: float = 30.0
    """Longest predicted time to the first token that is still admitted; 0 or inf admits all. The paper's bound end to end."""
    tbt_slo_s: float = 1.0
    """Longest predicted gap between tokens that is still admitted; 0 or inf admits all. Far above a healthy step even on a
    CPU, so that by default only an overfull or stalled decode rejects; a GPU deployment sets 0.1 to 0.3 as the paper does."""
    admission: Admission = "prediction"
    """When a request is refused, as the paper has it. none: never. baseline: at arrival if its prefill would be late, by the
    decode once the prefill is done. early: at arrival, by what both are like now. prediction: at arrival, by what the decode
    will be like when the prefill is done."""
    policy: Policy = "coming"
    """Who prefills. coming: as global, and KV that is being computed counts too: a prompt may wait for it. global: Algorithm 1
    of the paper, over what the pools of all hosts hold. local: the same without fetching between hosts. match: the
    longest prefix. load: the shortest queue. round-robin: in turn. random: by a digest of the request id."""
    kvcache_balancing_threshold: float | Literal["auto"] = "auto"
    """Algorithm 1: a prefill fetches from another host only if the best match is at least this many times its own match
    (1 or more, a ratio). At a match of 0 the ratio counts as infinite if anyone holds anything, and as 1 if nobody does.
    "auto": whenever it is predicted to be quicker. Recomputed blocks enter the pool just as fetched ones do, so that nothing
    but time is to be weighed, and that the conductor predicts for each node; a slower fetch is left out at any threshold."""
    engine_price: float = 0.25
    """Seconds of a prompt's own time to its first token that a second of prefill engine time is worth: waiting for KV that is
    being computed costs the one and saves the other, which is everybody's once engines are busy."""
    patience: float = 0.25
    """A request that would miss its SLO on an idle cluster too is refused only if it would wait for more than this share of
    its own work (of its own step): waiting does not make it shorter."""
    correction_half_life_s: float = 10.0
    """What a node measured counts half as much after this, so that an idle node is taken at the cost model's word again."""
    tie_ratio: float = 0.05
    """Predictions within this share of the best are ties, and ties rotate. The estimates err by more than this, and
    one shared leading block of a long prompt must not outweigh spreading."""
    expected_output_tokens: int = 512
    """Output tokens a request is taken to produce: how long it stays, and, up to its own max_tokens, the room its decode must
    have besides the prompt. The paper's mean is 343; a decode that runs short preempts, so asking for more leaves KV unused."""
    booking_ttl_s: float = 120.0
    """A booking nobody ends is dropped after this: long after its prefill, by when reports have taken its place."""
    report_grace_s: float = 0.25
    """A request that no load report names this long after it was placed is not there: the way from here over the gateway to the
    node. One that a report names is the report's at once."""
    max_keys: int = 2_000_000
    """Keys in the prefix index; past it those not asked for longest go, and are counted. At 145 bytes per key: 290 MB."""
    max_bookings: int = 65_536
    """Bookings held; past it the oldest is dropped and counted. 500 requests per second for a whole booking_ttl_s."""
    role_change_after_s: float = 0.0
    """A node that `may_become` the other of prefill and decode is asked to once the load was lopsided for this long, one node
    at a time, and after a change none for twice as long. 0: never but when the operator asks. To drain and to start anew
    takes a node away for half a minute or more and empties its memory: a twentieth of the time for which a load stays as it is
    gains, a tenth loses. Needs both SLOs: they say what a role's load is a share of."""
    role_change_ratio: float = 1.5
    """Lopsided: a role has this many times the load that the other one would have with one node fewer (1 or more)."""
    pipeline_stages: int = 1
    """Prefills that may compute one long prompt together, each some of the layers (chunked pipeline parallelism); 1: none do.
    Above 1 prefills keep conversations among themselves, and need room in their slabs for the whole prompt each."""
    pipeline_min_tokens: int = 8192
    """Prompts with fewer tokens to compute are left to one prefill. Where filling the pipeline is still a small part."""
    pipeline_chunk_tokens: int = 512
    """The prefills' chunk_tokens, from which the conductor predicts what filling and draining a pipeline takes."""

    def __post_init__(self) -> None:
        for name in POSITIVE + NOT_NEGATIVE:
            value = getattr(self, name)
            if math.isnan(value) or value < 0 or (name in POSITIVE and value == 0):
                raise ValueError(f"{name} must be {'positive' if name in POSITIVE else '0 or more'}, not {value}")
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
