"""What an operator sets for how a gateway drives its requests."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsSettings:
    """How a gateway drives its requests."""

    conductors: tuple[str, ...] = ()
    """In order of preference: the first one alive decides, the others only listen."""
    max_open: int = 256
    """Requests at once; a further one is answered 503."""
    deadline_s: float = 600.0
    """Every request ends by then, with an error if need be."""
    placement_wait_s: float = 10.0
    """How long a new request waits for a conductor, a prefill and a decode to be there before it is answered 503."""
    stall_s: float = 60.0
    """An attempt that brings no token for this long is given up and placed again: longer than the longest prefill's queue."""
    max_attempts: int = 12
    """Attempts of one request that may break (a node died, a block did not verify) before it gets an error: it may be what
    breaks them. Those that found no room do not count; the deadline bounds them."""
    backoff_s: float = 0.05
    """Pause before the second attempt; doubled for each further one."""
    backoff_max_s: float = 1.0
    """Longest pause between attempts."""

    def __post_init__(self) -> None:
        if min(self.max_open, self.max_attempts) < 1:
            raise ValueError("max_open and max_attempts must be at least 1")
        if min(self.deadline_s, self.placement_wait_s, self.stall_s, self.backoff_s) <= 0:
            raise ValueError("deadline_s, placement_wait_s, stall_s and backoff_s must be positive")
        if self.backoff_max_s < self.backoff_s:
            raise ValueError("backoff_max_s must not be below backoff_s")
