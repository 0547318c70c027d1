"""The decodes' batches: what each reported last, thinned out as its requests leave, and the placements that are on their way
there. PURE.

A request joins the batch when its prefill is done, so that is the time its decode is judged at. Those that run began evenly
spread and so leave evenly, over as long as a request stays; one on its way leaves that long after it came. Who finds the batch
full waits for a place, and that wait stands in its gap between the first two tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.conductor.bookings import Booking
from mooncake_zmq.conductor.columns import Cells, Columns, Floats
from mooncake_zmq.conductor.corrections import Accuracy, Correction
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.gaps import longest_gaps
from mooncake_zmq.core.messages import MAX_REPORTED, DecodeLoad, Measured

UNLIMITED = float(1 << 40)


class DecodeNode:
    """One decode."""

    __slots__ = ("coming", "draining", "host", "load", "name", "slot", "step")

    def __init__(self, name: str, host: str, half_life_s: float) -> None:
        self.name = name
        self.host = host
        self.slot = 0
        self.draining = False
        self.load: DecodeLoad | None = None
        self.step = Correction(half_life_s)
        self.coming: list[Booking] = []
        """By row of their cells."""


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """One decode when the request would join it: its `batch` then without the request, and its predicted gap between tokens
    with it. `alone_s`: the gap if nobody else were there."""

    node: DecodeNode
    tbt_s: float
    batch: float
    alone_s: float


class Decodes(Columns[DecodeNode]):
    """All decodes. `there`: requests that run or will at once; `context` their KV; `free` and `places` less what is on its
    way and not reserved yet; `held` all KV in use; `step_s` the step as it is now, corrected like `scale`."""

    there: Floats
    context: Floats
    max_batch: Floats
    places: Floats
    free: Floats
    held: Floats
    scale: Floats
    step_s: Floats
    reported_at: Floats
    closed: Floats
    host: Floats
    """By number, see `host_number`."""

    def __init__(self, settings: ConductorSettings, costs: Costs, accuracy: Accuracy) -> None:
        self._settings = settings
        self._costs = costs
        self._accuracy = accuracy
        self._dues = Cells(np.inf)
        self._tokens = Cells(0.0)
        super().__init__(
            there=0.0,
            context=0.0,
            max_batch=UNLIMITED,
            places=UNLIMITED,
            free=UNLIMITED,
            held=0.0,
            scale=1.0,
            step_s=costs.step_s(1, 0),
            reported_at=0.0,
            closed=0.0,
            host=-1.0,
        )
        self._hosts: dict[str, int] = {}

    def join(self, name: str, host: str) -> None:
        """A conversation began."""
        node = DecodeNode(name, host, self._settings.correction_half_life_s)
        self.insert(node)
        self._hosts.setdefault(host, len(self._hosts))
        self.host[node.slot] = self._hosts[host]
        for cells in (self._dues, self._tokens):
            cells.insert(node.slot)

    def leave(self, node: DecodeNode) -> None:
        """A conversation ended."""
        for cells in (self._dues, self._tokens):
            cells.delete(node.slot)
        self.delete(node)

    def host_number(self, host: str) -> int:
        """The number that stands for a host in `host`; none of them if no decode was ever there."""
        return self._hosts.get(host, -2)

    # --- what is told

    def report(self, now: float, node: DecodeNode, load: DecodeLoad) -> None:
        """The node's own figures; who it names has KV there, and who it named before and no more has left."""
        node.load, node.draining = load, load.draining
        if node.coming:
            self._sort_out(now, node, load)
        self._correct(now, node, load)
        slot = node.slot
        reserved_ours = sum([booking.reserved for booking in node.coming])
        self.there[slot] = there = load.running + max(0, load.reserved - reserved_ours)
        self.context[slot] = load.context_tokens
        self.max_batch[slot] = max(1, load.max_batch)
        self.held[slot] = load.capacity_tokens - load.free_tokens
        self.scale[slot] = scale = node.step.factor
        self.step_s[slot] = scale * self._costs.step_s(max(1, min(there, load.max_batch)), load.context_tokens)
        self.reported_at[slot] = now
        self.closed[slot] = np.inf if load.draining else 0.0
        self._set_room(node)

    def book(self, node: DecodeNode, booking: Booking) -> None:
        """A request was placed there."""
        booking.row = row = len(node.coming)
        node.coming.append(booking)
        self._dues.reach(row + 1)
        self._tokens.reach(row + 1)
        self._dues.rows[row, node.slot] = booking.due
        self._tokens.rows[row, node.slot] = booking.context_tokens
        self._set_room(node)

    def unbook(self, node: DecodeNode, booking: Booking) -> None:
        """A request ended, or will never come."""
        if booking.row >= 0:
            self._remove(node, booking)
            self._set_room(node)

    def move(self, node: DecodeNode, booking: Booking, due: float) -> None:
        """Its prefill will be over then."""
        booking.due = due
        if booking.row >= 0:
            self._dues.rows[booking.row, node.slot] = due

    def close(self, node: DecodeNode) -> None:
        """It was asked to leave: it takes nothing new."""
        node.draining = True
        self.closed[node.slot] = np.inf

    # --- what is asked

    def tbt_s(self, at: float, *, own_tokens: float, expected_tokens: float, stay_tokens: float) -> tuple[Floats, Floats]:
        """By slot: the predicted gap between tokens of a request that joins at time `at` with `own_tokens` of KV, and the batch
        that it finds. The gap is the mean of the longest tenth, as it is counted afterwards."""
        costs = self._costs
        stay_s = stay_tokens * self.step_s
        staying = 1.0 - np.minimum((at - self.reported_at) / stay_s, 1.0)
        batch = self.there * staying
        present = None
        if len(self._dues.rows):
            dues = self._dues.rows
            present = (dues <= at) & (dues > at - stay_s)
            batch += present.sum(axis=0)
        step = costs.decode_request_s * batch
        step += costs.decode_step_s + costs.decode_request_s + costs.decode_context_s * own_tokens
        if costs.decode_context_s:
            context = self.context * staying
            if present is not None:
                context += (self._tokens.rows * present).sum(axis=0)
            context *= costs.decode_context_s
            step += context
        tbt = self.scale * step
        over = batch - self.max_batch
        if over[over.argmax()] > -1.0:
            tbt = self._waiting(tbt, batch, over + 1.0, stay_s / longest_gaps(int(expected_tokens) - 1))
        return tbt, batch

    def _waiting(self, tbt: Floats, batch: Floats, over: Floats, stay_s: Floats) -> Floats:
        """The same where the batch has no place: its step is that of a full one, and `over` leave one after the other first."""
        in_batch = np.minimum(batch + 1.0, self.max_batch)
        base = self.scale * self._costs.decode_step_s
        full = base + (tbt - base) * in_batch / (batch + 1.0)
        waiting: Floats = full + np.maximum(over, 0.0) * stay_s / self.max_batch
        return waiting

    def roomy(self, wait_s: float, need_tokens: int, stay_tokens: float) -> NDArray[np.bool_]:
        """By slot: whether the decode has KV and a place for the request when its prefill begins, in `wait_s`."""
        fits: NDArray[np.bool_] = (self.free >= need_tokens) & (self.places >= 1)
        if wait_s > 0 and not fits.all():
            gone = np.minimum(wait_s / (stay_tokens * self.step_s), 1.0)
            fits = (self.free + self.held * gone >= need_tokens) & (self.places + self.there * gone >= 1)
        return fits

    def growth_s(self, slot: int, tokens: float) -> float:
        """What a step takes longer for so many more tokens of KV."""
        return float(self.scale[slot]) * self._costs.decode_context_s * tokens

    def alone_s(self, slot: int, own_tokens: float) -> float:
        """The gap between tokens if the request were the only one there."""
        return float(self.scale[slot]) * self._costs.step_s(1, own_tokens)

    def check(self, now: float) -> None:
        """The columns tell what the nodes do."""
        assert [node.name for node in self.nodes] == sorted(self.by_name)
        for slot, node in enumerate(self.nodes):
            assert node.slot == slot
            assert self.by_name[node.name] is node
            count = len(node.coming)
            assert [booking.row for booking in node.coming] == list(range(count))
            assert list(self._dues.rows[:count, slot]) == [booking.due for booking in node.coming]
            assert np.isinf(self._dues.rows[count:, slot]).all()
            assert not self._tokens.rows[count:, slot].any()
            unseen = [booking for booking in node.coming if not booking.reserved]
            if node.load is not None:
                assert self.free[slot] == node.load.free_tokens - sum(booking.need_tokens for booking in unseen)
                assert self.places[slot] == node.load.room - len(unseen)

    # --- leaves

    def _sort_out(self, now: float, node: DecodeNode, load: DecodeLoad) -> None:
        named = frozenset(load.bookings)
        complete = len(load.bookings) < MAX_REPORTED
        horizon = now - self._settings.report_grace_s
        for booking in list(node.coming):
            if booking.placed.booking in named:
                booking.reserved = True
                if booking.due <= now:
                    self._remove(node, booking)
            elif (booking.reserved and complete) or booking.due <= horizon:
                self._remove(node, booking)

    def _remove(self, node: DecodeNode, booking: Booking) -> None:
        """The last row takes its place."""
        last, slot = node.coming.pop(), node.slot
        end = len(node.coming)
        for cells, empty in ((self._dues.rows, np.inf), (self._tokens.rows, 0.0)):
            cells[booking.row, slot] = cells[end, slot]
            cells[end, slot] = empty
        if last is not booking:
            node.coming[booking.row] = last
            last.row = booking.row
        booking.row = -1

    def _set_room(self, node: DecodeNode) -> None:
        load, slot = node.load, node.slot
        if load is not None:
            unseen = [booking.need_tokens for booking in node.coming if not booking.reserved]
            self.free[slot] = load.free_tokens - sum(unseen)
            self.places[slot] = load.room - len(unseen)

    def _correct(self, now: float, node: DecodeNode, load: DecodeLoad) -> None:
        measured = load.step
        if not measured.predicted_s and load.step_s:
            model_s = self._costs.step_s(max(1, min(load.running, load.max_batch)), load.context_tokens)
            measured = Measured(seconds=load.step_s, predicted_s=model_s)
        before = node.step.factor
        if node.step.report(now, measured):
            self._accuracy.add("step", measured.seconds, before * measured.predicted_s)
