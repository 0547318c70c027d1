"""The ends of a decode's requests: gateway and prefill are notified, and everything held for them is freed. PURE."""

from mooncake_zmq.core.actor import CancelTimer, CancelWork, Effect, Send
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import AttemptFailed, HandoffFailed, ReturnBlocks, clip
from mooncake_zmq.core.reports import Reports
from mooncake_zmq.decode.budget import Budget
from mooncake_zmq.decode.flight import Flight
from mooncake_zmq.decode.kept import Kept
from mooncake_zmq.decode.request import Request, RequestState
from mooncake_zmq.decode.requests import Requests
from mooncake_zmq.pool.node.client import PoolClient

DEADLINE = "deadline"
"""Kind of the timers that end requests; they carry request and attempt."""
HELD = "held"
"""Kind of the timers that end the wait for a pool; they carry request and attempt."""
LOADING, STEPPING, SITTING_OUT = RequestState.LOADING, RequestState.STEPPING, RequestState.SITTING_OUT


class Ends:
    """End the requests of one decode."""

    def __init__(
        self,
        *,
        pool: PoolClient,
        requests: Requests,
        budget: Budget,
        kept: Kept,
        flight: Flight,
        reports: Reports,
        counts: Tally,
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._budget = budget
        self._kept = kept
        self._flight = flight
        self._reports = reports
        self._counts = counts

    def fail(
        self, now: float, request: Request, reason: str, *, full: bool = False, avoid: str = "", stuck: bool = False
    ) -> list[Effect]:
        """End a request that has to be placed again."""
        self._counts.add("requests_failed")
        message = request.request
        failed = AttemptFailed(
            request_id=message.request_id, attempt=message.attempt, reason=clip(reason), full=full, avoid=avoid, stuck=stuck
        )
        return [Send(message.gateway, failed), *self.drop(now, request, reason)]

    def drop(self, now: float, request: Request, reason: str) -> list[Effect]:
        """End a request that its gateway cancelled; its prefill is notified if the handoff is still under way."""
        return [*_prefill_notified(request, reason), *self.close(now, request)]

    def close(self, now: float, request: Request, *, prefill_fails: bool = False) -> list[Effect]:
        """Free everything that a request holds. Those that wait for its handoff are placed by themselves, unless
        `prefill_fails`: then their gateway learns it from the prefill."""
        message = request.request
        effects: list[Effect] = [CancelTimer((DEADLINE, message.request_id, message.attempt)), *self._reports.hurry(now)]
        if message.reuse_keys:
            effects.append(CancelTimer((HELD, message.request_id, message.attempt)))
        if request.state is STEPPING:
            effects += self._flight.interrupt()
        if request.state is SITTING_OUT:
            effects.append(CancelWork(request.sampling_id))
        effects += [Send(loan.lender, ReturnBlocks(loan=loan.number)) for loan in request.loans]
        self._requests.close(request)
        request.wanted, request.loans = [], []
        unread = [request.segment.lease_id] if request.segment else []
        request.segment = None
        if request.kept_lease:
            unread.append(request.kept_lease)
        if not request.pulling:
            unread += request.reading
            request.reading = []
        for lease_id in unread:
            effects += self._pool.release(lease_id)
        effects += self._part(now, request, prefill_fails=prefill_fails)
        return effects + self.try_end(request)

    def _part(self, now: float, request: Request, *, prefill_fails: bool) -> list[Effect]:
        """Separate a request that ended from its leader, and from the siblings that wait for its handoff."""
        leader, request.leader = request.leader, None
        if leader is not None:
            leader.siblings.remove(request)
            alone = leader.unwanted and not leader.siblings
            return self.drop(now, leader, "cancelled") if alone else []
        effects: list[Effect] = []
        siblings, request.siblings = request.siblings, []
        for sibling in siblings:
            sibling.leader = None
            effects += self.close(now, sibling) if prefill_fails else self.fail(now, sibling, "its handoff is over", full=True)
        return effects

    def try_end(self, request: Request) -> list[Effect]:
        """Keep or free the sequence of a request that ended, unless a work still uses it."""
        if request.in_flight:
            return []
        self._requests.end(request)
        self._budget.give_back(request)
        return self._kept.end(request)


def _prefill_notified(request: Request, reason: str) -> list[Effect]:
    if request.state is not LOADING or request.forked:
        return []
    message = request.request
    failed = HandoffFailed(request_id=message.request_id, attempt=message.attempt, reason=clip(reason))
    return [Send(request.prefill, failed)]
