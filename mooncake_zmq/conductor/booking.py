"""The record of one placement, kept for as long as the conductor remembers it. PURE."""

from collections.abc import Mapping

from mooncake_zmq.core.messages import Placed

BookingKey = tuple[str, str]
"""Identifies a booking by gateway and request id."""


class Booking:
    """One placement: the answer that was sent, which a repeated `Schedule` receives again, and what it was predicted from."""

    __slots__ = (
        "alone",
        "at",
        "choices",
        "coming",
        "deadline",
        "due",
        "earliest",
        "expected_tokens",
        "idle",
        "key",
        "lent",
        "load_s",
        "need_tokens",
        "number",
        "placed",
        "reserved",
        "tbt_s",
        "tenant",
        "ttft_s",
        "work_s",
    )

    def __init__(
        self,
        key: BookingKey,
        placed: Placed,
        *,
        number: int,
        at: float,
        ttft_s: float,
        tbt_s: float,
        deadline: float,
        need_tokens: int,
        lent: Mapping[str, int],
        load_s: float,
        choices: int,
        expected_tokens: float,
        idle: bool,
        alone: bool,
        waits: bool,
        work_s: float,
        tenant: str,
    ) -> None:
        self.key = key
        self.placed = placed
        self.number = number
        """The number by which nodes name the placement in their reports."""
        self.at = at
        self.ttft_s = ttft_s
        """The predicted TTFT, and next the predicted TBT, before `Hindsight` corrects them."""
        self.tbt_s = tbt_s
        self.due = at + ttft_s
        """The time at which its prefill should end; reports of the prefill update it."""
        self.earliest = self.due if waits else 0.0
        """The earliest end of its prefill while that waits for blocks, whatever its queue."""
        self.deadline = deadline
        """The time at which its first token is due by its SLO; inf without one."""
        self.need_tokens = need_tokens
        """The KV tokens that the decode must have free for all its choices."""
        self.lent = lent
        """The KV tokens that other decodes are to lend it."""
        self.load_s = load_s
        """The seconds that it adds to each step of its decode by the cost model, with the KV that it holds on average."""
        self.choices = choices
        """The number of sequences that it will run on its decode."""
        self.expected_tokens = expected_tokens
        self.idle = idle
        """Whether its prefill had an empty queue and it waits for no blocks."""
        self.alone = alone
        """Whether its decode was expected to have no other request."""
        self.coming = False
        """Whether it has yet to appear in the reports of its decode."""
        self.reserved = False
        """Whether the decode reported it: it holds KV there."""
        self.work_s = work_s
        """The seconds that its prefill works on it."""
        self.tenant = tenant

    @property
    def begins(self) -> float:
        """The time at which its prefill should begin; it reserves KV at its decode then."""
        return self.due - self.work_s
