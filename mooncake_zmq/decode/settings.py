"""Settings of a decode node."""

import math
from dataclasses import dataclass, field
from typing import Literal

from mooncake_zmq.core.drain import GRACE_S
from mooncake_zmq.core.messages import MAX_RUN, MAX_TOKENS
from mooncake_zmq.core.selection import Selection
from mooncake_zmq.pool.node.client import PoolClientSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """Settings of one decode instance."""

    capacity_tokens: int = 16_384
    """KV budget in tokens, of 46 kB each with the default model. It has to hold at least one request of full length."""
    max_batch: int = 16
    """Most requests in one step. 0: it takes none, and only lends."""
    max_requests: int = 64
    """Most requests that hold KV, waiting ones included; a further one is denied."""
    report_s: float = 0.25
    """Interval of the load reports to the conductors."""
    pull_deadline_s: float = 30.0
    """Longest copy of a handoff; a longer one fails the attempt."""
    step_deadline_s: float = 60.0
    """Longest work of one or more steps; a longer one fails its requests here."""
    max_steps: int = 1
    """Most steps in one work. More than 1 suits deployments where clients do not watch token by token: tokens come in
    bursts."""
    store_output: bool = True
    """Offer blocks completed by decoding to the host's pool, for the next turn of a chat. Otherwise their keys are not
    computed either."""
    store_prompts: bool = True
    """Offer prompts prefilled on another host to the own host's pool too, from where the next turn of a chat is loaded
    without a link between hosts. Otherwise the pool gets only what decoding completes, and what is fetched."""
    own_reuse: bool = True
    """Keep the KV of requests that ended, as far as `capacity_tokens` leave room beside those that run, and copy from it what
    later prompts begin with. Only prompts prefilled on another host name the blocks that allow that."""
    lend_tokens: int = 0
    """Most of `capacity_tokens` that requests of other decodes may use, for prompts that have no room at theirs."""
    borrow: bool = False
    """Take requests that have no room here if other decodes lend it. Each of their tokens then takes longer."""
    lender_timeout_s: float = 2.0
    """Longest wait of a request for a decode that holds KV of it; then it goes on elsewhere. Requests beside it in a batch wait
    for at most four steps, or 0.25 s."""
    own_tokens: int = MAX_TOKENS
    """Most KV of a prompt that is here where others lend more; 0: its last tokens, up to a whole block, and the output."""
    selection: Literal["none", "kcache", "pqcache", "quest"] = "none"
    """How a step chooses the few tokens that it attends to, of each layer and KV head, in a longer context; "none": it attends
    to all. Such an answer is approximate, and marked so; nothing that is computed from then on is offered to a pool."""
    selection_tokens: int = 256
    """The tokens that are chosen beside the first 4 and the last 32. Up to so many in all, attention is exact."""
    measured_half_life_s: float = 60.0
    """Time in which the measured speed of an idle node loses half of its weight, as for a prefill."""
    drain_grace_s: float = GRACE_S
    """When the decode drains, answers that do not end within so long go on at another decode that has room for them; without
    one they end here. From `cluster.drain_timeout_s` on: all of them end here."""
    pool: PoolClientSettings = field(default_factory=PoolClientSettings)

    def __post_init__(self) -> None:
        if min(self.capacity_tokens, self.max_requests) < 1 or min(self.max_batch, self.own_tokens) < 0:
            raise ValueError("capacity_tokens and max_requests must be at least 1, max_batch and own_tokens at least 0")
        if not 0 <= self.lend_tokens <= self.capacity_tokens:
            raise ValueError("lend_tokens must be in 0..capacity_tokens")
        if self.selection_tokens < 1:
            raise ValueError("selection_tokens must be at least 1")
        if self.choice and (self.borrow or self.lend_tokens):
            raise ValueError("selection is for KV that is all here: leave borrow and lend_tokens out")
        if not 1 <= self.max_steps <= MAX_RUN:
            raise ValueError(f"max_steps must be in 1..{MAX_RUN}")
        if min(self.report_s, self.pull_deadline_s, self.step_deadline_s, self.measured_half_life_s) <= 0:
            raise ValueError("report_s, pull_deadline_s, step_deadline_s and measured_half_life_s must be positive")
        if not 0 < self.lender_timeout_s < math.inf:
            raise ValueError("lender_timeout_s must be positive and finite")
        if not 0 <= self.drain_grace_s < math.inf:
            raise ValueError("drain_grace_s must be 0 or more, and finite")

    @property
    def choice(self) -> Selection | None:
        """How steps choose what they attend to; None: they attend to all."""
        return None if self.selection == "none" else Selection(self.selection, self.selection_tokens)

    @property
    def most_taken(self) -> int:
        """Most requests that hold KV."""
        return self.max_requests if self.max_batch else 0
