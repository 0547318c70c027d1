"""Checks the clock and the boot id: incarnations are numbered by the clock, and two processes may share memory only if they
see the same boot."""

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

from mooncake_zmq.operate.doctor.finding import Finding, Here
from mooncake_zmq.store.segment import boot_id

AREA = "clock"
UNSYNCHRONIZED = 0x40  # STA_UNSYNC
TIMEX_BYTES, STATUS_AT = 208, 40  # struct timex of 64-bit Linux
AHEAD_S = 60.0


def examine(here: Here) -> Iterator[Finding]:
    """Yield findings: whether the clock is synchronized and not behind earlier incarnations of nodes, and whether there is a
    boot id if a store needs it."""
    if is_synchronized():
        yield Finding(AREA, "ok", "the clock is synchronized")
    else:
        yield Finding(AREA, "warning", "nothing synchronizes the clock", "timedatectl set-ntp true, or run chronyd")
    runtime_dir = Path(here.config.cluster.runtime_dir)
    for node in here.nodes:
        ahead_s = last_start_s(runtime_dir / f"{node.name}.lock") - time.time()
        if ahead_s > AHEAD_S:
            found = f"an earlier incarnation of {node.name} began {ahead_s:,.0f} s in the future: the clock went back"
            yield Finding(
                AREA, "warning", found, "set the clock right; peers accept a node only with a greater number than before"
            )
    if any(node.store_endpoint for node in here.of_role("cache-node")):
        if boot_id():
            yield Finding(AREA, "ok", "the boot id can be read: store clients of this machine share memory")
        else:
            advice = "ProcSubset=all in the unit of the cache-node and of each client"
            yield Finding(AREA, "warning", "no boot id: store clients of this machine go by the network", advice)


def is_synchronized() -> bool:
    """Return whether the kernel considers the clock synchronized."""
    state = ctypes.create_string_buffer(TIMEX_BYTES)
    ctypes.CDLL(None).adjtimex(state)
    return not int.from_bytes(state.raw[STATUS_AT : STATUS_AT + 4], "little") & UNSYNCHRONIZED


def last_start_s(lock: Path) -> float:
    """Return when the last incarnation of a node began, by its lock; 0 if unknown."""
    try:
        return int(lock.read_text().split()[1]) / 1000
    except (OSError, ValueError, IndexError):
        return 0.0
