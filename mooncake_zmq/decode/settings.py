"""What an operator sets for a decode node."""

from dataclasses import dataclass, field

from mooncake_zmq.core.messages import MAX_RUN
from mooncake_zmq.pool.node.client import PoolClientSettings


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
    """A work of one or more steps that takes longer fails its requests here."""
    max_steps: int = 1
    """Steps in one work. More is for engines whose steps nobody watches token by token: clients get their tokens in bursts."""
    store_output: bool = True
    """Blocks that decoding completes go to the host's pool, for a chat's next turn. Off, their keys are not made either."""
    store_prompts: bool = True
    """Prompts that were prefilled on another host go to the own host's pool too, from where the next turn of a chat is loaded
    without a link between hosts. Off, the pool gets only what decoding completes, and what was fetched."""
    measured_half_life_s: float = 60.0
    """As of prefill: without work, what was measured of this node's speed loses half of its weight in this time."""
    pool: PoolClientSettings = field(default_factory=PoolClientSettings)

    def __post_init__(self) -> None:
        if min(self.capacity_tokens, self.max_batch, self.max_requests) < 1:
            raise ValueError("capacity_tokens, max_batch and max_requests must be at least 1")
        if not 1 <= self.max_steps <= MAX_RUN:
            raise ValueError(f"max_steps must be in 1..{MAX_RUN}")
        if min(self.report_s, self.pull_deadline_s, self.step_deadline_s, self.measured_half_life_s) <= 0:
            raise ValueError("report_s, pull_deadline_s, step_deadline_s and measured_half_life_s must be positive")
