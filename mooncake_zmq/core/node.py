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
    CordonWanted,
    Drained,
    DrainTimedOut,
    DrainWanted,
    Effect,
    Event,
    Outer,
    Received,
    Send,
    SetTimer,
    Start,
    ToClient,
    Transmit,
    WorkDone,
)
from mooncake_zmq.core.drain import changes_role
from mooncake_zmq.core.messages import MAX_DUMP_BYTES, AskState, Message, Report, SetCordon, StateReported, Watch, clip
from mooncake_zmq.core.session import Session, SessionEvent
from mooncake_zmq.core.transfer_stats import COUNTED, TransferStats
from mooncake_zmq.core.watch import Looking, Watchers, report
from mooncake_zmq.kv.layout import BlockLayout

Facts = Callable[[], tuple[Mapping[str, float], Mapping[str, float]]]
"""Counts and gauges of a whole process, as in its metrics."""
Dump = Callable[[], dict[str, Any]]
Observe = Callable[[float, Event, list[Effect]], None]
WATCHING: frozenset[type] = frozenset((Watch, Report, AskState, StateReported, SetCordon))
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
        on_state: Callable[[str, StateReported], None] | None = None,
        part: Callable[[str], bytes] | None = None,
    ) -> None:
        """Make a node. `layout`: the KV layout for counting moved bytes; None: they are not counted. `facts`, `state`: those of
        the whole process, where it is more than the actor. `observe` gets every event that the actor has handled, and its
        effects; `on_state` gets the sender and the answer of each `ask_state`. `part`: returns a named part of the state, as
        JSON, where peers may ask for less than the whole."""
        self.actor = actor
        self.session = session
        self.looking = Looking()
        self.draining = False
        self.cordoned = False
        """Whether the node is cordoned by an operator: it accepts nothing new until he undoes it or the process ends."""
        self.cordon_wanted = False
        """Whether an operator wants the node cordoned; it may not be so yet."""
        self._defers_cordon = False
        self.watchers = Watchers(session.counts)
        self.transfer_stats = None if layout is None else TransferStats(session.me, layout)
        self._facts = facts
        self._state = state
        self._observe = observe
        self._on_state = on_state
        self._part = part
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
        events += self._send_reports(now)
        return self._run(now, events)

    def handle(self, now: float, event: Event) -> list[Outer]:
        """Handle a timer, a work's progress or end, or a client's input."""
        kind = type(event)
        if kind is WorkDone and self.transfer_stats is not None:
            assert isinstance(event, WorkDone)
            self.transfer_stats.end(event.work_id, event.result)
        elif kind is DrainWanted or kind is DrainTimedOut:
            self.draining = True
        elif kind is CordonWanted:
            assert isinstance(event, CordonWanted)
            self.cordoned = event.cordoned
        return self._run(now, [event])

    # --- watching

    def look(self, now: float, for_s: float) -> list[Outer]:
        """Watch the peers for `for_s` seconds; their reports stand in `looking.reports`."""
        self.looking.look(now, for_s)
        return self._run(now, self._ask(now))

    def ask_state(self, now: float, peer: str, ask_id: int, part: str = "") -> list[Outer]:
        """Request a peer's state, whole or the named part of it: `on_state` gets it, if it comes."""
        return self._run(now, self.session.send(now, peer, AskState(ask_id=ask_id, part=part)))

    def set_cordon(self, now: float, peer: str, cordoned: bool) -> list[Outer]:
        """Cordon a peer or this node itself, or undo it: its reports show when it is done."""
        order = SetCordon(cordoned=cordoned)
        own = peer == self.session.me
        return self._run(now, [Received(peer, order)] if own else self.session.send(now, peer, order))

    def defer_cordon(self) -> None:
        """Leave it to the process to hand in `CordonWanted`: it has something to do before the actor accepts nothing new."""
        self._defers_cordon = True

    def report(self, now: float) -> Report:
        """Return this process's report."""
        counts, gauges = self._facts() if self._facts is not None else (self.actor.counts, self.actor.gauges(now))
        return report(
            uptime_s=now - self._began_at,
            draining=self.draining or self.cordon_wanted or changes_role(counts),
            cordoned=self.cordoned,
            counts=counts,
            gauges=gauges,
            moved=self.transfer_stats.totals() if self.transfer_stats is not None else (),
            refused=self.session.refusals,
        )

    def _ask(self, now: float) -> list[SessionEvent]:
        watches = self.looking.to_ask(now, self.session.incarnations) if now < self.looking.until else ()
        return [event for peer, watch in watches for event in self.session.send(now, peer, watch)]

    def _send_reports(self, now: float) -> list[SessionEvent]:
        """Send the reports that are due. One may be lost: the next one repeats everything."""
        due = self.watchers.due(now)
        own = self.report(now) if due else None
        return [event for peer in due if own for event in self.session.send(now, peer, own, lossy=True)]

    def _on_watching(self, now: float, sender: str, message: Message) -> Sequence[Event]:
        match message:
            case Watch(for_s=for_s):
                self.watchers.ask(now, sender, for_s)
                return self._send_reports(now)
            case SetCordon(cordoned=cordoned):
                return self._set_cordon(cordoned)
            case Report():
                self.looking.receive_report(now, sender, message)
            case AskState():
                return self.session.send(now, sender, self._state_for(now, message))
            case StateReported() if self._on_state is not None:
                self._on_state(sender, message)
        return []

    def _set_cordon(self, cordoned: bool) -> Sequence[Event]:
        self.cordon_wanted = cordoned
        if cordoned == self.cordoned or (cordoned and self._defers_cordon):
            return []
        self.cordoned = cordoned
        return [CordonWanted(cordoned)]

    def state(self, now: float) -> bytes:
        """Return the process's whole state as JSON."""
        return json.dumps(self._state() if self._state is not None else self.dump(now), default=printable).encode()

    def _state_for(self, now: float, asked: AskState) -> StateReported:
        ask_id = asked.ask_id
        state = self._part(asked.part) if asked.part and self._part is not None else self.state(now)
        if len(state) > MAX_DUMP_BYTES:
            return StateReported(ask_id=ask_id, error=clip(f"{len(state)} bytes of state are more than a message takes"))
        return StateReported(ask_id=ask_id, state=state)

    def dump(self, now: float) -> dict[str, Any]:
        """Return the state of session and actor, JSON-able."""
        return {"session": self.session.dump(), "counts": dict(self.actor.counts), "actor": self.actor.dump(now)}

    def _run(self, now: float, events: Sequence[Event]) -> list[Outer]:
        queue = list(events)
        outer: list[Outer] = []
        position, leaves = 0, False
        to_client = ToClient  # most effects of a gateway: a search by name and `isinstance` would cost much as machine code
        while position < len(queue):
            event = queue[position]
            position += 1
            if isinstance(event, Received) and type(event.message) in WATCHING:
                queue += self._on_watching(now, event.sender, event.message)
                continue
            effects = self.actor.handle(now, event)
            if self._observe is not None:
                self._observe(now, event, effects)
            leaves = leaves or type(event) is DrainTimedOut
            for effect in effects:
                if type(effect) is to_client:
                    outer.append(effect)
                    continue
                if isinstance(effect, Send):
                    queue += self.session.send(now, effect.to, effect.message, lossy=effect.lossy)
                    continue
                outer.append(effect)
                leaves = leaves or type(effect) is Drained
                if isinstance(effect, Start) and self.transfer_stats is not None and type(effect.work) in COUNTED:
                    self.transfer_stats.begin(effect.work_id, effect.work)
        if leaves:
            self.session.leave(now)  # behind all that the actor had to send
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
