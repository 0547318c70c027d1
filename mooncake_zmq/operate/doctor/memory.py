"""Checks shared memory and RAM against what this machine's nodes are configured to use."""

import os
from collections.abc import Iterator
from pathlib import Path

from mooncake_zmq.config.kv_sizes import kv_of
from mooncake_zmq.config.records import NodeSettings
from mooncake_zmq.engine.inspect import measure_host
from mooncake_zmq.operate.doctor.finding import Finding, Here

AREA = "memory"
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
LARGE_BYTES = 8 << 30
"""The size from which the page tables of shared memory cost noticeable time and memory."""


def examine(here: Here) -> Iterator[Finding]:
    """Yield findings on room in shm_dir for what is not allocated yet, on RAM for all nodes, and on large pages for large
    pools."""
    directory = Path(here.config.cluster.shm_dir)
    shared = {node.name: shared_bytes(here, node) for node in here.nodes}
    coming_bytes = sum(needed for name, needed in shared.items() if name not in here.running)
    yield from _room(here, directory, coming_bytes)
    yield _ram(here, sum(shared.values()), coming_bytes)
    if sum(shared.values()) >= LARGE_BYTES:
        yield large_pages(HUGE_PAGES)


def shared_bytes(here: Here, node: NodeSettings) -> int:
    """Return the bytes of shm_dir that a node uses: the most of any of its roles."""
    return max(_of_role(here, node.in_role(role)) for role in node.roles)


def _of_role(here: Here, node: NodeSettings) -> int:
    section = here.section(node)
    match node.role:
        case "cache-node":
            return int(section.pool_bytes + (section.objects.object_bytes if node.store_endpoint else 0))
        case "prefill" if node.device == "cpu":
            return int(section.slab_bytes)
    return 0


def _room(here: Here, directory: Path, needed_bytes: int) -> Iterator[Finding]:
    try:
        state = os.statvfs(directory)
    except OSError as error:
        yield Finding(
            AREA, "problem", f"{directory}: {error.strerror}", f"mount a tmpfs at {directory}, or set cluster.shm_dir"
        )
        return
    free_bytes, total_bytes = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    found = f"{directory} has {size(free_bytes)} free; the nodes here take another {size(needed_bytes)}"
    if free_bytes >= needed_bytes:
        yield Finding(AREA, "ok", found)
    else:
        gib = -(-(total_bytes - free_bytes + needed_bytes) >> 30) + 1
        yield Finding(
            AREA,
            "problem",
            found,
            f"mount -o remount,size={gib}G {directory} (and the same in /etc/fstab), or lower pool_bytes",
        )


def _ram(here: Here, shared: int, coming: int) -> Finding:
    """Check the RAM that is available. Allocated shared memory and the KV of running decodes are no longer in it, so both are
    left out of what is needed."""
    per_token, _ = kv_of(here.config)
    waiting = [node for node in here.of_role("decode") if node.name not in here.running and node.device == "cpu"]
    private = sum(here.section(node).capacity_tokens * per_token for node in waiting)
    available = measure_host(Path("/")).memory_available_bytes
    found = f"shared memory of {size(shared)} in all; KV of decodes to be started {size(private)} at most"
    if coming + private <= available:
        return Finding(AREA, "ok", f"{found}; RAM available {size(available)}")
    advice = "lower cache_node.pool_bytes or decode.capacity_tokens, or move nodes to another machine"
    return Finding(AREA, "warning", f"{found}, and {size(available)} of RAM are available", advice)


def large_pages(setting: Path) -> Finding:
    """Check whether the kernel backs shared memory with large pages where it is asked to."""
    try:
        chosen = setting.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        chosen = "unknown"
    if chosen in ("always", "within_size", "advise", "force"):
        return Finding(AREA, "ok", f"large pages for shared memory: {chosen}")
    advice = f"echo advise > {setting} (and at each start, by a line in /etc/tmpfiles.d: w {setting} - - - - advise)"
    return Finding(AREA, "warning", f"large pages for shared memory: {chosen}", advice)


def size(count: int) -> str:
    """Return a number of bytes for people."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if count >= 10 * unit or (count >= unit and unit == 1 << 20):
            return f"{count / unit:,.1f} {name}" if count < 100 * unit else f"{count / unit:,.0f} {name}"
    return f"{count:,} bytes"
