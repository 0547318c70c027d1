"""Settings of a prefill node."""

import math
from dataclasses import dataclass, field

from mooncake_zmq.core.drain import GRACE_S
from mooncake_zmq.core.messages import MAX_OVERTAKE, MAX_SECONDS
from mooncake_zmq.pool.node.client import PoolClientSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings:
    """Settings of one prefill instance."""

    slab_bytes: int = 512 << 20
    """Shared memory for the KV of running prompts and the node's own reuse. It has to hold at least one prompt of full
    length."""
    chunk_tokens: int = 512
    """Prompt tokens per chunk: about a second on one CPU core with the default model, the longest a short prompt waits."""
    max_active: int = 4
    """Most prompts that hold KV and interleave their chunks."""
    short_jobs: int = 2
    """Further places for prompts that rank before one that holds a place, so that long prompts do not block short ones."""
    max_queued: int = 64
    """Most waiting jobs; a further one is refused and placed elsewhere."""
    overtake: float = 0.0
    """Seconds of later arrival that a prompt gives way for each second of its own work, see `core.order`. 0: first come,
    first served, so that no later prompt breaks a prediction. 1: a prompt of 30 s waits for nothing that arrives more than
    30 s after it, and one of 1 s passes it until 29 s after. On the public trace at twice its rate (8P+8D) that shortens the
    mean TTFT from 3.8 to 2.2 s and makes its prediction wrong by a quarter instead of a seventieth."""
    priority_s: float = 10.0
    """Seconds of later arrival that one step of a request's priority is worth. More than most prompts take, so that a step
    has an effect, and far less than a deadline, so that it starves no request."""
    report_s: float = 0.25
    """Interval of the load reports to the conductors; a quarter of it after something ended."""
    measured_half_life_s: float = 60.0
    """Time in which the measured speed of an idle node loses half of its weight: one slow chunk, such as the first one with
    cold caches, must not keep requests away for ever. Long compared with the gaps of a node in use."""
    work_deadline_s: float = 120.0
    """Longest time for a chunk; a longer one fails."""
    own_reuse: bool = True
    """Look up blocks in the own slab before the pool. Otherwise every reused block comes from the pool, which allows to
    measure it."""
    meet: bool = False
    """Compute the head of a prompt while blocks of it are fetched from the last one on, where the prefill has no other
    prompt. Otherwise it waits for all of them."""
    meet_chunk_tokens: int = 128
    """Tokens in the last chunks of such a head, where both ends are near each other: the fetch may outrun a longer one, and a
    shorter one costs more for each token."""
    blend: bool = False
    """Reuse the KV of earlier prompts' blocks in the slab wherever the same tokens stand in a prompt, and compute only some of
    these tokens again. Such an answer is approximate, and marked so; nothing computed for it is reused as exact KV."""
    blend_share: float = 0.15
    """Share of such tokens that are computed again: those whose values deviate most in the first layer that depends on what
    stands before them."""
    blend_least_tokens: int = 64
    """Least length of a part that is reused so."""
    blend_most_tokens: int = 8192
    """Most tokens behind the exact prefix of a prompt that is computed so, as one work for which all others wait; a longer one
    is computed exactly."""
    drain_grace_s: float = GRACE_S
    """When the prefill drains, prompts that are not expected to be computed within so long are placed on another prefill at
    once; without one they are computed here."""
    pool: PoolClientSettings = field(default_factory=PoolClientSettings)

    def __post_init__(self) -> None:
        if self.meet_chunk_tokens < 1:
            raise ValueError("meet_chunk_tokens must be at least 1")
        if not 0 <= self.blend_share <= 1 or min(self.blend_least_tokens, self.blend_most_tokens) < 1:
            raise ValueError("blend_share must be in 0..1, blend_least_tokens and blend_most_tokens at least 1")
        if self.chunk_tokens < 1 or self.max_active < 1 or self.short_jobs < 0 or self.max_queued < 1:
            raise ValueError("chunk_tokens, max_active and max_queued must be at least 1, short_jobs at least 0")
        if not (0 <= self.overtake <= MAX_OVERTAKE and 0 <= self.priority_s <= MAX_SECONDS):
            raise ValueError(f"overtake must be in 0..{MAX_OVERTAKE:g}, and priority_s in 0..{MAX_SECONDS:g}")
        if min(self.report_s, self.measured_half_life_s, self.work_deadline_s) <= 0 or self.slab_bytes <= 0:
            raise ValueError("slab_bytes, report_s, measured_half_life_s and work_deadline_s must be positive")
        if not 0 <= self.drain_grace_s < math.inf:
            raise ValueError("drain_grace_s must be 0 or more, and finite")
