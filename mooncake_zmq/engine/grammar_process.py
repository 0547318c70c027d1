"""The process in which grammars are followed, started by `engine.grammars`: it serves one request after another over its one
socket, and ends when one takes more CPU time or memory than it may. All its state can be made again."""

import contextlib
import resource
import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from mooncake_zmq.engine.constraint import Bytes, Compiler, ConstraintError, Matcher, NamedWords, Words

COMPILE_STACK_BYTES = 256 << 20
"""Stack for the compiler: the library recurses once, by at most 6 KB, for each link of a chain, and a full stack ends the
process."""
MEMORY_BYTES = 512 << 20
"""Memory of all grammars, beside the vocabulary's table: a batch of the largest that are followed needs half of it."""
DATA_PAGES = 5
"""The field of /proc/PID/statm that RLIMIT_DATA counts."""
LENGTH_BYTES = 4


class Begin(Struct, frozen=True, tag=True):
    """The first message: the vocabulary. `words`: a model's path as `open_tokenizer` takes it, or single bytes."""

    words: str | NamedWords
    vocab_size: int


class Ask(Struct, frozen=True, tag=True):
    """A request for the tokens that may come behind `tokens` of an answer. They continue those sent before; with `grammar` the
    answer begins here.

    `cpu_s`: CPU time after which the process ends. `drop`: answers that are not followed any more."""

    answer: int
    tokens: Sequence[int]
    cpu_s: float
    grammar: bytes | None = None
    drop: tuple[int, ...] = ()


class Answer(Struct, frozen=True, tag=True):
    """The result of `Matcher.allowed`, or why there is none; the first one says that the process is ready."""

    allowed: bytes = b""
    refused: str = ""


def send(connection: socket.socket, message: Begin | Ask | Answer) -> None:
    """Send one message. Raises OSError."""
    body = msgspec.msgpack.encode(message)
    connection.sendall(len(body).to_bytes(LENGTH_BYTES, "big") + body)


def receive(connection: socket.socket) -> bytes:
    """Return one message's bytes. Raises EOFError at the end of the connection, and OSError."""
    return _exactly(connection, int.from_bytes(_exactly(connection, LENGTH_BYTES), "big"))


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def main() -> None:
    """Serve the socket that is file 0, until its other end is closed, such as by the end of the process that held it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF,))
    threading.stack_size(COMPILE_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(socket.socket(fileno=0),), name="grammars")
    thread.start()
    thread.join()


def _serve(connection: socket.socket) -> None:
    with contextlib.suppress(EOFError, OSError):
        begin = msgspec.msgpack.decode(receive(connection), type=Begin)
        compiler = Compiler(lambda: _words(begin.words), begin.vocab_size)
        decoder = msgspec.msgpack.Decoder(Ask)
        followed: dict[int, Matcher] = {}
        with contextlib.suppress(ConstraintError):  # each request gets this error
            compiler.prepare()
        _bound_memory()
        send(connection, Answer())
        while True:
            ask = decoder.decode(receive(connection))
            for answer in ask.drop:
                followed.pop(answer, None)
            signal.setitimer(signal.ITIMER_PROF, ask.cpu_s)  # the signal ends the process at any point
            reply = _answer_to(compiler, followed, ask)
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(connection, reply)


def _bound_memory() -> None:
    """Limit the data memory to the present size and MEMORY_BYTES more."""
    pages = int(Path("/proc/self/statm").read_text().split()[DATA_PAGES])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _answer_to(compiler: Compiler, followed: dict[int, Matcher], ask: Ask) -> Answer:
    try:
        if ask.grammar is not None:
            followed[ask.answer] = compiler.matcher(ask.grammar)
        matcher = followed[ask.answer]
        for token in ask.tokens:
            matcher.feed(token)
        return Answer(matcher.allowed())
    except ConstraintError as error:
        followed.pop(ask.answer, None)
        return Answer(refused=str(error))


def _words(words: str | NamedWords) -> Words:
    if isinstance(words, NamedWords):
        return Bytes(words)
    from mooncake_zmq.engine.tokenizer import open_tokenizer

    return open_tokenizer(words)
