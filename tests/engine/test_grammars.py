"""A grammar that takes all time or memory ends a process that nobody misses: what others follow goes on, as does who asks."""

import os
import resource
import signal
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest
from stopping import stop
from waiting import eventually

from mooncake_zmq.core.messages import Sampling
from mooncake_zmq.engine import grammar_process
from mooncake_zmq.engine import grammars as grammars_module
from mooncake_zmq.engine.constraint import ConstraintError, ConstraintNotReady
from mooncake_zmq.engine.grammars import Grammars
from mooncake_zmq.engine.sampling import Past
from mooncake_zmq.gateway.openai.constraints import of_lark, of_schema

YES_NO = of_lark('start: "yes" | "no"')
PATTERNS = [f".*a.{{{number},{number + 30}}}b.*" for number in range(30)]
TOGETHER = " & ".join(f"/{pattern}/" for pattern in PATTERNS)
BOMB = of_lark(f"start: A\nA: {TOGETHER}")
SCHEMA_BOMB = of_schema({"allOf": [{"type": "string", "pattern": f"^{pattern}$"} for pattern in PATTERNS]})
LATE_BOMB = of_lark(f'start: A\nA: /x/ | "bbb" (/x/ | ({TOGETHER}))')
"""What is read at once, and never comes back from its third token."""


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(grammars_module, "MAX_WAIT_S", 180.0)  # a machine that runs much else is no hanging process
    monkeypatch.setattr(grammars_module, "START_S", 180.0)
    made = []

    def begin(**limits):
        made.append(Grammars("toy", 512, **limits))
        return made[-1]

    yield begin
    for grammars in made:
        grammars.close()


def process_of(grammars):
    return psutil.Process(grammars._process.pid)


def next_of(following):
    return bytes(np.flatnonzero(following.allowed()).tolist())


@pytest.mark.parametrize("bomb", [BOMB, SCHEMA_BOMB])
def test_what_takes_too_long_to_read_is_refused_once_and_for_all(make, bomb):
    grammars = make(max_compile_s=0.2)
    other = grammars.begin(YES_NO, b"y")
    assert next_of(other) == b"e"
    for _ in range(3):
        with pytest.raises(ConstraintError, match="fewer and simpler patterns"):
            grammars.check(bomb)
    assert grammars.counts == {"begun": 1, "ended[reason=cpu]": 1}
    other.feed(ord("e"))
    assert next_of(other) == b"s"
    assert grammars.counts["begun"] == 2


def test_what_takes_too_long_many_tokens_later_is_refused_then(make):
    grammars = make(max_token_s=0.2)
    other, late = grammars.begin(YES_NO), grammars.begin(LATE_BOMB)
    late.allowed()
    for _ in range(3):
        late.feed(ord("b"))
    with pytest.raises(ConstraintError, match="fewer and simpler patterns"):
        late.allowed()
    other.feed(ord("n"))
    assert next_of(other) == b"o"
    with pytest.raises(ConstraintError, match="fewer and simpler patterns"):
        grammars.check(LATE_BOMB)


def test_what_takes_too_much_memory_is_refused_once_and_for_all(make):
    grammars = make(max_compile_s=60.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        with pytest.raises(ConstraintError, match="512 MiB"):
            grammars.check(BOMB)
    assert grammars.counts == {"begun": 2, "ended[reason=crash]": 2}
    grammars.check(YES_NO)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10


def test_what_ended_a_process_is_remembered_up_to_a_bound(make, monkeypatch):
    monkeypatch.setattr(grammars_module, "MAX_REFUSED", 2)
    grammars = make(max_compile_s=0.05)
    for number in range(3):
        with pytest.raises(ConstraintError):
            grammars.check(BOMB + b"\n" * number)
    assert len(grammars._refused) == 2


def test_a_process_that_somebody_ends_is_begun_anew_and_nothing_is_held_against_a_grammar(make):
    grammars = make()
    following = grammars.begin(YES_NO)
    assert next_of(following) == b"ny"
    for token in b"no":
        process_of(grammars).kill()
        following.feed(token)
        following.allowed()
    assert np.flatnonzero(following.allowed()).tolist() == [256]
    assert grammars.counts == {"begun": 3, "ended[reason=killed]": 2}


def test_a_process_that_hangs_is_ended_and_nothing_is_held_against_a_grammar(make, monkeypatch):
    grammars = make()
    grammars.check(YES_NO)
    stop(process_of(grammars).pid)
    with monkeypatch.context() as impatient:
        impatient.setattr(grammars_module, "MAX_WAIT_S", 0.2)
        impatient.setattr(grammars_module, "START", "import time; time.sleep(60)")  # the next one is never ready in time
        impatient.setattr(grammars_module, "START_S", 0.2)
        with pytest.raises(ConstraintNotReady):
            grammars.check(YES_NO)
        eventually(lambda: grammars.counts.get("ended[reason=late]", 0) >= 2, 60)
    grammars.check(YES_NO)


def test_a_process_that_does_not_begin_is_told_as_such(make, monkeypatch):
    grammars = make()
    with monkeypatch.context() as broken:
        broken.setattr(grammars_module, "START", "raise SystemExit(1)")
        for _ in range(2):
            with pytest.raises(ConstraintNotReady, match="does not begin"):
                grammars.check(YES_NO)
    grammars.check(YES_NO)


@pytest.mark.parametrize(
    ("owner", "name", "error"), [(subprocess, "Popen", BlockingIOError), (threading.Thread, "start", RuntimeError)]
)
def test_a_process_or_thread_that_cannot_be_started_is_no_more_than_not_ready(make, monkeypatch, owner, name, error):
    def full(*_, **__):
        raise error("no room")

    grammars = make()
    with monkeypatch.context() as crowded:
        crowded.setattr(owner, name, full)
        for _ in range(2):
            with pytest.raises(ConstraintNotReady, match="cannot be started"):
                grammars.check(YES_NO)
    grammars.check(YES_NO)
    assert grammars.counts == {"begun": 1}


def test_the_process_has_nothing_of_ours_but_one_socket(make, monkeypatch, tmp_path):
    monkeypatch.setenv("A_SECRET", "hidden")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        grammars = make()
        grammars.check(YES_NO)
        process = process_of(grammars)
        assert "A_SECRET" not in process.environ()
        files = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in os.listdir(f"/proc/{process.pid}/fd")]
    assert sorted(name.split(":")[0] for name in files) == ["/dev/null", "/dev/null", "socket"]
    assert os.getsid(process.pid) == process.pid, "who stops a program in its terminal does not stop it"


def test_none_is_begun_before_a_grammar_is_asked_for_and_none_is_left_at_the_end(make):
    grammars = make()
    assert grammars._process is None
    grammars.check(YES_NO)
    process = process_of(grammars)
    grammars.close()
    assert not process.is_running()
    assert grammars.counts == {"begun": 1}
    forgotten = Grammars("toy", 512)
    forgotten.check(YES_NO)
    process = process_of(forgotten)
    del forgotten
    process.wait(10)


def test_a_close_waits_for_no_grammar(make):
    grammars = make(max_compile_s=60.0)
    grammars.check(YES_NO)
    following = grammars.begin(BOMB)
    process = process_of(grammars)
    grammars.close()
    assert not process.is_running()
    with pytest.raises(ConstraintNotReady):
        following.allowed()


PARENT = """
import sys
from mooncake_zmq.engine.grammars import Grammars
grammars = Grammars("toy", 512)
grammars.check(b'start: "a"')
print(grammars._process.pid, flush=True)
if sys.argv[1:]:
    grammars.begin(sys.argv[1].encode())
sys.stdin.read()
"""


@pytest.mark.parametrize("asked", [(), (BOMB.decode(),)])
def test_it_dies_with_its_parent_whatever_it_does(asked):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *asked], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    child.wait(60)


def test_what_nobody_wants_any_more_is_not_made(make, monkeypatch):
    go_on, made = threading.Event(), []
    ask = Grammars._ask

    def held(grammars, following, tokens):
        go_on.wait(10)
        made.append(following.constraint)
        return ask(grammars, following, tokens)

    monkeypatch.setattr(Grammars, "_ask", held)
    grammars = make()
    first = Past(Sampling(constraint=YES_NO), b"", grammars)
    dropped = Past(Sampling(constraint=BOMB), b"", grammars)
    dropped.close()
    go_on.set()
    first.forbid(np.zeros(512, np.float32))
    assert made == [YES_NO]
    with pytest.raises(ConstraintError, match="no longer wanted"):
        dropped.forbid(np.zeros(512, np.float32))


def test_answers_that_are_over_are_forgotten(make, monkeypatch):
    asks = []
    send = grammars_module.send
    monkeypatch.setattr(grammars_module, "send", lambda connection, message: asks.append(message) or send(connection, message))
    grammars = make()
    for _ in range(3):
        grammars.check(YES_NO)
    assert [ask.drop for ask in asks if isinstance(ask, grammar_process.Ask)] == [(), (0,), (1,)]


def test_nobody_waits_for_a_grammar_for_ever(make, monkeypatch):
    go_on = threading.Event()
    ask = Grammars._ask
    monkeypatch.setattr(Grammars, "_ask", lambda *asked: go_on.wait(10) and ask(*asked))
    grammars = make()
    past = Past(Sampling(constraint=YES_NO), b"", grammars)
    assert past.awaited() is not None
    monkeypatch.setattr(grammars_module, "MAX_WAIT_S", 0.01)
    with pytest.raises(ConstraintNotReady, match="not ready"):
        past.forbid(np.zeros(512, np.float32))
    assert past.awaited() is None, "who waited for so long waits no more"
    go_on.set()


def test_a_token_may_be_said_once_more(make):
    past = Past(Sampling(constraint=YES_NO), b"", make())
    for token, position in ((ord("y"), 0), (ord("y"), 0), (ord("e"), 1), (ord("e"), 1)):
        past.feed(token, position)
    logits = np.zeros(512, np.float32)
    past.forbid(logits)
    assert np.flatnonzero(np.isfinite(logits)).tolist() == [ord("s")]
    for token, position in ((ord("x"), 1), (ord("e"), 0)):
        with pytest.raises(ValueError, match="comes next"):
            past.feed(token, position)


def test_grammars_are_asked_from_many_threads_at_once(make):
    grammars, found = make(), []
    threads = [threading.Thread(target=lambda: found.append(next_of(grammars.begin(YES_NO)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"ny"] * 8


def test_another_tenants_answer_waits_for_the_one_under_way_and_not_for_all_of_a_tenants_others(make, monkeypatch):
    grammars = make()
    grammars.check(YES_NO)
    began, go_on, asked, answer = threading.Event(), threading.Event(), [], Grammars._ask

    def held(self, following, tokens):
        asked.append(following.tenant)
        began.set()
        assert go_on.wait(20.0)
        return answer(self, following, tokens)

    monkeypatch.setattr(Grammars, "_ask", held)
    many = [grammars.begin(YES_NO, tenant="bob")]
    assert began.wait(20.0)
    many += [grammars.begin(YES_NO, tenant="bob") for _ in range(20)]
    other = grammars.begin(YES_NO, tenant="alice")
    go_on.set()
    assert [next_of(each) for each in (other, *many)] == [b"ny"] * 22
    assert asked.index("alice") <= 2


def test_an_answer_that_is_dropped_waits_for_nothing(make, monkeypatch):
    grammars = make()
    began, go_on, asked = threading.Event(), threading.Event(), []

    def held(self, following, tokens):
        asked.append(following.tenant)
        began.set()
        assert go_on.wait(20.0)
        return bytes(64)

    monkeypatch.setattr(Grammars, "_ask", held)
    first, dropped, last = (grammars.begin(YES_NO, tenant=name) for name in ("a", "b", "c"))
    assert began.wait(20.0)
    dropped.drop()
    go_on.set()
    for each in (first, last):
        each.allowed()
    assert asked == ["a", "c"]
    with pytest.raises(ConstraintNotReady, match="no longer wanted"):
        dropped.allowed()
