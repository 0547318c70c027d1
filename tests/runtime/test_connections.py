"""What is counted of a connection may be asked for when the connection has just ended."""

import os

import zmq

from mooncake_zmq.transfer.connections import _received_bytes, came_by


def test_a_connection_that_ended_has_no_bytes() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    assert _received_bytes(reading) is None
    os.close(reading)
    assert _received_bytes(reading) is None


def test_a_frame_of_a_connection_that_has_ended_came_by_none() -> None:
    class Gone:
        def get(self, _option: int) -> int:
            raise zmq.ZMQError(zmq.EINVAL)

    assert came_by(Gone()) == -1
