"""Waits for what threads and processes bring about, on the condition itself and for a bounded time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], timeout_s: float = 20.0, what: str = "", *, poll_s: float = 0.002) -> T:
    """Return the first value of `condition` that is true; fail with `what` if there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        time.sleep(poll_s)
    return found
