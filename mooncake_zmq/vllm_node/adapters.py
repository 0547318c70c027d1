"""The adapters that the vLLM beside a node lists, and which conductors know them. PURE."""

from collections.abc import Iterable

from mooncake_zmq.core.actor import Effect, Send
from mooncake_zmq.core.messages import MAX_ADAPTERS, AdaptersListed


class ListedAdapters:
    """The adapters as last listed; none is sent before they are known."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] | None = None

    def listed(self, names: tuple[str, ...] | None, conductors: Iterable[str]) -> list[Effect]:
        """Note what the server lists, None being nothing new, and send a change to these conductors."""
        if names is None or (names := tuple(sorted(names)[:MAX_ADAPTERS])) == self._names:
            return []
        self._names = names
        return [effect for conductor in conductors for effect in self.announce_to(conductor)]

    def announce_to(self, conductor: str) -> list[Effect]:
        """Send what is known to a conductor."""
        return [] if self._names is None else [Send(conductor, AdaptersListed(adapters=self._names))]
