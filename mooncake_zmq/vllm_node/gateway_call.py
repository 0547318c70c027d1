"""One call by which a gateway has the vLLM beside a node do something for a request, beside generating. PURE."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from mooncake_zmq.core.messages import ReadAnswer, RenderChat

MessageT = TypeVar("MessageT", ReadAnswer, RenderChat)


@dataclass(slots=True)
class GatewayCall(Generic[MessageT]):
    """A call, when it arrived, and when its work began."""

    gateway: str
    message: MessageT
    arrived_at: float
    began_at: float = 0.0

    def left_s(self, now: float) -> float:
        """Return the time for which the gateway still waits."""
        return self.message.deadline_s - (now - self.arrived_at)

    def is_of(self, gateway: str, request_id: str) -> bool:
        """Return whether this is a call for a gateway's request."""
        return (self.gateway, self.message.request_id) == (gateway, request_id)
