"""Sequences whose KV is in several decodes: one that is lent is attended to for its borrower, one that borrows is connected
with its lenders before its first step. Each loan has a stream of its own, so that what befalls it ends no other."""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from mooncake_zmq.core.messages import LoanPlace
from mooncake_zmq.core.work import BorrowParts, Done, LendSequence, Result, SequenceLent, TakeBack, WorkFailed, lender_lost
from mooncake_zmq.engine.coded_kv import CodedSequenceKV
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.engine.spec import Engine
from mooncake_zmq.runtime.executor.jobs import Job, OpenedSequence, Subtasks, Turn
from mooncake_zmq.runtime.executor.worker import Worker
from mooncake_zmq.transfer.partials import Borrowed, Lender, PartialHost
from mooncake_zmq.transfer.stream import StreamError
from mooncake_zmq.transfer.tickets import Ticket


def why_not(engine: Engine) -> str:
    """Return why an engine can neither lend KV nor borrow it; empty: it can."""
    if not isinstance(engine, Llama):
        return f"{type(engine).__name__} computes no parts of an attention"
    sequence = engine.new_sequence(1)
    is_lendable = isinstance(sequence.keys, np.ndarray) and not isinstance(sequence, CodedSequenceKV)
    sequence.close()
    return "" if is_lendable else "only exact KV in a CPU's memory is lent"


class Lending:
    """Lend and borrow on a thread of its own, which waits for lenders. `endpoints`: those of the other decodes, by name."""

    def __init__(
        self,
        engine: Llama,
        endpoint: str,
        endpoints: Mapping[str, str],
        *,
        sealed: bool,
        timeout_s: float,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        """Raises OSError where it cannot listen. `timeout_s`: see `Lender`."""
        self._spec, self._endpoints, self._timeout_s = engine.spec, endpoints, timeout_s
        self._host = PartialHost(engine.spec, engine.attend_part, endpoint, sealed=sealed, on_crash=on_crash)
        self._worker = Worker("lending", on_crash)

    def close(self) -> None:
        """Stop the threads."""
        self._worker.close()
        self._host.close()

    def begin(self, job: Job, work: LendSequence | TakeBack | BorrowParts) -> Subtasks:
        """Plan a work."""
        opened = job.sequences[work.sequence]
        turn: Turn
        match work:
            case LendSequence():
                turn = partial(self._lend, opened)
            case TakeBack():
                turn = partial(self._take_back, opened)
            case BorrowParts():
                turn = partial(self._borrow, job, work, opened)
        return Subtasks([(self._worker, turn)])

    def _lend(self, opened: OpenedSequence) -> Result:
        ticket = self._host.ticket()
        opened.kv.set_length(opened.kv.capacity)
        number = self._host.lend(ticket.token, opened.kv)
        if number is None:
            return WorkFailed("too many loans")
        where = self._host.where
        place = LoanPlace(where=where, number=number, token=ticket.token, secret=ticket.secret, sealed=ticket.sealed)
        return SequenceLent(place)

    def _take_back(self, opened: OpenedSequence) -> Result:
        self._host.take_back(opened.kv)
        return Done()

    def _borrow(self, job: Job, work: BorrowParts, opened: OpenedSequence) -> Result:
        for part in work.parts:
            job.check()
            place = part.place
            ticket = Ticket(place.token, place.secret, place.sealed)
            try:
                where, endpoint = place.where, self._endpoints[part.lender]
                lender = Lender(self._spec, where, endpoint, ticket, part.lender, timeout_s=self._timeout_s)
            except StreamError as error:
                return lender_lost(part.lender, str(error))
            opened.borrowed.append(Borrowed(0, lender, place.number, part.tokens))
        opened.kv.before = sum(part.tokens for part in work.parts)
        return Done()
