"""The thread that answers for keys, under a seeded schedule: rotations, floods of connections, and the end.

A bug that is planted in each of them is found."""

import select
import sys
from collections import deque
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import zmq
from thread_schedule import first_failure, its_descriptors
from zmq.utils import z85

from mooncake_zmq.core import keys as key_texts
from mooncake_zmq.transfer import key_files, sockets
from mooncake_zmq.transfer.own_files import replace_own

HERE = sys.modules[__name__]
SEEDS = range(100)
SOON_S = 10.0
"""Virtual: a thread that waits for so long was not woken."""


OWN, OLD, NEW = (zmq.curve_keypair()[0].decode() for _ in range(3))


def book_of(*its_keys):
    made = [("here", OWN), *(("there", key) for key in its_keys)]
    return "".join(f"{name} node 2026-01-01 {key}\n" for name, key in made)


def own_keys(directory):
    """The path of a file of public keys, and its keys as this process has them."""
    path = directory / key_files.PUBLIC_KEYS
    replace_own(path, book_of(OLD).encode())
    book = key_texts.parse(book_of(OLD))
    return path, key_files.Keys(path=path, _seen=None, name="here", public=OWN, secret=b"", book=book, clock=lambda: 0.0)


def keys_in_rotation(directory):
    """A node's key is rotated under load: it is let in by either key while the file has both, and by the old one no more once
    that is dropped; and at every moment there is a key by which it can be reached."""

    def case(schedule):
        def body():
            path, mine = own_keys(directory)
            with patch.object(zmq, "Context", lambda io_threads: SimpleNamespace()):
                shared, over = sockets.Sockets(mine), []

            def operator():
                replace_own(path, book_of(OLD, NEW).encode())
                while shared.holder("control", f"there {NEW}") != "there":
                    schedule.switch()
                assert shared.holder("control", f"there {OLD}") == "there"
                replace_own(path, book_of(NEW).encode())
                while shared.holder("control", f"there {OLD}"):
                    schedule.switch()
                over.append(True)

            def follows():
                while not over:
                    mine.refresh()
                    schedule.switch()

            def connects():
                while not over:
                    assert shared.key_of("there") in (OLD, NEW)
                    assert any(shared.holder("control", f"there {key}") for key in (OLD, NEW, OLD))
                    schedule.switch()

            with patch.object(key_files, "log", SimpleNamespace(info=lambda *_, **__: None)), its_descriptors(shared):
                schedule.together(operator, follows, connects)

        return body

    return case


def take_piecemeal(self, text):
    """Planted: the book is emptied, and filled again line by line."""
    self.book = key_texts.KeyBook()
    for key in key_texts.parse(text).keys:
        self.book = self.book.with_key(key)
    return len(self.book.keys)


class KeysSocket:
    """The socket by which libzmq asks for the keys of new connections: each question is answered before the next is taken."""

    def __init__(self):
        self.asked, self.answers, self.open_question = deque(), {}, None

    def bind(self, endpoint):
        pass

    def close(self):
        pass

    def recv_multipart(self):
        assert self.open_question is None, "a question was taken before the last one had its answer"
        self.open_question = self.asked.popleft()
        request_id, plane, key = self.open_question
        return [b"1.0", request_id, plane, b"10.0.0.1", b"", b"CURVE", z85.decode(key)]

    def send_multipart(self, answer):
        assert answer[1] == self.open_question[0], "a question got the answer of another"
        self.answers[answer[1]], self.open_question = answer[2], None


def poller_of(schedule, keys_socket):
    """A poller of that socket and of the eventfd that stops its thread."""

    class Poller:
        def __init__(self):
            self.stop = -1

        def register(self, each, events):
            self.stop = each if isinstance(each, int) else self.stop

        def poll(self, timeout_ms):
            def ready():
                stopped = select.select([self.stop], [], [], 0)[0]
                return [(keys_socket, zmq.POLLIN)] * bool(keys_socket.asked) + [(each, zmq.POLLIN) for each in stopped]

            schedule.wait_until(ready, timeout_ms / 1000)
            return ready()

    return Poller


STRANGER = zmq.curve_keypair()[0].decode()


def answers_for_keys(directory):
    """Connections come without a pause while a key is dropped, and its messages are refused elsewhere: each gets the answer of
    its own key, the dropped one is refused within a moment, and every refusal is counted."""

    def case(schedule):
        def body():
            path, mine = own_keys(directory)
            keys_socket, refused, answered = KeysSocket(), [], []
            silent = SimpleNamespace(info=lambda *_, **__: None, warning=lambda *_, **__: None)
            with (
                patch.object(zmq, "Context", lambda io_threads: SimpleNamespace(term=lambda: None)),
                patch.object(zmq, "Poller", poller_of(schedule, keys_socket)),
                patch.object(sockets.Sockets, "inner", lambda self, kind: keys_socket),
                patch.multiple(key_files, log=silent),
                patch.multiple(sockets, log=silent),
            ):
                shared = sockets.Sockets(mine).borrow()

                def connects(name, key):
                    request_id = name.encode()
                    keys_socket.asked.append((request_id, b"control", key))
                    schedule.wait_until(lambda: request_id in keys_socket.answers, SOON_S)
                    answer = keys_socket.answers[request_id]
                    answered.append(answer)
                    return answer == b"200"

                def flood():
                    for number in range(12):
                        assert not connects(f"stranger {number}", STRANGER)

                def member():
                    assert connects("member", OWN)
                    replace_own(path, book_of().encode())
                    for number in range(3):
                        gone = not connects(f"old {number}", OLD)
                    assert gone, "a dropped key was let in three times"

                def receiver():
                    for number in range(4):
                        assert not shared.holder("control", f"stranger {STRANGER}")
                        refused.append(number)

                with its_descriptors(shared):
                    shared._answer_for_keys()
                    schedule.together(flood, member, receiver)
                    shared.give_back()
                    shared._stop = -1
            assert schedule.now < SOON_S
            assert shared.counts == {"admitted": answered.count(b"200"), "refused": answered.count(b"400") + len(refused)}

        return body

    return case


def count_without_the_guard(self, what):
    """Planted: two threads count at once."""
    counted = self.counts[what]
    for _ in range(5):  # so that there are steps at which the other thread may come between
        self.counts[what] = counted + 1


def run_reading_when_idle(self):
    """Planted: the file is not read while connections come."""
    poller = zmq.Poller()
    poller.register(self._zap, zmq.POLLIN)
    poller.register(self._stop, zmq.POLLIN)
    while self._stop not in (ready := dict(poller.poll(int(sockets.REFRESH_S * 1000)))):
        if self._zap in ready:
            self._zap.send_multipart(self._answer(self.keys, self._zap.recv_multipart()))
        else:
            self.keys.refresh()


def one_authenticator(schedule):
    """However many sockets begin to listen at once, one thread answers for keys; the last part that gives back ends it."""

    def body():
        began, ended = [], []
        with (
            patch.object(sockets.Sockets, "inner", lambda self, kind: SimpleNamespace(bind=began.append, close=lambda: None)),
            patch.object(sockets.Sockets, "_run", lambda self: None),
            patch.object(sockets.Sockets, "_end", lambda self: ended.append(self)),
            patch.object(zmq, "Context", lambda io_threads: SimpleNamespace()),
        ):
            shared = sockets.Sockets()
            for _ in range(3):
                shared.borrow()

            def part():
                shared._answer_for_keys()
                shared.give_back()

            with its_descriptors(shared):
                schedule.together(part, part, part)
        assert began == [sockets.ZAP_ENDPOINT]
        assert ended == [shared]

    return body


def give_back_without_the_guard(self):
    """Planted: two parts that give back at once may both, or neither, be the last."""
    self._users -= 1
    if self._users == 0:
        self._end()


def test_a_key_is_rotated_under_load(tmp_path):
    assert first_failure(keys_in_rotation(tmp_path), SEEDS, sockets, key_files, HERE) == ""


def test_a_bug_planted_in_a_rotation_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(key_files.Keys, "_take", take_piecemeal)
    assert first_failure(keys_in_rotation(tmp_path), range(400), sockets, key_files, HERE) != ""


def test_keys_are_answered_for_under_a_flood(tmp_path):
    assert first_failure(answers_for_keys(tmp_path), SEEDS, sockets, key_files, HERE) == ""


@pytest.mark.parametrize(
    ("attribute", "planted"), [("_count", count_without_the_guard), ("_run", run_reading_when_idle)], ids=["count", "loop"]
)
def test_a_bug_planted_in_the_answers_for_keys_is_found(tmp_path, monkeypatch, attribute, planted):
    monkeypatch.setattr(sockets.Sockets, attribute, planted)
    assert first_failure(answers_for_keys(tmp_path), range(400), sockets, key_files, HERE) != ""


def test_one_thread_answers_for_keys():
    assert first_failure(one_authenticator, SEEDS, sockets, HERE) == ""


def test_a_bug_planted_in_the_end_of_sockets_is_found(monkeypatch):
    monkeypatch.setattr(sockets.Sockets, "give_back", give_back_without_the_guard)
    assert first_failure(one_authenticator, range(400), sockets, HERE) != ""
