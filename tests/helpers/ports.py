"""Ports for servers of the tests."""

import random
import socket

PORTS = range(15_000, 32_000)
"""Ports that the kernel gives to no outgoing connection by default, so that none takes one before its server listens."""


def free_port() -> int:
    """Return a port of loopback on which nothing listens now, drawn at random."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("100 ports drawn at random are all in use")
