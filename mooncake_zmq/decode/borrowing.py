"""Requests of whose KV other decodes hold the leading blocks: what is asked of whom, and what they answer. PURE.

A request whose prompt has no room here borrows what it lacks, of one lender after the other as its `ReserveDecode` names them.
They read those blocks from the prefill as this decode reads the others, and every step asks them for their part of the
attention. Whatever goes wrong there ends the attempt; its deadline bounds each wait. No such KV is kept or offered to a pool.
"""

from collections.abc import Mapping

from mooncake_zmq.core.actor import CloseSequence, Effect, Send, Start
from mooncake_zmq.core.actor_parts import Ids, Tally
from mooncake_zmq.core.messages import (
    GROWTH_TOKENS,
    BlocksLent,
    DecodeDenied,
    Hello,
    LendBlocks,
    LoanEnded,
    LoanFilled,
    ReserveDecode,
)
from mooncake_zmq.core.work import BlocksPulled, BorrowParts, Done, LentPart, WorkFailed
from mooncake_zmq.decode.budget import Budget
from mooncake_zmq.decode.ends import Ends
from mooncake_zmq.decode.handoff import Handoff
from mooncake_zmq.decode.kept import Kept
from mooncake_zmq.decode.request import Loan, Request, RequestState
from mooncake_zmq.decode.requests import Requests
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.kv.layout import BlockLayout


class Borrowing:
    """Carry out the loans to one decode's requests."""

    def __init__(
        self,
        *,
        settings: DecodeSettings,
        layout: BlockLayout,
        peers: Mapping[str, Hello],
        requests: Requests,
        budget: Budget,
        kept: Kept,
        handoff: Handoff,
        ends: Ends,
        ids: Ids,
        counts: Tally,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._peers = peers
        self._requests = requests
        self._budget = budget
        self._kept = kept
        self._handoff = handoff
        self._ends = ends
        self._ids = ids
        self._counts = counts
        self._connecting: dict[int, Request] = {}
        """Requests by the works that connect them with their lenders."""

    def lacking(self, message: ReserveDecode, budget: int) -> int:
        """Return how many leading tokens of a prompt are to be borrowed; 0 if all have room here, or borrowing is of no use.
        `budget`: the KV without which it cannot begin."""
        size, free = self._layout.block_tokens, self._budget.free_tokens
        own = self._settings.own_tokens
        if not (self._settings.borrow and message.lenders) or (budget <= free and message.tokens <= own):
            return 0
        growth = min(GROWTH_TOKENS, max(1, message.stop.max_tokens - message.first_index))
        wanted = self._layout.blocks_for(message.tokens + growth) * size - free
        wanted = max(wanted, (message.tokens - own) // size * size)
        lent = min(wanted, (message.tokens - 1) // size * size)
        return lent if budget - lent <= free else 0

    def begin(self, now: float, request: Request) -> list[Effect]:
        """Ask lenders for what a new request lacks."""
        request.lenders, request.pulling = list(request.request.lenders), True
        return self._ask(now, request)

    def _ask(self, now: float, request: Request) -> list[Effect]:
        """Ask the next lender that is up, connect with all of them, or deny the request."""
        held, lacks = request.lent_blocks, request.lent_tokens // self._layout.block_tokens
        if held == lacks:
            return [self._connect(request)]
        while request.lenders and not self._is_decode(request.lenders[0]):
            del request.lenders[0]
        message, prefill = request.request, request.prefill
        if not request.lenders:
            more = (lacks - held) * self._layout.block_tokens
            if not self._budget.lacks(message.tenant, more, request.own_tokens):
                return self._have_here(now, request, more)
            self._counts.add("reservations_denied")
            reason = "no decode lends as much"
            denied = DecodeDenied(request_id=message.request_id, attempt=message.attempt, reason=reason, full=True)
            return [Send(prefill, denied), *self._ends.close(now, request, prefill_fails=True)]
        loan = Loan(request.lenders.pop(0), self._ids.new(), range(held, lacks))
        request.loans.append(loan)
        ask = LendBlocks(loan=loan.number, blocks=lacks - held, ttl_s=message.deadline_s, tenant=message.tenant)
        return [Send(loan.lender, ask)]

    def _have_here(self, now: float, request: Request, more: int) -> list[Effect]:
        """Hold what nothing lends of a prompt that has room here."""
        message, closed = request.request, request.sequence
        self._budget.take(message.tenant, more)
        request.lent_tokens -= more
        capacity = min(request.capacity_tokens + more, self._budget.capacity_tokens)
        effects = self._kept.hold(capacity - request.capacity_tokens)
        request.capacity_tokens, request.sequence = capacity, self._ids.new()
        effects += [CloseSequence(closed), request.opened]
        if request.lent_tokens:
            return [*effects, self._connect(request)]
        request.keys, request.pulling = [*message.reuse_keys, *message.new_keys], False
        return effects + self._handoff.begin(now, request)

    def _is_decode(self, name: str) -> bool:
        return name in self._peers and self._peers[name].role == "decode"

    def _connect(self, request: Request) -> Effect:
        size = self._layout.block_tokens
        parts = [LentPart(each.lender, each.place, len(each.blocks) * size) for each in request.loans if each.place]
        work_id = self._ids.new()
        self._connecting[work_id] = request
        request.in_flight += 1
        return Start(work_id, BorrowParts(request.sequence, tuple(parts)), self._settings.pull_deadline_s)

    def is_connecting(self, work_id: int) -> bool:
        """Return whether this work connects a request with its lenders."""
        return work_id in self._connecting

    def on_connected(self, now: float, work_id: int, result: Done | WorkFailed) -> list[Effect]:
        """Begin the handoff of a request all of whose KV has a place."""
        request = self._connecting.pop(work_id)
        request.in_flight -= 1
        if request.state is RequestState.CLOSING:
            return self._ends.try_end(request)
        if isinstance(result, WorkFailed):
            return self._ends.fail(now, request, result.reason, avoid=result.avoid)
        self._counts.add("requests_borrowing")
        request.pulling = False
        return self._handoff.begin(now, request)

    # --- from lenders

    def on_lent(self, now: float, sender: str, message: BlocksLent) -> list[Effect]:
        """Take what a lender has, and ask the next one for the rest."""
        found = self._find(sender, message.loan)
        if found is None:
            return []  # it was returned
        request, loan = found
        if loan.place is not None or message.blocks > len(loan.blocks):
            return self._ends.fail(now, request, f"{sender} lent what was not asked for", avoid=sender)
        loan.place, loan.blocks = message.place, loan.blocks[: message.blocks]
        return self._ask(now, request)

    def on_filled(self, now: float, sender: str, message: LoanFilled) -> list[Effect]:
        """Take note of blocks that a lender has read."""
        found = self._find(sender, message.loan)
        if found is None:
            return []
        request, loan = found
        asked, loan.asked = loan.asked, frozenset()
        others = {block for block, _, _ in message.parts}.union(message.failed, message.corrupt) - asked
        if not asked or others or any([layer >= self._layout.layers for _, layer, _ in message.parts]):
            return self._ends.fail(now, request, f"{sender} read what was not asked for", avoid=sender)
        request.pulling = False
        pulled = BlocksPulled(message.parts, message.failed, message.corrupt)
        return self._handoff.take(now, request, pulled, loan.blocks.start)

    def on_ended(self, now: float, sender: str, message: LoanEnded) -> list[Effect]:
        """Ask another lender instead of one that refused; one that ends a loan ends the attempt."""
        found = self._find(sender, message.loan)
        if found is None:
            return []
        request, loan = found
        if loan.place is None:
            request.loans.remove(loan)
            return self._ask(now, request)
        return self._ends.fail(now, request, f"{sender} ended a loan: {message.reason}", full=True, avoid=sender)

    def _find(self, lender: str, number: int) -> tuple[Request, Loan] | None:
        for request in self._requests.live.values():
            for loan in request.loans:
                if loan.number == number and loan.lender == lender:
                    return request, loan
        return None
