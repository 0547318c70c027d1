"""How an actor finds what a message leads to. PURE."""

from collections.abc import Callable, Mapping
from typing import Any

from mooncake_zmq.core.actor import Effect
from mooncake_zmq.core.messages import Message
from mooncake_zmq.core.shell import Tally


class Reactions:
    """What each message leads to, by its type. Patterns over the frequent ones would take longer than all that is done with
    some of them. `may_say`: whether this sender may say that; what may not be said, or leads to nothing, is counted."""

    def __init__(
        self,
        counts: Tally,
        reactions: Mapping[type, Callable[[float, str, Any], list[Effect]]],
        may_say: Callable[[str, Message], bool] | None = None,
    ) -> None:
        self._counts, self._reactions, self._may_say = counts, reactions, may_say

    def to(self, now: float, sender: str, message: Message) -> list[Effect]:
        """The effects of a message."""
        react = self._reactions.get(type(message))
        if react is None or (self._may_say is not None and not self._may_say(sender, message)):
            self._counts.add(f"unexpected_messages[type={type(message).__name__}]")
            return []
        return react(now, sender, message)
