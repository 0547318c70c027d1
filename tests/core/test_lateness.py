"""Sessions whose processes get no CPU: silent and deaf for a while, and not dead."""

import heapq

import pytest
from test_session import SETTINGS, Pair, a_frame, envelope_of, settled

from mooncake_zmq.core.actor import PeerDown, PeerUp
from mooncake_zmq.core.messages import ReleaseLease, decode_envelope
from mooncake_zmq.core.session import (
    LATE_BEATS,
    LATE_HALF_LIFE_S,
    MOST_EXCUSED,
    SECOND_INCARNATION_BEATS,
    Session,
)

TIMEOUT_S = SETTINGS.peer_timeout_s
LONGEST_S = MOST_EXCUSED * TIMEOUT_S
TICK_S = SETTINGS.retransmit_s / 2


def starve(pair: Pair, names: str, seconds: float) -> None:
    """These processes get no CPU: what comes for them waits, and their overdue tick then comes before what lies in their
    sockets, as the runtime's timers do. What they are to say waits too."""
    end = pair.now + seconds
    held = [entry for entry in pair.wire if entry[2] in names and entry[0] <= end]
    pair.wire = [entry for entry in pair.wire if entry not in held]
    heapq.heapify(pair.wire)
    others = [name for name in pair.alive if name not in names]
    sessions = {name: pair.alive.pop(name) for name in names}
    keep, pair.schedule = (
        pair.schedule,
        lambda delay, name, frame, life=0: (
            held.append((pair.now + delay, pair.order, name, frame, life)) if name in names else keep(delay, name, frame, life)
        ),
    )
    pair.run(seconds)
    assert sorted(pair.alive) == others
    pair.schedule = keep
    pair.alive |= sessions
    for position, (_, _, name, frame, life) in enumerate(sorted(held, key=lambda entry: (entry[3] is not None, entry[:2]))):
        pair.order += 1
        heapq.heappush(pair.wire, (pair.now + position * 1e-6, pair.order, name, frame, life))


def late_loops(pair: Pair) -> dict[str, int]:
    return {name: session.counts.get("late_loops", 0) for name, session in pair.alive.items()}


@pytest.mark.parametrize("seconds", [1.0, TIMEOUT_S, 5.0, 0.95 * LONGEST_S])
def test_a_machine_that_stands_still_ends_no_conversation(seconds: float) -> None:
    pair = settled()
    for _ in range(20):
        pair.say("a")
        pair.say("b")
    starve(pair, "ab", seconds)
    pair.run(2.0)
    assert pair.downs() == 0
    assert late_loops(pair) == {"a": 1, "b": 1}
    assert {name: len(pair.heard[name]) for name in "ab"} == {"a": 20, "b": 20}


def test_it_would_if_the_time_counted_in_which_frames_lay_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: to judge before reading."""
    monkeypatch.setattr(Session, "_counted_s", lambda self, now, since, excused_s=0.0: now - since.at)
    pair = settled()
    starve(pair, "ab", 5.0)
    pair.run(2.0)
    assert pair.downs() > 0


@pytest.mark.parametrize("seed", range(40))
def test_lateness_within_its_limits_loses_and_repeats_nothing(seed: int) -> None:
    """Whoever is late alone has been late before: its peers have been told how it is."""
    pair = settled(seed=seed)
    rng = pair.rng
    told = dict.fromkeys("ab", 0.0)
    for _ in range(30):
        for _ in range(rng.choice((0, 3, 40))):
            pair.say(rng.choice("ab"))
        names = rng.choice(("a", "b", "ab"))
        most_s = TIMEOUT_S - SETTINGS.heartbeat_s - TICK_S + min(told[name] for name in names)
        seconds = rng.uniform(0.0, 0.9 * LONGEST_S if names == "ab" else min(most_s, 0.9 * LONGEST_S))
        starve(pair, names, seconds)
        pair.run(rng.choice((0.7, 2.0)))
        told = {name: session.recent_late_s for name, session in pair.alive.items()}
    pair.run(4.0)
    assert pair.downs() == 0
    said = {name: sum(speaker == name for speaker, _, _ in pair.said.values()) for name in "ab"}
    assert {"a": len(pair.heard["b"]), "b": len(pair.heard["a"])} == said


def test_a_dead_peer_is_down_in_a_bounded_time_however_late_its_watcher_is() -> None:
    pair = settled()
    pair.kill("b")
    died_at = pair.now
    while pair.up["a"]:
        starve(pair, "a", 1.0)
        pair.run(0.001)
        assert pair.now - died_at < (1 + MOST_EXCUSED) * TIMEOUT_S + 1.5
    assert pair.now - died_at > TIMEOUT_S + 1.0, "not by a watch that only ran now and then"
    assert pair.log["a"][-1] == PeerDown("b", "silent")
    assert pair.alive["a"].counts["late_loops"] >= 4


@pytest.mark.parametrize("late_s", [0.7, 2.0, 4.0, 1e9])
def test_a_peer_that_said_how_late_it_was_has_that_much_more_time(late_s: float) -> None:
    pair = settled()
    frame = envelope_of(a_frame(pair), late_ms=int(1000 * late_s), bodies=())
    pair.run(0.1)
    pair.kill("b")
    pair.run(0.1)
    pair.learn("a", pair.alive["a"].receive(pair.now, frame))
    more_s = min(LATE_BEATS * late_s, LONGEST_S)
    pair.run(TIMEOUT_S + more_s - 0.01)
    assert pair.up["a"]
    assert pair.alive["a"].counts["peers_spared"] == 1
    pair.run(2 * TICK_S)
    assert not pair.up["a"]


def test_what_is_said_of_lateness_fades() -> None:
    pair = settled()
    starve(pair, "ab", 2.0)
    pair.run(0.5)
    said_ms = decode_envelope(a_frame(pair)).late_ms
    assert 1_500 < said_ms <= 2_000
    pair.run(LATE_HALF_LIFE_S)
    assert decode_envelope(a_frame(pair)).late_ms == pytest.approx(said_ms / 2, rel=0.02)


def with_kernel(pair: Pair, starved: bool) -> Session:
    """Side a, with a kernel that shows this of b."""
    session = pair.alive["a"]
    session._starved = lambda peer, incarnation: starved and (peer, incarnation) == ("b", pair.lives["b"])
    return session


def test_a_peer_that_waits_for_a_cpu_is_not_given_up_until_the_last() -> None:
    pair = settled()
    session = with_kernel(pair, True)
    pair.kill("b")
    pair.say("a")
    pair.run(TIMEOUT_S + LONGEST_S - SETTINGS.heartbeat_s - TICK_S)
    assert pair.up["a"]
    assert session.counts["peers_spared"] == 1, "once for one silence"
    pair.run(SETTINGS.heartbeat_s + 2 * TICK_S)
    assert not pair.up["a"]


def test_one_that_is_starved_alone_by_less_than_that_loses_nothing() -> None:
    pair = settled()
    with_kernel(pair, True)
    for _ in range(20):
        pair.say("a")
    starve(pair, "b", 0.9 * LONGEST_S)
    pair.run(2.0)
    assert pair.downs() == 0
    assert len(pair.heard["b"]) == 20


def test_one_that_stands_still_and_waits_for_no_cpu_is_down_after_the_timeout() -> None:
    pair = settled()
    with_kernel(pair, False)
    pair.kill("b")
    pair.run(TIMEOUT_S + 2 * TICK_S)
    assert not pair.up["a"]


def test_no_other_incarnation_is_heard_because_we_were_late() -> None:
    pair = settled()
    pair.run(2.0)
    frame = a_frame(pair)
    session = pair.alive["a"]
    forged = envelope_of(frame, incarnation=9, sequence=0, bodies=(), to_incarnation=0)
    starve(pair, "ab", 2 * SECOND_INCARNATION_BEATS * SETTINGS.heartbeat_s)
    assert session.receive(pair.now, forged) == []
    assert session.counts["dropped[reason=other_incarnation]"] == 1
    pair.run(2.0)
    assert pair.downs() == 0


def test_a_restart_while_we_were_late_is_noticed() -> None:
    pair = settled()
    pair.kill("b")
    pair.boot("b")
    starve(pair, "a", 2.0)
    pair.run(SECOND_INCARNATION_BEATS * SETTINGS.heartbeat_s + SETTINGS.retransmit_s)
    assert [e.incarnation for e in pair.log["a"] if isinstance(e, PeerUp)] == [1, 2]


def test_nothing_is_sent_again_because_acknowledgements_lay_unread() -> None:
    pair = settled()
    pair.say("a")
    starve(pair, "a", 1.0)
    pair.run(2.0)
    assert pair.alive["a"].counts.get("retransmits", 0) == 0


def test_to_a_late_peer_messages_are_sent_again_later_and_yet_again() -> None:
    pair = settled()
    frame = envelope_of(a_frame(pair), late_ms=900_000, bodies=())
    session = pair.alive["a"]
    session.receive(pair.now, frame)
    pair.kill("b")
    pair.learn("a", session.send(pair.now, "b", ReleaseLease(lease_id=1)))
    pair.run(SETTINGS.retransmit_s + TICK_S)
    assert "retransmits" not in session.counts
    pair.run(TIMEOUT_S / 3 + TICK_S)
    assert session.counts["retransmits"] == 1
