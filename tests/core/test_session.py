"""Two sessions over a link that drops, duplicates, reorders, delays and partitions; processes that restart."""

import heapq
import random
from dataclasses import replace

import pytest
from msgspec import structs

from mooncake_zmq.core.actor import PeerDown, PeerUp, Received
from mooncake_zmq.core.messages import (
    MAX_BODIES,
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    BlocksAnnounced,
    ChangeRole,
    Envelope,
    Goodbye,
    Hello,
    LeaseBlocks,
    LeaseRenewed,
    ReleaseLease,
    decode,
    decode_envelope,
    encode,
)
from mooncake_zmq.core.routes import Member
from mooncake_zmq.core.session import (
    FRAME_BYTES,
    GAP_BYTES,
    MAX_LEAP,
    REORDER_LIMIT,
    SECOND_INCARNATION_BEATS,
    Session,
    SessionSettings,
)
from mooncake_zmq.kv.layout import BlockLayout

SETTINGS = SessionSettings()
HELLO = Hello(protocol=PROTOCOL_VERSION, role="cache-node", host="h", model="m", tokenizer="t", layout="l")
MEMBERS = dict.fromkeys("ab", Member(("cache-node",), "h"))
OTHER = {"a": "b", "b": "a"}


def replaced(**fields):
    """Return HELLO with other fields."""
    return structs.replace(HELLO, **fields)


class Pair:
    """Sessions "a" and "b", checked at every event.

    What one side hears in one interval (PeerUp .. PeerDown) must be a gapless prefix of what the other side said in one
    interval of its own, and no two intervals may share one: that is "at most once, in order, nothing from before counts".
    """

    def __init__(self, seed=0, *, settings=SETTINGS, hellos=None, protocols=None, delay_s=0.001):
        self.rng = random.Random(seed)
        self.settings = settings
        self.hellos = hellos or {}
        self.protocols = protocols or {}
        self.now = 0.0
        self.drop = self.duplicate = 0.0
        self.delay_s = delay_s
        self.cut = set()
        self.wire = []
        self.order = 0
        self.lives = {"a": 0, "b": 0}
        self.alive = {}
        self.intervals = {"a": 0, "b": 0}
        self.positions = {"a": 0, "b": 0}
        self.up = {"a": False, "b": False}
        self.said = {}
        self.heard = {"a": [], "b": []}
        self.partner = {"a": None, "b": None}
        self.partners = {"a": [], "b": []}
        self.log = {"a": [], "b": []}

    def boot(self, name):
        self.lives[name] += 1
        self.up[name] = False
        hello = self.hellos.get(name, HELLO)
        session = Session(
            me=name,
            incarnation=self.lives[name],
            hello=hello,
            peers=MEMBERS,
            settings=self.settings,
            now=self.now,
            protocols=self.protocols.get(name, (OLDEST_PROTOCOL, PROTOCOL_VERSION)),
        )
        self.alive[name] = session
        session.start(self.now)
        self.flush(name)
        self.schedule(0.0, name, None, self.lives[name])

    def kill(self, name):
        del self.alive[name]
        self.up[name] = False

    def leave(self, name):
        self.alive[name].leave(self.now)
        self.flush(name)

    def schedule(self, delay, name, frame, life=0):
        self.order += 1
        heapq.heappush(self.wire, (self.now + delay, self.order, name, frame, life))

    def flush(self, name):
        session = self.alive[name]
        session.flush(self.now)
        for to, frame in session.outgoing:
            assert to == OTHER[name]
            copies = 1 + (self.rng.random() < self.duplicate)
            for _ in range(copies):
                if (name, to) not in self.cut and self.rng.random() >= self.drop:
                    self.schedule(self.rng.random() * self.delay_s, to, frame)
        session.outgoing.clear()

    def run(self, seconds):
        end = self.now + seconds
        while self.wire and self.wire[0][0] <= end:
            self.now, _, name, frame, life = heapq.heappop(self.wire)
            session = self.alive.get(name)
            if session is None or (frame is None and life != self.lives[name]):
                continue
            if frame is None:
                self.learn(name, session.tick(self.now))
                self.schedule(session.tick_s, name, None, life)
            else:
                self.learn(name, session.receive(self.now, frame))
            self.flush(name)
        self.now = end

    def learn(self, name, events):
        for event in events:
            self.log[name].append(event)
            match event:
                case PeerUp():
                    assert not self.up[name], "PeerUp and PeerDown alternate"
                    self.up[name] = True
                    self.intervals[name] += 1
                    self.positions[name] = 0
                    self.heard[name] = []
                    self.partner[name] = None
                case PeerDown():
                    assert self.up[name], "PeerUp and PeerDown alternate"
                    self.up[name] = False
                case Received(_, ReleaseLease(lease_id=number)):
                    assert self.up[name]
                    speaker, interval, position = self.said[number]
                    assert speaker == OTHER[name]
                    assert position == len(self.heard[name]), "in order, no gap, at most once"
                    if self.partner[name] is None:
                        assert interval not in self.partners[name], "another interval heard this one already"
                        self.partner[name] = interval
                        self.partners[name].append(interval)
                    assert self.partner[name] == interval, "two conversations of the speaker in one of the listener"
                    self.heard[name].append(number)

    def say(self, name):
        if name in self.alive and self.up[name]:
            number = len(self.said)
            self.said[number] = (name, self.intervals[name], self.positions[name])
            self.positions[name] += 1
            self.learn(name, self.alive[name].send(self.now, OTHER[name], ReleaseLease(lease_id=number)))
            self.flush(name)

    def heal(self):
        self.drop = self.duplicate = 0.0
        self.delay_s = 0.001
        self.cut.clear()
        for name in OTHER:
            if name in self.alive and self.alive[name]._departing:
                self.kill(name)
            if name not in self.alive:
                self.boot(name)

    def downs(self):
        return sum(isinstance(event, PeerDown) for log in self.log.values() for event in log)

    def assert_settled(self, within=2 * SETTINGS.peer_timeout_s):
        """Both sides come up, stay up, and everything said then arrives and is acknowledged."""
        self.run(within)
        assert self.up == {"a": True, "b": True}
        downs = self.downs()
        self.run(10 * SETTINGS.peer_timeout_s)
        assert self.downs() == downs, "no ping-pong of epochs"
        before = {name: len(self.heard[name]) for name in OTHER}
        for _ in range(100):
            self.say("a")
            self.say("b")
        self.run(2.0)
        assert {name: len(self.heard[name]) - before[name] for name in OTHER} == {"a": 100, "b": 100}
        assert all(session.unacknowledged == 0 for session in self.alive.values())
        assert not any(peer.unacked for session in self.alive.values() for peer in session._peers.values())


def settled(**options):
    pair = Pair(**options)
    pair.boot("a")
    pair.boot("b")
    pair.run(1.0)
    assert pair.up == {"a": True, "b": True}
    return pair


def envelope_of(frame, **changes):
    return encode(Envelope(**{f: getattr(decode_envelope(frame), f) for f in Envelope.__struct_fields__} | changes))


@pytest.mark.parametrize("seed", range(120))
def test_any_faults_then_health(seed):
    pair = Pair(seed)
    rng = pair.rng
    pair.boot("a")
    if rng.random() < 0.8:
        pair.boot("b")
    pair.drop, pair.duplicate = rng.choice((0.0, 0.1, 0.4)), rng.choice((0.0, 0.2))
    pair.delay_s = rng.choice((0.001, 0.3, 3.0))
    for _ in range(60):
        roll = rng.random()
        if roll < 0.12:
            pair.cut = set(rng.sample([("a", "b"), ("b", "a")], rng.randint(0, 2)))
        elif roll < 0.22:
            name = rng.choice("ab")
            if name in pair.alive and not pair.alive[name]._departing and rng.random() < 0.5:
                pair.leave(name)
            elif name in pair.alive:
                pair.kill(name)
            else:
                pair.boot(name)
        elif roll < 0.7:
            for _ in range(rng.choice((1, 5, 400))):
                pair.say(rng.choice("ab"))
        pair.run(rng.choice((0.01, 0.3, 1.0, 4.0)))
    pair.heal()
    pair.assert_settled()


def test_one_way_partition_ends_the_conversation_on_both_sides():
    pair = settled()
    pair.cut = {("a", "b")}
    pair.say("a")
    pair.run(4 * SETTINGS.peer_timeout_s)
    assert pair.up == {"a": False, "b": False}, "a hears b, but b acknowledges nothing"
    pair.heal()
    pair.assert_settled(within=2.0)


def test_only_one_side_gave_up():
    pair = settled()
    pair.learn("a", pair.alive["a"]._give_up(pair.now, pair.alive["a"]._peers["b"], "test"))
    pair.flush("a")
    pair.run(0.5)
    assert [type(e) for e in pair.log["b"]] == [PeerUp, PeerDown, PeerUp]
    pair.assert_settled(within=0.5)


def test_one_side_was_never_up():
    pair = Pair()
    pair.boot("a")
    pair.cut = {("a", "b")}
    pair.run(1.0)
    pair.boot("b")
    pair.run(1.0)
    assert pair.up == {"a": True, "b": False}
    pair.run(20.0)
    pair.heal()
    pair.assert_settled(within=2.0)


def test_a_peer_that_comes_late_is_not_given_up_at_once():
    pair = Pair(delay_s=0.4)
    pair.boot("a")
    pair.run(60.0)
    pair.boot("b")
    pair.run(5.0)
    assert pair.up == {"a": True, "b": True}
    assert pair.downs() == 0


def test_a_restart_is_noticed_by_its_larger_incarnation():
    pair = settled()
    pair.say("b")
    pair.kill("a")
    pair.boot("a")
    pair.run(SECOND_INCARNATION_BEATS * SETTINGS.heartbeat_s + SETTINGS.retransmit_s)
    assert [e.reason for e in pair.log["b"] if isinstance(e, PeerDown)] == ["restarted"]
    assert [e.incarnation for e in pair.log["b"] if isinstance(e, PeerUp)] == [1, 2]
    pair.assert_settled(within=0.5)


def test_a_greeting_to_a_former_incarnation_that_arrives_late_makes_no_lopsided_conversation():
    pair = Pair()
    pair.boot("b")
    late = next(frame for _, _, _, frame, _ in pair.wire if frame)  # b's Hello, sent before it knew any life of a
    pair.wire = [entry for entry in pair.wire if entry[3] is None]
    pair.cut = {("b", "a")}
    pair.boot("a")
    pair.run(1.0)
    pair.kill("a")
    pair.boot("a")
    session = pair.alive["a"]
    pair.learn("a", session.receive(pair.now, late))
    pair.flush("a")
    pair.say("a")
    pair.cut.clear()
    pair.assert_settled(within=2.0)
    changes = [type(event) for event in pair.log["a"] if not isinstance(event, Received)]
    assert changes == [PeerUp, PeerDown, PeerUp], "up once with the late greeting, once for good"


def test_a_silent_peer_is_down_after_the_timeout_and_not_before():
    pair = settled()
    pair.kill("b")
    pair.run(SETTINGS.peer_timeout_s - SETTINGS.heartbeat_s)
    assert pair.up["a"]
    pair.run(2 * SETTINGS.heartbeat_s)
    assert not pair.up["a"]
    assert pair.log["a"][-1] == PeerDown("b", "silent")
    assert pair.alive["a"].counts["timeouts"] == 1


def test_a_full_window_gives_the_peer_up_and_a_dead_peer_gets_nothing():
    pair = settled(settings=replace(SETTINGS, window_messages=16))
    pair.cut = {("a", "b")}
    for _ in range(17):
        pair.say("a")
    assert pair.log["a"][-1] == PeerDown("b", "window full")
    assert pair.alive["a"].send(pair.now, "b", ReleaseLease(lease_id=1)) == []
    assert pair.alive["a"].counts["dropped[reason=peer_down]"] == 1
    assert pair.alive["a"].send(pair.now, "nobody", ReleaseLease(lease_id=1)) == []
    pair.heal()
    pair.run(2.0)
    assert pair.up == {"a": True, "b": True}


@pytest.mark.parametrize("field", ["model", "tokenizer", "layout"])
def test_a_peer_with_another_fingerprint_is_refused(field):
    pair = Pair(hellos={"b": replaced(**{field: "other"})})
    pair.boot("a")
    pair.boot("b")
    pair.run(10.0)
    assert pair.log == {"a": [], "b": []}
    assert pair.alive["a"].counts[f"refused[reason={field}]"] == 1, "its Hello is acknowledged, not repeated"
    assert field in pair.alive["a"].refusals["b"]
    del pair.hellos["b"]
    pair.kill("b")
    pair.boot("b")
    pair.run(2.0)
    assert pair.up == {"a": True, "b": True}
    assert pair.alive["a"].refusals == {}


def test_nodes_of_different_codecs_refuse_each_other_and_say_which():
    blocks = BlockLayout(layers=2, kv_heads=2, head_dim=64, block_tokens=32)
    codecs = {"a": "int8", "b": "k8v4"}
    pair = Pair(hellos={name: replaced(layout=blocks.coded(codec).fingerprint) for name, codec in codecs.items()})
    pair.boot("a")
    pair.boot("b")
    pair.run(2.0)
    for name, other in OTHER.items():
        refusal = pair.alive[name].refusals[other]
        assert "int8-" in refusal
        assert "k8v4-" in refusal
        assert "model.kv_codec" in refusal
    assert pair.log == {"a": [], "b": []}


@pytest.mark.parametrize(
    ("one", "other", "accepted"),
    [
        ("m", "m n", True),
        ("m n", "n", True),
        ("m n", "n m", True),
        ("m n", "n o", False),
        ("m", "mn", False),
        ("", "", True),
        ("", "m", False),
        (" ", "m", False),
    ],
)
def test_nodes_of_several_models_and_of_one_of_them_greet_each_other(one, other, accepted):
    common = {field: getattr(HELLO, field) for field in HELLO.__struct_fields__}
    pair = Pair(hellos={"a": Hello(**common | {"model": one}), "b": Hello(**common | {"model": other})})
    pair.boot("a")
    pair.boot("b")
    pair.run(2.0)
    assert pair.up == {"a": accepted, "b": accepted}


@pytest.mark.parametrize(
    ("other", "accepted"), [({}, True), ({"model": "m n"}, False), ({"model": "n"}, False), ({"layout": "k"}, False)]
)
def test_a_node_of_one_of_several_models_greets_with_that_ones_fingerprints_alone(other, accepted):
    common = {field: getattr(HELLO, field) for field in HELLO.__struct_fields__}
    one = {"model": "m", "tokenizer": "t", "layout": "l"}
    shared = Hello(**common | {"model": "m n", "tokenizer": "t u", "layout": "k l"})
    pair = Pair(hellos={"a": shared, "b": Hello(**common | one | other)})
    pair.boot("a")
    pair.alive["a"]._peers["b"].member = replace(pair.alive["a"]._peers["b"].member, fingerprints=one)
    pair.boot("b")
    pair.run(2.0)
    assert pair.up["a"] == accepted
    assert bool(pair.alive["a"].refusals) != accepted


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sender": "mallory"}, "stranger"),
        ({"version": PROTOCOL_VERSION + 1}, "version"),
        ({"to_incarnation": 77}, "former_incarnation"),
        ({"incarnation": 0}, "other_incarnation"),
        ({"incarnation": 2**48 - 1}, "other_incarnation"),
        ({"epoch": 2 + MAX_LEAP}, "leap"),
        ({"floor": 2 + 2 * MAX_LEAP}, "leap"),
        ({"epoch": 0}, "old_epoch"),
    ],
)
def test_a_frame_of_no_current_conversation_is_dropped_and_counted(changes, reason):
    pair = settled()
    session = pair.alive["a"]
    pair.alive["b"].send(pair.now, "a", ReleaseLease(lease_id=5))
    pair.alive["b"].flush(pair.now)
    _, frame = pair.alive["b"].outgoing.pop()
    assert session.receive(pair.now, envelope_of(frame, **changes)) == []
    assert session.counts[f"dropped[reason={reason}]"] == 1
    assert session.receive(pair.now, frame) == [Received("b", ReleaseLease(lease_id=5))], "the genuine one counts"


def forged(frame, **changes):
    """What a stranger makes of a frame, to whichever life of ours: it says that it is "b", and nothing else."""
    return envelope_of(frame, **({"incarnation": 2**48 - 1, "to_incarnation": 0, "bodies": ()} | changes))


def a_frame(pair, name="b"):
    pair.alive[name].send(pair.now, OTHER[name], ReleaseLease(lease_id=5), lossy=True)
    return pair.alive[name].outgoing.pop()[1]


def test_a_frame_that_names_a_peer_cuts_nobody_off():
    pair = settled()
    frame = a_frame(pair)
    for _ in range(40):
        assert pair.alive["a"].receive(pair.now, forged(frame)) == []
        pair.run(0.25)
    assert pair.alive["a"].counts["dropped[reason=other_incarnation]"] == 40
    assert pair.downs() == 0


def test_a_peer_that_was_silent_when_another_took_its_name_is_heard_again():
    pair = settled()
    frame = a_frame(pair)
    pair.cut = {("b", "a")}
    pair.run(SECOND_INCARNATION_BEATS * SETTINGS.heartbeat_s)
    pair.learn("a", pair.alive["a"].receive(pair.now, forged(frame)))
    assert pair.log["a"][-1] == PeerDown("b", "restarted")
    pair.cut.clear()
    pair.run(0.9 * SETTINGS.peer_timeout_s)
    assert not pair.up["a"], "the other one might still speak"
    pair.assert_settled(within=SETTINGS.peer_timeout_s)
    assert [e.incarnation for e in pair.log["a"] if isinstance(e, PeerUp)] == [1, 1]


def test_two_that_each_write_to_an_ended_incarnation_of_the_other_meet_again():
    pair = settled()
    frame = a_frame(pair)
    pair.cut = {("a", "b"), ("b", "a")}
    pair.kill("a")
    pair.boot("a")
    pair.learn("a", pair.alive["a"].receive(pair.now, forged(frame)))
    pair.run(0.5 * SETTINGS.peer_timeout_s)
    pair.cut.clear()
    pair.run(SETTINGS.peer_timeout_s)
    pair.assert_settled()
    assert [e.incarnation for e in pair.log["b"] if isinstance(e, PeerUp)] == [1, 2]


def test_a_life_with_a_lower_incarnation_is_heard_once_the_known_one_is_silent():
    pair = Pair()
    pair.lives["b"] = 86_400_000
    pair.boot("a")
    pair.boot("b")
    pair.run(1.0)
    pair.kill("b")
    pair.lives["b"] = 7  # its clock was a day ahead, and its host was started anew
    pair.boot("b")
    pair.run(0.9 * SETTINGS.peer_timeout_s)
    assert not [event for event in pair.log["a"] if isinstance(event, PeerUp) and event.incarnation == 8]
    pair.assert_settled(within=SETTINGS.peer_timeout_s)
    assert [e.incarnation for e in pair.log["a"] if isinstance(e, PeerUp)] == [86_400_001, 8]


@pytest.mark.parametrize("seed", range(20))
def test_an_old_incarnation_is_not_heard_after_a_newer_one_unless_its_frames_outlast_the_timeout(seed):
    pair = settled(seed=seed)
    pair.delay_s = 0.9 * SETTINGS.peer_timeout_s
    for _ in range(30):
        pair.say("b")
    pair.kill("b")
    pair.boot("b")
    pair.run(pair.rng.random() * 2 * SETTINGS.peer_timeout_s)
    pair.kill("b")
    pair.run(4 * SETTINGS.peer_timeout_s)
    lives = [e.incarnation for e in pair.log["a"] if isinstance(e, PeerUp)]
    assert lives == sorted(lives)


def test_numbers_of_epochs_are_not_used_up_by_a_few_forged_frames():
    pair = settled()
    frame = a_frame(pair)
    for leap in (MAX_LEAP, 2**47):
        pair.learn("a", pair.alive["a"].receive(pair.now, forged(frame, incarnation=1, epoch=1 + leap)))
        pair.learn("a", pair.alive["a"].receive(pair.now, forged(frame, incarnation=1, to_incarnation=1, floor=leap)))
        pair.flush("a")
    pair.assert_settled(within=3 * SETTINGS.peer_timeout_s)
    assert pair.alive["b"]._peers["a"].remote_epoch < 4 * MAX_LEAP


def test_what_waits_behind_a_gap_is_bounded_in_bytes():
    pair = settled()
    session = pair.alive["a"]
    expected = session._peers["b"].expected
    body = encode(LeaseBlocks(lease_id=0, keys=(bytes(16),) * 16_000, sources=(), fetch_s=0.0, ttl_s=0.0))
    frame = a_frame(pair)
    for number in range(1, REORDER_LIMIT):
        session.receive(pair.now, envelope_of(frame, sequence=expected + number, bodies=(body,) * 2))
    peer = session._peers["b"]
    assert sum(map(len, peer.early.values())) == peer.early_bytes <= GAP_BYTES
    assert len(peer.early) == GAP_BYTES // len(body)
    heard = session.receive(pair.now, envelope_of(frame, sequence=expected, bodies=(body,)))
    assert len(heard) == 1 + GAP_BYTES // len(body)
    assert peer.early_bytes == 0


def test_a_retransmission_is_no_longer_than_what_the_other_side_keeps():
    pair = settled()
    pair.cut = {("a", "b")}
    session = pair.alive["a"]
    for number in range(100):
        session.send(pair.now, "b", LeaseBlocks(lease_id=number, keys=(bytes(16),) * 16_000, sources=(), fetch_s=0, ttl_s=0))
    session.flush(pair.now)
    session.outgoing.clear()
    for _ in range(2):
        session.outgoing.clear()
        pair.now += SETTINGS.retransmit_s
        session.tick(pair.now)
    assert GAP_BYTES / 2 < sum(len(frame) for _, frame in session.outgoing) < 1.1 * GAP_BYTES
    session.outgoing.clear()
    pair.cut.clear()
    pair.run(2 * SETTINGS.peer_timeout_s)
    assert len(pair.log["b"]) == 101, "all arrive, piece by piece"


@pytest.mark.parametrize(
    "told", [{"role": "gateway"}, {"role": "conductor"}, {"role": "nothing"}, {"host": "elsewhere"}, {"role": "prefill"}]
)
def test_a_peer_is_what_the_configuration_says_or_nobody(told):
    changed = structs.replace(HELLO, **told)
    pair = Pair(hellos={"b": changed})
    pair.boot("a")
    pair.boot("b")
    pair.run(5.0)
    assert not pair.up["a"]
    assert pair.alive["a"].counts["refused[reason=member]"] == 1
    assert "the configuration: cache-node on h" in pair.alive["a"].refusals["b"]


def test_a_peer_says_what_its_role_may_and_nothing_else():
    pair = settled()
    session = pair.alive["a"]
    for message in (BlocksAnnounced(), ChangeRole(role="decode"), LeaseRenewed(lease_id=1)):
        for lossy in (False, True):
            pair.alive["b"].send(pair.now, "a", message, lossy=lossy)
    pair.flush("b")
    pair.run(0.5)
    assert session.counts["dropped[reason=not_of_its_role]"] == 6
    assert not any(isinstance(event, Received) for event in pair.log["a"])
    pair.say("b")
    pair.assert_settled()


def test_garbage_is_dropped_and_counted():
    pair = settled()
    session = pair.alive["a"]
    assert session.receive(pair.now, b"\xc1garbage") == []
    assert session.counts["dropped[reason=malformed]"] == 1
    pair.alive["b"].send(pair.now, "a", ReleaseLease(lease_id=5))
    pair.alive["b"].flush(pair.now)
    _, frame = pair.alive["b"].outgoing.pop()
    assert session.receive(pair.now, envelope_of(frame, bodies=(b"nonsense",))) == []
    assert session.counts["dropped[reason=invalid]"] == 1


def test_a_second_hello_does_not_bring_a_peer_up_twice():
    pair = settled()
    session = pair.alive["a"]
    pair.alive["b"].send(pair.now, "a", HELLO)
    pair.alive["b"].flush(pair.now)
    _, frame = pair.alive["b"].outgoing.pop()
    assert session.receive(pair.now, frame) == []
    assert session.counts["dropped[reason=second_hello]"] == 1


def test_nothing_is_heard_before_the_hello():
    pair = Pair()
    pair.boot("a")
    pair.boot("b")
    frame = next(entry[3] for entry in pair.wire if entry[2] == "a" and entry[3])
    body = encode(ReleaseLease(lease_id=5))
    assert pair.alive["a"].receive(0.0, envelope_of(frame, bodies=(body,))) == []
    assert pair.alive["a"].counts["dropped[reason=no_hello]"] == 1
    assert pair.alive["a"].receive(0.0, envelope_of(frame, sequence=0, bodies=(body,))) == []


def test_a_lossy_message_is_never_repeated():
    pair = settled()
    pair.cut = {("a", "b")}
    pair.alive["a"].send(pair.now, "b", ReleaseLease(lease_id=9), lossy=True)
    pair.flush("a")
    pair.cut.clear()
    pair.run(2.0)
    assert not any(isinstance(event, Received) for event in pair.log["b"])
    pair.said[9] = ("a", pair.intervals["a"], 0)
    pair.alive["a"].send(pair.now, "b", ReleaseLease(lease_id=9), lossy=True)
    pair.flush("a")
    pair.run(1.0)
    assert pair.log["b"][-1] == Received("a", ReleaseLease(lease_id=9))


def test_more_messages_than_the_reorder_limit_pass_a_gap():
    pair = settled()
    pair.cut = {("a", "b")}
    pair.say("a")
    pair.cut.clear()
    for _ in range(3 * REORDER_LIMIT):
        pair.say("a")
    assert len(pair.alive["b"]._peers["a"].early) <= REORDER_LIMIT
    pair.run(SETTINGS.peer_timeout_s)
    assert len(pair.heard["b"]) == 3 * REORDER_LIMIT + 1
    assert pair.downs() == 0


def test_an_idle_pair_stays_up_on_heartbeats_alone():
    pair = settled()
    pair.run(100.0)
    assert pair.downs() == 0
    assert pair.alive["a"].counts.get("retransmits", 0) == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"heartbeat_s": 1.1},
        {"heartbeat_s": 0.0},
        {"retransmit_s": 3.0},
        {"retransmit_s": 0.0},
        {"window_messages": 15},
    ],
)
def test_settings_that_cannot_work_are_refused(bad):
    with pytest.raises(ValueError):
        replace(SETTINGS, **bad)


def test_what_is_said_to_one_peer_at_once_travels_in_one_frame_and_in_order():
    pair = settled()
    session = pair.alive["a"]
    messages = [ReleaseLease(lease_id=number) for number in range(5)]
    for message in messages:
        session.send(pair.now, "b", message)
    session.flush(pair.now)
    ((_, frame),) = session.outgoing
    assert pair.alive["b"].receive(pair.now, frame) == [Received("a", message) for message in messages]
    session.outgoing.clear()
    session.flush(pair.now)
    assert session.outgoing == [], "once"


def test_a_frame_has_its_limits():
    pair = settled()
    session = pair.alive["a"]
    keys = tuple(bytes([number]) * 16 for number in range(200)) * 80
    long = LeaseBlocks(lease_id=0, keys=keys, sources=(), fetch_s=0.0, ttl_s=0.0)
    messages = [ReleaseLease(lease_id=1), long, long, *(ReleaseLease(lease_id=number) for number in range(2, 150))]
    for message in messages:
        session.send(pair.now, "b", message)
    session.flush(pair.now)
    frames = [frame for _, frame in session.outgoing]
    assert max(len(frame) for frame in frames) < FRAME_BYTES + len(encode(long)) // 2
    assert max(len(decode_envelope(frame).bodies) for frame in frames) == MAX_BODIES
    heard = [event for frame in frames for event in pair.alive["b"].receive(pair.now, frame)]
    assert heard == [Received("a", message) for message in messages]


def test_what_is_unsent_when_a_conversation_ends_is_not_said_in_the_next():
    pair = settled()
    session = pair.alive["a"]
    events = []
    while not events:
        events = session.send(pair.now, "b", ReleaseLease(lease_id=1))
    assert isinstance(events[0], PeerDown)
    session.outgoing.clear()
    session.flush(pair.now)
    bodies = [body for _, frame in session.outgoing for body in decode_envelope(frame).bodies]
    assert {type(decode(body)) for body in bodies} == {Hello}


def test_who_has_the_key_of_one_does_not_speak_as_another():
    greeting = Session(me="a", incarnation=1, hello=HELLO, peers=MEMBERS, settings=SETTINGS, now=0.0)
    hearing = Session(me="b", incarnation=1, hello=HELLO, peers=MEMBERS, settings=SETTINGS, now=0.0)
    greeting.start(0.0)
    greeting.flush(0.0)
    ((_, frame),) = greeting.outgoing
    for key_of in ("", "b", "c"):
        assert hearing.receive(0.0, frame, key_of) == []
    assert hearing.counts == {"dropped[reason=not_its_key]": 3}
    assert hearing.receive(0.0, frame, "a") == [PeerUp("a", 1, HELLO)]


def test_a_goodbye_ends_the_conversation_at_once_behind_all_that_was_sent_before():
    pair = settled()
    for _ in range(3):
        pair.say("a")
    pair.leave("a")
    pair.run(0.01)
    assert pair.log["b"][-1] == PeerDown("a", "left")
    assert len(pair.heard["b"]) == 3
    assert pair.alive["b"].departed == ["a"]
    assert pair.alive["a"].unacknowledged == 0, "what ended the conversation has acknowledged it"
    pair.run(3 * SETTINGS.peer_timeout_s)
    assert pair.alive["b"].up_peers == {}, "it comes back by no heartbeat of the one that leaves"
    pair.kill("a")
    pair.heal()
    pair.assert_settled(within=2.0)
    assert pair.alive["b"].departed == []


def test_a_lost_goodbye_is_sent_again_and_without_it_the_silence_counts_as_before():
    pair = settled()
    pair.cut = {("a", "b")}
    pair.leave("a")
    pair.run(0.3)
    pair.cut = set()
    pair.run(SETTINGS.retransmit_s + 0.1)
    assert pair.log["b"][-1] == PeerDown("a", "left")
    pair = settled()
    pair.cut = {("a", "b")}
    pair.leave("a")
    pair.kill("a")
    pair.run(2 * SETTINGS.peer_timeout_s)
    assert pair.log["b"][-1] == PeerDown("a", "silent")
    assert pair.alive["b"].departed == []


def test_one_that_leaves_acknowledges_no_message_that_it_does_not_handle():
    pair = settled()
    pair.cut = {("a", "b")}
    pair.leave("a")
    pair.cut = set()
    pair.say("b")
    pair.run(SETTINGS.retransmit_s - 0.1)
    assert pair.up["b"], "the goodbye was lost"
    assert pair.heard["a"] == []
    assert pair.alive["b"].unacknowledged == 1


def test_no_process_can_say_goodbye_for_another_node_nor_for_a_later_incarnation():
    pair = settled()
    pair.leave("a")
    frames = [frame for _, _, _, frame, _ in pair.wire if frame is not None]
    (goodbye,) = (frame for frame in frames if any(decode(body) == Goodbye() for body in decode_envelope(frame).bodies))
    hearing = pair.alive["b"]
    for key_of in ("", "b", "c"):
        assert hearing.receive(pair.now, goodbye, key_of) == []
    assert hearing.counts["dropped[reason=not_its_key]"] == 3
    pair.kill("a")
    pair.run(2.0)
    pair.boot("a")
    pair.run(2.0)
    assert pair.up["b"]
    assert hearing.receive(pair.now, goodbye, "a") == []
    assert pair.up == {"a": True, "b": True}
