"""Dispatch of an actor's messages to its handlers. PURE."""

from collections.abc import Callable, Mapping
from typing import Any

from mooncake_zmq.core.actor import Effect
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import Message


class Handlers:
    """Handlers of messages by type: a `match` would take longer than some of the frequent handlers. `may_say`: whether this
    sender may send that. A message that is not allowed, or has no handler, is dropped and counted."""

    def __init__(
        self,
        counts: Tally,
        handlers: Mapping[type, Callable[[float, str, Any], list[Effect]]],
        may_say: Callable[[str, Message], bool] | None = None,
    ) -> None:
        self._counts, self._handlers, self._may_say = counts, handlers, may_say

    def to(self, now: float, sender: str, message: Message) -> list[Effect]:
        """Return the effects of a message."""
        handler = self._handlers.get(type(message))
        if handler is None or (self._may_say is not None and not self._may_say(sender, message)):
            self._counts.add(f"unexpected_messages[type={type(message).__name__}]")
            return []
        return handler(now, sender, message)
