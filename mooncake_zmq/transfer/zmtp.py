"""ZeroMQ's wire (ZMTP 3) by hand, without its library and without keys: to ask what listens somewhere, and to say what the
library never would."""

MORE, LONG, COMMAND = 1, 2, 4
GREETING_BYTES = 64
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MECHANISM = slice(12, 32)
"""In a greeting: the name of what guards the connection."""


def part(content: bytes, flags: int = 0) -> bytes:
    """A part of a message, or a command, as it is on the wire."""
    if len(content) < 256:
        return bytes([flags, len(content)]) + content
    return bytes([flags | LONG]) + len(content).to_bytes(8, "big") + content


def ready(kind: bytes) -> bytes:
    """What follows the greeting: the type of our socket, and no identity."""
    told = b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind + b"\x08Identity" + bytes(4)
    return part(b"\x05READY" + told, COMMAND)
