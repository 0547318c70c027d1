"""Bytes of memory that the pool's index takes per block: the growth of a fresh process, this module run as one."""

import hashlib
import subprocess
import sys
from pathlib import Path

import click


def index_bytes_per_block(blocks: int) -> float:
    """Resident bytes per block of `blocks` blocks that are each in DRAM and on SSD, in a process of its own."""
    run = subprocess.run([sys.executable, "-m", __name__, str(blocks)], capture_output=True, text=True)
    if run.returncode:
        raise click.ClickException(f"measuring the index failed:\n{run.stderr}")
    return float(run.stdout)


def _grow(blocks: int) -> float:
    """Fill a tier's slots in the way of each tier: DRAM by puts, SSD by what a recovery finds."""
    from mooncake_zmq.kv.slots import Slots, SlotState

    before = _resident_bytes()
    dram = Slots(blocks)
    ssd = Slots(blocks)
    for block in range(blocks):
        key = hashlib.sha256(block.to_bytes(8, "big")).digest()[:16]
        slot = dram.reserve(key)
        assert slot is not None
        dram.commit(slot, block)
        dram.take_fences()
        ssd.restore(block, key, block)
        ssd.take_fences()
    grown = _resident_bytes() - before
    assert dram.count(SlotState.COMMITTED) == ssd.count(SlotState.COMMITTED) == blocks
    return grown / blocks


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no VmRSS")


if __name__ == "__main__":
    sys.stdout.write(str(_grow(int(sys.argv[1]))))
