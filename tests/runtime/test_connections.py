"""What is counted of a connection may be asked for when the connection has just ended."""

import os

from mooncake_zmq.runtime.connections import _received_bytes


def test_a_connection_that_ended_has_no_bytes() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    assert _received_bytes(reading) is None
    os.close(reading)
    assert _received_bytes(reading) is None
