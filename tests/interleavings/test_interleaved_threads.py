"""The threads that no seed of the simulation has: what each promises holds however they are interleaved.

A bug that is planted in each of them is found."""

import sys
from collections import Counter, deque
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import zmq
from thread_schedule import first_failure, its_descriptors

from mooncake_zmq.core import turns
from mooncake_zmq.engine import fair_pool, grammars
from mooncake_zmq.engine.constraint import ConstraintError
from mooncake_zmq.engine.grammar_process import Answer, Ask
from mooncake_zmq.runtime.executor import load_records, sampler
from mooncake_zmq.transfer import connections, stream_host

HERE = sys.modules[__name__]
SEEDS = range(100)
SOON_S = 10.0
"""Virtual: a thread that waits for so long was not woken."""


# --- the pool in which requests are prepared


def pool_of_tenants(schedule):
    """Tenants ask side by side, and one of them cancels: every work runs once at most, on so many threads at most."""

    def body():
        threads = schedule.random.choice((1, 2))
        pool, ran, at_once = fair_pool.FairPool("pool", threads, lambda: schedule.now), Counter(), []

        def work(name):
            at_once.append(name)
            assert len(at_once) <= threads
            ran[name] += 1
            at_once.remove(name)
            return name

        def tenant(name):
            for number in range(2):
                asked = pool.submit(name, lambda number=number: work((name, number)))
                cancelled = name == "b" and asked.cancel()
                with suppress(CancelledError):
                    assert asked.result(SOON_S) == (name, number)
                assert ran[name, number] == (not cancelled)

        schedule.together(*[lambda name=name: tenant(name) for name in "ab"])
        pool.close(wait=True)

    return body


def pool_that_closes(schedule):
    """Whatever was asked before, during or after the close ends: it is done or cancelled."""

    def body():
        pool = fair_pool.FairPool("pool", 1, lambda: schedule.now)

        def tenant(name):
            for _ in range(2):
                with suppress(CancelledError):
                    assert pool.submit(name, lambda: name).result(SOON_S) == name

        schedule.together(lambda: tenant("a"), lambda: tenant("b"), pool.close)

    return body


def idle_without_the_lock(self):
    """Planted: a thread says that it is idle after it has let go of the lock."""
    with self._lock:
        work = self._turns.take()
    for _ in range(10):  # so that there are steps at which another thread may come between
        is_idle = work is None
    self._busy -= is_idle
    return work


# --- the thread that asks the grammars' process


class GrammarProcess:
    """Stands in for the process: what may come next is told by the tokens that it was given."""

    was_late, code = False, 0

    def __init__(self, begin, incarnation):
        self.incarnation = incarnation
        self.stopped = False
        self.answers = {}
        self.asked = False

    def begun(self):
        pass

    def ask(self, ask):
        assert not self.asked, "the process is asked one thing at a time"
        self.asked = True
        for number in ask.drop:
            self.answers.pop(number, None)
        known = [] if ask.grammar is not None else self.answers.get(ask.answer)
        self.asked = False
        if self.stopped or known is None:  # as the live one ends when it is asked for an answer that it does not have
            raise EOFError
        self.answers[ask.answer] = known = [*known, *ask.tokens]
        return Answer(allowed=bytes([sum(known)]))

    def stop(self):
        self.stopped = True

    def end(self):
        self.stop()


def stood_in_for(schedule):
    """No process, and the schedule's time for turns."""
    return patch.multiple(grammars, _Process=GrammarProcess, FairPool=partial(fair_pool.FairPool, clock=lambda: schedule.now))


def following(asks, name, tokens):
    """One answer under a grammar: what may come next is always told of exactly the tokens so far."""
    answer = asks.begin(b"grammar", (), name)
    for token in tokens:
        assert np.packbits(answer.allowed(), bitorder="little").tobytes() == bytes([sum(answer.answer)])
        answer.feed(token)
    answer.drop()


def answers_with_grammars(schedule):
    def body():
        with patch.multiple(
            grammars, _Process=GrammarProcess, FairPool=partial(fair_pool.FairPool, clock=lambda: schedule.now)
        ):
            asks = grammars.Grammars(b"", 8)
            schedule.together(*[lambda name=name: following(asks, name, (1, 2, 4)) for name in "aab"])
            assert schedule.now < SOON_S, "an answer waited for what was never looked for"
            asks.close()
            assert asks.counts == {"begun": 1}, "the process was not made to end"

    return body


def grammars_that_close(schedule):
    """Who waits at the close learns it at once."""

    def body():
        with patch.multiple(
            grammars, _Process=GrammarProcess, FairPool=partial(fair_pool.FairPool, clock=lambda: schedule.now)
        ):
            asks = grammars.Grammars(b"", 8)

            def follow():
                with suppress(ConstraintError):
                    following(asks, "a", (1, 2))

            schedule.together(follow, follow, asks.close)
            assert schedule.now < SOON_S

    return body


def ask_of_what_is_dropped(self, process, following, tokens):
    """Planted: an answer is dropped in the message that asks for it."""
    with self._lock:
        dropped, self._dropped = self._dropped, []
    incarnation, known = following.held or (-1, 0)
    if incarnation != process.incarnation:
        return Ask(following.number, following.answer[:tokens], 1.0, following.constraint, tuple(dropped))
    return Ask(following.number, following.answer[known:tokens], 1.0, drop=tuple(dropped))


# --- the executor's sampler, and its wait for a prefix


class Unsampled:
    def __init__(self):
        self.future = Future()

    def awaited(self):
        return None if self.future.done() else self.future

    def left_s(self):
        return SOON_S


def sampler_of_jobs(schedule):
    """A job is sampled once: when its mask is there, or when it is stopped; and nothing waits for longer than that."""

    def body():
        sampled, samples = Counter(), sampler.Sampler(lambda error: None)
        jobs = [SimpleNamespace(unsampled=Unsampled(), stopped="", deadline=SOON_S, is_late=lambda: False) for _ in range(3)]

        def asks(number):
            samples.put(jobs[number], lambda: sampled.update([number]))

        def stops(job):
            job.stopped = "cancelled"
            samples.wake()

        schedule.together(
            *[lambda number=number: asks(number) for number in range(3)],
            lambda: jobs[0].unsampled.future.set_result(b""),
            lambda: jobs[1].unsampled.future.set_result(b""),
            lambda: stops(jobs[2]),
        )
        schedule.wait_until(lambda: sampled.total() == 3, SOON_S)
        assert schedule.now < SOON_S, "the sampler slept although something had changed"
        samples.close()
        assert sampled == {0: 1, 1: 1, 2: 1}

    return body


def wake_before_the_job_is_there(self, job, sample):
    """Planted: the thread is woken before there is something for it to see."""
    self.wake()
    with self._lock:
        self._waiting.append((job, job.unsampled, sample))


def prefix_of_a_chunk(schedule):
    """The compute thread goes on when a layer's parts have come, from whichever threads."""

    def body():
        loads = [SimpleNamespace(first_layer=0, stop_layer=2)] * 2
        prefix = load_records.Prefix(2, loads)
        schedule.together(
            lambda: [prefix.wait(layer, lambda: None, SOON_S) for layer in (0, 1)],
            *[lambda block=block: [prefix.arrived(block, range(i, i + 1), ()) for i in (0, 1)] for block in (0, 1)],
        )
        assert prefix._missing == [0, 0]
        assert schedule.now < SOON_S

    return body


def arrived_without_the_lock(self, block, layers, checksums):
    """Planted: two threads count the same layer's parts at once."""
    for layer in layers:
        self._missing[layer] -= 1
    with self._changed:
        self._changed.notify_all()


# --- the books of a listening socket's connections


class Watched(connections.Connections):
    """Without its thread: the schedule looks in its place."""

    def _run(self):
        pass


class Listening:
    type, rcvbuf, rcvhwm = zmq.ROUTER, 0, 0

    def get(self, option):
        return 0

    def get_monitor_socket(self, events):
        return SimpleNamespace(close=lambda linger: None)

    def disable_monitor(self):
        pass


FRAME_BYTES = 600 << 10
HONEST, ENDLESS = 5, 6


def honest_and_endless(schedule):
    """A connection whose messages are whole is never cut, whenever they are taken; one whose message never ends always is."""

    def body():
        received, queue, cuts, taken = {HONEST: 0, ENDLESS: 0}, deque(), [], 0
        watching = Watched(Listening(), {}, lambda error: None)
        watching._process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0))
        for descriptor in received:
            watching._open[descriptor] = connections._Open("10.0.0.1", 0.0)

        def sends():
            for _ in range(6):
                received[HONEST] += FRAME_BYTES + connections.LONG_BYTES
                queue.append(FRAME_BYTES)
            received[ENDLESS] += 2 * FRAME_BYTES

        def receives():
            nonlocal taken
            while taken < 6:
                watching.looking()
                if queue:
                    watching.took(HONEST, queue.popleft())
                    taken += 1
                else:
                    watching.drained()
                    schedule.switch()
            watching.drained()

        def looks():
            while schedule.now < 2 * connections.PARTIAL_S:
                watching._look(schedule.now, connections.LOOK_S)
                schedule.sleep(5 * connections.LOOK_S if taken == 6 else 0.0)

        with (
            patch.object(connections, "_received_bytes", received.get),
            patch.object(connections, "cut", lambda listening, descriptor: cuts.append(descriptor)),
            patch.object(connections, "_endpoint", lambda listening: "tcp://here"),
            patch.object(connections, "log", SimpleNamespace(warning=lambda *_, **__: None)),
            its_descriptors(watching),
        ):
            schedule.together(sends, receives, looks)
            watching.close()
        assert cuts == [ENDLESS]

    return body


LOOK = connections.Connections._look


def look_that_loses(self, now, elapsed_s):
    """Planted: what is taken while the books are read is not counted."""
    noted = list(self._taken)
    self._taken.clear()
    self._taken.extend(noted)
    LOOK(self, now, elapsed_s)


# --- streams, of which each has a thread


class Stream:
    """Waits for a request from its beginning, and ends when it is shut."""

    def __init__(self, schedule):
        self.schedule, self.waits_since, self.over = schedule, schedule.now, False

    def run(self):
        self.schedule.wait_until(lambda: self.over)

    def shut(self):
        self.over = True

    def close(self):
        pass


def flood_of_streams(directory):
    """A key floods with connections: it has its share of the streams and no more, and another key is let in all the while."""

    def case(schedule):
        def body():
            with (
                patch.multiple(stream_host, MAX_STREAMS=5, MAX_STREAMS_OF_A_KEY=3),
                patch.object(stream_host.StreamHost, "_run", lambda self: None),
                patch.object(stream_host, "log", SimpleNamespace(critical=lambda *_, **__: None)),
            ):
                crashes = []
                host = stream_host.StreamHost(
                    f"ipc://{directory}/streams", 0, None, None, crashes.append, counts={}, name="streams"
                )

                def begin(holder):
                    host._make_room(holder)
                    assert len(host._of(holder)) < stream_host.MAX_STREAMS_OF_A_KEY
                    assert len(host._open) < stream_host.MAX_STREAMS
                    host._begin(Stream(schedule), SimpleNamespace(holder=holder, token=b""))

                with its_descriptors(host, "_listener", "_ready"):
                    for holder in ["red"] * 5 + ["blue", "red", "blue", "red", "blue"]:
                        begin(holder)
                    assert len(host._of("blue")) >= 2
                    host.close()
                assert crashes == []
                assert not host._open

        return body

    return case


def room_by_sum_alone(self, holder):
    """Planted: no key has a share of its own."""
    if len(self._open) >= stream_host.MAX_STREAMS:
        self._wait_for_room(lambda: list(self._open), stream_host.MAX_STREAMS)


# --- all of them

CASES = {
    "the pool of tenants": (pool_of_tenants, (fair_pool, turns), fair_pool.FairPool, "_next", idle_without_the_lock),
    "grammars": (answers_with_grammars, (grammars, fair_pool), grammars.Grammars, "_ask_of", ask_of_what_is_dropped),
    "the sampler": (sampler_of_jobs, (sampler,), sampler.Sampler, "put", wake_before_the_job_is_there),
    "a chunk's prefix": (prefix_of_a_chunk, (load_records,), load_records.Prefix, "arrived", arrived_without_the_lock),
    "connections": (honest_and_endless, (connections,), connections.Connections, "_look", look_that_loses),
}


@pytest.mark.parametrize("name", CASES)
def test_threads_hold_what_is_promised_however_they_are_interleaved(name):
    case, watched, *_ = CASES[name]
    assert first_failure(case, SEEDS, *watched, HERE) == ""


@pytest.mark.parametrize("name", CASES)
def test_a_bug_planted_in_threads_is_found(name, monkeypatch):
    case, watched, owner, attribute, planted = CASES[name]
    monkeypatch.setattr(owner, attribute, planted)
    assert first_failure(case, range(400), *watched, HERE) != ""


@pytest.mark.parametrize("case", [pool_that_closes, grammars_that_close])
def test_what_is_asked_amid_a_close_ends(case):
    assert first_failure(case, SEEDS, fair_pool, grammars, turns, HERE) == ""


def test_a_flood_of_streams_leaves_others_theirs(tmp_path):
    assert first_failure(flood_of_streams(tmp_path), SEEDS, stream_host, HERE) == ""


def test_a_bug_planted_in_the_shares_of_streams_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_host.StreamHost, "_make_room", room_by_sum_alone)
    assert first_failure(flood_of_streams(tmp_path), SEEDS, stream_host, HERE) != ""
