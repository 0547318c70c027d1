"""One request at a node beside vLLM, and the table of its states. PURE."""

from dataclasses import dataclass

from mooncake_zmq.core.actor_parts import Named
from mooncake_zmq.core.messages import StartPrefill, StopRule
from mooncake_zmq.core.work import Embed, Generate


class JobState(Named):
    """States of a request at a node beside vLLM."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    """Sent to vLLM, and no token received yet."""
    DECODING = "decoding"
    CLOSING = "closing"
    """The request ended, but vLLM may still work on it."""
    ENDED = "ended"


class JobEvent(Named):
    """Events that change the state of a request."""

    BEGIN = "begin"
    TOKEN = "token"
    CLOSE = "close"
    END = "end"


NEXT_STATE: dict[tuple[JobState, JobEvent], JobState] = {
    (JobState.QUEUED, JobEvent.BEGIN): JobState.PREFILLING,
    (JobState.QUEUED, JobEvent.END): JobState.ENDED,
    (JobState.PREFILLING, JobEvent.TOKEN): JobState.DECODING,
    (JobState.PREFILLING, JobEvent.CLOSE): JobState.CLOSING,
    (JobState.PREFILLING, JobEvent.END): JobState.ENDED,
    (JobState.DECODING, JobEvent.CLOSE): JobState.CLOSING,
    (JobState.DECODING, JobEvent.END): JobState.ENDED,
    (JobState.CLOSING, JobEvent.END): JobState.ENDED,
}


@dataclass(slots=True)
class Job:
    """One attempt of one request at a node beside vLLM."""

    request: StartPrefill
    gateway: str
    order: int
    rank: float
    """Rank among the waiting requests, see `core.order`."""
    arrived_at: float
    state: JobState = JobState.QUEUED
    work_id: int | None = None
    began_at: float = 0.0
    """When vLLM received it."""
    made: int = 0
    """Output tokens of this attempt."""
    token_at: float = 0.0
    """When the latest token arrived."""

    @property
    def taken_over(self) -> bool:
        """Whether another vLLM has prefilled it."""
        return bool(self.request.gateway)

    @property
    def length(self) -> int:
        """Number of tokens that it arrived with."""
        return len(self.request.tokens) // 4

    @property
    def context(self) -> int:
        """Tokens of KV that it has, or will have once vLLM began it."""
        return self.length + self.made

    @property
    def count(self) -> int:
        """Output tokens of the whole request so far."""
        return self.request.first_index + self.made

    def times_s(self, now: float) -> tuple[float, float]:
        """Return how long it waited, and how long vLLM has had it."""
        return max(0.0, self.began_at - self.arrived_at), max(0.0, now - self.began_at)

    def work(self, stop: StopRule, quiet_s: float) -> Generate | Embed:
        """Return the work that vLLM does for it: until `stop`, and never silent for longer than `quiet_s`."""
        request = self.request
        if (embedding := request.embedding) is not None:
            return Embed(request.tokens, embedding, request.root, request.adapter, quiet_s)
        return Generate(
            tokens=request.tokens,
            count=request.first_index,
            root=request.root,
            adapter=request.adapter,
            sampling=request.sampling,
            stop=stop,
            sources=request.sources,
            quiet_s=quiet_s,
            coming_tokens=self.length - 1 if self.taken_over else 0,
            prompt_likeliest=request.prompt_logprobs,
            images=request.images,
        )
