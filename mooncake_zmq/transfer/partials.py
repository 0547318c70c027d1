"""Partial attention of another process: queries go out, results over the KV that it lent come back, on one stream.

borrower's stream -- AskPart, queries, new KV of loans that grow --> the lender's, see `stream.py`; one layer at a time
                  <- PartGiven, mixed and states -----------------

A step's parts have to be just the tokens that its rows have not got. A borrower waits for a given time in all for the answers
of a step, and for as long again from the layer on that follows a lender that was lost or late; an answer that has begun to
arrive by then is read. A loan is of one ticket's holder, and ends with its stream, while its memory stays its owner's; a lender
ends the stream over any other loan, or one that has not as many tokens as the borrower says. A lender that is gone, or answers
what no attention can be, fails the rows that it has part of, and is asked no more. The rows of one that is late get no result
of this step, and may be tried again by a later one: what it owes is read and dropped before it is asked again. So no part is
left out, or counted twice. It takes a loan's memory back only between two answers.

A lender computes a part of the model. One that lies plausibly is not noticed, as a prefill that stores wrong KV is not.
"""

import itertools
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
from mooncake_zmq.engine.elsewhere import FarKV, Floats, Partial, no_tokens
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.spec import ModelSpec
from mooncake_zmq.transfer.sockets import connect_beside
from mooncake_zmq.transfer.stream import Stream, StreamError, StreamGarbage
from mooncake_zmq.transfer.stream_host import Guest, StreamHost, StreamServed
from mooncake_zmq.transfer.tickets import Ticket, Tickets

log = structlog.get_logger()

MAX_ROWS = 256
"""Rows of one step that one lender has part of."""
MAX_LOANS = 1024
"""Loans of one lender."""
MAX_HEAD_BYTES = 8192
SLICE_S = 0.05
STALL_S = 10.0
"""Time for a request, from its head to the end of its answer."""
LEAST_TOTAL, MOST_OF_A_TOKEN = 0.5, 1.01
"""Bounds of a part's total: the token of the highest score weighs about 1, and no other one more."""
MOST = 1e9
"""Scores and values of any model are smaller, and no sums of such ones overflow."""
NOTHING = np.empty(0, np.float32)
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

    token: bytes
    """The borrower's ticket's."""
    sequence: SequenceKV
    grows: bool

    def has(self, tokens: int) -> bool:
        """Return whether it has so many tokens; one that grows may go back to fewer, and has room for one more."""
        length = self.sequence.length
        return 0 < tokens <= length and tokens < self.sequence.capacity if self.grows else tokens == length > 0


AttendPart = Callable[[int, Sequence[SequenceKV], Sequence[int], Floats], Partial]
"""See `Llama.attend_part`."""


class PartialHost:
    """The lender's end: it attends to its loans on a thread for each borrower, for one at a time, until closed. `counts`: also
    the requests for what was not lent."""

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
        self.counts: dict[str, int] = dict.fromkeys(("parts", "garbage", "refused"), 0)
        self.spec, self._attend = spec, attend
        self._loans: dict[int, Loan] = {}
        self._numbers = itertools.count(1)
        self._attached: set[bytes] = set()
        """The tickets that have a stream; only the accepting thread adds to them."""
        self._lock = threading.Lock()
        """Held while loans are attended to, made or ended."""
        self.is_stopping = False
        self._tickets = Tickets(sealed=sealed)
        self._host = StreamHost(endpoint, 0, self._tickets, self._make, on_crash, counts=self.counts, name="partials")
        self.where = self._host.endpoint

    def ticket(self) -> Ticket:
        """Make a ticket for a borrower, who has one stream by it."""
        return self._tickets.make()

    def lend(self, token: bytes, sequence: SequenceKV, *, grows: bool = False) -> int | None:
        """Attend to a sequence for the holder of a ticket until it is taken back, or the end of the holder's stream. Return the
        loan's number, or None if there are too many."""
        with self._lock:
            if len(self._loans) >= MAX_LOANS:
                return None
            number = next(self._numbers)
            self._loans[number] = Loan(token, sequence, grows)
            return number

    def take_back(self, sequence: SequenceKV) -> None:
        """End the loan of a sequence, if it has not ended, once it is not being attended to."""
        self._end(lambda loan: loan.sequence is sequence)

    def close(self) -> None:
        """End all streams, and their loans. May be called twice."""
        self.is_stopping = True
        self._host.close()

    def _make(self, guest: Guest) -> "_Served":
        if guest.token in self._attached:
            raise RuntimeError("its ticket has a stream")
        self._attached.add(guest.token)
        return _Served(guest, self)

    def end(self, token: bytes) -> None:
        """End the loans to the holder of a ticket, whose stream is over."""
        self._end(lambda loan: loan.token == token)
        self._attached.discard(token)

    def _end(self, is_over: Callable[[Loan], bool]) -> None:
        with self._lock:
            self._loans = {number: loan for number, loan in self._loans.items() if not is_over(loan)}

    def growing(self, asked: AskPart, token: bytes) -> int:
        """Return how many of these loans grow. Raises StreamError unless all are the ticket's, and none comes twice."""
        with self._lock:
            loans = [loan for each in set(asked.loans) if (loan := self._loans.get(each)) and loan.token == token]
        if asked.layer >= self.spec.layers or not len(loans) == len(asked.loans) == len(asked.tokens) > 0:
            raise self._refused("no loans of ours")
        return sum(each.grows for each in loans)

    def answer(self, asked: AskPart, queries: Floats, grown: Floats) -> Partial:
        """Attend to loans. Raises StreamError if one has ended, or has another number of tokens than the borrower says."""
        new, sequences, lengths = iter(grown), [], []
        with self._lock:
            for number, tokens in zip(asked.loans, asked.tokens, strict=True):
                loan = self._loans.get(number)
                if loan is None or not loan.has(tokens):
                    raise self._refused("a loan that has ended, or other tokens than lent")
                if loan.grows:
                    loan.sequence.append(asked.layer, tokens, *next(new))
                    loan.sequence.set_length(tokens + (asked.layer == self.spec.layers - 1))
                sequences.append(loan.sequence)
                lengths.append(tokens + loan.grows)
            return self._attend(asked.layer, sequences, lengths, queries)

    def _refused(self, reason: str) -> StreamError:
        self.count("refused")
        return StreamError(reason)

    def count(self, what: str, by: int = 1) -> None:
        """Add to a counter, from any thread."""
        self._host.count(what, by)


class _Served(StreamServed):
    """One borrower's stream."""

    def __init__(self, guest: Guest, host: PartialHost) -> None:
        super().__init__(guest, SLICE_S)
        self._host, self._token = host, guest.token

    def run(self) -> None:
        try:
            for asked in self.requests(decode_ask, MAX_HEAD_BYTES):
                self.stream.stop_at = time.monotonic() + STALL_S
                self._serve(asked)
                self.stream.stop_at = math.inf
        except StreamError as error:
            self._host.count("garbage", isinstance(error, StreamGarbage))
            log.debug("partials_ended", reason=str(error))
        finally:
            self._host.end(self._token)

    def _serve(self, asked: AskPart) -> None:
        spec = self._host.spec
        grown = _room(self._host.growing(asked, self._token), 2, spec.kv_heads, spec.head_dim)
        queries = _room(len(asked.loans), spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
        self.stream.receive_views([_bytes(each) for each in (queries, grown) if each.size])
        given = self._host.answer(asked, queries, grown)
        self.stream.send(PartGiven(asked.number), [_bytes(each) for each in given])
        self._host.count("parts")

    def _idle(self, quiet_s: float) -> None:
        if self._host.is_stopping:
            raise StreamError("the lender is closing")
        _give_up(self.stream)


class Lender:
    """The borrower's end of a stream to one lender. Once it is `lost` it stays so, as its loans have ended with the stream:
    unlike a store's client it does not come again after its idle stream was ended to make room, see `stream_host`."""

    def __init__(self, spec: ModelSpec, where: str, endpoint: str, ticket: Ticket, name: str = "", *, timeout_s: float) -> None:
        """Attach to the lender beside `endpoint`, within `timeout_s`, which is also the limit for sending a query and for the
        rest of an answer that has begun. Raises StreamError."""
        self.name = name
        self._spec, self._timeout_s = spec, timeout_s
        self._number = 0
        self._owed_rows = 0
        """The rows of the query that it has not answered yet."""
        self.lost = ""
        """The reason why it cannot be asked."""
        self.moved_bytes = 0
        """Payload: bytes of queries, new KV and results, both ways, without heads, lengths and seals."""
        try:
            connection = connect_beside(where, endpoint, timeout_s)
        except (OSError, ValueError, OverflowError) as error:
            raise StreamError(str(error)) from error
        self._stream = Stream(connection, lambda _: _give_up(self._stream), slice_s=SLICE_S)
        self._stream.stop_at = time.monotonic() + timeout_s
        try:
            self._stream.attach(ticket)
        except StreamError:
            self._stream.close()
            raise

    def ask(self, layer: int, loans: Sequence["Borrowed"], queries: Floats, grown: Floats) -> None:
        """Ask for a layer's results of some rows. Raises StreamError."""
        assert not self._owed_rows, "it is asked for one layer at a time"
        self._number += 1
        self._stream.stop_at = time.monotonic() + self._timeout_s
        asked = AskPart(self._number, layer, tuple(each.loan for each in loans), tuple(each.tokens for each in loans))
        self._stream.send(asked, [_bytes(each) for each in (queries, grown) if each.size])
        self._owed_rows = len(loans)
        self.moved_bytes += queries.nbytes + grown.nbytes

    def answer(self, loans: Sequence["Borrowed"], until: float) -> Partial | None:
        """Return the answer, or None if it has not begun to arrive by then. Raises StreamError."""
        result = self._received(until)
        if result is not None and not _is_attention(result, [each.tokens + each.grows for each in loans]):
            raise StreamGarbage("no result of attention")
        return result

    def is_free(self) -> bool:
        """Return whether it owes no answer, after dropping one that has come late. Raises StreamError."""
        return not self._owed_rows or self._received(-math.inf) is not None

    def _received(self, until: float) -> Partial | None:
        spec, rows = self._spec, self._owed_rows
        if not self._stream.has_more(until):
            return None
        self._stream.stop_at = time.monotonic() + self._timeout_s
        given = self._stream.receive(decode_given, MAX_HEAD_BYTES)
        if given.number != self._number:
            raise StreamGarbage("an answer to what was not asked")
        group = spec.heads // spec.kv_heads
        result = Partial(_room(rows, spec.kv_heads, group, spec.head_dim), _room(rows, spec.kv_heads, group, 2))
        self._stream.receive_views([_bytes(each) for each in result])
        self._owed_rows = 0
        self.moved_bytes += result.mixed.nbytes + result.states.nbytes
        return result

    def close(self) -> None:
        """End the stream. May be called twice."""
        self.lose("closed")

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
    """Implements `Elsewhere`. Rows that `failed`, by a lender that was lost, or that are `late`, as one has not answered while
    their step waited for `wait_s` in all, have no valid result, and are not asked for; their sequences have to be dropped, or
    set back by the step's token."""

    def __init__(self, spec: ModelSpec, borrowed: Sequence[Borrowed], *, wait_s: float) -> None:
        self._spec, self._borrowed, self._wait_s = spec, borrowed, wait_s
        self._parts: defaultdict[Lender, list[Borrowed]] = defaultdict(list)
        for each in borrowed:
            self._parts[each.lender].append(each)
        self.failed: dict[int, Lender] = {}
        self.late: dict[int, Lender] = {}
        self._has_waited = False
        """Whether lenders were lost or late in this layer, so that others may have waited in vain for as long."""

    def begin(self, sequences: Sequence[SequenceKV | FarKV]) -> None:
        """See `Elsewhere.begin`; a row that keeps no new KV has just one part that grows. Raises ValueError also for two parts
        of a row, or more than MAX_ROWS, at one lender."""
        far = [isinstance(each, FarKV) for each in sequences]
        lacking = [(each.length if isinstance(each, FarKV) else each.before) for each in sequences]
        tokens, growing = [0] * len(far), [0] * len(far)
        if any(not 0 <= each.row < len(far) for each in self._borrowed):
            raise ValueError("a part of no row")
        for each in self._borrowed:
            tokens[each.row] += each.tokens
            growing[each.row] += each.grows
        if tokens != lacking or growing != far:
            raise ValueError(f"parts of {tokens} tokens, {growing} of which grow, where {lacking} are lacking")
        for lender, parts in self._parts.items():
            if len({each.row for each in parts}) < len(parts) or len(parts) > MAX_ROWS:
                raise ValueError("a row twice at a lender, or too many rows")
            if lender.lost:
                self._fail(lender, lender.lost)
                continue
            try:
                if not lender.is_free():
                    self._pass_over(lender)
            except StreamError as error:
                self._fail(lender, str(error))
        self._all_rows, self._left_s = list(range(len(far))), self._wait_s

    def ask(self, layer: int, queries: Floats, keys: Floats, values: Floats) -> None:
        self._asked: list[tuple[Lender, list[Borrowed]]] = []
        if self._has_waited:
            self._has_waited, self._left_s = False, self._wait_s
        for lender, of_lender in self._parts.items():
            parts = [each for each in of_lender if each.row not in self.failed and each.row not in self.late]
            if not parts:
                continue
            rows, growing = [each.row for each in parts], [each.row for each in parts if each.grows]
            try:
                grown = np.stack([keys[growing], values[growing]], axis=1) if growing else NOTHING
                lender.ask(layer, parts, queries if rows == self._all_rows else queries[rows], grown)
                self._asked.append((lender, parts))
            except StreamError as error:
                self._fail(lender, str(error))

    def answers(self, layer: int) -> Partial:
        result: Partial | None = None
        since = time.monotonic()
        for lender, parts in self._asked:
            try:
                given = lender.answer(parts, since + self._left_s)
            except StreamError as error:
                self._fail(lender, str(error))
                continue
            rows = [each.row for each in parts]
            if given is None:
                self._pass_over(lender)
            elif result is None and rows == self._all_rows:
                result = given
            else:
                result = result or self._nothing()
                result.merge(given, rows)
        self._left_s = max(0.0, self._left_s - (time.monotonic() - since))
        return result or self._nothing()

    def _nothing(self) -> Partial:
        spec = self._spec
        return no_tokens(len(self._all_rows), spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)

    def _fail(self, lender: Lender, reason: str) -> None:
        lender.lose(reason)
        self.failed |= dict.fromkeys((each.row for each in self._parts[lender]), lender)
        self._has_waited = True

    def _pass_over(self, lender: Lender) -> None:
        self.late |= dict.fromkeys((each.row for each in self._parts[lender]), lender)
        self._has_waited = True


def _is_attention(result: Partial, tokens: Sequence[int]) -> bool:
    """Return whether this can be the attention over so many tokens of each row; NaN is not."""
    highest, totals = result.states[..., 0], result.states[..., 1]
    most = np.array(tokens, np.float32)[:, None, None] * MOST_OF_A_TOKEN
    is_total = (totals >= LEAST_TOTAL) & (totals <= most) & (np.abs(highest) <= MOST)
    return bool(is_total.all() and (np.abs(result.mixed) <= MOST * totals[..., None]).all())


def _give_up(stream: Stream) -> None:
    if time.monotonic() > stream.stop_at:
        raise StreamError("no answer in time")


def _room(*shape: int) -> NDArray[np.float32]:
    return np.empty(shape, np.float32)


def _bytes(array: Floats) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")
