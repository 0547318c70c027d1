"""Answers that follow grammars, for gateways, which check that an answer can begin, and for engines.

Grammars are untrusted input to a library that may take unbounded time and memory for one: `engine.grammar_process` then ends,
and is started again when it is needed. Its other answers continue from their grammars and tokens, which are kept here. The
grammar at fault is refused from then on.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future

import msgspec
import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.constraint import ConstraintError, ConstraintNotReady, NamedWords, digest_of
from mooncake_zmq.engine.fair_pool import FairPool
from mooncake_zmq.engine.grammar_process import MEMORY_BYTES, Answer, Ask, Begin, receive, send

MAX_COMPILE_S = 8.0
"""CPU seconds for one grammar and the answer so far: far beyond the grammars that a gateway admits, so that no engine refuses
one of these."""
MAX_TOKEN_S = 0.5
"""CPU seconds for one more token: the worst case that the library bounds takes a twentieth."""
MAX_WAIT_S = 20.0
"""Seconds that an answer waits for its allowed tokens, and a request for the process, which by then gets no CPU time."""
START_S = 60.0
"""Seconds until the process has read the vocabulary: usually one."""
END_S = 1.0
"""Seconds until an idle process has ended."""
MAX_REFUSED = 1024
"""Grammars that ended a process and are remembered, the last ones."""
TRIES = 2
"""Attempts with a grammar that ends a process for another reason than CPU time: other grammars' memory there may be the
cause."""
SIMPLER = "write it with fewer and simpler patterns that hold together"
CPU, CRASH, KILLED, LATE = "cpu", "crash", "killed", "late"
"""Why a process ended: by its CPU limit, by a crash, by a signal from outside, by us because it did not answer."""
START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from mooncake_zmq.engine.grammar_process import main; main()"
PASSED_ON = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""Environment variables for the process; others may hold secrets. One thread computes all: the tokenizer's threads are not
started."""

_decoder = msgspec.msgpack.Decoder(Answer)


class Following:
    """One answer and its grammar, used by one thread at a time."""

    def __init__(self, grammars: "Grammars", constraint: bytes, answer: Sequence[int], tenant: str) -> None:
        self.number = grammars.new_flow()
        self.tenant = tenant
        self.constraint = constraint
        self.digest = digest_of(constraint)
        self.answer = list(answer)
        self.held: tuple[int, int] | None = None
        """The process that holds the answer, and the number of its tokens there. Only the pool's thread uses it."""
        self._grammars = grammars
        self._allowed = grammars.ask(self)
        self._asked_at = time.monotonic()

    def feed(self, token: int) -> None:
        """Append a token to the answer; the tokens that may follow it are computed meanwhile."""
        self.answer.append(token)
        if self._allowed.cancel() or not (self._allowed.done() and self._allowed.exception()):
            self._allowed = self._grammars.ask(self)
            self._asked_at = time.monotonic()

    def awaited(self) -> Future[bytes] | None:
        """The result for which `allowed` would wait."""
        return None if self._allowed.done() or self.left_s() == 0.0 else self._allowed

    def allowed(self) -> NDArray[np.bool_]:
        """Return which ids may come next; wait for it, for a limited time. Raises ConstraintError."""
        try:
            packed = self._allowed.result(self.left_s())
        except TimeoutError:
            raise ConstraintNotReady(f"its grammar was not ready in {MAX_WAIT_S:g} s") from None
        except CancelledError:
            raise ConstraintNotReady("its grammar is no longer wanted") from None
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=self._grammars.vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def left_s(self) -> float:
        """Return how long `allowed` would wait at most."""
        return max(0.0, self._asked_at + MAX_WAIT_S - time.monotonic())

    def drop(self) -> None:
        """Stop following the answer."""
        self._allowed.cancel()
        self._grammars.drop(self)


class Grammars:
    """The process over one vocabulary, and the thread that sends its requests, for one answer after the other: tenants, and a
    tenant's answers, have equal shares of its time. Safe to share between threads."""

    def __init__(
        self,
        words: str | NamedWords,
        vocab_size: int,
        *,
        max_compile_s: float = MAX_COMPILE_S,
        max_token_s: float = MAX_TOKEN_S,
    ) -> None:
        """`words`: a model's path, as `open_tokenizer` takes it, or single bytes. `vocab_size`: ids that the engine gives
        logits for."""
        self.vocab_size = vocab_size
        self.counts: dict[str, float] = {}
        """Processes started, and processes ended, by reason. Several objects may share these."""
        self._begin = Begin(words, vocab_size)
        self._max_compile_s = max_compile_s
        self._max_token_s = max_token_s
        self._incarnation = 0
        self._process: _Process | None = None
        self._end_of_process: Callable[[], object] = int
        self._closed = False
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        """Why each grammar is refused, by digest."""
        self._dropped: list[int] = []
        self._lock = threading.Lock()
        """Guards `_dropped`. Only the thread uses all other fields."""
        self._thread = FairPool("grammars")
        self.new_flow = self._thread.new_flow

    def begin(self, constraint: bytes, answer: Sequence[int] = (), tenant: str = "") -> Following:
        """Follow an answer from its tokens so far, without waiting. `tenant`: the owner of the answer."""
        return Following(self, constraint, answer, tenant)

    def check(self, constraint: bytes) -> None:
        """Raise ConstraintError unless an answer can begin."""
        following = self.begin(constraint)
        try:
            following.allowed()
        finally:
            following.drop()

    def close(self) -> None:
        """Begin no more answers, and end the process. May be called twice."""
        self._closed = True
        self._thread.close()
        if (process := self._process) is not None:
            process.stop()  # the thread waits for it
        self._thread.close(wait=True)
        self._end_of_process()

    # --- called by `Following`

    def ask(self, following: Following) -> Future[bytes]:
        """Request the tokens that may come behind the answer so far."""
        tokens = len(following.answer)
        try:
            return self._thread.submit(following.tenant, lambda: self._ask(following, tokens), following.number)
        except RuntimeError as error:
            failed: Future[bytes] = Future()
            failed.set_exception(ConstraintNotReady(f"what follows grammars cannot be started: {error}"))
            return failed

    def drop(self, following: Following) -> None:
        with self._lock:
            self._dropped.append(following.number)
        self._thread.drop(following.tenant, following.number)

    # --- called by the pool's thread

    def _ask(self, following: Following, tokens: int) -> bytes:
        """Request the tokens that may come behind the first `tokens` of the answer. Raises ConstraintError."""
        for _ in range(TRIES):
            if why := self._refused.get(following.digest):
                raise ConstraintError(why)
            process = self._running()
            ask = self._ask_of(process, following, tokens)
            try:
                reply = process.ask(ask)
            except (EOFError, OSError):
                why = self._ended(process)
                if why == CPU:
                    self._refuse(following, f"it takes more than {ask.cpu_s:g} s to follow: {SIMPLER}")
                continue
            following.held = None if reply.refused else (process.incarnation, tokens)
            if reply.refused:
                raise ConstraintError(reply.refused)
            return reply.allowed
        if why != CRASH:
            raise ConstraintNotReady("what follows its grammar was stopped")
        self._refuse(following, f"it takes more than {MEMORY_BYTES >> 20} MiB to follow: {SIMPLER}")
        raise ConstraintError(self._refused[following.digest])

    def _ask_of(self, process: "_Process", following: Following, tokens: int) -> Ask:
        incarnation, known = following.held or (-1, 0)
        with self._lock:  # this answer may have been dropped while it waited for its turn: the next message says so
            dropped = [number for number in self._dropped if number != following.number]
            self._dropped = [number for number in self._dropped if number == following.number]
        if incarnation != process.incarnation:
            return Ask(following.number, following.answer[:tokens], self._max_compile_s, following.constraint, tuple(dropped))
        new = following.answer[known:tokens]
        return Ask(following.number, new, self._max_token_s * max(1, len(new)), drop=tuple(dropped))

    def _running(self) -> "_Process":
        if self._closed:
            raise ConstraintNotReady("its grammar is no longer wanted")
        if self._process is None:
            self._incarnation += 1
            try:
                self._process = _Process(self._begin, self._incarnation)
            except OSError as error:  # no memory, no room for a process or a file
                raise ConstraintNotReady(f"what follows grammars cannot be started: {error.strerror}") from None
            self._count("begun")
            self._end_of_process = weakref.finalize(self, self._process.end)
            try:
                self._process.begun()
            except (EOFError, OSError):
                self._ended(self._process)
                raise ConstraintNotReady("what follows grammars does not begin") from None
        return self._process

    def _ended(self, process: "_Process") -> str:
        """Clean up after a process that did not answer, and return the reason."""
        self._end_of_process()
        self._process = None
        why = LATE if process.was_late else {-signal.SIGPROF: CPU, -signal.SIGKILL: KILLED}.get(process.code, CRASH)
        if not self._closed:
            self._count(f"ended[reason={why}]")
        return why

    def _refuse(self, following: Following, why: str) -> None:
        while len(self._refused) >= MAX_REFUSED:
            self._refused.popitem(last=False)
        self._refused[following.digest] = why

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1


class _Process:
    """One incarnation of the process. It shares only one end of a socket with us, and ends when the other end is closed."""

    def __init__(self, begin: Begin, incarnation: int) -> None:
        self.incarnation = incarnation
        self.was_late = False
        self._begin = begin
        self._ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as failing:
            failing.callback(self._ours.close)
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-c", START, json.dumps(sys.path)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in PASSED_ON if name in os.environ},
                start_new_session=True,
            )
            failing.pop_all()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def code(self) -> int:
        """The exit code."""
        return self._popen.wait()

    def begun(self) -> None:
        """Wait until it is ready. Raises EOFError or OSError."""
        self._exchange(self._begin, START_S)

    def ask(self, ask: Ask) -> Answer:
        """Send a request and return the answer. Raises EOFError or OSError."""
        return self._exchange(ask, MAX_WAIT_S)

    def stop(self) -> None:
        """Close the connection, so that a waiting caller gets no answer. Any thread may call it."""
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """End the process, by force unless it ends by itself in time."""
        self.stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(0 if self.was_late else END_S)
        self._popen.kill()
        self._popen.wait()
        self._ours.close()

    def _exchange(self, message: Begin | Ask, wait_s: float) -> Answer:
        self._ours.settimeout(wait_s)
        try:
            send(self._ours, message)
            return _decoder.decode(receive(self._ours))
        except TimeoutError:
            self.was_late = True
            raise
