"""Requests that another vLLM passed on before their gateway is connected here. PURE.

While a cluster starts, a gateway may have both nodes before the second one has the gateway: the request is then held for a
moment. Dropping it would cost the gateway's whole stall timeout, as no answer could reach it.
"""

from typing import Final

from mooncake_zmq.core.actor import CancelTimer, Effect, SetTimer
from mooncake_zmq.core.messages import StartPrefill

EARLY: Final = "early"
"""The first part of the key of a held request's timer."""
EARLY_S: Final = 5.0
"""How long a request is held; connections are made anew within two seconds."""


class EarlyRequests:
    """Hold at most `most` requests."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[tuple[str, int], tuple[str, StartPrefill]] = {}
        """Sender and message by request and attempt."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, sender: str, message: StartPrefill) -> list[Effect]:
        """Hold a request until its gateway is connected or its timer fires. Returns nothing if there is no room."""
        if len(self._held) >= self._most:
            return []
        key = (message.request_id, message.attempt)
        self._held[key] = (sender, message)
        return [SetTimer((EARLY, *key), EARLY_S)]

    def take(self, gateway: str) -> tuple[list[tuple[str, StartPrefill]], list[Effect]]:
        """Release the requests of a gateway: their senders and messages, and the effects that end their timers."""
        found = {key: held for key, held in self._held.items() if held[1].gateway == gateway}
        for key in found:
            del self._held[key]
        return list(found.values()), [CancelTimer((EARLY, *key)) for key in found]

    def expire(self, request_id: str, attempt: int) -> bool:
        """Drop a request whose gateway did not connect in time; returns whether it was held."""
        return self._held.pop((request_id, attempt), None) is not None
