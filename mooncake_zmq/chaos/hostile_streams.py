"""Hostile inputs for the plain TCP streams of a node: invalid openings and proofs, and, after a valid ticket, invalid records
and messages. Each has a connection of its own, as a server closes it at the first input that it cannot read."""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from itertools import cycle, islice
from random import Random

import zmq

from mooncake_zmq.core.records import NotAMessage, encode
from mooncake_zmq.fuzz.decoders import DECODERS
from mooncake_zmq.fuzz.examination import mutations
from mooncake_zmq.store import protocol
from mooncake_zmq.store.stream_messages import Attach
from mooncake_zmq.transfer import block_messages
from mooncake_zmq.transfer.block_messages import StreamDenied, StreamOffered, StreamWanted
from mooncake_zmq.transfer.sealing import Sealer
from mooncake_zmq.transfer.sockets import Limits, Sockets, connect_beside
from mooncake_zmq.transfer.stream import LENGTH, framed
from mooncake_zmq.transfer.tickets import CHALLENGE_BYTES, Attaching, Refused, Ticket

INPUTS_PER_TICKET = 100
"""The number of inputs per ticket: tickets for blocks are valid for half a minute only."""
TIMEOUT_S = 5.0
MAX_BYTES = 8192
"""The size of one connection's input: the server reads so much before the client must read its answers."""
DRAWN = 5000
"""The number of different series of messages, after which they repeat."""
KNOWN_SHARE = 0.75
"""The share of a store's streams that begin with a valid attach message."""
_LIMITS = Limits(max_message_bytes=protocol.MAX_FRAME_BYTES, send_hwm=10, receive_hwm=10)


class _NoTicket(Exception):
    """No ticket was to be had."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The address where streams connect, and the ticket for them. `first`: returns the message that each stream begins with."""

    where: str
    ticket: Ticket
    first: bytes = b""


Admit = Callable[[Sockets, str, str], "Iterator[Admission]"]


class Spoilt(Enum):
    """A mutated input of one connection; what comes before it is valid."""

    OPENING = auto()
    PROOF = auto()
    RECORD = auto()
    MESSAGE = auto()


def of_blocks(sockets: Sockets, endpoint: str, server: str) -> Iterator[Admission]:
    """Get the ticket that a reader on another host gets. A request with the wrong incarnation is answered with the right
    one."""
    dealer, _ = sockets.connecting(zmq.DEALER, endpoint, "data", _LIMITS, server=server)
    with closing(dealer):
        _patiently(dealer, endpoint)
        answer = _asked(dealer, StreamWanted(block_messages.PROTOCOL_VERSION, 0), block_messages.decode_offer)
        if isinstance(answer, StreamDenied):
            answer = _asked(dealer, StreamWanted(answer.protocol, answer.incarnation), block_messages.decode_offer)
        if not isinstance(answer, StreamOffered):
            raise _NoTicket(f"{server} denies us a stream")
        yield Admission(answer.where, Ticket(answer.token, answer.secret, answer.sealed))


def of_values(sockets: Sockets, endpoint: str, server: str) -> Iterator[Admission]:
    """Get the ticket that a client of a store without shared memory gets."""
    name = os.urandom(16)
    dealer, _ = sockets.connecting(zmq.DEALER, endpoint, "store", _LIMITS, server=server)
    with closing(dealer):
        dealer.routing_id = b"c" + name + bytes(4)
        _patiently(dealer, endpoint)
        answer = _asked(dealer, protocol.Hello(1, protocol.PROTOCOL_VERSION, "", False), protocol.decode_reply)
        if not isinstance(answer, protocol.Welcome):
            raise _NoTicket(f"{server} does not welcome us")
        ticket = Ticket(answer.token, answer.secret, answer.sealed)
        yield Admission(answer.stream, ticket, bytes(framed(Attach(name, answer.token))))


def _patiently(dealer: "zmq.Socket[bytes]", endpoint: str) -> None:
    dealer.immediate = True
    dealer.sndtimeo = dealer.rcvtimeo = int(TIMEOUT_S * 1000)
    dealer.connect(endpoint)


def _asked(dealer: "zmq.Socket[bytes]", asked: object, decode: Callable[[bytes], object]) -> object:
    try:
        dealer.send(encode(asked))
        return decode(dealer.recv())
    except (zmq.Again, NotAMessage) as error:
        raise _NoTicket(str(error)) from error


def pour(sockets: Sockets, endpoint: str, server: str, admit: Admit, count: int, random: Random) -> int:
    """Send so many inputs to the streams beside `endpoint`, until no ticket is to be had; return how many the server read to
    their end."""
    spoilt = cycle(_messages("stream-request" if admit is of_values else "block-request", random, min(count, DRAWN)))
    taken = 0
    sockets.borrow()
    with suppress(_NoTicket):
        for first in range(0, count, INPUTS_PER_TICKET):
            with contextmanager(admit)(sockets, endpoint, server) as admission:
                for said in islice(spoilt, min(INPUTS_PER_TICKET, count - first)):
                    taken += _tried(admission, endpoint, said, random)
    sockets.give_back()
    return taken


def _messages(decoder: str, random: Random, count: int) -> Sequence[bytes]:
    """Return one message or several in a row, mutated together with their lengths."""
    alone = [LENGTH.pack(len(raw)) + raw for raw in DECODERS[decoder].seeds()]
    several = [b"".join(random.choices(alone, k=3)) for _ in alone]
    return list(mutations([*alone, *several], random, count, MAX_BYTES))


def _tried(admission: Admission, endpoint: str, said: bytes, random: Random) -> bool:
    """Return whether the server read the input and closed the connection, as it must when the client sends no more."""
    try:
        connection = connect_beside(admission.where, endpoint, TIMEOUT_S)
    except (OSError, ValueError, OverflowError):
        return False
    with connection:
        connection.settimeout(TIMEOUT_S)
        try:
            return _say(connection, admission, said, random) and _ended(connection)
        except TimeoutError:
            return False
        except OSError:  # the server closed it amid the input
            return True


def _say(connection: socket.socket, admission: Admission, said: bytes, random: Random) -> bool:
    """Send the input; return False where a client with a ticket was not admitted."""
    what = random.choice(list(Spoilt))
    attaching = Attaching(admission.ticket)
    connection.sendall(_spoilt(attaching.opening, random) if what is Spoilt.OPENING else attaching.opening)
    if what is Spoilt.OPENING:
        return True
    try:
        proof, keys = attaching.answer(_received(connection, CHALLENGE_BYTES))
    except Refused:
        return False
    if what is Spoilt.PROOF:
        connection.sendall(_spoilt(proof, random))
        return True
    is_known = not admission.first or random.random() < KNOWN_SHARE
    said = (admission.first if is_known else _spoilt(admission.first, random)) + said
    if keys.to_server is not None:
        said = b"".join(map(bytes, Sealer(keys.to_server).records([memoryview(said)])))
    connection.sendall(proof + (_spoilt(said, random) if what is Spoilt.RECORD else said))
    return True


def _spoilt(raw: bytes, random: Random) -> bytes:
    *_, spoilt = mutations([raw], random, 1, 2 * MAX_BYTES)
    return spoilt


def _received(connection: socket.socket, size: int) -> bytes:
    """Receive so many bytes, or fewer if the server closes before."""
    came = b""
    while len(came) < size and (more := connection.recv(size - len(came))):
        came += more
    return came


def _ended(connection: socket.socket) -> bool:
    """Read answers until the end of the connection."""
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(1 << 16):
        pass
    return True
