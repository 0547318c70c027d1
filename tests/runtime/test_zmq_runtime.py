"""Two nodes with tiny actors over real ZeroMQ sockets, both drivers."""

import asyncio
import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import zmq
from waiting import eventually

from mooncake_zmq.core.actor import (
    CancelTimer,
    CancelWork,
    Drained,
    DrainTimedOut,
    DrainWanted,
    Effect,
    Event,
    Fence,
    OpenSequence,
    PeerDown,
    PeerUp,
    Received,
    Send,
    SetTimer,
    Start,
    Started,
    TimerFired,
    WorkDone,
)
from mooncake_zmq.core.messages import Hello, ReleaseLease
from mooncake_zmq.core.node import Node
from mooncake_zmq.core.routes import Member
from mooncake_zmq.core.session import Session, SessionSettings
from mooncake_zmq.core.work import ProbeProcess, ProcessProbed
from mooncake_zmq.runtime import peer_sockets
from mooncake_zmq.runtime.zmq_runtime import READ_FIRST_TURNS, ZmqRuntime
from mooncake_zmq.transfer.sockets import BadEndpoint, check_endpoint

# A peer is not taken for dead while a busy machine keeps it waiting: what was on its way would be void.
SETTINGS = SessionSettings(heartbeat_s=0.05, peer_timeout_s=3.0, retransmit_s=0.1)
QUIET = SessionSettings(heartbeat_s=100.0, peer_timeout_s=1000.0, retransmit_s=100.0)
"""No tick within a test, to wake a loop that missed something else."""
ANSWER = 1 << 20
NOT_SENDABLE = "frames_dropped[reason=not_sendable]"
MANY = 2000
"""Frames of which some are lost where a queue holds 50."""
HELLO = Hello(protocol=1, role="cache-node", host="here", model="m", tokenizer="t", layout="l")


@dataclass
class Echo:
    """Answers a ReleaseLease with the same id + ANSWER; everything else it only remembers."""

    counts: dict[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    started: list[Effect] = field(default_factory=list)
    busy: bool = False

    def handle(self, now: float, event: Event) -> list[Effect]:
        self.events.append(event)
        match event:
            case Started():
                return self.started
            case Received(sender, ReleaseLease(lease_id=lease)) if lease < ANSWER:
                return [Send(sender, ReleaseLease(lease_id=lease + ANSWER))]
            case DrainWanted() if not self.busy:
                return [Drained()]
        return []

    def check(self, now: float) -> None: ...

    def gauges(self, now: float) -> dict[str, float]:
        return {"busy": float(self.busy)}

    def dump(self, now: float) -> dict[str, Any]:
        return {"events": len(self.events)}

    def of(self, kind: type) -> list[Any]:
        return [event for event in list(self.events) if isinstance(event, kind)]

    def leases(self) -> list[int]:
        return [event.message.lease_id for event in self.of(Received) if isinstance(event.message, ReleaseLease)]


def endpoint(directory: Path, name: str) -> str:
    return f"ipc://{directory}/{name}.ipc"


def make(
    directory: Path,
    me: str,
    peers: list[str],
    *,
    incarnation: int = 1,
    actor: Echo | None = None,
    settings: SessionSettings = SETTINGS,
    **more: Any,
) -> ZmqRuntime:
    actor = actor or Echo()
    session = Session(
        me=me,
        incarnation=incarnation,
        hello=HELLO,
        peers=dict.fromkeys(peers, Member(("cache-node",), "here")),
        settings=settings,
        now=time.monotonic(),
    )
    return ZmqRuntime(
        Node(actor, session),
        endpoint=endpoint(directory, me),
        peers={peer: endpoint(directory, peer) for peer in peers},
        **more,
    )


def run_in_asyncio(runtime: ZmqRuntime) -> None:
    async def serve() -> None:
        stopped = asyncio.Event()
        runtime.attach(asyncio.get_running_loop(), stopped.set, fail)
        await stopped.wait()
        runtime.close()

    asyncio.run(serve())


@contextmanager
def running(runtime: ZmqRuntime, drive: Callable[[ZmqRuntime], None] = ZmqRuntime.run):
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            drive(runtime)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield runtime
    finally:
        runtime.call(runtime.stop)
        thread.join(5)
        assert not thread.is_alive()
        if drive is ZmqRuntime.run:
            runtime.close()
        if failures:
            raise failures[0]


def send(runtime: ZmqRuntime, to: str, lease_id: int, *, lossy: bool = False) -> None:
    """Make the actor send, as an effect of its next event."""

    def act() -> None:
        runtime._carry_out([*_transmits(runtime, to, ReleaseLease(lease_id=lease_id), lossy)])

    runtime.call(act)


def _transmits(runtime: ZmqRuntime, to: str, message: ReleaseLease, lossy: bool):
    class Once(Echo):
        def handle(self, now: float, event: Event) -> list[Effect]:
            return [Send(to, message, lossy=lossy)]

    real, runtime.node.actor = runtime.node.actor, Once()
    try:
        return runtime.node.handle(time.monotonic(), Started())
    finally:
        runtime.node.actor = real


def test_peers_greet_and_exchange_messages_in_order(tmp_path: Path) -> None:
    a, b = Echo(), Echo()
    with running(make(tmp_path, "a", ["b"], actor=a)) as left, running(make(tmp_path, "b", ["a"], actor=b)):
        eventually(lambda: a.of(PeerUp) and b.of(PeerUp))
        for lease in range(200):
            send(left, "b", lease)
        eventually(lambda: len(a.leases()) == 200)
        assert b.leases() == list(range(200))
        assert a.leases() == list(range(ANSWER, ANSWER + 200))
        assert isinstance(a.events[0], Started)
    assert os.listdir(tmp_path) == []


def test_a_restart_is_a_peer_down_then_up_with_the_new_incarnation(tmp_path: Path) -> None:
    a = Echo()
    with running(make(tmp_path, "a", ["b"], actor=a)) as left:
        with running(make(tmp_path, "b", ["a"], incarnation=1)):
            eventually(lambda: a.of(PeerUp))
        b = Echo()
        with running(make(tmp_path, "b", ["a"], incarnation=2, actor=b)):
            eventually(lambda: len(a.of(PeerUp)) == 2)
            assert [event.incarnation for event in a.of(PeerUp)] == [1, 2]
            ups_and_downs = [type(event) for event in a.events if isinstance(event, PeerUp | PeerDown)]
            assert ups_and_downs == [PeerUp, PeerDown, PeerUp]
            send(left, "b", 5)
            eventually(lambda: b.leases() == [5])


def test_a_silent_peer_goes_down(tmp_path: Path) -> None:
    a = Echo()
    with running(make(tmp_path, "a", ["b"], actor=a)):
        with running(make(tmp_path, "b", ["a"])):
            eventually(lambda: a.of(PeerUp))
        eventually(lambda: a.of(PeerDown))
        assert a.of(PeerDown)[0].reason == "silent"


def test_the_log_tells_who_came_went_and_was_refused(tmp_path: Path) -> None:
    a = Echo()
    with structlog.testing.capture_logs() as lines, running(make(tmp_path, "a", ["b"], actor=a)):

        def states() -> list[str]:
            return [str(line["state"]).partition(" differs")[0] for line in lines if line["event"] == "peer"]

        with running(make(tmp_path, "b", ["a"], incarnation=2)):
            eventually(lambda: a.of(PeerUp) and "up" in states())  # both log, and b may be the first
        eventually(lambda: "down" in states())
        other = make(tmp_path, "b", ["a"], incarnation=3)
        other.node.session._hello = msgspec.structs.replace(HELLO, model="another")
        with running(other):
            eventually(lambda: "refused: model" in states())


def test_a_loop_that_was_late_itself_says_so_before_it_calls_a_peer_down(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as lines, running(make(tmp_path, "a", ["b"])) as left:
        with running(make(tmp_path, "b", ["a"])):
            eventually(lambda: left.node.session.up_peers)
            left.node.session.counts.add("late_loops")
            left.node.session.recent_late_s = 0.7
            eventually(lambda: any(line["event"] == "loop_was_late" for line in lines))
            left.node.session.counts.add("late_loops")  # within the same minute
            left.node.session.recent_late_s = 0.9
        eventually(lambda: any(line.get("state") == "down" for line in lines))
    told = [line for line in lines if line["event"] in ("peer", "loop_was_late")]
    assert [line["event"] for line in told[-2:]] == ["loop_was_late", "peer"]
    assert (told[-1]["state"], told[-1]["own_late_s"] > 0) == ("down", True)


def test_a_node_that_stops_in_order_is_gone_at_once_and_no_log_warns_of_it(tmp_path: Path) -> None:
    a, b = Echo(), Echo(busy=False)
    with structlog.testing.capture_logs() as lines, running(make(tmp_path, "a", ["b"], actor=a)) as left:
        with running(make(tmp_path, "b", ["a"], actor=b)) as leaving:
            eventually(lambda: a.of(PeerUp) and b.of(PeerUp))
            leaving.call(leaving.drain)
            eventually(lambda: leaving.stopped)
        eventually(lambda: a.of(PeerDown))
        assert a.of(PeerDown) == [PeerDown("b", "left")]
        assert b.of(PeerDown) == []
        eventually(lambda: any(line.get("state") == "left" for line in lines))
        assert left.node.session.up_peers == {}
    assert [line for line in lines if line["log_level"] == "warning" and line["event"] == "peer"] == []


def test_garbage_frames_are_counted_and_harm_nobody(tmp_path: Path) -> None:
    a = Echo()
    with running(make(tmp_path, "a", ["b"], actor=a)) as left, running(make(tmp_path, "b", ["a"])):
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 1000)
        stranger.connect(endpoint(tmp_path, "a"))
        stranger.send(b"\xc1 no MessagePack")
        stranger.send(b"")
        stranger.send_multipart([b"two", b"parts"])
        stranger.send_multipart([b""] * 300)
        eventually(lambda: left.counts.get("frames_dropped[reason=not_single_part]", 0) == 2)
        eventually(lambda: left.node.session.counts.get("dropped[reason=malformed]", 0) == 2)
        stranger.close()
        context.term()
        eventually(lambda: a.of(PeerUp))


DRIVERS = pytest.mark.parametrize("drive", [ZmqRuntime.run, run_in_asyncio], ids=["run", "attach"])


@DRIVERS
def test_frames_that_a_full_turn_leaves_are_taken_without_another_wake(drive, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("mooncake_zmq.runtime.zmq_runtime.FRAMES_PER_TURN", 2)
    sent = threading.Event()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 1000)
    try:
        with running(make(tmp_path, "a", [], settings=QUIET), drive) as runtime:
            runtime.call(lambda: sent.wait(5) and None)
            stranger.connect(endpoint(tmp_path, "a"))
            for _ in range(1000):
                stranger.send(b"")
            sent.set()
            eventually(lambda: runtime.node.session.counts.get("dropped[reason=malformed]", 0) == 1000)
    finally:
        stranger.close()
        context.term()


@DRIVERS
def test_an_event_from_another_thread_wakes_an_idle_loop_once(drive, tmp_path: Path) -> None:
    actor = Echo()
    with running(make(tmp_path, "a", [], actor=actor, settings=QUIET), drive) as runtime:
        for number in range(1, 4):
            runtime.post(TimerFired((number,)))
            eventually(lambda number=number: len(actor.of(TimerFired)) == number)
        assert select.select([runtime._wake_fd], [], [], 0)[0] == [], "or the loop would go round for ever"


def test_frames_lost_at_the_high_water_mark_are_counted_and_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_sockets, "LIMITS", replace(peer_sockets.LIMITS, send_hwm=50, receive_hwm=50))
    a, b = Echo(), Echo()
    with running(make(tmp_path, "a", ["b"], actor=a)) as left, running(make(tmp_path, "b", ["a"], actor=b)) as right:
        eventually(lambda: a.of(PeerUp) and b.of(PeerUp))
        lost, sent = threading.Event(), []
        before = left.counts.get(NOT_SENDABLE, 0)  # frames of the time before the connection
        right.call(lambda: lost.wait(60) and None)  # b receives nothing meanwhile

        def send_until_one_is_lost() -> None:
            while left.counts.get(NOT_SENDABLE, 0) == before and len(sent) < MANY:
                send(left, "b", len(sent))
                sent.append(len(sent))
            lost.set()

        left.call(send_until_one_is_lost)
        eventually(lambda: lost.is_set() and b.leases() == sent, timeout_s=60)
        assert left.counts[NOT_SENDABLE] > before
        assert left.node.session.counts["retransmits"] > 0


def test_timers_fire_once_in_order_and_can_be_replaced_and_cancelled(tmp_path: Path) -> None:
    effects: list[Effect] = [
        SetTimer(("last",), 0.15),
        SetTimer(("early",), 0.05),
        SetTimer(("replaced",), 0.01),
        SetTimer(("replaced",), 0.1),
        SetTimer(("cancelled",), 0.02),
        SetTimer(("cancelled late",), 0.12),
        CancelTimer(("cancelled late",)),
        CancelTimer(("cancelled",)),
        CancelTimer(("never set",)),
    ]
    actor = Echo(started=effects)
    with running(make(tmp_path, "a", [], actor=actor)):
        # What must not fire was due before the last one.
        eventually(lambda: TimerFired(("last",)) in actor.events)
        assert [event.key for event in actor.of(TimerFired)] == [("early",), ("replaced",), ("last",)]


@dataclass
class Threads:
    """An executor whose works end in threads of their own; it also remembers the order of calls."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    emit: Any = None

    def start(self, work_id: int, work: Any, deadline_s: float) -> None:
        self.calls.append(("start", work_id))
        done = WorkDone(work_id, ProcessProbed(alive=True))
        threading.Timer(0.01, lambda: self.emit(done)).start()

    def cancel(self, work_id: int) -> None:
        self.calls.append(("cancel", work_id))

    def fence(self, generations: Any) -> None:
        self.calls.append(("fence", generations))

    def open_sequence(self, asked: OpenSequence) -> None: ...

    def close_sequence(self, sequence: int) -> None: ...

    def learn_peer(self, name: str, incarnation: int, hello: Hello) -> None:
        self.calls.append(("peer", name, incarnation))

    def forget_peer(self, name: str) -> None:
        self.calls.append(("gone", name))


def test_works_end_as_events_and_effects_keep_their_order(tmp_path: Path) -> None:
    probe = ProbeProcess("b", 1)
    works = [Fence(((1, 3),)), Start(1, probe, 1.0), Fence(((1, 4),)), CancelWork(1), Start(2, probe, 1.0)]
    actor, executor = Echo(started=works), Threads()
    runtime = make(tmp_path, "a", ["b"], actor=actor, executor=executor)
    executor.emit = runtime.post
    with running(runtime), running(make(tmp_path, "b", ["a"], incarnation=7)):
        eventually(lambda: len(actor.of(WorkDone)) == 2)
        eventually(lambda: actor.of(PeerUp))
        assert executor.calls[:5] == [("fence", ((1, 3),)), ("start", 1), ("fence", ((1, 4),)), ("cancel", 1), ("start", 2)]
        assert executor.calls[5] == ("peer", "b", 7)


def test_a_drained_actor_ends_the_runtime(tmp_path: Path) -> None:
    actor = Echo(busy=True)
    runtime = make(tmp_path, "a", [], actor=actor)
    with running(runtime):
        runtime.call(runtime.drain)
        eventually(lambda: actor.of(DrainWanted))
        for _ in range(3):  # each in a turn of its own, and it is at a turn's end that the runtime would stop
            turned = threading.Event()
            runtime.call(turned.set)
            assert turned.wait(5)
        assert not runtime.stopped
        actor.busy = False
        runtime.call(runtime.drain)
        eventually(lambda: runtime.stopped)


def fail(error: BaseException) -> None:
    raise AssertionError("crashed") from error


def test_the_asyncio_driver_tells_of_a_bug_instead_of_going_on(tmp_path: Path) -> None:
    """asyncio itself would only log it."""

    class Buggy(Echo):
        def handle(self, now: float, event: Event) -> list[Effect]:
            assert not isinstance(event, TimerFired | DrainWanted), "a bug"
            return super().handle(now, event)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        runtime = make(tmp_path, "a", [], actor=Buggy(started=[SetTimer(("soon",), 0.01)]))
        stopped = asyncio.Event()
        crashes: list[BaseException] = []

        def on_crash(error: BaseException) -> None:
            crashes.append(error)
            runtime.stop()

        runtime.attach(loop, stopped.set, on_crash)
        with pytest.raises(AssertionError, match="a bug"):
            runtime.handle(DrainWanted())
        await asyncio.wait_for(stopped.wait(), 5)
        assert len(crashes) == 1
        runtime.close()
        runtime.handle(DrainWanted())  # from a call that ends late

    asyncio.run(serve())


def test_the_asyncio_driver_tells_of_a_bug_in_its_own_turn(tmp_path: Path) -> None:
    class Buggy(Echo):
        def handle(self, now: float, event: Event) -> list[Effect]:
            assert not isinstance(event, TimerFired), "a bug"
            return super().handle(now, event)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        runtime = make(tmp_path, "a", [], actor=Buggy(started=[SetTimer(("soon",), 0.01)]))
        stopped = asyncio.Event()
        runtime.attach(loop, stopped.set, lambda _error: runtime.stop())
        await asyncio.wait_for(stopped.wait(), 5)
        runtime.close()

    asyncio.run(serve())


class Leaves(Echo):
    """Has something to say when its drain is out of time, and is never done."""

    def handle(self, now: float, event: Event) -> list[Effect]:
        last = ReleaseLease(lease_id=ANSWER)
        return super().handle(now, event) + ([Send("b", last)] if isinstance(event, DrainTimedOut) else [])


def test_a_drain_that_ran_out_of_time_ends_the_runtime_once_its_last_words_are_heard(tmp_path: Path) -> None:
    leaver, hearer = Leaves(busy=True), Echo()
    leaving = make(tmp_path, "a", ["b"], actor=leaver)
    with running(leaving), running(make(tmp_path, "b", ["a"], actor=hearer)):
        eventually(lambda: leaver.of(PeerUp) and hearer.of(PeerUp))
        leaving.call(leaving.drain)
        leaving.call(leaving.hand_over)
        eventually(lambda: leaving.stopped)
        eventually(lambda: hearer.leases() == [ANSWER])


def test_an_actor_that_says_again_that_it_is_drained_does_not_put_off_the_end(tmp_path: Path) -> None:
    class Chatty(Echo):
        """Drained, yet woken ever again; its peer acknowledges nothing."""

        def handle(self, now: float, event: Event) -> list[Effect]:
            self.events.append(event)
            if isinstance(event, Started):
                return [SetTimer(("again",), 0.01)]
            return [Drained(), SetTimer(("again",), 0.01)] if isinstance(event, TimerFired | DrainWanted) else []

    runtime = make(tmp_path, "a", [], actor=Chatty())
    with running(runtime):
        session = type(runtime.node.session)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "unacknowledged", property(lambda _self: 1))
            runtime.call(runtime.drain)
            eventually(lambda: runtime.stopped, 3)


def test_the_asyncio_driver_serves_beside_other_tasks(tmp_path: Path) -> None:
    a, b = Echo(started=[SetTimer(("soon",), 0.01)]), Echo()
    ticks = 0

    async def serve() -> None:
        runtime = make(tmp_path, "a", ["b"], actor=a)
        stopped = asyncio.Event()
        runtime.attach(asyncio.get_running_loop(), stopped.set, fail)
        try:
            await talk(runtime)
            runtime.call(runtime.drain)
            await asyncio.wait_for(stopped.wait(), 5)
        finally:  # a context left open would hang the garbage collector
            runtime.close()

    async def talk(runtime: ZmqRuntime) -> None:
        nonlocal ticks
        deadline = time.monotonic() + 20
        while not a.of(PeerUp):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        # More than one turn takes, so that leftovers on the edge-triggered descriptor are not forgotten.
        for lease in range(3000):
            send(runtime, "b", lease)
        while len(a.leases()) < 3000:
            assert time.monotonic() < deadline
            ticks += 1
            await asyncio.sleep(0.01)

    with running(make(tmp_path, "b", ["a"], actor=b)):
        asyncio.run(serve())
    assert b.leases() == list(range(3000))
    assert a.of(TimerFired)
    assert ticks > 0


def test_endpoints_are_checked() -> None:
    for bad in ("ipc://relative.ipc", "ipc:///" + "x" * 120, "http://x", "inproc://x"):
        with pytest.raises(BadEndpoint):
            check_endpoint(bad)
    check_endpoint("tcp://127.0.0.1:5555")


@pytest.mark.parametrize(
    "bad",
    [
        "some-host:5555",
        "localhost:1",
        "*:5555",
        "0.0.0.0:5555",
        "[::1]:5",
        "eth0:5",
        "10.0.0.1",
        "10.0.0.1:0",
        "10.0.0.1:*",
        "",
    ],
)
def test_a_tcp_endpoint_is_one_address_and_port(bad: str) -> None:
    with pytest.raises(BadEndpoint, match="write tcp://ADDRESS:PORT with an IPv4 address"):
        check_endpoint(f"tcp://{bad}")


def test_a_tcp_port_in_use_is_one_clear_line() -> None:
    context = zmq.Context()
    holder = context.socket(zmq.ROUTER)
    port = holder.bind_to_random_port("tcp://127.0.0.1")
    session = Session(me="a", incarnation=1, hello=HELLO, peers={}, settings=SETTINGS, now=0.0)
    with pytest.raises(BadEndpoint, match=f"cannot listen on tcp://127.0.0.1:{port}: the address is in use"):
        ZmqRuntime(Node(Echo(), session), endpoint=f"tcp://127.0.0.1:{port}", peers={})
    holder.close(linger=0)
    context.term()


def test_the_dump_holds_every_layer(tmp_path: Path) -> None:
    runtime = make(tmp_path, "a", ["b"])
    runtime.close()
    runtime.post(Started())  # from a thread that ends late
    assert set(runtime.dump()) == {"session", "counts", "actor", "gauges", "runtime"}


def test_what_lies_unread_is_read_before_an_overdue_timer_fires(tmp_path: Path) -> None:
    a, b = Echo(), Echo()
    count = 50
    with running(make(tmp_path, "a", ["b"], actor=a)) as left, running(make(tmp_path, "b", ["a"], actor=b)) as right:
        eventually(lambda: a.of(PeerUp) and b.of(PeerUp))
        held, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            right._carry_out([SetTimer(("late",), 0.0)])
            held.set()
            go_on.wait(20)

        right.call(hold)
        assert held.wait(20)
        for lease in range(count):
            send(left, "b", ANSWER + lease)
        eventually(lambda: left.node.session.unacknowledged >= count)
        time.sleep(2 * right.node.session.tick_s)
        go_on.set()
        eventually(lambda: len(b.leases()) == count and b.of(TimerFired))
        before = b.events[: b.events.index(b.of(TimerFired)[0])]
        assert sum(isinstance(event, Received) for event in before) > 0


def test_timers_wait_for_frames_a_bounded_number_of_turns(tmp_path: Path) -> None:
    runtime = make(tmp_path, "a", [])
    try:
        assert not runtime._reads_on(busy=True), "no timer is due"
        runtime._timers.set("late", time.monotonic() - 100, lambda: None)
        assert not runtime._reads_on(busy=False)
        assert [runtime._reads_on(busy=True) for _ in range(READ_FIRST_TURNS + 1)] == [True] * READ_FIRST_TURNS + [False]
        assert not runtime._reads_on(busy=False)
        assert runtime._reads_on(busy=True)
    finally:
        runtime.close()
