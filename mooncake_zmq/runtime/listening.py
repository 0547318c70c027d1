"""Listening sockets for HTTP, on an address of the process's own or on one that processes of the same user share."""

import socket

HTTP_BACKLOG = 2048


class PortInUse(OSError):
    """Another process listens on the wanted address."""


def claim(host: str, port: int, *, share: bool) -> socket.socket:
    """Return a socket that is bound to an address for HTTP and does not listen yet; raises PortInUse.

    With `share` other processes of this user that share the address too may bind it. The kernel refuses all others only while
    one listens: until `begin` any program may take the address.
    """
    try:
        return _bound(host, port, share)
    except OSError as error:
        raise _in_use(host, port, error) from error


def is_deserted(host: str, port: int) -> bool:
    """Return whether no socket listens on the address: one that does keeps others from binding it, unless they share it too."""
    try:
        claim(host, port, share=False).close()
    except PortInUse:
        return False
    return True


def listen(host: str, port: int, *, share: bool = False) -> socket.socket:
    """Return a listening socket for HTTP; raises PortInUse."""
    listener = claim(host, port, share=share)
    begin(listener)
    return listener


def begin(claimed: socket.socket) -> None:
    """Listen on a claimed socket. Raises PortInUse, after closing it."""
    host, port, *_ = claimed.getsockname()
    try:
        claimed.listen(HTTP_BACKLOG)
    except OSError as error:
        claimed.close()
        raise _in_use(host, port, error) from error


def _bound(host: str, port: int, share: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off; else a first token waits 40 ms for the headers' ACK.
    claimed = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP)
    try:
        claimed.setblocking(False)
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        claimed.bind((host, port))
    except OSError:
        claimed.close()
        raise
    return claimed


def _in_use(host: str, port: int, error: OSError) -> PortInUse:
    return PortInUse(f"cannot listen on {host}:{port}: {error.strerror or error}")
