"""One process's pure core: an actor behind its session. PURE; the ZeroMQ runtime and the simulation both drive this.

The runtime feeds frames, ticks, timers and finished works in, and carries out the effects that come back, in their order.
Watchers of this process are answered here, where every event and effect passes: actors know nothing of them.
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
"""Counts and gauges of a whole process, as in its metrics."""
Dump = Callable[[], dict[str, Any]]
Observe = Callable[[float, Event, list[Effect]], None]
WATCHING: frozenset[type] = frozenset((Watch, Report, AskState, StateTold, SetResting))
"""Messages that reach no actor."""
UNSEEN: frozenset[type] = frozenset((CloseSequence, SetTimer, CancelTimer))
"""Effects that no peer can observe."""


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
        """Make a node. `layout`: the KV layout for counting moved bytes; None: they are not counted. `facts`, `state`: those of
        the whole process, where it is more than the actor. `observe` gets every event that the actor has handled, and its
        effects; `on_state` gets the sender and the answer of each `ask_state`."""
        self.actor = actor
        self.session = session
        self.looking = Looking()
        self.draining = False
        self.resting = False
        """Whether the node is cordoned by an operator: it accepts nothing new until he undoes it or the process ends."""
        self.rest_wanted = False
        """Whether an operator wants the node cordoned; it may not be so yet."""
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
        """Handle a frame from a connection with the key of the node `key_of`; None: from one that needs no key."""
        return self._run(now, self.session.receive(now, frame, key_of))

    def tick(self, now: float) -> list[Outer]:
        """Run the session's timers; called every `session.tick_s`."""
        events = self.session.tick(now)
        events += self._ask(now)
        events += self._tell(now)
        return self._run(now, events)

    def handle(self, now: float, event: Event) -> list[Outer]:
        """Handle a timer, a work's progress or end, or a client's input."""
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
        """Watch the peers for `for_s` seconds; their reports stand in `looking.heard`."""
        self.looking.look(now, for_s)
        return self._run(now, self._ask(now))

    def ask_state(self, now: float, peer: str, ask_id: int) -> list[Outer]:
        """Request a peer's whole state: `on_state` gets it, if it comes."""
        return self._run(now, self.session.send(now, peer, AskState(ask_id=ask_id)))

    def rest(self, now: float, peer: str, resting: bool) -> list[Outer]:
        """Cordon a peer or this node itself, or undo it: its reports show when it is done."""
        order = SetResting(resting=resting)
        own = peer == self.session.me
        return self._run(now, [Received(peer, order)] if own else self.session.send(now, peer, order))

    def defer_cordon(self) -> None:
        """Leave it to the process to hand in `RestWanted`: it has something to do before the actor accepts nothing new."""
        self._defers_cordon = True

    def report(self, now: float) -> Report:
        """Return this process's report."""
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
        """Send the reports that are due. One may be lost: the next one repeats everything."""
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
        """Return the process's whole state as JSON."""
        return json.dumps(self._state() if self._state is not None else self.dump(now), default=printable).encode()

    def _state_for(self, now: float, ask_id: int) -> StateTold:
        state = self.state(now)
        if len(state) > MAX_DUMP_BYTES:
            return StateTold(ask_id=ask_id, error=clip(f"{len(state)} bytes of state are more than a message takes"))
        return StateTold(ask_id=ask_id, state=state)

    def dump(self, now: float) -> dict[str, Any]:
        """Return the state of session and actor, JSON-able."""
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
        """Move the frames before the effects that no peer can observe, as freeing memory takes the kernel time, and behind all
        effects that peers might look for once they have the frames."""
        position = len(outer)
        while position and type(outer[position - 1]) in UNSEEN:
            position -= 1
        outer[position:position] = [Transmit(to, frame) for to, frame in self.session.outgoing]
        self.session.outgoing.clear()


def printable(value: object) -> object:
    """Return a JSON value for a type that JSON lacks, of those in a dump."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    return str(value)
