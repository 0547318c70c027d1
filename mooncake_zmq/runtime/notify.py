"""Messages of a process to the service manager that started it, by sd_notify(3); without one, nothing is sent or received.

systemd limits the time of a start and a stop, and kills a process that does not report in time. So long steps report while they
last.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

SEND_TIMEOUT_S = 1.0
"""A manager that takes no message for this long misses it: no request waits for it."""
EXTENSION_S = 60.0
"""Time that a long step requests at once: the manager's timeout, counted from the last request."""
AGAIN_S = 5.0
LONGEST_S = 4 * 3600.0
"""Longest step of a start, in which the largest model is downloaded and converted."""


def ready(status: str) -> None:
    """Report that the process serves."""
    _send("READY=1", f"STATUS={_line(status)}")


def status(text: str) -> None:
    """Set the line that `systemctl status` shows."""
    _send(f"STATUS={_line(text)}")


def alive(status: str) -> None:
    """Report to the watchdog that the process runs."""
    _send("WATCHDOG=1", f"STATUS={_line(status)}")


def waiting() -> None:
    """Report that a process which does not serve yet is still working; extends its time until the next report."""
    _send(f"EXTEND_TIMEOUT_USEC={EXTENSION_S * 1e6:.0f}", "WATCHDOG=1")


def stopping(status: str, within_s: float) -> None:
    """Report that the process ends, and request `within_s` for that."""
    _send("STOPPING=1", f"STATUS={_line(status)}", f"EXTEND_TIMEOUT_USEC={within_s * 1e6:.0f}")


def watchdog_s() -> float:
    """Return the watchdog's interval; 0: the manager does not watch this process."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    try:
        return max(0.0, int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6)
    except ValueError:
        return 0.0


@contextlib.contextmanager
def extended_timeout(text: str) -> Iterator[None]:
    """Request time while the block runs, from a thread: the block itself need not report, but has to let other threads run."""
    if not _manager():
        yield
        return
    status(text)
    over = threading.Event()

    def ask() -> None:
        waited_s, step_s = 0.0, min(AGAIN_S, watchdog_s() / 2 or AGAIN_S)
        while not over.is_set() and waited_s < LONGEST_S:
            waiting()
            over.wait(step_s)
            waited_s += step_s

    thread = threading.Thread(target=ask, name="notify", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _line(text: str) -> str:
    return " ".join(text.split())


def _manager() -> str:
    """Return the address of the manager's socket; empty if there is no manager."""
    where = os.environ.get("NOTIFY_SOCKET", "")
    return "\0" + where[1:] if where.startswith("@") else where if where.startswith("/") else ""


def _send(*assignments: str) -> None:
    if not (manager := _manager()):
        return
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as notifier:
        notifier.settimeout(SEND_TIMEOUT_S)
        notifier.sendto("\n".join(assignments).encode(), manager)
