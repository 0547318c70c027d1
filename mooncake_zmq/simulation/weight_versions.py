"""The check of what answers say of the weights that made them."""

from mooncake_zmq.core.messages import FirstToken, StartPrefill, TokensDecoded
from mooncake_zmq.gateway.requests.client_events import Finished
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.simulation.violation import Violation
from mooncake_zmq.simulation.vllm_works import version_of


class WeightVersions:
    """Notes which node sent each token, and compares that with the versions in the end of an answer."""

    def __init__(self) -> None:
        self._senders: dict[str, dict[int, set[str]]] = {}
        """Request that has not ended -> index of a token -> nodes that sent it in an attempt that was under way then."""
        self._roots: dict[str, Key] = {}

    def started(self, message: StartPrefill) -> None:
        """Note the root of a request, and of those placed with it."""
        ids = [message.request_id, *(sibling.request_id for sibling in message.siblings)]
        self._roots |= dict.fromkeys(ids, message.root)

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
        """Check I3: a token is said to be made by weights that made it. Unknown ones are those without a version, and those of
        nodes that an answer has left."""
        senders, root = self._senders.pop(request_id, {}), self._roots.pop(request_id)
        versions: dict[int, str | None] = dict.fromkeys(range(end.completion_tokens))
        for version, start, stop in end.versions:
            versions |= dict.fromkeys(range(start, stop), version)
        for index, version in versions.items():
            made = {version_of(sender, root) or None for sender in senders.get(index, ())}
            if version not in made and not (version is None and end.attempts + end.relocations > 1):
                raise Violation("I3", f"{request_id} token {index} is said to be made by {version}, but it was by {made}")
