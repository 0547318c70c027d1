"""What an operator sets for a decode node."""

from dataclasses import dataclass, field

from mooncake_zmq.cache_node.client import PoolClientSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """One decode instance."""

    capacity_tokens: int = 16_384
    """KV budget in tokens; 46 kB each with the default model. At least one request of the full length."""
    max_batch: int = 16
    """Requests in one step."""
    max_requests: int = 64
    """Requests that hold KV, waiting ones included; a further one is denied."""
    report_s: float = 0.25
    """How often the load is told to the conductors."""
    pull_deadline_s: float = 30.0
    """A handoff's copy that takes longer fails the attempt."""
    step_deadline_s: float = 60.0
    """A step that takes longer fails its requests here."""
    pool: PoolClientSettings = field(default_factory=PoolClientSettings)

    def __post_init__(self) -> None:
        if min(self.capacity_tokens, self.max_batch, self.max_requests) < 1:
            raise ValueError("capacity_tokens, max_batch and max_requests must be at least 1")
        if min(self.report_s, self.pull_deadline_s, self.step_deadline_s) <= 0:
            raise ValueError("report_s, pull_deadline_s and step_deadline_s must be positive")
