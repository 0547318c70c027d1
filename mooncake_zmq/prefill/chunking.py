"""Which prompt computes its next chunk, and how long that chunk is. PURE.

The rule: the job with the fewest tokens left goes first, and every second a job has waited since its last chunk (or its
arrival) counts as `aging_tokens_per_s` tokens fewer. So a short prompt overtakes a long one between two chunks, and a
long one is passed over for at most `tokens left / aging_tokens_per_s` seconds.
"""

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Waiting(Protocol):
    """What the rule looks at."""

    @property
    def tokens_left(self) -> int:
        """Prompt tokens not computed yet."""

    @property
    def waiting_since(self) -> float:
        """End of the last chunk, or arrival."""

    @property
    def order(self) -> int:
        """Arrival number: decides ties."""


W = TypeVar("W", bound=Waiting)


def next_job(now: float, jobs: Iterable[W], aging_tokens_per_s: float) -> W | None:
    """The job whose turn it is."""

    def rank(job: W) -> tuple[float, int]:
        return job.tokens_left - (now - job.waiting_since) * aging_tokens_per_s, job.order

    return min(jobs, key=rank, default=None)


def chunk_stop(start: int, end: int, chunk_tokens: int) -> int:
    """Where the chunk that begins at `start` stops: whole blocks (chunk_tokens is a multiple of them) up to `end`.

    A remainder of less than a quarter chunk is not left over: a tiny chunk costs nearly a whole pass over the weights.
    """
    stop = start + chunk_tokens
    return end if end - stop < chunk_tokens // 4 else stop
