"""One request at a node beside vLLM, and the table of its life. PURE."""

from dataclasses import dataclass

from mooncake_zmq.core.messages import StartPrefill
from mooncake_zmq.core.shell import Named


class JobState(Named):
    """Life of a request here."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    """vLLM has it, and no token came yet."""
    DECODING = "decoding"
    CLOSING = "closing"
    """Over, but vLLM may not know it yet."""
    ENDED = "ended"


class JobEvent(Named):
    """What moves it on."""

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
    """One attempt of one request."""

    request: StartPrefill
    gateway: str
    order: int
    rank: float
    """Among those that wait, see `core.order`."""
    arrived_at: float
    state: JobState = JobState.QUEUED
    work_id: int | None = None
    began_at: float = 0.0
    """When vLLM got it."""
    made: int = 0
    """Output tokens of this attempt."""
    token_at: float = 0.0
    """When the last of them came."""

    @property
    def taken_over(self) -> bool:
        """Another vLLM has prefilled it."""
        return bool(self.request.gateway)

    @property
    def length(self) -> int:
        """Tokens that it came with."""
        return len(self.request.tokens) // 4

    @property
    def context(self) -> int:
        """Tokens of KV that it has, or will have once vLLM took it in."""
        return self.length + self.made

    @property
    def count(self) -> int:
        """Output tokens of the whole request so far."""
        return self.request.first_index + self.made
