"""Conversations with peers: liveness, incarnations, and messages at most once and in order. PURE.

Messages between actors are repeated here and nowhere else. ZeroMQ loses what was queued when a connection breaks; a session
numbers its messages, resends them until acknowledged and drops duplicates. When a peer restarts, falls silent or stops
acknowledging, the whole *conversation* ends: the actor gets `PeerDown`, then `PeerUp` when a new one begins, and may rely on
no message sent before.

Each direction of a conversation is an *epoch* of its sender. Rules, for an envelope from peer P to this process:
- P's epoch is older than known or than our floor: P itself has given it up. The envelope is dropped and counted.
- P's incarnation is not the known one: the envelope may be an old incarnation's, long under way, or of a stranger that claims
  to be P. It is dropped and counted until the known incarnation has been silent: for `SECOND_INCARNATION_BEATS` heartbeats if
  the other one is newer (P was restarted), for the peer timeout if it is older (its clock went back and it lost its lock file,
  or the known one was never P's). So no stranger cuts P off by a number, and P cuts itself off for the peer timeout at most.
- P's incarnation is another one, and accepted, or its epoch is newer than known: P began anew, and our side of the old
  conversation ends.
- `floor` is above our epoch: P gave up on our epoch, and we begin a new one at `floor`.
- An epoch leaps by more than `MAX_LEAP`: no peer that counts its epochs sends that. Dropped and counted.
- `to_incarnation` is neither 0 nor ours: it was meant for our former incarnation. Dropped and counted.
- P began anew while we were up, yet demands no new epoch of ours (its greeting to our former incarnation reached us late): we
  give up too, or P would take our earlier messages as later ones.
The first messages of an epoch are `Hello`s, each sent once: one for each protocol that this process speaks, the newest first. A
peer is up once a Hello arrived in its current epoch whose protocol this process speaks, and which agrees with the
configuration; the later ones do not count. So both sides find the newest protocol that both speak, and the envelopes and
messages of the conversation are of that one. Until then envelopes are of the oldest protocol that their sender speaks. A
message that the peer's protocol lacks is not sent, and counted. Once it is up it may send what `routes.SAYS` allows its role
to send to ours, and nothing else.
The last message of a process that ends in order is `Goodbye`, behind all earlier ones: its receiver gives up on the
epoch at once, which acknowledges it. The process that leaves receives nothing more, and acknowledges no message that it will
not handle. If the goodbye is lost, the silence that follows ends the conversation.

A frame of an old incarnation O is not accepted after one of a newer incarnation N, unless it was under way for longer than the
peer timeout: O had ended when N began, so N must have been silent for that long when the frame arrives, and the frame is older
than the last one of N. (If the clock went back in between, O's number is the larger one, and the bound is two heartbeats.) A
frame that was under way for longer (a host cut off while its kernel still held O's last bytes, and N dead too meanwhile)
begins a conversation without a partner, whole from its Hello on or not at all, which ends by the peer timeout.

Where connections need keys, a frame counts only if its sender is the node whose key its connection has: the holder of a node's
key can send as that node, and no other process can.

The memory that one peer can make this process hold is bounded in bytes too: `GAP_BYTES` behind a gap.

**Lateness.** A process that gets no CPU neither sends nor receives, yet is not dead. A silence or a lack of acknowledgements
therefore counts only while we could have received and the peer could have sent:
- The time by which our own ticks came late does not count, nor for accepting another incarnation: the peers' frames lay unread
  in our sockets.
- Every envelope holds the recent lateness of its sender's loop. `LATE_BEATS` times as much of the silence does not count.
- A peer that waits for a CPU, as the kernel of this machine shows, is not given up.
Together these excuse at most `MOST_EXCUSED` peer timeouts of one silence. A dead peer is down after one peer timeout if no loop
was late, and at the first tick after `1 + MOST_EXCUSED` in any case. To decide later is safe: leases end by the clocks of
holder and granter, with or without a conversation, and another incarnation is accepted later, never earlier, so the bounds
above hold with more room.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from msgspec import structs

from mooncake_zmq.core.actor import PeerDown, PeerUp, Received
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import (
    MAX_BODIES,
    MAX_MESSAGE_BYTES,
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    Envelope,
    Goodbye,
    Hello,
    Message,
    ProtocolError,
    decode,
    decode_envelope,
    encode,
    speaks,
)
from mooncake_zmq.core.routes import SAYS, Kinds, Member

SessionEvent = PeerUp | PeerDown | Received


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Liveness and retransmission. Times in seconds."""

    heartbeat_s: float = 0.5
    """Longest interval between two frames to a peer."""
    peer_timeout_s: float = 3.0
    """A peer that is silent, or acknowledges nothing, for this long is down; up to four times as long if either side's loop was
    late. At least three heartbeats, and longer than a process may wait for a busy core."""
    retransmit_s: float = 0.4
    """An unacknowledged message is resent after this; well above a heartbeat's acknowledgement on a busy machine."""
    window_messages: int = 8192
    """Unacknowledged messages per peer; one more ends the conversation, as such a peer is too far behind to serve."""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_s * 3 <= self.peer_timeout_s:
            raise ValueError("peer_timeout_s must be at least 3 * heartbeat_s")
        if not 0 < self.retransmit_s < self.peer_timeout_s:
            raise ValueError("retransmit_s must be positive and below peer_timeout_s")
        if self.window_messages < 16:
            raise ValueError("window_messages must be at least 16")


REORDER_LIMIT = 256
"""Messages from a gap on that are kept, and that a retransmission repeats; later ones are sent again later."""
GAP_BYTES = MAX_MESSAGE_BYTES
"""`REORDER_LIMIT` in bytes: at least one message."""
SECOND_INCARNATION_BEATS = 2
"""Heartbeats that a peer's known incarnation must have missed before a newer one is accepted."""
MAX_LEAP = 1 << 20
"""Epochs that a peer may begin, or demand of us, at once: more would use up the numbers, so that no epoch could follow."""
MOST_EXCUSED = 3
"""Peer timeouts by which lateness may lengthen the one after which a silent peer is down."""
LATE_BEATS = 2
"""Multiple of a peer's lateness that is excused: it may be late again by more, or one of its frames be lost."""
LATE_HALF_LIFE_S = 10.0
"""Time in which the reported lateness of a loop is halved."""
FRAME_BYTES = 256 << 10
"""Messages share a frame up to this size; a longer one has a frame of its own."""
ACK_EVERY = 32
"""Received messages after which an acknowledgement is sent without waiting for the tick."""


Starved = Callable[[str, int], bool]
"""Returns whether this incarnation of this silent peer is known to wait for a CPU."""


@dataclass(slots=True)
class _Unacked:
    sequence: int
    body: bytes
    sent_at: float


@dataclass(slots=True)
class _Moment:
    """The time of something, and the sum of our own loop's lateness until then."""

    at: float
    late_s: float


@dataclass(slots=True)
class _Peer:
    """State of one peer. `epoch` is ours towards it, `remote_epoch` its own towards us."""

    name: str
    member: Member
    received: "_Moment"
    incarnation: int = 0
    epoch: int = 1
    remote_epoch: int = 0
    floor: int = 1
    hello: Hello | None = None
    says: Kinds = frozenset()
    """Types of the messages that its role may send to ours."""
    next_sequence: int = 1
    unacked: deque[_Unacked] = field(default_factory=deque)
    unsent: list[bytes] = field(default_factory=list)
    """The last messages of `unacked`, not transmitted yet."""
    unsent_bytes: int = 0
    expected: int = 1
    early: dict[int, bytes] = field(default_factory=dict)
    """Messages that arrived behind a gap, by sequence."""
    early_bytes: int = 0
    unreported: int = 0
    sent_at: float = float("-inf")
    acked: "_Moment" = field(default_factory=lambda: _Moment(0.0, 0.0))
    """The last time that the peer came up, acknowledged, or was sent a first unacknowledged message: we may receive from a peer
    that receives nothing from us."""
    late_s: float = 0.0
    """Recent lateness of its loop, as it reports."""
    spared: bool = False
    """Whether its present silence would have ended the conversation, had no loop been late."""
    left: bool = False
    """Whether it said goodbye, and has not come up since."""

    @property
    def up(self) -> bool:
        return self.hello is not None


class Session:
    """All conversations of one process. `outgoing` collects (peer, frame) pairs for the runtime to transmit.

    All messages of one event to one peer share a frame: call `flush` after the event, before reading `outgoing`.
    """

    def __init__(
        self,
        *,
        me: str,
        incarnation: int,
        hello: Hello,
        peers: Mapping[str, Member],
        settings: SessionSettings,
        now: float,
        starved: Starved = lambda peer, incarnation: False,
        protocols: tuple[int, int] = (OLDEST_PROTOCOL, PROTOCOL_VERSION),
    ) -> None:
        """`protocols`: the oldest and the newest that this process speaks; the Hellos name them, whatever `hello` names."""
        self.me = me
        self.incarnation = incarnation
        self.outgoing: list[tuple[str, bytes]] = []
        self.counts = Tally()
        self.refusals: dict[str, str] = {}
        """Reason why a peer's Hello was refused, by peer, for the log and the state dump."""
        self._hello = hello
        self._oldest, self._newest = protocols
        self._settings = settings
        self._waiting: list[_Peer] = []
        """Peers that may have unsent messages."""
        self._starved = starved
        self._tick_s = min(settings.heartbeat_s, settings.retransmit_s) / 2
        self._ticked_at = now
        self._late_s = 0.0
        """Sum of the lateness of all ticks."""
        self.recent_late_s = 0.0
        """Recent lateness of the loop, as reported to peers."""
        self._departing = False
        """Whether this process has said goodbye."""
        self._peers = {name: _Peer(name, peers[name], self._moment(now)) for name in sorted(peers) if name != me}

    @property
    def tick_s(self) -> float:
        """Interval in which the runtime calls `tick`."""
        return self._tick_s

    @property
    def up_peers(self) -> Mapping[str, Hello]:
        """Peers with a conversation, with their Hellos."""
        return {name: peer.hello for name, peer in self._peers.items() if peer.hello is not None}

    @property
    def departed(self) -> list[str]:
        """Peers that said goodbye and have not come up since."""
        return [name for name, peer in self._peers.items() if peer.left]

    @property
    def incarnations(self) -> Mapping[str, int]:
        """Incarnations of the peers with a conversation."""
        return {name: peer.incarnation for name, peer in self._peers.items() if peer.hello is not None}

    @property
    def unacknowledged(self) -> int:
        """Number of unacknowledged messages to peers that are up; a draining process waits until it is 0."""
        return sum(len(peer.unacked) for peer in self._peers.values() if peer.up)

    @property
    def lateness_s(self) -> float:
        """Recent lateness of this loop or of a peer's, the larger one: an awaited message may come later by so much."""
        worst_s = max((peer.late_s for peer in self._peers.values() if peer.up), default=0.0)
        return min(max(self.recent_late_s, worst_s), MOST_EXCUSED * self._settings.peer_timeout_s)

    def silent_s(self, now: float, name: str) -> float:
        """Return the time since the last frame from a peer."""
        return now - self._peers[name].received.at

    def start(self, now: float) -> None:
        """Greet every peer."""
        self._ticked_at = now
        for peer in self._peers.values():
            self._begin_epoch(now, peer, peer.epoch)

    def send(self, now: float, to: str, message: Message, *, lossy: bool = False) -> list[SessionEvent]:
        """Queue a message. Returns events, as a peer that leaves a whole window unacknowledged is given up."""
        peer = self._peers.get(to)
        if peer is None or not peer.up or self._departing:
            self.counts.add("dropped[reason=peer_down]")
            return []
        protocol = _protocol(peer, self._oldest)
        if not speaks(protocol, type(message)):
            self.counts.add(f"unspoken[message={type(message).__name__}]")
            return []
        if lossy:
            self._transmit(now, peer, 0, (encode(message, protocol),))
            return []
        if len(peer.unacked) >= self._settings.window_messages:
            self.counts.add("windows_full")
            return self._give_up(now, peer, "window full")
        self._send_sequenced(now, peer, encode(message, protocol))
        return []

    def leave(self, now: float) -> None:
        """Say goodbye to every peer; from here on nothing is sent but what is unacknowledged, and nothing received."""
        if self._departing:
            return
        self._departing = True
        for peer in self._peers.values():
            if peer.up:
                self._send_sequenced(now, peer, encode(Goodbye()))

    def receive(self, now: float, frame: bytes, key_of: str | None = None) -> list[SessionEvent]:
        """Handle one frame. `key_of`: the node whose key its connection has shown; None: the connection needs no key."""
        try:
            envelope = decode_envelope(frame)
        except ProtocolError:
            self.counts.add("dropped[reason=malformed]")
            return []
        if not _is_by(envelope.sender, key_of):
            self.counts.add("dropped[reason=not_its_key]")
            return []
        peer = self._peers.get(envelope.sender)
        reason = self._refusal(now, peer, envelope)
        if peer is None or reason is not None:
            self.counts.add(f"dropped[reason={reason}]")
            return self._greet_anew(now, peer, envelope) if peer is not None and reason == "former_incarnation" else []
        if self._departing:
            if envelope.to_incarnation == self.incarnation and envelope.floor > peer.epoch:
                peer.unacked.clear()  # it has ended the conversation, which acknowledges everything
            _acknowledge(peer, envelope)
            return []
        events = self._follow(now, peer, envelope)
        peer.received = received = self._moment(now)
        peer.late_s, peer.spared = envelope.late_ms / 1000, False
        if envelope.epoch < peer.floor:
            return events
        if _acknowledge(peer, envelope):
            peer.acked = received
        if envelope.sequence > 0:
            return events + self._accept_sequenced(now, peer, envelope)
        for body in envelope.bodies:
            events += self._deliver(now, peer, body) if peer.up else []
        return events

    def tick(self, now: float) -> list[SessionEvent]:
        """Send heartbeats and retransmissions, and apply timeouts; call every `tick_s`."""
        late_s = self._note_lateness(now)
        events: list[SessionEvent] = []
        for peer in self._peers.values():
            reason = "" if self._departing or not peer.up else self._timed_out(now, peer)
            if reason:
                self.counts.add("timeouts")
                events += self._give_up(now, peer, reason)
            if peer.unacked and now - late_s - peer.unacked[0].sent_at >= self._resend_after_s(peer):
                self._resend(now, peer)
            if peer.unreported or now - peer.sent_at >= self._settings.heartbeat_s:
                self._transmit(now, peer, 0, ())
        return events

    def _timed_out(self, now: float, peer: _Peer) -> str:
        """Return why the conversation with a peer ends by the peer timeout; empty: it does not."""
        if self._lasts(now, peer, peer.received):
            return "silent"
        return "acknowledges nothing" if peer.unacked and self._lasts(now, peer, peer.acked) else ""

    def _note_lateness(self, now: float) -> float:
        """Return the lateness of this tick, and count it."""
        since_s = now - self._ticked_at
        late_s = max(0.0, since_s - self.tick_s)
        self._ticked_at = now
        self._late_s += late_s
        self.recent_late_s = max(late_s, self.recent_late_s * math.pow(0.5, since_s / LATE_HALF_LIFE_S))
        self.counts.add("late_loops", int(late_s > self._settings.heartbeat_s))
        return late_s

    def _resend_after_s(self, peer: _Peer) -> float:
        """Return the time until a message is resent: longer for a late peer, which retransmissions would make later still."""
        return self._settings.retransmit_s + min(peer.late_s, self._settings.peer_timeout_s / 3)

    def _moment(self, now: float) -> _Moment:
        """Return the present moment; its lateness includes that of an overdue tick."""
        return _Moment(now, self._late_s + max(0.0, now - self._ticked_at - self._tick_s))

    def _lasts(self, now: float, peer: _Peer, since: _Moment) -> bool:
        """Return whether a silence of this peer since `since` has lasted for the peer timeout and what lateness excuses."""
        timeout_s = self._settings.peer_timeout_s
        if now - since.at <= timeout_s:
            return False
        lasts = self._counted_s(now, since, LATE_BEATS * peer.late_s) > timeout_s
        most_s = (1 + MOST_EXCUSED) * timeout_s
        if lasts and (now - since.at > most_s or not self._starved(peer.name, peer.incarnation)):
            return True
        self.counts.add("peers_spared", int(not peer.spared))
        peer.spared = True
        return False

    def _counted_s(self, now: float, since: _Moment, excused_s: float = 0.0) -> float:
        """Return the time since `since` less this loop's lateness and `excused_s`, which are limited together."""
        excused_s += self._moment(now).late_s - since.late_s
        return now - since.at - min(excused_s, MOST_EXCUSED * self._settings.peer_timeout_s)

    def flush(self, now: float) -> None:
        """Put the messages since the last call into `outgoing`."""
        for peer in self._waiting:
            self._flush(now, peer)
        self._waiting.clear()

    def dump(self) -> dict[str, object]:
        """Return the state, JSON-able, for debugging."""
        return {
            "me": self.me,
            "incarnation": self.incarnation,
            "refusals": self.refusals,
            "counts": self.counts,
            "peers": {
                p.name: {
                    "up": p.up,
                    "protocol": _protocol(p, self._oldest),
                    "incarnation": p.incarnation,
                    "epoch": p.epoch,
                    "remote_epoch": p.remote_epoch,
                    "unacked": len(p.unacked),
                }
                for p in self._peers.values()
            },
        }

    def _refusal(self, now: float, peer: _Peer | None, envelope: Envelope) -> str | None:
        if not self._oldest - 1 <= envelope.version <= self._newest:  # a peer of the former protocol may speak one more
            return "version"
        if peer is None:
            return "stranger"
        if envelope.to_incarnation not in (0, self.incarnation):
            return "former_incarnation"
        known = max(peer.remote_epoch, peer.floor)
        if envelope.incarnation != peer.incarnation:
            if peer.incarnation and self._counted_s(now, peer.received) < self._silence_s(peer, envelope):
                return "other_incarnation"
            known = 1
        elif envelope.epoch < known:
            return "old_epoch"
        return "leap" if envelope.epoch - known > MAX_LEAP or envelope.floor - peer.epoch > 2 * MAX_LEAP else None

    def _greet_anew(self, now: float, peer: _Peer, envelope: Envelope) -> list[SessionEvent]:
        """Forget a peer's incarnation that has been silent while another one writes to a former incarnation of ours: each side
        would else drop all that the other writes, since it is for an incarnation that has ended."""
        if peer.incarnation in (0, envelope.incarnation) or self._departing:
            return []
        if self._counted_s(now, peer.received) < self._silence_s(peer, envelope):
            return []
        events = _down(peer, "restarted")
        peer.incarnation = peer.remote_epoch = 0
        peer.floor = 1
        self._begin_epoch(now, peer, peer.epoch + 1)
        return events

    def _silence_s(self, peer: _Peer, envelope: Envelope) -> float:
        """Return how long the known incarnation must have been silent for another one to be accepted."""
        settings = self._settings
        newer = envelope.incarnation > peer.incarnation
        return SECOND_INCARNATION_BEATS * settings.heartbeat_s if newer else settings.peer_timeout_s

    def _follow(self, now: float, peer: _Peer, envelope: Envelope) -> list[SessionEvent]:
        """Follow the peer into its current incarnation and epoch, and into a new epoch of ours if it gave up on the old one."""
        events: list[SessionEvent] = []
        reborn = envelope.incarnation != peer.incarnation
        began_anew = reborn or envelope.epoch > peer.remote_epoch
        if began_anew:
            events += _down(peer, "restarted" if reborn else "began anew")
            known_before = peer.incarnation
            peer.incarnation, peer.remote_epoch = envelope.incarnation, envelope.epoch
            peer.expected = 1
            peer.early.clear()
            peer.early_bytes = 0
            if reborn:
                peer.floor = 1
                if known_before:
                    self._begin_epoch(now, peer, peer.epoch + 1)
        if envelope.to_incarnation == self.incarnation and envelope.floor > peer.epoch:
            events += _down(peer, "peer gave up")
            self._begin_epoch(now, peer, envelope.floor)
        elif began_anew and not reborn and events:
            self._give_up(now, peer, "began anew")
        return events

    def _accept_sequenced(self, now: float, peer: _Peer, envelope: Envelope) -> list[SessionEvent]:
        events: list[SessionEvent] = []
        for sequence, body in enumerate(envelope.bodies, envelope.sequence):
            peer.unreported += 1
            events += self._accept(now, peer, sequence, body)
        if peer.unreported >= ACK_EVERY:
            self._transmit(now, peer, 0, ())
        return events

    def _accept(self, now: float, peer: _Peer, sequence: int, body: bytes) -> list[SessionEvent]:
        if sequence > peer.expected:
            fits = sequence < peer.expected + REORDER_LIMIT and peer.early_bytes + len(body) <= GAP_BYTES
            if fits and sequence not in peer.early:
                peer.early[sequence] = body
                peer.early_bytes += len(body)
            return []
        if sequence < peer.expected:
            self.counts.add("duplicates")
            return []
        events: list[SessionEvent] = []
        following: bytes | None = body
        while following is not None:
            peer.expected += 1
            events += self._deliver(now, peer, following)
            following = peer.early.pop(peer.expected, None)
            peer.early_bytes -= len(following or b"")
        return events

    def _deliver(self, now: float, peer: _Peer, body: bytes) -> list[SessionEvent]:
        try:
            message = decode(body)
        except ProtocolError:
            self.counts.add("dropped[reason=invalid]")
            return []
        if isinstance(message, Hello):
            if peer.hello is not None:
                older = message.protocol < peer.hello.protocol
                self.counts.add("dropped[reason=second_hello]", int(not older))
                return []
            return self._greeted(now, peer, message)
        if not peer.up:
            self.counts.add("dropped[reason=no_hello]")
            return []
        if isinstance(message, Goodbye):
            peer.left = True
            return self._give_up(now, peer, "left")
        if type(message) not in peer.says:
            self.counts.add("dropped[reason=not_of_its_role]")
            return []
        return [Received(peer.name, message)]

    def _greeted(self, now: float, peer: _Peer, hello: Hello) -> list[SessionEvent]:
        objection = _objection(self.me, self._hello, (self._oldest, self._newest), peer, hello)
        if objection is not None:
            what, why = objection
            self.counts.add(f"refused[reason={what}]", int(self.refusals.get(peer.name) != why))
            self.refusals[peer.name] = why
            return []
        self.refusals.pop(peer.name, None)
        peer.hello, peer.says = hello, SAYS.get((hello.role, self._hello.role), frozenset())
        peer.acked, peer.left = self._moment(now), False
        return [PeerUp(peer.name, peer.incarnation, hello)]

    def _give_up(self, now: float, peer: _Peer, reason: str) -> list[SessionEvent]:
        events = _down(peer, reason)
        peer.floor = peer.remote_epoch + 1
        self._begin_epoch(now, peer, peer.epoch + 1)
        return events

    def _begin_epoch(self, now: float, peer: _Peer, epoch: int) -> None:
        peer.epoch = epoch
        peer.next_sequence = 1
        peer.unacked.clear()
        peer.unsent.clear()
        peer.unsent_bytes = 0
        for protocol in range(self._newest, self._oldest - 1, -1):
            self._send_sequenced(now, peer, encode(structs.replace(self._hello, protocol=protocol), protocol))

    def _send_sequenced(self, now: float, peer: _Peer, body: bytes) -> None:
        if len(peer.unsent) == MAX_BODIES or peer.unsent_bytes + len(body) > FRAME_BYTES:
            self._flush(now, peer)
        sequence = peer.next_sequence
        peer.next_sequence += 1
        if not peer.unacked:
            peer.acked = self._moment(now)
        peer.unacked.append(_Unacked(sequence, body, now))
        if not peer.unsent:
            self._waiting.append(peer)
        peer.unsent.append(body)
        peer.unsent_bytes += len(body)

    def _flush(self, now: float, peer: _Peer) -> None:
        if peer.unsent:
            self._transmit(now, peer, peer.next_sequence - len(peer.unsent), tuple(peer.unsent))
            peer.unsent.clear()
            peer.unsent_bytes = 0

    def _resend(self, now: float, peer: _Peer) -> None:
        """Go back to the oldest unacknowledged message; the receiver keeps what follows a gap, as far as it has room."""
        room = GAP_BYTES
        for unacked in islice(peer.unacked, REORDER_LIMIT):
            room -= len(unacked.body)
            if room < 0:
                break
            self.counts.add("retransmits")
            unacked.sent_at = now
            self._transmit(now, peer, unacked.sequence, (unacked.body,))

    def _transmit(self, now: float, peer: _Peer, sequence: int, bodies: tuple[bytes, ...]) -> None:
        peer.sent_at = now
        peer.unreported = 0
        protocol = _protocol(peer, self._oldest)
        frame = encode(
            Envelope(
                version=protocol,
                sender=self.me,
                incarnation=self.incarnation,
                epoch=peer.epoch,
                to_incarnation=peer.incarnation,
                floor=peer.floor,
                sequence=sequence,
                ack_epoch=peer.remote_epoch,
                ack=peer.expected - 1,
                bodies=bodies,
                late_ms=int(1000 * self.recent_late_s),
            ),
            protocol,
        )
        self.outgoing.append((peer.name, frame))


def _protocol(peer: _Peer, oldest: int) -> int:
    """Return the protocol that is spoken to a peer: `oldest` until it has greeted."""
    return oldest if peer.hello is None else peer.hello.protocol


def _down(peer: _Peer, reason: str) -> list[SessionEvent]:
    was_up, peer.hello = peer.up, None
    return [PeerDown(peer.name, reason)] if was_up else []


def _objection(me: str, mine: Hello, spoken: tuple[int, int], peer: _Peer, hello: Hello) -> tuple[str, str] | None:
    """Return what of a peer's Hello is refused, and why; None: nothing."""
    (oldest, newest), exact, name = spoken, peer.member.fingerprints, peer.name
    if not oldest <= hello.protocol <= newest:
        # That of a newer protocol may be followed by one that both speak.
        what = "protocol" if hello.protocol < oldest else "newer_protocol"
        return what, f"protocol differs: {name} has {hello.protocol}, {me} has {oldest} to {newest}"
    for what in ("model", "tokenizer", "layout"):
        theirs, ours = getattr(hello, what), exact[what] if what in exact else getattr(mine, what)
        if theirs != ours and (what in exact or not _overlap(theirs, ours)):
            decides = "; model.kv_codec, model.block_tokens and the model's shape decide it" if what == "layout" else ""
            return what, f"{what} differs: {name} has {theirs}, {me} has {ours}{decides}"
    if hello.role not in peer.member.roles or hello.host != peer.member.host:
        configured = f"{'/'.join(peer.member.roles)} on {peer.member.host}"
        return "member", f"{name} says it is a {hello.role} on {hello.host}, the configuration: {configured}"
    return None


def _acknowledge(peer: _Peer, envelope: Envelope) -> bool:
    """Forget what an envelope acknowledges; return whether that is anything."""
    before = len(peer.unacked)
    if envelope.ack_epoch == peer.epoch:
        while peer.unacked and peer.unacked[0].sequence <= envelope.ack:
            peer.unacked.popleft()
    return len(peer.unacked) < before


def _overlap(theirs: str, ours: str) -> bool:
    """Return whether one of two lists of fingerprints, which are separated by spaces, has all of the other's."""
    these, those = set(theirs.split()), set(ours.split())
    return bool(these and those) and (these <= those or those <= these)


def _is_by(sender: str, key_of: str | None) -> bool:
    """Return whether the holder of the key of `key_of` may send as `sender`."""
    return key_of is None or key_of == sender
