"""A decode that holds KV of other decodes' requests: what it lends is free KV of its own, until the borrower returns it. PURE.

A loan ends when its borrower says so or is down, when its time is over, or when this decode has to leave. Its memory is free
again only once no query reads it, and nothing is copied into it.
"""

from mooncake_zmq.core.actor import CancelTimer, CloseSequence, Effect, OpenSequence, Send, SetTimer, Start
from mooncake_zmq.core.actor_parts import Ids, Tally
from mooncake_zmq.core.drain import Drain
from mooncake_zmq.core.messages import BlocksLent, FillLoan, LendBlocks, LoanEnded, LoanFilled, ReturnBlocks, clip
from mooncake_zmq.core.work import BlockLoad, BlocksPulled, Done, LendSequence, PullBlocks, SequenceLent, TakeBack, WorkFailed
from mooncake_zmq.decode.budget import Budget
from mooncake_zmq.decode.kept import Kept
from mooncake_zmq.decode.request import Lent, LentState
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.kv.layout import BlockLayout

LENT = "lent"
"""Kind of the timers that end loans; they carry the borrower and its number of the loan."""
USED, OVER, TAKEN_BACK = LentState.USED, LentState.OVER, LentState.TAKEN_BACK
LentResult = SequenceLent | BlocksPulled | Done | WorkFailed


class Lending:
    """Hold the loans of one decode."""

    def __init__(
        self,
        *,
        settings: DecodeSettings,
        layout: BlockLayout,
        budget: Budget,
        kept: Kept,
        drain: Drain,
        ids: Ids,
        counts: Tally,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._budget = budget
        self._kept = kept
        self._drain = drain
        self._ids = ids
        self._counts = counts
        self._loans: dict[tuple[str, int], Lent] = {}
        self.ending: list[Lent] = []
        """Loans that are over, whose memory is still used."""
        self._works: dict[int, Lent] = {}

    @property
    def loans(self) -> list[Lent]:
        """The loans that are not over."""
        return list(self._loans.values())

    @property
    def held(self) -> list[Lent]:
        """All loans that hold memory."""
        return self.loans + self.ending

    @property
    def lent_tokens(self) -> int:
        """The KV that other decodes have of this one."""
        return sum([each.capacity_tokens for each in self.held])

    @property
    def lendable(self) -> int:
        """The KV in whole blocks that it would lend now."""
        if self._drain.draining or len(self.held) >= self._settings.max_requests:
            return 0
        size = self._layout.block_tokens
        return max(0, min(self._settings.lend_tokens - self.lent_tokens, self._budget.free_tokens)) // size * size

    def on_lend(self, _now: float, sender: str, message: LendBlocks) -> list[Effect]:
        """Lend what there is of what a decode asks for, or refuse."""
        size = self._layout.block_tokens
        tokens = 0 if (sender, message.loan) in self._loans else min(self.lendable, message.blocks * size)
        while tokens and self._budget.lacks(message.tenant, tokens):  # to leave room for other tenants
            tokens = tokens // 2 // size * size
        if not tokens:
            self._counts.add("loans_refused")
            return [Send(sender, LoanEnded(loan=message.loan, reason="there is nothing to lend"))]
        self._counts.add("loans")
        lent = self._loans[sender, message.loan] = Lent(sender, message.loan, self._ids.new(), message.tenant, tokens)
        self._budget.take(lent.tenant, tokens)
        return [
            *self._kept.hold(tokens),
            OpenSequence(lent.sequence, tokens, filled_tokens=tokens, tenant=lent.tenant),
            SetTimer((LENT, sender, message.loan), message.ttl_s),
            self._start(lent, LendSequence(lent.sequence)),
        ]

    def on_fill(self, _now: float, sender: str, message: FillLoan) -> list[Effect]:
        """Read blocks into a loan, some at a time."""
        lent = self._loans.get((sender, message.loan))
        if lent is None:
            return []  # it has ended, as its borrower will learn
        size, layers = self._layout.block_tokens, self._layout.layers
        loads = tuple([BlockLoad(*each, size) for each in message.loads])
        is_lent = all([each.block * size < lent.capacity_tokens for each in loads])
        if lent.state is USED or not is_lent or not all([each.first_layer < each.stop_layer <= layers for each in loads]):
            return self.end(lent, "more blocks than may be read")
        return [self._start(lent, PullBlocks(lent.sequence, loads))]

    def _start(self, lent: Lent, work: LendSequence | PullBlocks) -> Effect:
        work_id = self._ids.new()
        self._works[work_id], lent.state = lent, USED
        return Start(work_id, work, self._settings.pull_deadline_s)

    def is_at_work(self, work_id: int) -> bool:
        """Return whether this work is one of a loan."""
        return work_id in self._works

    def on_done(self, work_id: int, result: LentResult) -> list[Effect]:
        """Answer the borrower when a work has ended."""
        lent = self._works.pop(work_id)
        if lent.state is TAKEN_BACK:
            return self._free(lent)
        if lent.state is OVER:
            return self._take_back(lent)
        lent.state = LentState.HELD
        match result:
            case SequenceLent(place):
                blocks = lent.capacity_tokens // self._layout.block_tokens
                return [Send(lent.borrower, BlocksLent(loan=lent.number, blocks=blocks, place=place))]
            case BlocksPulled(parts, failed, corrupt):
                return [Send(lent.borrower, LoanFilled(loan=lent.number, parts=parts, failed=failed, corrupt=corrupt))]
            case WorkFailed(reason):
                return self.end(lent, reason)
            case Done():
                raise TypeError(result)  # of a loan that is not taken back

    # --- ends

    def on_return(self, _now: float, sender: str, message: ReturnBlocks) -> list[Effect]:
        """End a loan that its borrower does not need any more."""
        lent = self._loans.get((sender, message.loan))
        return [] if lent is None else self._over(lent)

    def expire(self, borrower: str, number: int) -> list[Effect]:
        """End a loan whose time is over."""
        lent = self._loans.get((borrower, number))
        return [] if lent is None else self.end(lent, "its time is over")

    def peer_down(self, peer: str) -> list[Effect]:
        """End the loans of a decode that is down."""
        return [effect for lent in self.loans if lent.borrower == peer for effect in self._over(lent)]

    def end_all(self) -> list[Effect]:
        """End all loans, as this decode leaves: their requests go on elsewhere."""
        return [effect for lent in self.loans for effect in self.end(lent, "the lender is leaving")]

    def end(self, lent: Lent, reason: str) -> list[Effect]:
        """End a loan whose borrower does not know it."""
        self._counts.add("loans_ended")
        return [Send(lent.borrower, LoanEnded(loan=lent.number, reason=clip(reason))), *self._over(lent)]

    def _over(self, lent: Lent) -> list[Effect]:
        del self._loans[lent.borrower, lent.number]
        self.ending.append(lent)
        ended = CancelTimer((LENT, lent.borrower, lent.number))
        if lent.state is USED:
            lent.state = OVER
            return [ended]
        return [ended, *self._take_back(lent)]

    def _take_back(self, lent: Lent) -> list[Effect]:
        """Stop answering queries to a loan that is over, and that no other work uses."""
        work_id = self._ids.new()
        self._works[work_id], lent.state = lent, TAKEN_BACK
        return [Start(work_id, TakeBack(lent.sequence))]

    def _free(self, lent: Lent) -> list[Effect]:
        """Free the memory of a loan that nothing reads any more."""
        self.ending.remove(lent)
        self._budget.give_back(lent)
        return [*self._kept.hold(-lent.capacity_tokens), CloseSequence(lent.sequence)]

    def check(self) -> None:
        """See `core.actor`."""
        assert self.lent_tokens <= self._settings.lend_tokens
        used = {id(each) for each in self._works.values()}
        assert len(used) == len(self._works)
        assert used == {id(each) for each in self.held if each.state is not LentState.HELD}
        assert {each.state for each in self.ending} <= {OVER, TAKEN_BACK}
        assert {each.state for each in self.loans} <= {LentState.HELD, USED}
