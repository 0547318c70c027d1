"""The table of a decode's requests, and the only place where their states change. PURE."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from mooncake_zmq.core.actor_parts import Lifecycle, Tally
from mooncake_zmq.decode.request import MISSING, NEXT_STATE, Request, RequestEvent, RequestState


class Requests:
    """Hold the live attempt of each request, and the ended requests whose sequences a copy or step still uses."""

    def __init__(self, transitions: Tally) -> None:
        self.live: OrderedDict[str, Request] = OrderedDict()
        """Live requests by id, in order of reservation."""
        self.closing: list[Request] = []
        self._states = Lifecycle("decode request", NEXT_STATE, transitions)

    def __len__(self) -> int:
        return len(self.live) + len(self.closing)

    def __iter__(self) -> Iterator[Request]:
        return iter([*self.live.values(), *self.closing])

    def add(self, request: Request) -> None:
        """Add a request for which there is room; it has no other attempt here."""
        self.live[request.request.request_id] = request

    def attempt(self, request_id: str, attempt: int) -> Request | None:
        """Return the live request of one attempt."""
        request = self.live.get(request_id)
        return request if request is not None and request.request.attempt == attempt else None

    def move(self, request: Request, event: RequestEvent) -> None:
        """Change the state of a request by an event."""
        request.state = self._states.after(request.state, event)

    def close(self, request: Request) -> None:
        """Move a request to the ended ones."""
        self.move(request, RequestEvent.CLOSE)
        del self.live[request.request.request_id]
        self.closing.append(request)

    def end(self, request: Request) -> None:
        """Forget a request whose sequence is no longer used."""
        self.move(request, RequestEvent.END)
        self.closing.remove(request)

    def check(self) -> None:
        """See `core.actor`."""
        for request in self:
            assert (request.state is RequestState.CLOSING) == (request in self.closing)
            assert request.state is not RequestState.ENDED
            assert request.held_tokens <= request.budget_tokens
            assert request.leader is None or request in request.leader.siblings
            assert not request.unwanted or request.siblings or request.state is RequestState.CLOSING
            assert all(each.leader is request and each.state is RequestState.LOADING for each in request.siblings)

    def dump(self) -> list[dict[str, Any]]:
        """Return the state of each request, for debugging."""
        return [
            {
                "request": r.request.request_id,
                "attempt": r.request.attempt,
                "state": r.state.value,
                "prefill": r.prefill,
                "tokens": r.request.tokens,
                "output": r.count,
                "in_flight": r.in_flight,
                "lenders": [loan.lender for loan in r.loans],
                "parts": len(r.parts) - r.parts.count(MISSING),
                "handoff_done": r.done is not None,
            }
            for r in self
        ]
