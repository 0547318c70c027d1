"""The record of one placement, kept for as long as the conductor remembers it. PURE."""

from msgspec import Struct

from mooncake_zmq.core.messages import Placed

BookingKey = tuple[str, str]
"""Identifies a booking by gateway and request id."""


class Booking(Struct, eq=False, gc=False):
    """One placement: the answer that was sent, which a repeated `Schedule` receives again, and what it was predicted from."""

    key: BookingKey
    at: float
    placed: Placed
    due: float
    """The time at which its prefill should end; reports of the prefill update it."""
    deadline: float
    """The time at which its first token is due by its SLO; inf without one."""
    need_tokens: int
    """The KV tokens that the decode must have free for all its choices."""
    load_s: float
    """The seconds that it adds to each step of its decode by the cost model, with the KV that it holds on average."""
    choices: int
    """The number of sequences that it will run on its decode."""
    expected_tokens: float
    ttft_s: float
    """The predicted TTFT, and next the predicted TBT, before `Hindsight` corrects them."""
    tbt_s: float
    idle: bool
    """Whether its prefill had an empty queue and it waits for no blocks."""
    alone: bool
    """Whether its decode was expected to have no other request."""
    earliest: float = 0.0
    """The earliest end of its prefill while that waits for blocks, whatever its queue."""
    coming: bool = False
    """Whether it has yet to appear in the reports of its decode."""
    reserved: bool = False
    """Whether the decode reported it: it holds KV there."""
