"""What a process tells the service manager that started it, as sd_notify(3) has it; without one, nothing. It never listens.

systemd gives a start and a stop a time, and kills who does not say that it lives. So what takes long says so while it lasts.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

SEND_TIMEOUT_S = 1.0
"""A manager that takes no message for this long misses one: nobody's request waits for it."""
EXTENSION_S = 60.0
"""What a long step asks for at a time: this long after it last said so, the manager loses patience."""
AGAIN_S = 5.0
LONGEST_S = 4 * 3600.0
"""No step of a start takes longer: the largest model is downloaded and converted by then."""


def ready(status: str) -> None:
    """The process serves."""
    _tell("READY=1", f"STATUS={_line(status)}")


def status(text: str) -> None:
    """One line for `systemctl status`."""
    _tell(f"STATUS={_line(text)}")


def alive(status: str) -> None:
    """The watchdog's sign of life."""
    _tell("WATCHDOG=1", f"STATUS={_line(status)}")


def waiting() -> None:
    """A sign of life of what neither serves nor has given up yet: it asks for time until the next one."""
    _tell(f"EXTEND_TIMEOUT_USEC={EXTENSION_S * 1e6:.0f}", "WATCHDOG=1")


def stopping(status: str, within_s: float) -> None:
    """The process ends, and asks for `within_s` to do so."""
    _tell("STOPPING=1", f"STATUS={_line(status)}", f"EXTEND_TIMEOUT_USEC={within_s * 1e6:.0f}")


def watchdog_s() -> float:
    """Within which time the manager wants a sign of life; 0: it does not watch this process."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    try:
        return max(0.0, int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6)
    except ValueError:
        return 0.0


@contextlib.contextmanager
def patience(text: str) -> Iterator[None]:
    """Ask for time for as long as the block runs, from a thread: what takes long in it need not know, but lets others run."""
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
    """Its socket's address; empty: there is none that could be told."""
    where = os.environ.get("NOTIFY_SOCKET", "")
    return "\0" + where[1:] if where.startswith("@") else where if where.startswith("/") else ""


def _tell(*assignments: str) -> None:
    if not (manager := _manager()):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifier, contextlib.suppress(OSError):
        notifier.settimeout(SEND_TIMEOUT_S)
        notifier.sendto("\n".join(assignments).encode(), manager)
