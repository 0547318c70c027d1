"""The actor that produces the later tokens: reservation, verified handoff, continuous batch, preemption, puts. PURE.

It owns its running batch and the KV budget behind it. A request that cannot go on here ends with `AttemptFailed` to the
gateway, which resumes it on another decode from the prompt and the tokens so far.
"""

from collections.abc import Callable
from typing import Any

from msgspec.structs import asdict

from mooncake_zmq.core.actor import (
    CordonWanted,
    DrainTimedOut,
    DrainWanted,
    Effect,
    Event,
    PeerDown,
    PeerUp,
    Received,
    Started,
    TimerFired,
    WorkDone,
    WorkProgress,
)
from mooncake_zmq.core.actor_parts import Ids, Tally
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.drain import MOVE, Drain
from mooncake_zmq.core.handlers import Handlers
from mooncake_zmq.core.messages import (
    MAX_BLOCKS,
    MAX_REPORTED,
    BlocksLeased,
    BlocksLent,
    CancelRequest,
    ChangeRole,
    DecodeLoad,
    FillLoan,
    HandoffBlocks,
    HandoffDone,
    HandoffFailed,
    Hello,
    LayersReady,
    LeaseRenewed,
    LendBlocks,
    LoanEnded,
    LoanFilled,
    ReclaimSlots,
    ReserveDecode,
    ReturnBlocks,
    SlotsReserved,
)
from mooncake_zmq.core.reports import REPORT, Reports
from mooncake_zmq.core.work import (
    BlocksCopied,
    BlocksPulled,
    Done,
    Result,
    SequenceForked,
    SequenceLent,
    StepDecoded,
    TokensSampled,
    WorkFailed,
)
from mooncake_zmq.decode.admission import Admission
from mooncake_zmq.decode.borrowing import Borrowing
from mooncake_zmq.decode.budget import Budget
from mooncake_zmq.decode.ends import DEADLINE, HELD, Ends
from mooncake_zmq.decode.flight import Flight
from mooncake_zmq.decode.forks import Forks
from mooncake_zmq.decode.handoff import BORDER, Handoff
from mooncake_zmq.decode.kept import Kept
from mooncake_zmq.decode.lending import LENT, Lending
from mooncake_zmq.decode.offers import Offers
from mooncake_zmq.decode.request import RequestState
from mooncake_zmq.decode.requests import Requests
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.decode.steps import Steps
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.node.client import PoolClient

PIECE_TOKENS = 1024
"""Tokens whose KV is copied at a time, into a sequence or out of it."""

PULLED, DECODED, COPIED = (BlocksPulled, WorkFailed), (StepDecoded, WorkFailed), (BlocksCopied, WorkFailed)
FORKED, SAMPLED = (SequenceForked, WorkFailed), (TokensSampled, WorkFailed)
LENT_RESULTS, CONNECTED = (SequenceLent, BlocksPulled, Done, WorkFailed), (Done, WorkFailed)
"""Result types of the works of a decode."""
LOADING, RUNNING = RequestState.LOADING, (RequestState.READY, RequestState.STEPPING, RequestState.SITTING_OUT)
OVER = (RequestState.CLOSING, RequestState.ENDED)


class Decode:
    """One decode instance."""

    def __init__(
        self,
        *,
        name: str,
        host: str,
        incarnation: int,
        settings: DecodeSettings,
        layout: BlockLayout,
        costs: Costs,
        may_become: str = "",
    ) -> None:
        self.name = name
        self.host = host
        self.incarnation = incarnation
        self.counts = Tally()
        self.transitions = Tally()
        self.requests = Requests(self.transitions)
        self._settings = settings
        self._layout = layout
        self._costs = costs
        self._pool = PoolClient(host, settings.pool, self.counts)
        self._peers: dict[str, Hello] = {}
        self._budget = Budget(layout, settings.capacity_tokens)
        self._kept = Kept(settings.capacity_tokens if settings.own_reuse else 0)
        self._flight = Flight()
        self._reports = Reports(settings.report_s)
        self._ids = Ids()
        self._drain = Drain(may_become, self.counts)
        self._lending = Lending(
            settings=settings,
            layout=layout,
            budget=self._budget,
            kept=self._kept,
            drain=self._drain,
            ids=self._ids,
            counts=self.counts,
        )
        self._ends = Ends(
            pool=self._pool,
            requests=self.requests,
            budget=self._budget,
            kept=self._kept,
            flight=self._flight,
            reports=self._reports,
            counts=self.counts,
        )
        piece_blocks = max(1, PIECE_TOKENS // layout.block_tokens)
        self._offers = Offers(
            settings=settings, layout=layout, piece_blocks=piece_blocks, pool=self._pool, ends=self._ends, ids=self._ids
        )
        self._make_parts(min(piece_blocks * layout.layers, MAX_BLOCKS))  # a lender's answer names as many
        self._handler_table = Handlers(self.counts, self._handlers(), self._pool.may_say)

    def _make_parts(self, piece_parts: int) -> None:
        """Create the components that a request passes through. Copies take `piece_parts` layers of blocks at a time."""
        settings, layout, requests, ids, counts = self._settings, self._layout, self.requests, self._ids, self.counts
        ends, offers, flight = self._ends, self._offers, self._flight
        self._steps = steps = Steps(
            settings=settings,
            costs=self._costs,
            piece_parts=piece_parts,
            requests=requests,
            budget=self._budget,
            flight=flight,
            lending=self._lending,
            offers=offers,
            ends=ends,
            ids=ids,
            counts=counts,
        )
        self._forks = Forks(settings=settings, layout=layout, requests=requests, steps=steps, ends=ends, ids=ids)
        self._handoff = Handoff(
            settings=settings,
            layout=layout,
            piece_parts=piece_parts,
            pool=self._pool,
            requests=requests,
            kept=self._kept,
            flight=flight,
            steps=steps,
            forks=self._forks,
            offers=offers,
            ends=ends,
            ids=ids,
            counts=counts,
        )
        self._borrowing = Borrowing(
            settings=settings,
            layout=layout,
            peers=self._peers,
            requests=requests,
            budget=self._budget,
            kept=self._kept,
            handoff=self._handoff,
            ends=ends,
            ids=ids,
            counts=counts,
        )
        self._admission = Admission(
            name=self.name,
            settings=settings,
            layout=layout,
            peers=self._peers,
            requests=requests,
            budget=self._budget,
            kept=self._kept,
            borrowing=self._borrowing,
            handoff=self._handoff,
            ends=ends,
            drain=self._drain,
            ids=ids,
            counts=counts,
        )

    def _handlers(self) -> dict[type, Callable[[float, str, Any], list[Effect]]]:
        return {
            ReserveDecode: self._admission.on_reserve,
            HandoffBlocks: self._handoff.on_blocks,
            LayersReady: self._handoff.on_layers,
            HandoffDone: self._handoff.on_done,
            HandoffFailed: self._handoff.on_failed,
            CancelRequest: self._on_cancel,
            BlocksLeased: self._handoff.on_leased,
            LeaseRenewed: self._pool.on_renewed,
            SlotsReserved: self._offers.on_reserved,
            ReclaimSlots: self._pool.on_reclaim,
            ChangeRole: self._on_change,
            LendBlocks: self._lending.on_lend,
            FillLoan: self._lending.on_fill,
            ReturnBlocks: self._lending.on_return,
            BlocksLent: self._borrowing.on_lent,
            LoanFilled: self._borrowing.on_filled,
            LoanEnded: self._borrowing.on_ended,
        }

    def handle(self, now: float, event: Event) -> list[Effect]:
        """See `core.actor`."""
        effects = self._dispatch(now, event)
        if self._flight.step is None and self.requests.live:
            effects += self._steps.begin(now)
        return effects + self._drained() if self._drain.draining else effects

    def _dispatch(self, now: float, event: Event) -> list[Effect]:
        # Frequent events come first, see `Handlers`.
        if type(event) is Received:
            return self._handler_table.to(now, event.sender, event.message)
        if type(event) is WorkDone:
            return self._on_work(now, event)
        if type(event) is TimerFired and event.key == REPORT:
            return self._report(now)
        match event:
            case PeerUp() as up:
                self._peers[up.peer] = up.hello
                self._admission.links.peer_up(up.peer)
                self._reports.peer_up(up)
                return self._pool.peer_up(now, up)
            case PeerDown(peer, _):
                return self._on_peer_down(now, peer)
            case TimerFired(("renew",)):
                return [*self._pool.renew(now), self._pool.renewal_timer()]
            case TimerFired((kind, str(request_id), int(attempt))) if kind == DEADLINE:
                request = self.requests.attempt(request_id, attempt)
                return [] if request is None else self._ends.fail(now, request, "deadline passed in decode")
            case TimerFired((kind, int())) if kind == BORDER:
                return self._flight.interrupt()
            case TimerFired((kind, str(request_id), int(attempt))) if kind == HELD:
                return self._handoff.on_held_late(now, request_id, attempt)
            case TimerFired((kind, str(borrower), int(number))) if kind == LENT:
                return self._lending.expire(borrower, number)
            case Started():
                return [self._reports.begin(), self._pool.renewal_timer()]
            case TimerFired(key) if key == MOVE:
                return self._move()
            case DrainWanted() | CordonWanted() as order:
                self._drain.wanted(order)
                return self._on_drain(now)
            case DrainTimedOut():
                self._drain.drain()
                return self._hand_over(now)
            case TimerFired() | WorkProgress():
                return []
            case _:
                raise TypeError(event)

    def _on_work(self, now: float, event: WorkDone[Result]) -> list[Effect]:
        """Route the end of a work by its id; ids are used once, so each shows which work ended."""
        work_id, result = event.work_id, event.result
        if self._handoff.is_pulling(work_id):
            assert isinstance(result, PULLED)
            return self._handoff.on_pulled(now, work_id, result)
        if self._lending.is_at_work(work_id):
            assert isinstance(result, LENT_RESULTS)
            return self._lending.on_done(work_id, result)
        if self._borrowing.is_connecting(work_id):
            assert isinstance(result, CONNECTED)
            return self._borrowing.on_connected(now, work_id, result)
        if self._handoff.is_copying(work_id):
            assert isinstance(result, FORKED)
            return self._handoff.on_copied(now, work_id, result)
        if self._forks.is_copying(work_id):
            assert isinstance(result, FORKED)
            return self._forks.on_forked(now, work_id, result)
        step = self._flight.step
        if step is not None and step.work_id == work_id:
            assert isinstance(result, DECODED)
            return self._steps.on_stepped(now, result)
        if self._steps.is_sampling(work_id):
            assert isinstance(result, SAMPLED)
            return self._steps.on_sampled(now, work_id, result)
        if self._pool.copying(work_id):
            assert isinstance(result, COPIED)
            return self._offers.ended(now, self._pool.on_copied(work_id, result))
        return []

    def _on_change(self, now: float, sender: str, message: ChangeRole) -> list[Effect]:
        return self._on_drain(now) if self._drain.change(sender, message, self._peers) else []

    @property
    def kept_sequences(self) -> list[int]:
        """The sequences of ended requests that stay open."""
        return self._kept.sequences

    def check(self, now: float) -> None:
        """See `core.actor`."""
        self.requests.check()
        self._steps.check()
        self._lending.check()
        holders = [*self.requests, *self._lending.held]
        self._budget.check(holders)
        self._kept.check(holders)

    def gauges(self, now: float) -> dict[str, float]:
        """See `core.actor`."""
        live = self.requests.live
        running = sum(1 for r in live.values() if r.state in RUNNING)
        return {
            "capacity_tokens": self._budget.capacity_tokens,
            "cached_tokens": self._kept.tokens,
            "reserved_tokens": self._budget.capacity_tokens - self._budget.free_tokens,
            "lent_tokens": self._lending.lent_tokens,
            "borrowed_tokens": sum(request.lent_tokens for request in self.requests),
            "requests_running": running,
            "requests_waiting": len(live) - running,
            "requests_closing": len(self.requests.closing),
            "leases": self._pool.leases,
            "puts": self._pool.puts,
        }

    def dump(self, now: float) -> dict[str, Any]:
        """See `core.actor`."""
        return {
            "gauges": self.gauges(now),
            "step_s": self._flight.step_s,
            "step": asdict(self._steps.measured(now)),
            "draining": self._drain.draining,
            "requests": self.requests.dump(),
        }

    # --- ends of requests and of the node

    def _on_cancel(self, now: float, sender: str, message: CancelRequest) -> list[Effect]:
        request = self.requests.live.get(message.request_id)
        if request is None or request.request.gateway != sender or request.request.attempt > message.attempt:
            return []
        self.counts.add("requests_cancelled")
        if request.siblings:
            request.unwanted = True
            return []
        return self._ends.drop(now, request, "cancelled")

    def _on_drain(self, now: float) -> list[Effect]:
        """Report a drain that began or was undone. Requests that do not end within a while are placed elsewhere."""
        return [*self._report(now), self._drain.move_timer(self._settings.drain_grace_s)]

    def _move(self) -> list[Effect]:
        """End what is lent, and ask to place all requests elsewhere. Their full blocks are in the pool, or being put there."""
        wanted = [request.request for request in self.requests.live.values() if not request.unwanted]
        asked = self._drain.move((each.gateway, each.request_id, each.attempt) for each in wanted)
        return asked + self._lending.end_all()

    def _hand_over(self, now: float) -> list[Effect]:
        """End all requests at once so that they continue on other nodes; they count as ones for which there is no room."""
        live = self.requests.live
        self.counts.add("requests_handed_over", len(live))
        effects: list[Effect] = []
        while live:
            effects += self._ends.fail(now, next(iter(live.values())), "decode is leaving", full=True)
        return effects + self._lending.end_all()

    def _on_peer_down(self, now: float, peer: str) -> list[Effect]:
        self._peers.pop(peer, None)
        self._reports.peer_down(peer)
        effects = self._offers.ended(now, self._pool.peer_down(peer)) + self._lending.peer_down(peer)
        for request in list(self.requests.live.values()):
            unverified = request.state is LOADING and not request.forked
            if request.state in OVER:
                continue  # its leader, closed before, has ended it as well
            if request.request.gateway == peer:
                effects += self._ends.drop(now, request, f"{peer} is down")
            elif request.prefill == peer and unverified:
                effects += self._ends.fail(now, request, f"{peer} is down", avoid=peer)
            elif any(loan.lender == peer for loan in request.loans):
                effects += self._ends.fail(now, request, f"{peer} is down, which held a part of the KV", avoid=peer)
            elif self._pool.node is None:
                effects += self._handoff.forgo_segment(now, request)
        return effects

    def _report(self, now: float) -> list[Effect]:
        requests = self.requests.live.values()
        running = [r for r in requests if r.state in RUNNING]
        bookings = [booking for r in requests if (booking := r.request.booking)]
        load = DecodeLoad(
            running=len(running),
            reserved=len(requests) - len(running),
            free_tokens=self._budget.free_tokens,
            capacity_tokens=self._budget.capacity_tokens,
            context_tokens=sum([request.context for request in running]),
            max_batch=self._settings.max_batch,
            room=max(0, self._settings.most_taken - len(self.requests)),
            step_s=self._flight.step_s,
            step=self._steps.measured(now),
            bookings=tuple(bookings[:MAX_REPORTED]),
            draining=self._drain.draining,
            fixed_s=self._costs.decode_step_s,
            lendable=self._lending.lendable,
            borrows=self._settings.borrow,
            own_tokens=self._settings.own_tokens,
            lends=self._settings.lend_tokens,
        )
        return self._reports.send(now, load)

    def _drained(self) -> list[Effect]:
        idle = not (len(self.requests) or self._pool.puts or self._lending.held)
        return [*(self._kept.close_all() if idle else ()), *self._drain.drained(idle=idle)]
