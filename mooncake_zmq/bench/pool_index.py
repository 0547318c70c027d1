"""Bytes of memory that the pool's index takes per block: the growth of a new process that runs this module."""

import hashlib
import subprocess
import sys

import click


def index_bytes_per_block(blocks: int) -> float:
    """Return the resident bytes per block of `blocks` blocks that are each in DRAM and on SSD, in a process of its own."""
    run = subprocess.run([sys.executable, "-m", __name__, str(blocks)], capture_output=True, text=True)
    if run.returncode:
        raise click.ClickException(f"measuring the index failed:\n{run.stderr}")
    return float(run.stdout)


def _grow(blocks: int) -> float:
    """Fill each tier's slots as the live pool does: DRAM by puts, SSD by the blocks that a recovery finds."""
    import psutil

    from mooncake_zmq.kv.slots import Slots, SlotState

    process = psutil.Process()
    before = process.memory_info().rss
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
    grown = process.memory_info().rss - before
    assert dram.count(SlotState.COMMITTED) == ssd.count(SlotState.COMMITTED) == blocks
    return grown / blocks


if __name__ == "__main__":
    sys.stdout.write(str(_grow(int(sys.argv[1]))))
