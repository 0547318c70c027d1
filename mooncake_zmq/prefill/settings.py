"""What an operator sets for a prefill node."""

from dataclasses import dataclass, field

from mooncake_zmq.cache_node.client import PoolClientSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings:
    """One prefill instance."""

    slab_bytes: int = 512 << 20
    """Shared-memory slots for the KV of running prompts and the node's own reuse. At least one prompt of the full length."""
    chunk_tokens: int = 512
    """Prompt tokens per chunk: about a second on one CPU core with the default model, the longest a short prompt waits."""
    max_active: int = 4
    """Prompts that hold KV and interleave their chunks."""
    short_lane: int = 2
    """Further places for prompts of at most one chunk, so that long ones holding every place do not keep them out."""
    max_queued: int = 64
    """Jobs waiting; a further one is refused and placed elsewhere."""
    aging_tokens_per_s: float = 500.0
    """See `chunking`: how fast a waiting prompt gains on shorter ones. About the speed of one core."""
    report_s: float = 0.25
    """How often the load is told to the conductors."""
    work_deadline_s: float = 120.0
    """A chunk that takes longer is given up."""
    own_reuse: bool = True
    """Look into the own slab before the pool. Off, every reused block comes from the pool: for measuring it."""
    pool: PoolClientSettings = field(default_factory=PoolClientSettings)

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1 or self.max_active < 1 or self.short_lane < 0 or self.max_queued < 1:
            raise ValueError("chunk_tokens, max_active and max_queued must be at least 1, short_lane at least 0")
        if min(self.aging_tokens_per_s, self.report_s, self.work_deadline_s) <= 0 or self.slab_bytes <= 0:
            raise ValueError("slab_bytes, aging_tokens_per_s, report_s and work_deadline_s must be positive")
