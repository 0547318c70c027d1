"""File descriptors of a gateway: how many its connections may have, and one in reserve to refuse a client when none is left."""

import contextlib
import errno
import os
import resource
import socket

import structlog

NO_RESOURCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of `accept` that pass once something is closed."""

log = structlog.get_logger("gateway")


class Reserve:
    """One descriptor, held so that it can be given up for a connection that is only refused."""

    def __init__(self) -> None:
        self._file = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def accept(self, listener: socket.socket) -> socket.socket | None:
        """Accept one connection in place of the reserve; None: none waits. `refill` follows once it is closed."""
        self.close()
        try:
            return listener.accept()[0]
        except OSError:
            return None

    def refill(self) -> None:
        """Hold a descriptor again, if one is free by now."""
        with contextlib.suppress(OSError):
            self._file = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give the descriptor up."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def within_files(wanted: int, reserved: int) -> int:
    """Return the number of connections that the process may have beside its open files and `reserved` further ones."""
    reserved += len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + reserved:
        soft = min(wanted + reserved, hard) if hard != resource.RLIM_INFINITY else wanted + reserved
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = max(1, min(wanted, soft - reserved))
    if allowed < wanted:
        log.warning("fewer_http_connections", allowed=allowed, wanted=wanted, rlimit_nofile=soft)
    return allowed
