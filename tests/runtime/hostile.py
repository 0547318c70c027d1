"""A ZeroMQ peer by hand, which keeps to the protocol as long as it wants to; and how much memory that takes its victim."""

import os
import socket
from collections.abc import Iterable

from mooncake_zmq.transfer import zmtp


def connect(endpoint: str, kind: bytes) -> socket.socket:
    """A connection that has been greeted, as a socket of type `kind`."""
    scheme, _, where = endpoint.partition("://")
    if scheme == "ipc":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(where)
    else:
        address, _, port = where.rpartition(":")
        connection = socket.create_connection((address, int(port)))
    connection.settimeout(1.0)
    connection.sendall(zmtp.GREETING)
    greeting = b""
    while len(greeting) < zmtp.GREETING_BYTES:
        greeting += connection.recv(zmtp.GREETING_BYTES - len(greeting))
    connection.sendall(zmtp.ready(kind))
    connection.recv(4096)
    return connection


def rss_bytes() -> int:
    with open("/proc/self/statm") as told:
        return int(told.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth_while_sending(connection: socket.socket, parts: Iterable[bytes]) -> tuple[int, int]:
    """(the most by which this process grew, bytes sent) until all is sent, the connection ends, or nobody takes any more."""
    before = most = rss_bytes()
    sent = 0
    try:
        for each in parts:
            connection.sendall(each)
            sent += len(each)
            most = max(most, rss_bytes())
    except OSError:
        pass
    return max(most, rss_bytes()) - before, sent
