"""Two transports of messages: through sessions, encoded, over wires that may lose them; or handed over as they are.

`Sessions` is the live protocol with nothing left out. `Direct` is for replaying traces: a process that runs is up, messages
arrive once, in order and after a fixed time, and no time goes to heartbeats and codecs.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from mooncake_zmq.core.actor import Event, Outer, PeerDown, PeerUp, Received, Send, Started, Transmit
from mooncake_zmq.core.messages import PROTOCOL_VERSION, Hello, Message
from mooncake_zmq.core.node import Node
from mooncake_zmq.core.routes import Member
from mooncake_zmq.core.session import Session, SessionSettings
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.simulation.releases import THIS, Protocols, check_frame
from mooncake_zmq.simulation.violation import Violation
from mooncake_zmq.simulation.world import Incarnation, Process, World

HelloOf = Callable[[Process[Any]], Hello]
ProtocolsOf = Callable[[Process[Any]], Protocols]
StarvedAt = Callable[[Process[Any], str, int], bool]
"""Returns what the kernel of a process's host shows of a peer's incarnation; see `session.Starved`."""

UNREADABLE = "dropped[reason=invalid]"
"""Name of the count of messages that are beyond a limit: their sender never learns of it, and what they say is lost."""


@dataclass(slots=True)
class Wires:
    """The faults of the wires: chances per frame, a further random delay, and the number of cuts of each directed pair."""

    frame_s: float
    """The time of one control frame to another process, stretched by up to `jitter` at random."""
    jitter: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    delay_s: float = 0.0
    cut: Counter[tuple[str, str]] = field(default_factory=Counter)


class Sessions:
    """A link through sessions, which encode and decode every frame. `note` is called with each received frame. `keyed`: the
    wire names the key by which a frame came, as CURVE does. `starved`: what kernels show; by default nothing."""

    def __init__(
        self,
        *,
        settings: SessionSettings,
        hello: HelloOf,
        wires: Wires,
        random: Random,
        note: Callable[[bytes, Process[Any]], None] | None = None,
        keyed: bool = False,
        layout: BlockLayout | None = None,
        starved: StarvedAt = lambda process, peer, incarnation: False,
        protocols: ProtocolsOf = lambda process: THIS,
    ) -> None:
        self.wires = wires
        self._starved = starved
        self._layout = layout
        self.keyed = keyed
        self._settings = settings
        self._hello = hello
        self._protocols = protocols
        self._random = random
        self._note = note
        self._arrivals: dict[tuple[str, str], float] = {}
        """The arrival of each directed pair's last frame: without a fault the wire keeps their order."""
        self._world: World[Any]

    def attach(self, world: World[Any]) -> None:
        self._world = world

    def begin(self, process: Process[Any]) -> None:
        current, world = process.current, self._world
        assert current is not None
        session = Session(
            me=process.name,
            incarnation=current.incarnation,
            hello=self._hello(process),
            peers={name: _member(world.processes[name]) for name in process.spec.peers},
            settings=self._settings,
            now=world.clock(process),
            starved=partial(self._starved, process),
            protocols=self._protocols(process),
        )
        looks = current.observe
        observe = None if looks is None else lambda _now, event, effects: looks(event, effects)
        current.node = Node(current.actor, session, layout=self._layout, observe=observe)
        world.in_incarnation(process, world.now, self._start, process)
        world.in_incarnation(process, world.now + session.tick_s * self._random.random(), self._tick, process)

    def end(self, process: Process[Any], current: Incarnation[Any]) -> None:
        """See `world.Link`."""

    def handle(self, process: Process[Any], event: Event) -> None:
        self._carry_out(process, _node(process).handle(self._world.clock(process), event))

    def pending(self, process: Process[Any]) -> int:
        return _node(process).session.unacknowledged

    def look(self, process: Process[Any], for_s: float) -> None:
        """Have this gateway report the cluster's state to an operator, and ask its first peer for all its state."""
        node, now = _node(process), self._world.clock(process)
        self._carry_out(process, node.look(now, for_s))
        for peer in list(node.session.up_peers)[:1]:
            self._carry_out(process, node.ask_state(now, peer, 1))

    def set_cordon(self, process: Process[Any], peer: str, cordoned: bool) -> None:
        """Have this gateway cordon a peer or itself, or end that."""
        self._carry_out(process, _node(process).set_cordon(self._world.clock(process), peer, cordoned))

    def _start(self, process: Process[Any]) -> None:
        self._carry_out(process, _node(process).start(self._world.clock(process), Started()))

    def _tick(self, process: Process[Any]) -> None:
        node, world = _node(process), self._world
        self._carry_out(process, node.tick(world.clock(process)))
        world.in_incarnation(process, world.now + node.session.tick_s, self._tick, process)

    def _carry_out(self, process: Process[Any], outers: list[Outer]) -> None:
        current = process.current
        assert current is not None
        for outer in outers:
            if isinstance(outer, Transmit):
                current.recent.append((outer.to, outer.frame))
                self._transmit(process.name, outer.to, outer.frame)
            else:
                self._world.carry_out(process, current, outer)

    def _transmit(self, sender: str, to: str, frame: bytes) -> None:
        random, wires, world = self._random, self.wires, self._world
        if wires.cut[sender, to] or (wires.drop and random.random() < wires.drop):
            return
        copies = 2 if wires.duplicate and random.random() < wires.duplicate else 1
        process = world.processes[to]
        for _ in range(copies):
            arrival = world.now + wires.frame_s * (1 + wires.jitter * random.random())
            if wires.delay_s:
                arrival += wires.delay_s * random.random()
            else:
                arrival = max(arrival, self._arrivals.get((sender, to), 0.0))
                self._arrivals[sender, to] = arrival
            world.at(arrival, self.arrive, process, frame, sender)

    def arrive(self, process: Process[Any], frame: bytes, speaker: str) -> None:
        """Deliver a frame to the present incarnation; envelopes name the one that they are meant for. `speaker`: the owner of
        the key. A host that is suspended receives nothing: connections to it break."""
        if process.current is not None and process.still_since is None:
            self._world.let(process.current, self._receive, (process, frame, speaker))

    def read_first(self, current: Incarnation[Any]) -> None:
        """Have frames that came while a process stood still read before any of its timers fires, as they lie in its sockets."""
        current.postponed = deque(sorted(current.postponed, key=lambda waiting: waiting[0] != self._receive))

    def _receive(self, process: Process[Any], frame: bytes, speaker: str) -> None:
        if self._note is not None:
            self._note(frame, process)
        newest = self._protocols(process)[1]
        if newest < PROTOCOL_VERSION:
            check_frame(process.name, newest, frame)
        node, key_of = _node(process), speaker if self.keyed else None
        self._carry_out(process, node.receive(self._world.clock(process), frame, key_of))
        if UNREADABLE in node.session.counts:
            raise Violation("I6", f"{speaker} sent {process.name} a message that it cannot read")


def _member(process: Process[Any]) -> Member:
    return Member(tuple(process.by_role), process.spec.host)


def _node(process: Process[Any]) -> Node:
    assert process.current is not None
    assert process.current.node is not None
    return process.current.node


class Direct:
    """A link that hands messages over as objects, `delay_s` after they were sent. Peers are up while both run. A stopped
    process loses nothing."""

    def __init__(self, *, delay_s: float, hello: HelloOf) -> None:
        self._delay_s = delay_s
        self._hello = hello
        self._world: World[Any]

    def attach(self, world: World[Any]) -> None:
        self._world = world

    def begin(self, process: Process[Any]) -> None:
        world = self._world
        world.in_incarnation(process, world.now, self.handle, process, Started())
        for name in sorted(process.spec.peers):
            peer = world.processes[name]
            if peer.current is not None and process.name in peer.spec.peers:
                self._meet(process, peer)
                self._meet(peer, process)

    def _meet(self, process: Process[Any], peer: Process[Any]) -> None:
        world = self._world
        up = PeerUp(peer.name, peer.starts, self._hello(peer))
        world.in_incarnation(process, world.now + self._delay_s, self.handle, process, up)

    def end(self, process: Process[Any], current: Incarnation[Any]) -> None:
        world = self._world
        for name in sorted(process.spec.peers):
            peer = world.processes[name]
            if peer.current is not None and process.name in peer.spec.peers:
                down = PeerDown(process.name, "its incarnation is over")
                world.in_incarnation(peer, world.now + self._delay_s, self.handle, peer, down)

    def handle(self, process: Process[Any], event: Event) -> None:
        current, world = process.current, self._world
        assert current is not None
        now = world.now
        effects = current.actor.handle(now, event)
        if current.observe is not None:
            current.observe(event, effects)
        processes, acts, deliver = world.processes, world.acts, self._deliver
        for effect in effects:
            if type(effect) is Send:
                current.sent_at = now
                to = processes[effect.to]
                world.post(now + self._delay_s, deliver, (to, to.starts, process, process.starts, effect.message))
            else:
                acts[type(effect)](process, current, effect)

    def pending(self, process: Process[Any]) -> int:
        assert process.current is not None
        return int(self._world.now <= process.current.sent_at + self._delay_s)

    def _deliver(self, to: Process[Any], starts: int, sender: Process[Any], sender_starts: int, message: Message) -> None:
        """Deliver a message between the two incarnations that ran when it was sent, or not at all."""
        current = to.current
        if current is None or to.starts != starts or sender.current is None or sender.starts != sender_starts:
            return
        event = Received(sender.name, message)
        if current.paused or current.postponed:
            current.postponed.append((self.handle, (to, event)))
        else:
            self.handle(to, event)
