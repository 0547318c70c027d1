"""One process's pure core: an actor behind its session. PURE; the ZeroMQ runtime and the simulation both drive this.

The runtime feeds frames, ticks, timers and finished works in, and carries out the effects that come back, in their order.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from mooncake_zmq.core.actor import Actor, Effect, Event, Send
from mooncake_zmq.core.session import Session


class Transmit(Struct, frozen=True):
    """Put one frame on the wire to `to`; losing it is allowed."""

    to: str
    frame: bytes


Outer = Transmit | Effect
"""What a runtime carries out: everything an actor asks for but `Send`, which the session has turned into `Transmit`."""


class Node:
    """Routes events to the actor and its sends through the session."""

    def __init__(self, actor: Actor, session: Session) -> None:
        self.actor = actor
        self.session = session

    def start(self, now: float, event: Event) -> list[Outer]:
        """Greet the peers and hand the actor its first event."""
        self.session.start(now)
        return self.handle(now, event)

    def receive(self, now: float, frame: bytes, key_of: str | None = None) -> list[Outer]:
        """A frame arrived, on a connection by the key of the node `key_of`; None: on one that needs no key."""
        return self._run(now, self.session.receive(now, frame, key_of))

    def tick(self, now: float) -> list[Outer]:
        """`session.tick_s` have passed."""
        return self._run(now, self.session.tick(now))

    def handle(self, now: float, event: Event) -> list[Outer]:
        """A timer fired, a work progressed or ended, a client spoke."""
        return self._run(now, [event])

    def dump(self, now: float) -> dict[str, Any]:
        """JSON-able state of session and actor."""
        return {"session": self.session.dump(), "counts": dict(self.actor.counts), "actor": self.actor.dump(now)}

    def _run(self, now: float, events: Sequence[Event]) -> list[Outer]:
        queue = list(events)
        outer: list[Outer] = []
        position = 0
        while position < len(queue):
            event = queue[position]
            position += 1
            for effect in self.actor.handle(now, event):
                if isinstance(effect, Send):
                    queue += self.session.send(now, effect.to, effect.message, lossy=effect.lossy)
                else:
                    outer.append(effect)
        self.session.flush(now)
        outer += [Transmit(to, frame) for to, frame in self.session.outgoing]
        self.session.outgoing.clear()
        return outer
