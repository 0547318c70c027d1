"""How long things take: a cost formula rescaled by what nodes measure, plus what was placed since their last report. PURE."""

import math
from dataclasses import dataclass

from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import DecodeLoad, PrefillLoad

BookingKey = tuple[str, str]
"""Gateway and request id."""


def compute_s(costs: Costs, *, tokens: int, prefix: int, token_s: float) -> float:
    """Time to prefill `tokens` of which `prefix` are loaded: t(tokens) - t(prefix), t(n) = a n + b n^2.

    A node's measured `token_s` replaces `a` and scales `b` with it: attention's share is the model's, the speed the node's.
    """
    scale = token_s / costs.prefill_token_s if token_s > 0 else 1.0
    return scale * costs.compute_s(tokens, prefix)


@dataclass(frozen=True, slots=True)
class QueuedBooking:
    """Work given to a prefill that its reports may not show yet."""

    at: float
    work_s: float


class PrefillQueue:
    """One prefill's predicted queue: its last report and the bookings since, worked off at one second per second."""

    def __init__(self, settings: ConductorSettings, costs: Costs) -> None:
        self.token_s = 0.0
        self._costs = costs
        self.bookings: dict[BookingKey, QueuedBooking] = {}
        self._settings = settings
        self._reported_s = 0.0
        self._reported_at = -math.inf
        self._backlog_s = 0.0
        self._as_of = -math.inf

    def queue_s(self, now: float) -> float:
        """How long a job that arrives now would wait."""
        return max(0.0, self._backlog_s - (now - self._as_of)) if self._backlog_s else 0.0

    def report(self, now: float, load: PrefillLoad) -> None:
        """The node's own figures; bookings old enough to be among them are dropped here."""
        measured = load.compute
        self.token_s = self._costs.prefill_token_s * measured.seconds / measured.predicted_s if measured.predicted_s else 0.0
        self._reported_s, self._reported_at = sum(job.left_s for job in load.jobs), now
        horizon = now - self._settings.report_grace_s
        self.bookings = {key: booking for key, booking in self.bookings.items() if booking.at > horizon}
        self._rebuild()

    def book(self, now: float, key: BookingKey, work_s: float) -> None:
        """A job was sent here."""
        self._add(now, work_s)
        self.bookings[key] = QueuedBooking(now, work_s)

    def unbook(self, key: BookingKey) -> None:
        """The job ended, or will never come."""
        if self.bookings.pop(key, None) is not None:
            self._rebuild()

    def _rebuild(self) -> None:
        self._backlog_s, self._as_of = self._reported_s, self._reported_at
        for booking in self.bookings.values():
            self._add(booking.at, booking.work_s)

    def _add(self, at: float, work_s: float) -> None:
        """Work off the time since the last change, then add."""
        as_of = max(at, self._as_of)
        self._backlog_s, self._as_of = self.queue_s(as_of) + work_s, as_of


@dataclass(frozen=True, slots=True)
class DecodeBooking:
    """A request on its way to a decode. `due`: when its prefill should be over, so that it runs or was denied."""

    at: float
    due: float
    tokens: int


class DecodeBatch:
    """One decode's predicted batch: its last report and the requests placed there that the report cannot show yet.

    A decode learns of a request when the prefill reserves there, anywhere between placement and the end of the queue. So a
    report's `reserved` are taken to be the oldest of the requests still due, and only the others are added to it.
    """

    def __init__(self, settings: ConductorSettings, costs: Costs) -> None:
        self.bookings: dict[BookingKey, DecodeBooking] = {}
        self._costs = costs
        self._settings = settings
        self._load: DecodeLoad | None = None
        self._reported_at = -math.inf
        self._hidden: list[DecodeBooking] = []
        self._hidden_tokens = 0

    @property
    def batch(self) -> int:
        """Requests that run here or will."""
        known = self._load.running + self._load.reserved if self._load else 0
        return known + len(self._hidden)

    @property
    def reported(self) -> bool:
        """Whether the node has said anything yet."""
        return self._load is not None

    @property
    def free_tokens(self) -> float:
        """KV left for a new request; unlimited before the first report, as the decode checks for itself anyway."""
        return self._load.free_tokens - self._hidden_tokens if self._load else math.inf

    def after(self, now: float, wait_s: float) -> tuple[float, float]:
        """Requests here and KV free once a request has waited `wait_s` for its prefill, if every decode lasts equally long.

        Those that run now began evenly spread, so they leave evenly; one on its way leaves that long after it is due.
        """
        stay_s = self._settings.expected_output_tokens * self.step_s(self.batch)
        if wait_s <= 0 or not self._load:
            return self.batch, self.free_tokens
        gone = min(1.0, wait_s / stay_s)
        staying = [booking for booking in self._hidden if booking.due + stay_s > now + wait_s]
        count = (self._load.running + self._load.reserved) * (1 - gone) + len(staying)
        held = (self._load.capacity_tokens - self._load.free_tokens) * (1 - gone)
        return count, self._load.capacity_tokens - held - sum(booking.tokens for booking in staying)

    def step_s(self, batch: float) -> float:
        """Duration of a step at this batch size: the measured step, moved along the slope.

        A request more reads as much KV as those here do on average.
        """
        measured = self._load.step_s if self._load else 0.0
        at = max(1, self._load.running) if self._load and measured else 1
        costs, each = self._costs, self._tokens_per_request
        scale = measured / costs.step_s(at, at * each) if measured else 1.0
        return scale * costs.step_s(batch, batch * each)

    @property
    def _tokens_per_request(self) -> float:
        """Mean KV of the requests here; 0 before any report, and with nobody here."""
        load = self._load
        count = load.running + load.reserved if load else 0
        return (load.capacity_tokens - load.free_tokens) / count if load and count else 0.0

    def report(self, now: float, load: DecodeLoad) -> None:
        """The node's own figures; bookings old enough and due to run are among them."""
        self._load, self._reported_at = load, now
        horizon = now - self._settings.report_grace_s
        self.bookings = {key: b for key, b in self.bookings.items() if b.at > horizon or b.due > horizon}
        self._recount()

    def book(self, key: BookingKey, booking: DecodeBooking) -> None:
        """A request was placed here."""
        self.bookings[key] = booking
        self._hidden.append(booking)
        self._hidden_tokens += booking.tokens

    def unbook(self, key: BookingKey) -> None:
        """The request ended, or will never come."""
        if self.bookings.pop(key, None) is not None:
            self._recount()

    def _recount(self) -> None:
        horizon = self._reported_at - self._settings.report_grace_s
        reserved = self._load.reserved if self._load else 0
        older = [booking for booking in self.bookings.values() if booking.at <= horizon]
        fresh = [booking for booking in self.bookings.values() if booking.at > horizon]
        self._hidden = older[reserved:] + fresh
        self._hidden_tokens = sum(booking.tokens for booking in self._hidden)
