"""Partial attention of another process: queries go out, results over the KV that it lent come back, on one stream.

borrower's stream -- AskPart, queries, new KV of loans that grow --> the lender's, see `stream.py`; one layer at a time
                  <- PartGiven, mixed and states -----------------

A borrower waits ANSWER_S for an answer. A lender ends the stream over a loan that it has not got, or that has not as many
tokens as the borrower says. One that is late, gone, or answers what is no attention fails the rows that it has part of, and is
asked no more: no part is ever left out, or counted twice. It takes a loan's memory back only between two answers.
"""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import structlog
from msgspec import Meta, Struct
from numpy.typing import NDArray

from mooncake_zmq.core.messages import Count
from mooncake_zmq.core.records import decoder
from mooncake_zmq.engine.elsewhere import Floats, Partial, no_tokens
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.spec import ModelSpec
from mooncake_zmq.transfer.sockets import connect_beside
from mooncake_zmq.transfer.stream import Stream, StreamError, StreamGarbage
from mooncake_zmq.transfer.stream_host import Guest, StreamHost
from mooncake_zmq.transfer.tickets import Ticket, Tickets

log = structlog.get_logger()

MAX_ROWS = 256
"""Rows of one step that one lender has part of."""
MAX_LOANS = 1024
"""Loans of one lender."""
MAX_HEAD_BYTES = 8192
ANSWER_S = 5.0
"""Time for a layer's answer: a lender computes for some milliseconds, beside a step of its own."""
SLICE_S = 0.05
STALL_S = 10.0
"""Time after which a borrower that takes nothing of its answer is given up."""
LEAST_TOTAL = 0.5
"""Any token's weights add up to more: that of the highest score is about 1."""
Places = Annotated[tuple[Count, ...], Meta(max_length=MAX_ROWS)]


class AskPart(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Request for a layer's result over the first `tokens` of these loans. Queries [row, head, head_dim] follow, then the next
    keys and values [loan that grows, k/v, kv_head, head_dim]."""

    number: Count
    layer: Count
    loans: Places
    tokens: Places


class PartGiven(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answer to the request with this number. Mixed [row, head, head_dim] and states [row, head, 2] follow."""

    number: Count


decode_ask = decoder(AskPart)
decode_given = decoder(PartGiven)


@dataclass(slots=True, eq=False)
class Loan:
    """KV that a process attends to for another one. If it `grows`, the borrower sends it what new tokens have."""

    sequence: SequenceKV
    grows: bool

    def has(self, tokens: int) -> bool:
        """Return whether it has so many tokens; one that grows may go back to fewer, and has room for one more."""
        length = self.sequence.length
        return 0 < tokens <= length and tokens < self.sequence.capacity if self.grows else tokens == length > 0


AttendPart = Callable[[int, Sequence[SequenceKV], Sequence[int], Floats], Partial]
"""See `Llama.attend_part`."""


class PartialHost:
    """The lender's end: it attends to its loans on a thread for each borrower, for one at a time, until closed."""

    def __init__(
        self,
        spec: ModelSpec,
        attend: AttendPart,
        endpoint: str,
        *,
        sealed: bool,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        """Start to listen beside `endpoint`. Raises OSError."""
        self.counts: dict[str, int] = dict.fromkeys(("parts", "garbage"), 0)
        self.spec, self._attend = spec, attend
        self._loans: dict[int, Loan] = {}
        self._next_id = 1
        self._lock = threading.Lock()
        """Held while loans are attended to, made or ended."""
        self.is_stopping = False
        self._tickets = Tickets(sealed=sealed)
        self._host = StreamHost(endpoint, 0, self._tickets, self._make, on_crash, counts=self.counts, name="partials")
        self.where = self._host.endpoint

    def ticket(self) -> Ticket:
        """Make a ticket for a borrower."""
        return self._tickets.make()

    def lend(self, sequence: SequenceKV, *, grows: bool = False) -> int | None:
        """Attend to a sequence for a borrower from now on; return the loan's number, or None if there are too many."""
        with self._lock:
            if len(self._loans) >= MAX_LOANS:
                return None
            self._next_id += 1
            self._loans[self._next_id] = Loan(sequence, grows)
            return self._next_id

    def take_back(self, loan: int) -> SequenceKV | None:
        """End a loan, once it is not being attended to, and return its sequence; None if it has ended."""
        with self._lock:
            ended = self._loans.pop(loan, None)
        return ended.sequence if ended else None

    def close(self) -> None:
        """End all streams. May be called twice."""
        self.is_stopping = True
        self._host.close()

    def _make(self, guest: Guest) -> "_Served":
        return _Served(guest, self)

    def growing(self, asked: AskPart) -> int:
        """Return how many of these loans grow. Raises StreamError if the lender has not got all of them."""
        with self._lock:
            loans = [self._loans.get(loan) for loan in asked.loans]
        if asked.layer >= self.spec.layers or not len(loans) == len(asked.tokens) > 0 or None in loans:
            raise StreamError("no loans of ours")
        return sum(each is not None and each.grows for each in loans)

    def answer(self, asked: AskPart, queries: Floats, grown: Floats) -> Partial:
        """Attend to loans. Raises StreamError if one has ended, or has another number of tokens than the borrower says."""
        new, sequences, lengths = iter(grown), [], []
        with self._lock:
            for number, tokens in zip(asked.loans, asked.tokens, strict=True):
                loan = self._loans.get(number)
                if loan is None or not loan.has(tokens):
                    raise StreamError("a loan that has ended, or other tokens than lent")
                if loan.grows:
                    loan.sequence.append(asked.layer, tokens, *next(new))
                    loan.sequence.set_length(tokens + (asked.layer == self.spec.layers - 1))
                sequences.append(loan.sequence)
                lengths.append(tokens + loan.grows)
            return self._attend(asked.layer, sequences, lengths, queries)

    def count(self, what: str, by: int = 1) -> None:
        """Add to a counter, from any thread."""
        self._host.count(what, by)


class _Served:
    """One borrower's stream; see `stream_host.Served`."""

    def __init__(self, guest: Guest, host: PartialHost) -> None:
        keys = guest.keys
        self._stream = Stream(guest.connection, self._idle, slice_s=SLICE_S, seals=keys.to_client, opens=keys.to_server)
        self._host = host
        self.waits_since = time.monotonic()

    def run(self) -> None:
        try:
            while True:
                self.waits_since = time.monotonic()
                asked = self._stream.receive(decode_ask, MAX_HEAD_BYTES)
                self.waits_since = math.inf
                self._serve(asked)
        except StreamError as error:
            self._host.count("garbage", isinstance(error, StreamGarbage))
            log.debug("partials_ended", reason=str(error))

    def shut(self) -> None:
        self._stream.shut()

    def close(self) -> None:
        self._stream.close()

    def _serve(self, asked: AskPart) -> None:
        spec = self._host.spec
        grown = _room(self._host.growing(asked), 2, spec.kv_heads, spec.head_dim)
        queries = _room(len(asked.loans), spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
        self._stream.receive_views([_bytes(each) for each in (queries, grown) if each.size])
        given = self._host.answer(asked, queries, grown)
        self._stream.send(PartGiven(asked.number), [_bytes(each) for each in given])
        self._host.count("parts")

    def _idle(self, quiet_s: float) -> None:
        if self._host.is_stopping:
            raise StreamError("the lender is closing")
        if quiet_s >= STALL_S and self.waits_since == math.inf:
            raise StreamError("the borrower is silent")


class Lender:
    """The borrower's end of a stream to one lender. Once it is `lost` it stays so."""

    def __init__(self, spec: ModelSpec, where: str, endpoint: str, ticket: Ticket) -> None:
        """Attach to the lender beside `endpoint`. Raises StreamError."""
        self._spec = spec
        self._number = 0
        self.lost = ""
        """The reason why it cannot be asked."""
        self.moved_bytes = 0
        """Bytes of queries, new KV and results, both ways."""
        try:
            connection = connect_beside(where, endpoint, ANSWER_S)
        except (OSError, ValueError, OverflowError) as error:
            raise StreamError(str(error)) from error
        self._stream = Stream(connection, _give_up, slice_s=SLICE_S)
        try:
            self._stream.attach(ticket)
        except StreamError:
            self._stream.close()
            raise

    def ask(self, layer: int, loans: Sequence["Borrowed"], queries: Floats, grown: Floats) -> None:
        """Ask for a layer's results of some rows. Raises StreamError."""
        self._number += 1
        self._stream.stop_at = time.monotonic() + ANSWER_S
        asked = AskPart(self._number, layer, tuple(each.loan for each in loans), tuple(each.tokens for each in loans))
        self._stream.send(asked, [_bytes(each) for each in (queries, grown) if each.size])
        self.moved_bytes += queries.nbytes + grown.nbytes

    def answer(self, rows: int) -> Partial:
        """Wait for the answer. Raises StreamError."""
        spec = self._spec
        given = self._stream.receive(decode_given, MAX_HEAD_BYTES)
        if given.number != self._number:
            raise StreamGarbage("an answer to what was not asked")
        group = spec.heads // spec.kv_heads
        result = Partial(_room(rows, spec.kv_heads, group, spec.head_dim), _room(rows, spec.kv_heads, group, 2))
        self._stream.receive_views([_bytes(each) for each in result])
        if not all(np.isfinite(each).all() for each in result) or result.states[..., 1].min() < LEAST_TOTAL:
            raise StreamGarbage("no result of attention")
        self.moved_bytes += result.mixed.nbytes + result.states.nbytes
        return result

    def lose(self, reason: str) -> None:
        """Ask it no more. May be called twice."""
        self.lost = self.lost or reason
        self._stream.close()


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A part of a row's KV: a loan of so many tokens."""

    row: int
    lender: Lender
    loan: int
    tokens: int
    grows: bool = False


class BorrowedKV:
    """Implements `Elsewhere` for one step. Rows that `failed`, by the reason, have no valid result."""

    def __init__(self, spec: ModelSpec, borrowed: Sequence[Borrowed], rows: int) -> None:
        self._shape = (rows, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
        self._parts: defaultdict[Lender, list[Borrowed]] = defaultdict(list)
        for each in borrowed:
            self._parts[each.lender].append(each)
        self.failed: dict[int, str] = {}
        for lender, parts in self._parts.items():
            assert len({each.row for each in parts}) == len(parts), "a row borrows once from a lender"
            if lender.lost:
                self._fail(lender, lender.lost)

    def ask(self, layer: int, queries: Floats, keys: Floats, values: Floats) -> None:
        for lender, parts in self._standing():
            growing = [each.row for each in parts if each.grows]
            try:
                rows = [each.row for each in parts]
                lender.ask(layer, parts, queries[rows], np.stack([keys[growing], values[growing]], axis=1))
            except StreamError as error:
                self._fail(lender, str(error))

    def answers(self, layer: int) -> Partial:
        result = no_tokens(*self._shape)
        for lender, parts in self._standing():
            try:
                result.merge(lender.answer(len(parts)), [each.row for each in parts])
            except StreamError as error:
                self._fail(lender, str(error))
        return result

    def _standing(self) -> list[tuple[Lender, list[Borrowed]]]:
        return [(lender, parts) for lender, parts in self._parts.items() if not lender.lost]

    def _fail(self, lender: Lender, reason: str) -> None:
        lender.lose(reason)
        self.failed |= dict.fromkeys((each.row for each in self._parts[lender]), reason)


def _give_up(quiet_s: float) -> None:
    if quiet_s >= ANSWER_S:
        raise StreamError("no answer in time")


def _room(*shape: int) -> NDArray[np.float32]:
    return np.empty(shape, np.float32)


def _bytes(array: Floats) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")
