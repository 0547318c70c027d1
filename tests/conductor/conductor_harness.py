"""A conductor with a whole cluster of silent peers around it, checked after every event."""

import hashlib
import json
from dataclasses import replace

from mooncake_zmq.conductor.conductor import Conductor
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.actor import PeerDown, PeerUp, Received, Send, SetTimer, Started, TimerFired
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import (
    PROTOCOL_VERSION,
    BlocksAnnounced,
    ChangeReplica,
    DecodeLoad,
    Hello,
    Measured,
    Placed,
    PrefillLoad,
    QueuedJob,
    Rejected,
    RequestEnded,
    Schedule,
    WaitEnded,
    decode,
    encode,
)
from mooncake_zmq.kv.layout import BlockLayout

BLOCK = 256
COSTS = Costs()
LAYOUT = BlockLayout(layers=2, kv_heads=1, head_dim=2, block_tokens=BLOCK)
BASE = ConductorSettings(ttft_slo_s=0, tbt_slo_s=0)


def key(*parts):
    return hashlib.sha256(repr(parts).encode()).digest()[:16]


def keys(name, count, start=0):
    return tuple(key(name, i) for i in range(start, start + count))


def hello(role, host, may_become="", part="both"):
    return Hello(
        protocol=PROTOCOL_VERSION, role=role, host=host, model="m", tokenizer="t", layout="l", may_become=may_become, part=part
    )


class Cluster:
    """`hosts` hosts with one prefill, decode and cache-node each, named p0, d0, c0 ..., and the gateway g."""

    def __init__(self, hosts=2, *, reports=True, costs=COSTS, **settings):
        self.settings = replace(BASE, **settings)
        self.conductor = Conductor(name="k", host="h0", incarnation=1, settings=self.settings, layout=LAYOUT, costs=costs)
        self.now = 100.0
        self.timers = {}
        self.copy_requests = []
        """(cache-node, ChangeReplica) in the order of asking."""
        self.serial = 0
        self.handle(Started())
        self.up("g", "gateway", "h0")
        for i in range(hosts):
            self.up(f"p{i}", "prefill", f"h{i}")
            self.up(f"d{i}", "decode", f"h{i}")
            self.up(f"c{i}", "cache-node", f"h{i}")
            if reports:
                self.prefill_load(f"p{i}")
                self.decode_load(f"d{i}")

    def handle(self, event):
        effects = self.conductor.handle(self.now, event)
        self.conductor.check(self.now)
        json.dumps(self.conductor.dump(self.now))
        for effect in effects:
            if isinstance(effect, SetTimer):
                self.timers[effect.key] = self.now + effect.delay_s
            if isinstance(effect, Send):
                assert decode(encode(effect.message)) == effect.message
                if isinstance(effect.message, ChangeReplica):
                    self.copy_requests.append((effect.to, effect.message))
        return effects

    def advance(self, seconds):
        end = self.now + seconds
        while due := [(at, k) for k, at in self.timers.items() if at <= end]:
            at, timer = min(due)
            del self.timers[timer]
            self.now = max(self.now, at)
            self.handle(TimerFired(timer))
        self.now = end

    def up(self, name, role, host, incarnation=1, may_become="", part="both"):
        return self.handle(PeerUp(name, incarnation, hello(role, host, may_become, part)))

    def down(self, name):
        self.handle(PeerDown(name, "test"))

    def say(self, sender, message):
        return self.handle(Received(sender, message))

    def prefill_load(self, name, queued_s=0.0, token_s=0.0, jobs=None, **more):
        """`jobs`: (booking, rank_s, left_s) each, and perhaps a tenant, or one that nobody booked of `queued_s`."""
        if jobs is None:
            jobs = [(0, 0.0, queued_s)] if queued_s else []
        if token_s:
            more["compute"] = Measured(seconds=1000 * token_s, predicted_s=1000 * COSTS.prefill_token_s)
        load = PrefillLoad(
            jobs=tuple(QueuedJob(*job) for job in jobs),
            **more,
        )
        self.say(name, load)

    def decode_load(self, name, running=0, reserved=0, free=1_000_000, step_s=0.0, capacity=1_000_000, **more):
        load = DecodeLoad(running=running, reserved=reserved, free_tokens=free, capacity_tokens=capacity, step_s=step_s, **more)
        self.say(name, load)

    def announce(self, node, stored=(), removed=()):
        self.say(node, BlocksAnnounced(stored=tuple(stored), removed=tuple(removed)))

    def schedule(self, block_keys=(), tokens=None, *, request_id=None, attempt=1, exclude=(), max_tokens=100, **more):
        """Ask for a placement and return the answer. An attempt that replaces another may end waits for that one, too."""
        self.serial += 1
        message = Schedule(
            request_id=request_id or f"r{self.serial}",
            attempt=attempt,
            keys=tuple(block_keys),
            tokens=len(block_keys) * BLOCK + 10 if tokens is None else tokens,
            max_tokens=max_tokens,
            exclude=exclude,
            **more,
        )
        sends = [effect for effect in self.say("g", message) if isinstance(effect, Send)]
        answers = [send.message for send in sends if send.to == "g"]
        assert all(isinstance(send.message, WaitEnded | ChangeReplica) for send in sends if send.to != "g")
        if not answers:
            return None
        (answer,) = answers
        assert isinstance(answer, Placed | Rejected)
        return answer

    def end(self, answer, outcome=None):
        self.say("g", RequestEnded(request_id=answer.request_id, attempt=answer.attempt, outcome=outcome))
