"""The check of what answers say of the weights that made them: in a simulation a vLLM's version is the name of its node."""

from mooncake_zmq.core.messages import FirstToken, TokensDecoded
from mooncake_zmq.gateway.requests.client_events import Finished
from mooncake_zmq.simulation.violation import Violation


class WeightVersions:
    """Notes which node sent each token, and compares that with the versions in the end of an answer."""

    def __init__(self) -> None:
        self._senders: dict[str, dict[int, set[str]]] = {}
        """Request that has not ended -> index of a token -> nodes that sent it in an attempt that was under way then."""

    def received(self, sender: str, message: FirstToken | TokensDecoded, attempts: dict[str, int]) -> None:
        """Note the tokens that a gateway received. `attempts`: the attempt under way of each request."""
        runs = message.entries if isinstance(message, TokensDecoded) else ()
        if isinstance(message, FirstToken):
            runs = ((message.request_id, message.attempt, message.index, (message.token,)),)
        for request_id, attempt, first, tokens in runs:
            if attempts.get(request_id) == attempt:
                senders = self._senders.setdefault(request_id, {})
                for index in range(first, first + len(tokens)):
                    senders.setdefault(index, set()).add(sender)

    def finished(self, request_id: str, end: Finished) -> None:
        """Check I3: a token is said to be made by weights that made it, or by unknown ones."""
        senders = self._senders.pop(request_id, {})
        for version, start, stop in end.versions:
            for index in range(start, stop):
                if version is not None and version not in senders.get(index, ()):
                    made = sorted(senders.get(index, ()))
                    raise Violation("I3", f"{request_id} token {index} is said to be made by {version}, but {made} sent it")
