"""A ZeroMQ peer by hand, which keeps to the protocol as long as it wants to; and how much memory that takes its victim."""

import os
import socket
import struct
from collections.abc import Iterable

MORE, LONG, COMMAND = 1, 2, 4


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
    connection.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    greeting = b""
    while len(greeting) < 64:
        greeting += connection.recv(64 - len(greeting))
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind + b"\x08Identity" + struct.pack(">I", 0)
    connection.sendall(bytes([COMMAND, len(ready)]) + ready)
    connection.recv(4096)
    return connection


def part(content: bytes, flags: int = 0) -> bytes:
    """A part of a message as it is on the wire."""
    if len(content) < 256:
        return bytes([flags, len(content)]) + content
    return bytes([flags | LONG]) + struct.pack(">Q", len(content)) + content


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
