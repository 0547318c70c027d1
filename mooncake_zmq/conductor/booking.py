"""One placement, for as long as the conductor remembers it. PURE."""

from msgspec import Struct

from mooncake_zmq.core.messages import Placed

BookingKey = tuple[str, str]
"""Gateway and request id."""


class Booking(Struct, eq=False, gc=False):
    """One placement: the answer given, kept to answer a repeated `Schedule` alike, and what it was predicted from."""

    key: BookingKey
    at: float
    placed: Placed
    due: float
    """When its prefill should be over; the prefill's reports move it."""
    deadline: float
    """When it should have its first token at the latest, by its SLO; inf without one."""
    need_tokens: int
    """KV that the decode must have for it, with all its choices."""
    load_s: float
    """What it adds to each step of its decode, as the cost model has it, with the KV it holds on average."""
    choices: int
    """Requests that it will be there."""
    expected_tokens: float
    ttft_s: float
    """As it was predicted, likewise its TBT: before `Hindsight` corrects it."""
    tbt_s: float
    idle: bool
    """Its prefill had nothing to do before it, and it waits for no blocks."""
    alone: bool
    """Its decode was expected to have no other request."""
    earliest: float = 0.0
    """While its prefill waits for blocks: when it should be over at the earliest, whatever that prefill has to do."""
    coming: bool = False
    """It is on its way to its decode, whose reports do not count it as there yet."""
    reserved: bool = False
    """The decode named it: it holds KV there."""
