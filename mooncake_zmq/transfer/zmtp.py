"""ZeroMQ's wire protocol (ZMTP 3) without its library and without keys, to find what listens at an endpoint, and to send what
the library never sends."""

MORE, LONG, COMMAND = 1, 2, 4
GREETING_BYTES = 64
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MECHANISM = slice(12, 32)
"""Place of the security mechanism's name in a greeting."""


def part(content: bytes, flags: int = 0) -> bytes:
    """Return a part of a message, or a command, as it is on the wire."""
    if len(content) < 256:
        return bytes([flags, len(content)]) + content
    return bytes([flags | LONG]) + len(content).to_bytes(8, "big") + content


def ready(kind: bytes) -> bytes:
    """Return the command that follows the greeting: the type of our socket, and no identity."""
    properties = b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind + b"\x08Identity" + bytes(4)
    return part(b"\x05READY" + properties, COMMAND)
