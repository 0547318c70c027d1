"""Stops new connections at a listener that others share, without resetting those whose handshake is under way."""

import ctypes
import socket
import struct

SO_ATTACH_FILTER = 26
"""The number of an option that Python's socket module lacks."""
_INSTRUCTION = struct.Struct("HBBI")
DROP_SYN = b"".join(
    _INSTRUCTION.pack(*each)
    for each in (
        (0x30, 0, 0, 13),  # the flags of the TCP header
        (0x54, 0, 0, 0x12),  # of them SYN and ACK
        (0x15, 0, 1, 0x02),  # SYN alone:
        (0x06, 0, 0, 0),  # dropped
        (0x06, 0, 0, 0xFFFFFFFF),  # all else: as it is
    )
)
"""A program of the kernel's classic BPF, which drops the first segment of each new connection."""


def drop_new_connections(listener: socket.socket) -> None:
    """Have the kernel drop them at this listener; TCP tries again after a second, at another one. Raises OSError."""
    instructions = ctypes.create_string_buffer(DROP_SYN, len(DROP_SYN))
    program = struct.pack("HL", len(DROP_SYN) // _INSTRUCTION.size, ctypes.addressof(instructions))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
