"""A connection lends payloads to ZeroMQ: until when must the memory stay as it is?"""

from time import monotonic

import pytest
import zmq

from mooncake_zmq.store import protocol
from mooncake_zmq.store.link import LEND_BYTES, Link, Unreached

PAYLOADS = 24


@pytest.fixture
def peer_that_never_reads():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger, router.rcvhwm, router.rcvbuf = 0, 1, 1 << 16
        yield context, f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"


@pytest.fixture
def link(peer_that_never_reads):
    link = Link(*peer_that_never_reads, b"me", lambda socket: None, lambda: False)
    yield link
    if not link.socket.closed:
        link.close()


def fill(link, size):
    for index in range(PAYLOADS):
        link.send(protocol.WritePiece(1, 0, index * size), monotonic() + 10, memoryview(bytearray(size)))


def test_a_lent_payload_is_read_until_the_peer_takes_it_or_the_connection_is_closed(link):
    fill(link, 4 * LEND_BYTES)
    lent = list(link._lent)
    assert len(lent) == PAYLOADS
    with pytest.raises(Unreached):
        link.settle(monotonic() + 0.2)
    assert not all(tracker.done for tracker in lent)
    link.close()
    assert all(tracker.done for tracker in lent)


def test_short_payloads_are_copied(link):
    fill(link, LEND_BYTES - 1)
    link.settle(monotonic())
