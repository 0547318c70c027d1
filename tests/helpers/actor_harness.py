"""Drives one actor by hand: its effects are applied (timers, works, fences, sequences), and it is checked after every event."""

import json
from collections import Counter
from collections.abc import Sequence

from mooncake_zmq.core.actor import (
    CancelTimer,
    CancelWork,
    CloseSequence,
    CordonWanted,
    Drained,
    DrainTimedOut,
    DrainWanted,
    Fence,
    FromClient,
    OpenSequence,
    PeerDown,
    PeerUp,
    Publish,
    Received,
    Send,
    SetTimer,
    Start,
    Started,
    TimerFired,
    ToClient,
    WorkDone,
    WorkProgress,
)
from mooncake_zmq.core.messages import PROTOCOL_VERSION, BlocksLeased, Hello, SlotRef, decode, encode
from mooncake_zmq.kv.layout import BlockLayout

LAYOUT = BlockLayout(layers=2, kv_heads=1, head_dim=2, block_tokens=4)
ROLES = {"g": "gateway", "k": "conductor", "p": "prefill", "d": "decode", "c": "cache-node", "v": "vllm"}


def leased(lease_id: int, sources: Sequence[SlotRef], *, remote: int = 0, node: str = "c") -> BlocksLeased:
    """What the cache-node that holds `sources` (if any, else `node`) says of a lease."""
    return BlocksLeased(
        lease_id=lease_id,
        node=sources[0].node if sources else node,
        incarnation=sources[0].incarnation if sources else 1,
        slots=tuple(ref.slot for ref in sources),
        generations=tuple(ref.generation for ref in sources),
        checksums=tuple(ref.checksum for ref in sources),
        remote=remote,
    )


class Harness:
    """`sent`, `works`, `progress` hold what was not looked at yet; `take` and `work` look at it."""

    def __init__(self, actor, *, name="me", start=100.0):
        self.actor = actor
        self.now = start
        self.timers = {}
        self.works = {}
        self.cancelled = []
        self.sequences = set()
        self.longest_sequence = 0
        self.fences = {}
        self.sent = []
        self.clients = []
        self.published = []
        self.drained = self.cordons = False
        self.peers = {}
        self.work_ids = Counter()
        self.handle(Started())

    def handle(self, event):
        effects = self.actor.handle(self.now, event)
        self.actor.check(self.now)
        json.dumps(self.actor.dump(self.now))
        for effect in effects:
            self.apply(effect)
        return effects

    def apply(self, effect):
        match effect:
            case Send(to, message):
                assert decode(encode(message)) == message
                if to in self.peers:
                    self.sent.append((to, message))
            case SetTimer(key, delay_s):
                assert delay_s >= 0
                self.timers[key] = self.now + delay_s
            case CancelTimer(key):
                self.timers.pop(key, None)
            case Start(work_id, work, deadline_s):
                assert deadline_s > 0
                self.work_ids[work_id] += 1
                assert self.work_ids[work_id] == 1, "ids of works are never used again"
                self.works[work_id] = work
                sequence = getattr(work, "sequence", None)
                assert sequence is None or sequence in self.sequences
            case CancelWork(work_id):
                assert work_id in self.works
                self.cancelled.append(work_id)
            case OpenSequence(sequence, capacity_tokens, filled_tokens=filled_tokens):
                assert 0 < filled_tokens <= capacity_tokens
                assert sequence not in self.sequences
                self.longest_sequence = max(self.longest_sequence, capacity_tokens)
                self.sequences.add(sequence)
            case CloseSequence(sequence):
                self.sequences.remove(sequence)
                assert not self.uses(sequence), "no work in flight uses a closed sequence"
            case Fence(generations):
                self.fences.update(generations)
            case ToClient(request_id, output):
                self.clients.append((request_id, output))
            case Publish(events):
                self.published.extend(events)
            case Drained():
                self.drained = True
            case _:
                raise TypeError(effect)

    def uses(self, sequence):
        for work in self.works.values():
            if getattr(work, "sequence", None) == sequence:
                return True
            if getattr(work, "source", None) == sequence or sequence in getattr(work, "targets", ()):
                return True
            if any(entry.sequence == sequence for entry in getattr(work, "entries", ())):
                return True
            if any(getattr(source, "sequence", None) == sequence for source, _ in getattr(work, "copies", ())):
                return True
        return False

    def up(self, name, incarnation=1, *, role=None, host="h0", model="m", protocol=PROTOCOL_VERSION):
        hello = Hello(protocol=protocol, role=role or ROLES[name[0]], host=host, model=model, tokenizer="t", layout="l")
        self.peers[name] = incarnation
        self.handle(PeerUp(name, incarnation, hello))

    def down(self, name):
        del self.peers[name]
        self.handle(PeerDown(name, "test"))

    def say(self, sender, message):
        assert sender in self.peers
        return self.handle(Received(sender, message))

    def client(self, request_id, message):
        return self.handle(FromClient(request_id, message))

    def drain(self):
        self.handle(DrainWanted())

    def set_cordon(self, cordoned=True):
        self.cordons = cordoned
        return self.handle(CordonWanted(cordoned))

    def run_out_of_drain(self):
        self.handle(DrainTimedOut())

    def advance(self, seconds):
        end = self.now + seconds
        while due := [(at, repr(key), key) for key, at in self.timers.items() if at <= end]:
            at, _, key = min(due)
            del self.timers[key]
            self.now = max(self.now, at)
            self.handle(TimerFired(key))
        self.now = end

    def work(self, kind):
        """The one work of this kind in flight: (id, work)."""
        (found,) = [(i, work) for i, work in self.works.items() if isinstance(work, kind)]
        return found

    def progress(self, work_id, progress):
        self.handle(WorkProgress(work_id, progress))

    def done(self, work_id, result):
        del self.works[work_id]
        self.handle(WorkDone(work_id, result))

    def take(self, kind, to=None):
        """Messages of this kind sent and not taken yet."""
        found = [(t, m) for t, m in self.sent if isinstance(m, kind) and to in (None, t)]
        self.sent = [entry for entry in self.sent if entry not in found]
        return [message for _, message in found]

    def one(self, kind, to=None):
        (message,) = self.take(kind, to)
        return message

    def busy(self):
        """Gauges that should be zero at idle and are not."""
        gauges = self.actor.gauges(self.now)
        return {name: level for name, level in gauges.items() if level and not name.startswith(("capacity", "cached"))}
