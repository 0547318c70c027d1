"""Algorithm 1 of the Mooncake paper: which prefill, which decode, which blocks to reuse and where from. PURE functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mooncake_zmq.conductor.estimates import compute_s
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.costs import Costs

MAX_SOURCES = 4
"""Cache-nodes named in one plan: the one to fetch from, and three more should it be gone or have evicted."""


@dataclass(frozen=True, slots=True)
class PrefillOption:
    """One prefill instance. `local_blocks`: leading run its host holds; `can_fetch`: a cache-node there can fetch more."""

    name: str
    host: str
    queue_s: float
    token_s: float
    local_blocks: int
    can_fetch: bool
    last_chosen: int


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """`work_s`: fetch, load and compute; `fetch`: take what the host misses of `reuse_blocks` from another host."""

    name: str
    host: str
    reuse_blocks: int
    fetch: bool
    queue_s: float
    work_s: float

    @property
    def ttft_s(self) -> float:
        """Predicted time to the first token."""
        return self.queue_s + self.work_s


@dataclass(frozen=True, slots=True)
class DecodeOption:
    """One decode instance when the request's prefill begins: its `batch`, and its predicted step with the request in it."""

    name: str
    host: str
    tbt_s: float
    free_tokens: float
    batch: float


def reusable_blocks(*, tokens: int, keys: int, block_tokens: int) -> int:
    """Blocks that may be reused at most: complete ones, leaving at least one token to compute."""
    return max(0, min(keys, (tokens - 1) // block_tokens))


def balance_ratio(best: int, local: int) -> float:
    """Best match over local match. The paper leaves local = 0 open: infinite here, or 1 if best is 0 too."""
    if local > 0:
        return best / local
    return float("inf") if best > 0 else 1.0


def plan_prefill(
    option: PrefillOption, *, settings: ConductorSettings, costs: Costs, tokens: int, best_blocks: int, block_tokens: int
) -> PrefillChoice:
    """The quickest way for one instance to prefill the prompt: from its own host's blocks, or fetching the best match.

    Beyond Algorithm 1: where even the estimate says that computing is quicker than fetching, nothing is fetched.
    """

    def work(reuse: int, fetched: int) -> float:
        prefix = reuse * block_tokens
        loading = costs.load_s(prefix) + costs.transfer_s(fetched * block_tokens)
        return loading + compute_s(costs, tokens=tokens, prefix=prefix, token_s=option.token_s)

    local = option.local_blocks
    local_s = work(local, 0)
    if best_blocks > local and option.can_fetch:
        fetched_s = work(best_blocks, best_blocks - local)
        if balance_ratio(best_blocks, local) >= settings.kvcache_balancing_threshold and fetched_s < local_s:
            return PrefillChoice(option.name, option.host, best_blocks, True, option.queue_s, fetched_s)
    return PrefillChoice(option.name, option.host, local, False, option.queue_s, local_s)


def choose_prefill(
    options: Sequence[PrefillOption],
    *,
    settings: ConductorSettings,
    costs: Costs,
    tokens: int,
    best_blocks: int,
    block_tokens: int,
) -> PrefillChoice | None:
    """The instance with the smallest predicted TTFT; among ties the one chosen longest ago, so that load and blocks spread."""
    plans = [
        plan_prefill(option, settings=settings, costs=costs, tokens=tokens, best_blocks=best_blocks, block_tokens=block_tokens)
        for option in options
    ]
    if not plans:
        return None
    limit = min(plan.ttft_s for plan in plans) * (1 + settings.tie_ratio)
    tied = [(option.last_chosen, plan.name, plan) for option, plan in zip(options, plans, strict=True) if plan.ttft_s <= limit]
    return min(tied, key=lambda entry: entry[:2])[2]


def choose_decode(
    options: Sequence[DecodeOption], *, settings: ConductorSettings, host: str, need_tokens: int
) -> DecodeOption | None:
    """Of those with room the smallest predicted TBT; among ties the prefill's own host, where the handoff is a read of shared
    memory, then the most free tokens, then the name."""
    roomy = [option for option in options if option.free_tokens >= need_tokens]
    if not roomy:
        return None
    limit = min(option.tbt_s for option in roomy) * (1 + settings.tie_ratio)
    tied = [option for option in roomy if option.tbt_s <= limit]
    return min(tied, key=lambda option: (option.host != host, -option.free_tokens, option.name))


def choose_sources(
    matches: Mapping[str, int], *, hosts: Mapping[str, str], host: str, local_blocks: int, last_fetched: Mapping[str, int]
) -> tuple[str, ...]:
    """Cache-nodes of other hosts that hold more than `local_blocks`: longest first, of equals the one named longest ago."""
    better = [node for node, blocks in matches.items() if blocks > local_blocks and hosts[node] != host]
    better.sort(key=lambda node: (-matches[node], last_fetched.get(node, 0), node))
    return tuple(better[:MAX_SOURCES])
