"""Chooses prefills that compute a long prompt together, each some of the layers, if that is sooner. PURE functions.

With X stages of equal speed a stage takes an X-th of the time that one node would take for a chunk. The last chunk has left
the first stage once all chunks were computed there, and then passes the X - 1 other stages. It takes the longest, as it
attends to the most keys.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.costs import Costs


@dataclass(frozen=True, slots=True)
class Candidate:
    """One prefill: the seconds until it could begin, its measured multiple of the cost model's compute time, and the blocks
    that it could reuse."""

    name: str
    queue_s: float
    slowness: float
    reuse_blocks: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline. `stages`: the names of the later stages, in order; `queue_s`: seconds until all stages can begin; `work_s`:
    seconds from then to the first token, of which each stage computes `share_s`."""

    stages: tuple[str, ...]
    queue_s: float
    work_s: float
    share_s: float

    @property
    def ttft_s(self) -> float:
        """The predicted time to the first token."""
        return self.queue_s + self.work_s


def form_pipeline(
    first: Candidate,
    others: Iterable[Candidate],
    *,
    ttft_s: float,
    tokens: int,
    block_tokens: int,
    settings: ConductorSettings,
    costs: Costs,
) -> Pipeline | None:
    """Return the best pipeline with `first` in front, of up to `pipeline_stages` prefills, those that are free soonest; None
    if the prompt is short or `first` alone is predicted to be as quick (`ttft_s`)."""
    if settings.pipeline_stages < 2 or tokens - first.reuse_blocks * block_tokens < settings.pipeline_min_tokens:
        return None
    idlest = sorted((other for other in others if other.name != first.name), key=lambda other: (other.queue_s, other.name))
    best: Pipeline | None = None
    for count in range(1, min(settings.pipeline_stages, 1 + len(idlest))):
        pipeline = _predict(first, idlest[:count], tokens, block_tokens, settings, costs)
        if pipeline.ttft_s < (best.ttft_s if best else ttft_s):
            best = pipeline
    return best


def _predict(
    first: Candidate, later: list[Candidate], tokens: int, block_tokens: int, settings: ConductorSettings, costs: Costs
) -> Pipeline:
    """Predict a pipeline in which all stages reuse the prefix that every one of them can, at the speed of the slowest."""
    members = [first, *later]
    prefix = min(member.reuse_blocks for member in members) * block_tokens
    slowness = max(member.slowness for member in members)
    last_chunk = min(tokens - prefix, settings.pipeline_chunk_tokens)
    share_s = slowness * costs.compute_s(tokens, prefix) / len(members)
    drain_s = slowness * costs.compute_s(tokens, tokens - last_chunk) * len(later) / len(members)
    work_s = max(share_s, costs.load_s(prefix) / len(members)) + drain_s
    return Pipeline(tuple(member.name for member in later), max(member.queue_s for member in members), work_s, share_s)
