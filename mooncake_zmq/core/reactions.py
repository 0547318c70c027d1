"""Dispatch of an actor's messages to its handlers. PURE."""

from collections.abc import Callable, Mapping
from typing import Any

from mooncake_zmq.core.actor import Effect
from mooncake_zmq.core.messages import Message
from mooncake_zmq.core.shell import Tally


class Reactions:
    """Handlers of messages by type: a `match` would take longer than some of the frequent handlers. `may_say`: whether this
    sender may send that. A message that is not allowed, or has no handler, is dropped and counted."""

    def __init__(
        self,
        counts: Tally,
        reactions: Mapping[type, Callable[[float, str, Any], list[Effect]]],
        may_say: Callable[[str, Message], bool] | None = None,
    ) -> None:
        self._counts, self._reactions, self._may_say = counts, reactions, may_say

    def to(self, now: float, sender: str, message: Message) -> list[Effect]:
        """Return the effects of a message."""
        react = self._reactions.get(type(message))
        if react is None or (self._may_say is not None and not self._may_say(sender, message)):
            self._counts.add(f"unexpected_messages[type={type(message).__name__}]")
            return []
        return react(now, sender, message)
