"""Frames of strangers, impostors and former incarnations, which a session must drop and count."""

from collections import Counter
from typing import Any

from mooncake_zmq.core.messages import PROTOCOL_VERSION, Envelope, decode_envelope, encode
from mooncake_zmq.core.session import Session
from mooncake_zmq.simulation.machine import Machine
from mooncake_zmq.simulation.simulator import Simulator
from mooncake_zmq.simulation.violation import Violation
from mooncake_zmq.simulation.world import Process


class Garbage:
    """Sends such frames to the processes of a simulator. `counts`: how many of each kind were sent."""

    def __init__(self, simulator: Simulator) -> None:
        self.counts: Counter[str] = Counter()
        self._simulator = simulator

    def impersonate(self, process: Process[Machine], name: str) -> None:
        """Send one frame to `process` from a sender that claims to be a new incarnation of `name`, and no more."""
        simulator = self._simulator
        running = process.current
        if running is None or running.paused or name not in process.spec.peers:
            return
        if simulator.sessions.keyed:
            self._betray(process, running.incarnation, name)
            return
        frame = Envelope(
            version=PROTOCOL_VERSION,
            sender=name,
            incarnation=simulator.random.choice((1, 1 << 48)),
            epoch=1,
            to_incarnation=0,
            floor=1,
            sequence=0,
            ack_epoch=0,
            ack=0,
        )
        simulator.sessions.arrive(process, encode(frame), name)

    def _betray(self, process: Process[Machine], incarnation: int, name: str) -> None:
        """Send one frame to `process` by another member, which has all the state of `name` and claims to be its new
        incarnation."""
        simulator = self._simulator
        known: Any = _session(process).dump()["peers"]
        victim = known[name]
        frame = Envelope(
            version=PROTOCOL_VERSION,
            sender=name,
            incarnation=victim["incarnation"] or 1,
            epoch=victim["remote_epoch"] + 1,
            to_incarnation=incarnation,
            floor=victim["epoch"] + 1,
            sequence=0,
            ack_epoch=0,
            ack=0,
        )
        members = [each for each in simulator.processes if each not in (name, process.name)]
        self._must_drop(process, encode(frame), "traitor's", simulator.random.choice(members))

    def send(self, process: Process[Machine]) -> None:
        """Send a frame that must be dropped and counted, and do nothing else."""
        running = process.current
        if running is None or running.paused:
            return
        kind, frame = self._draw_garbage(process)
        self._must_drop(process, frame, kind, self._simulator.random.choice(list(process.spec.peers)))

    def _must_drop(self, process: Process[Machine], frame: bytes, kind: str, speaker: str) -> None:
        simulator = self._simulator
        self.counts[kind] += 1
        session = _session(process)
        before = _dropped(session)
        assert process.current is not None
        assert process.current.node is not None
        outers = process.current.node.receive(simulator.clock(process), frame, speaker if simulator.sessions.keyed else None)
        if outers or _dropped(session) != before + 1:
            raise Violation("I6", f"{process.name} did not drop and count a {kind} frame: {outers}")

    def _draw_garbage(self, process: Process[Machine]) -> tuple[str, bytes]:
        simulator = self._simulator
        random, peers = simulator.random, process.spec.peers
        former = [frame for peer in peers for frame in self._stale_frames(process, peer)]
        speaking = [peer for peer in peers if self._speaks(process, peer)]
        kinds = ["noise", "truncated", "stranger", "version"]
        kinds += ["old_incarnation"] * 2 * bool(former) + ["impostor"] * 2 * bool(speaking)
        kind = random.choice(kinds)
        if kind == "old_incarnation":
            return kind, random.choice(former)
        if kind == "noise":
            return kind, random.randbytes(random.randrange(200))
        impostor = kind == "impostor"
        envelope = Envelope(
            version=99 if kind == "version" else PROTOCOL_VERSION,
            sender="stranger" if kind == "stranger" else random.choice(speaking if impostor else peers),
            incarnation=1 << 40,
            epoch=1,
            to_incarnation=0 if impostor else process.next_incarnation,
            floor=1,
            sequence=1,
            ack_epoch=1,
            ack=0,
            bodies=(b"\x90",),
        )
        frame = encode(envelope)
        return kind, frame[: random.randrange(len(frame))] if kind == "truncated" else frame

    def _stale_frames(self, process: Process[Machine], peer: str) -> list[bytes]:
        """Return frames to `process` of an incarnation of `peer` that it knows to be over, since its session is with a newer
        one. From a peer that has been silent for too long it accepts any incarnation."""
        simulator = self._simulator
        current = simulator.processes[peer].current
        if _session(process).silent_s(simulator.clock(process), peer) >= simulator.silence_s:
            return []
        peers: Any = _session(process).dump()["peers"]
        known = peers[peer]
        if current is None or not known["up"] or known["incarnation"] != current.incarnation:
            return []
        former = [frame for to, frame in simulator.processes[peer].former_frames if to == process.name]
        return [frame for frame in former if decode_envelope(frame).incarnation < current.incarnation]

    def _speaks(self, process: Process[Machine], peer: str) -> bool:
        """Return whether `process` has just received something of `peer`, so that it accepts no other by that name."""
        session = _session(process)
        return peer in session.up_peers and session.silent_s(self._simulator.clock(process), peer) < session.tick_s


def _session(process: Process[Machine]) -> Session:
    assert process.current is not None
    assert process.current.node is not None
    return process.current.node.session


def _dropped(session: Session) -> int:
    return sum(count for name, count in session.counts.items() if name.startswith("dropped["))
