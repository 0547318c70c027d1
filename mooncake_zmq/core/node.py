"""One process's pure core: an actor behind its session. PURE; the ZeroMQ runtime and the simulation both drive this.

The runtime feeds frames, ticks, timers and finished works in, and carries out the effects that come back, in their order.
Whoever watches this process is answered here, as every event and effect passes: actors know nothing of it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mooncake_zmq.core.actor import (
    Actor,
    CancelTimer,
    CloseSequence,
    DrainTimedOut,
    DrainWanted,
    Effect,
    Event,
    Outer,
    Received,
    RestWanted,
    Send,
    SetTimer,
    Start,
    Transmit,
    WorkDone,
)
from mooncake_zmq.core.messages import MAX_DUMP_BYTES, AskState, Message, Report, SetResting, StateTold, Watch, clip
from mooncake_zmq.core.moves import MOVES, Moves
from mooncake_zmq.core.session import Session, SessionEvent
from mooncake_zmq.core.watch import Looking, Watchers, report
from mooncake_zmq.kv.layout import BlockLayout

Facts = Callable[[], tuple[Mapping[str, float], Mapping[str, float]]]
"""Counts and gauges of a whole process, as its metrics tell them."""
Dump = Callable[[], dict[str, Any]]
Observe = Callable[[float, Event, list[Effect]], None]
WATCHING: frozenset[type] = frozenset((Watch, Report, AskState, StateTold, SetResting))
"""Messages that no actor hears."""
UNSEEN: frozenset[type] = frozenset((CloseSequence, SetTimer, CancelTimer))
"""Effects that no peer can tell from those not carried out yet."""


class Node:
    """Routes events to the actor and its sends through the session."""

    def __init__(
        self,
        actor: Actor,
        session: Session,
        *,
        layout: BlockLayout | None = None,
        facts: Facts | None = None,
        state: Dump | None = None,
        observe: Observe | None = None,
        on_state: Callable[[str, StateTold], None] | None = None,
    ) -> None:
        """`layout`: by which KV that is moved is counted; None: it is not. `facts`, `state`: of the whole process, where there
        is more to it than the actor. `observe` is given every event that the actor has handled, and its effects; `on_state`
        the sender and the answer to each `ask_state`."""
        self.actor = actor
        self.session = session
        self.looking = Looking()
        self.draining = False
        self.resting = False
        """It takes nothing new, as an operator wants, until he says otherwise or this life ends."""
        self.rest_wanted = False
        """He does want it; it may not be so yet."""
        self._defers_cordon = False
        self.watchers = Watchers(session.counts)
        self.moves = None if layout is None else Moves(session.me, layout)
        self._facts = facts
        self._state = state
        self._observe = observe
        self._on_state = on_state
        self._began_at = 0.0

    def start(self, now: float, event: Event) -> list[Outer]:
        """Greet the peers and hand the actor its first event."""
        self._began_at = now
        self.session.start(now)
        return self.handle(now, event)

    def receive(self, now: float, frame: bytes, key_of: str | None = None) -> list[Outer]:
        """A frame arrived, on a connection by the key of the node `key_of`; None: on one that needs no key."""
        return self._run(now, self.session.receive(now, frame, key_of))

    def tick(self, now: float) -> list[Outer]:
        """`session.tick_s` have passed."""
        events = self.session.tick(now)
        events += self._ask(now)
        events += self._tell(now)
        return self._run(now, events)

    def handle(self, now: float, event: Event) -> list[Outer]:
        """A timer fired, a work progressed or ended, a client spoke."""
        kind = type(event)
        if kind is WorkDone and self.moves is not None:
            assert isinstance(event, WorkDone)
            self.moves.end(event.work_id, event.result)
        elif kind is DrainWanted or kind is DrainTimedOut:
            self.draining = True
        elif kind is RestWanted:
            assert isinstance(event, RestWanted)
            self.resting = event.resting
        return self._run(now, [event])

    # --- watching

    def look(self, now: float, for_s: float) -> list[Outer]:
        """Somebody looks at the peers by this node, and perhaps for so long: see `looking.heard`."""
        self.looking.look(now, for_s)
        return self._run(now, self._ask(now))

    def ask_state(self, now: float, peer: str, ask_id: int) -> list[Outer]:
        """Have a peer tell all its state: `on_state` hears it, if it comes."""
        return self._run(now, self.session.send(now, peer, AskState(ask_id=ask_id)))

    def rest(self, now: float, peer: str, resting: bool) -> list[Outer]:
        """Have a peer, or this node itself, take nothing new, or take again: its reports tell once it does."""
        order = SetResting(resting=resting)
        own = peer == self.session.me
        return self._run(now, [Received(peer, order)] if own else self.session.send(now, peer, order))

    def defer_cordon(self) -> None:
        """From here on the process has something to do before the actor takes nothing new, and itself hands in `RestWanted`."""
        self._defers_cordon = True

    def report(self, now: float) -> Report:
        """How this process is."""
        counts, gauges = self._facts() if self._facts is not None else (self.actor.counts, self.actor.gauges(now))
        return report(
            uptime_s=now - self._began_at,
            draining=self.draining or self.rest_wanted or "role_changes_begun" in counts,
            resting=self.resting,
            counts=counts,
            gauges=gauges,
            moved=self.moves.told() if self.moves is not None else (),
            refused=self.session.refusals,
        )

    def _ask(self, now: float) -> list[SessionEvent]:
        asks = self.looking.to_ask(now, self.session.lives) if now < self.looking.until else ()
        return [event for peer, watch in asks for event in self.session.send(now, peer, watch)]

    def _tell(self, now: float) -> list[SessionEvent]:
        """A report may be lost: the next one says it all again."""
        due = self.watchers.due(now)
        told = self.report(now) if due else None
        return [event for peer in due if told for event in self.session.send(now, peer, told, lossy=True)]

    def _on_watching(self, now: float, sender: str, message: Message) -> Sequence[Event]:
        match message:
            case Watch(for_s=for_s):
                self.watchers.ask(now, sender, for_s)
                return self._tell(now)
            case SetResting(resting=resting):
                return self._rest(resting)
            case Report():
                self.looking.hear(now, sender, message)
            case AskState(ask_id=ask_id):
                return self.session.send(now, sender, self._state_for(now, ask_id))
            case StateTold() if self._on_state is not None:
                self._on_state(sender, message)
        return []

    def _rest(self, resting: bool) -> Sequence[Event]:
        self.rest_wanted = resting
        if resting == self.resting or (resting and self._defers_cordon):
            return []
        self.resting = resting
        return [RestWanted(resting)]

    def state(self, now: float) -> bytes:
        """All of it, as JSON."""
        return json.dumps(self._state() if self._state is not None else self.dump(now), default=printable).encode()

    def _state_for(self, now: float, ask_id: int) -> StateTold:
        state = self.state(now)
        if len(state) > MAX_DUMP_BYTES:
            return StateTold(ask_id=ask_id, error=clip(f"{len(state)} bytes of state are more than a message takes"))
        return StateTold(ask_id=ask_id, state=state)

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
            if isinstance(event, Received) and type(event.message) in WATCHING:
                queue += self._on_watching(now, event.sender, event.message)
                continue
            effects = self.actor.handle(now, event)
            if self._observe is not None:
                self._observe(now, event, effects)
            for effect in effects:
                if isinstance(effect, Send):
                    queue += self.session.send(now, effect.to, effect.message, lossy=effect.lossy)
                    continue
                outer.append(effect)
                if isinstance(effect, Start) and self.moves is not None and type(effect.work) in MOVES:
                    self.moves.begin(effect.work_id, effect.work)
        self.session.flush(now)
        self._transmit(outer)
        return outer

    def _transmit(self, outer: list[Outer]) -> None:
        """What peers wait for leaves before memory is given back, which takes the kernel its time; behind whatever they might
        look for once they have it."""
        position = len(outer)
        while position and type(outer[position - 1]) in UNSEEN:
            position -= 1
        outer[position:position] = [Transmit(to, frame) for to, frame in self.session.outgoing]
        self.session.outgoing.clear()


def printable(value: object) -> object:
    """For JSON, what a dump may hold beside its own kinds."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    return str(value)
