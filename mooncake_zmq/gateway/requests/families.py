"""Open requests that belong together: a family has one prompt, and a call has one answer of several parts. PURE."""

from mooncake_zmq.gateway.requests.request import PLACED, Request, RequestState


class Families:
    """The open requests by family and by call. A request is at most in one of each."""

    def __init__(self) -> None:
        self._families: dict[str, dict[str, Request]] = {}
        self._calls: dict[str, dict[str, Request]] = {}

    def add(self, request: Request) -> None:
        """Enter an open request."""
        for group, groups in self._groups(request):
            groups.setdefault(group, {})[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Remove a request that ended."""
        for group, groups in self._groups(request):
            members = groups[group]
            del members[request.request_id]
            if not members:
                del groups[group]

    def waiting_with(self, request: Request) -> list[Request]:
        """Return the other requests of its family that wait and have no token yet: all of them are placed together."""
        if not request.family or request.answer.tokens:
            return []
        return [
            each
            for each in self._families[request.family].values()
            if each is not request and each.state is RequestState.WAITING and not each.answer.tokens
        ]

    def led_by(self, request: Request) -> list[Request]:
        """Return the requests that wait for the placement of this one."""
        if not request.family or request.state is not RequestState.PLACING:
            return []
        return [each for each in self._families[request.family].values() if each.led_by == request.request_id]

    def begin(self, request: Request) -> None:
        """Note that the client has tokens of this request."""
        request.begun = True
        if request.family:
            for each in self._families[request.family].values():
                each.begun = True
        if request.client.call:
            for each in self._calls[request.client.call].values():
                each.answered = True

    def is_under_way(self, request: Request) -> bool:
        """Return whether the client has tokens of the request's call, or another part of the call is placed. What takes the
        room may be the rest of the call, all of it in vain without this request: such a request waits for room."""
        if request.begun or request.answered:
            return True
        call = request.client.call
        return bool(call) and any(each is not request and each.state in PLACED for each in self._calls[call].values())

    def _groups(self, request: Request) -> list[tuple[str, dict[str, dict[str, Request]]]]:
        groups = ((request.family, self._families), (request.client.call, self._calls))
        return [(name, members) for name, members in groups if name]
