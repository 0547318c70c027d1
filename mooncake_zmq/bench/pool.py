"""`bench pool`: the KV pool against memory, transport and disk, and against other stores over the same values.

Local and remote: values of one size, put and got in batches of 16, over a working set larger than any cache; each store's
owner and client are processes of their own (`others`). The sides of a row take turns round by round, the
first round of each is not counted (its memory is written for the first time), and every byte got is compared.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mooncake_zmq.bench.disk import disk_rows
from mooncake_zmq.bench.others.peers import Peer, peer
from mooncake_zmq.bench.pool_index import index_bytes_per_block
from mooncake_zmq.bench.pool_keys import cost_of_keys
from mooncake_zmq.bench.pool_lease import BLOCKS, lease_times_s
from mooncake_zmq.bench.pool_load import COPY, LAYOUT, load_gb_per_s
from mooncake_zmq.bench.report import Progress, Report, Row
from mooncake_zmq.transfer.shared_memory import needs_checksums

MIB = 1 << 20
SIZES = (1 * MIB, 4 * MIB, 16 * MIB)
SINGLE_BYTES, SINGLES = 64 << 10, 1000
RESIDENT_KEYS, KEYS_PER_CALL, IN_FLIGHT = 100_000, 512, 4
EXIST_CALLS = 400
LEASES = 1000
LOADED_BLOCKS = 64
INDEX_BLOCKS = 1_000_000
WANTED_SINGLE_US, WANTED_KEYS_PER_S, WANTED_LEASE_US, WANTED_INDEX_BYTES = 200.0, 1.2e6, 300.0, 256.0
SEED = 3
OURS, MOONCAKE, STREAM = "mooncake_zmq", "mooncake", "stream"
"""The driver's names of the stores."""
CHECKED, UNCHECKED = "checksum on", "checksum off"
LOCAL_SETTINGS = {CHECKED: {}, UNCHECKED: {"verify_local": False, "checksum_local": False}}
"""Settings by name; the second is for machines whose CPU lets a client skip local verification."""
WAYS = ("get", "put")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBench:
    """The parameters of a run. Pythons: interpreters whose environments have the other stores; None leaves these out."""

    rounds: int = 5
    working_set_bytes: int = 512 * MIB
    sizes: tuple[int, ...] = SIZES
    mooncake_python: str | None = None
    disk_directory: Path = Path("/var/tmp")


def bench_pool(bench: PoolBench, *, parts: Sequence[str], progress: Progress) -> Report:
    """Run the chosen groups of rows. Raises click.ClickException when one of its processes dies."""
    report = Report("pool")
    for part in parts:
        report.rows += PARTS[part](bench, progress)
    return report


def local_rows(bench: PoolBench, progress: Progress) -> list[Row]:
    """Measure shared memory, beside a plain copy from source to target by one thread in the same process and round."""
    with ExitStack() as stack:
        pool = stack.enter_context(_owner(bench, OURS, segment_bytes=_segment_bytes(bench)))
        sides = {
            checks: stack.enter_context(_client(bench, OURS, pool, client=settings))
            for checks, settings in LOCAL_SETTINGS.items()
            if not settings or not needs_checksums(checks)
        }
        if bench.mooncake_python:
            master = stack.enter_context(_owner(bench, MOONCAKE, segment_bytes=0))
            sides[MOONCAKE] = stack.enter_context(_client(bench, MOONCAKE, master, segment_bytes=_segment_bytes(bench)))
        rows = []
        for size in bench.sizes:
            took = _rounds(bench, progress, f"local {_shown(size)}", sides, "bytes", size=size)
            for way in WAYS:
                what = f"local {way} {_shown(size)}"
                for checks in [each for each in LOCAL_SETTINGS if each in sides]:
                    rows.append(_rate(f"{what}, {checks} / memory copy", took[checks, way], took[checks, "copy"]))
                if MOONCAKE in sides:
                    rows.append(_rate(f"{what}, {CHECKED} / {MOONCAKE}", took[CHECKED, way], took[MOONCAKE, way]))
    return rows


def remote_rows(bench: PoolBench, progress: Progress) -> list[Row]:
    """Measure TCP loopback, checksums on, beside a bare zero-copy stream of the same bytes and beside the other stores."""
    with ExitStack() as stack:
        streams = {f"stream {n}": _stream(bench, stack, connections=n) for n in (1, 2)}
        stores = _remote_stores(bench, stack)
        rows = []
        for size in bench.sizes:
            took = _rounds(bench, progress, f"remote {_shown(size)}", stores | streams, "bytes", size=size)
            best = max((took[name, "get"] for name in streams), key=median)
            for way in WAYS:
                references = {"bare stream": best} | {name: took[name, way] for name in stores if name != OURS}
                for name, reference in references.items():
                    rows.append(_rate(f"remote {way} {_shown(size)} / {name}", took[OURS, way], reference))
        count = min(SINGLES, bench.working_set_bytes // SINGLE_BYTES)
        took = _rounds(bench, progress, "single gets", stores, "single", size=SINGLE_BYTES, count=count)
        references = {"200 us wanted": [WANTED_SINGLE_US]} | {name: took[name, "p50"] for name in stores if name != OURS}
        for name, reference in references.items():
            rows.append(_cost(f"remote get 64 KiB alone, p50 / {name}", "us", took[OURS, "p50"], reference))
    return rows


def exist_rows(bench: PoolBench, progress: Progress) -> list[Row]:
    """Measure batched existence from another process, half of the keys missing, several calls in flight."""
    with ExitStack() as stack:
        stores = _remote_stores(bench, stack)
        arguments = {"resident": RESIDENT_KEYS, "keys_per_call": KEYS_PER_CALL, "in_flight": IN_FLIGHT, "calls": EXIST_CALLS}
        took = _rounds(bench, progress, "batch_is_exist", stores, "exist", **arguments)
    references = {"1.2 M wanted": [WANTED_KEYS_PER_S]} | {name: took[name, "rate"] for name in stores if name != OURS}
    return [
        _rate(f"batch_is_exist, {KEYS_PER_CALL} keys / {name}", took[OURS, "rate"], reference, unit="keys/s")
        for name, reference in references.items()
    ]


def lease_rows(bench: PoolBench, progress: Progress) -> list[Row]:
    """Measure a lease of 32 blocks and its release, at a cache-node process of this host."""
    medians = []
    for number in range(bench.rounds):
        progress(f"leases, round {number + 1} of {bench.rounds}")
        medians.append(median(lease_times_s(LEASES)) * 1e6)
    return [_cost(f"lease + release of {BLOCKS} blocks / 300 us wanted", "us", medians, [WANTED_LEASE_US])]


def index_rows(bench: PoolBench, progress: Progress) -> list[Row]:
    """Measure the memory of the index, each block being in DRAM and on SSD."""
    progress(f"index of {INDEX_BLOCKS:,} blocks")
    grown = index_bytes_per_block(INDEX_BLOCKS)
    return [_cost("index, each block in DRAM and SSD / 256 wanted", "bytes/block", [grown], [WANTED_INDEX_BYTES])]


def keys_rows(bench: PoolBench, progress: Progress) -> list[Row]:
    """Measure control frames, blocks and values over TCP with keys, beside the same without, and blocks beside a bare stream;
    see `bench.pool_keys`."""
    took = cost_of_keys(bench.rounds, progress)
    on, off = "encrypted", "clear"
    rows = [
        _cost("control round trip, keys on / off", "us", took[on, "round trip"], took[off, "round trip"]),
        _rate("control frames of 256 B, keys on / off", took[on, "frames"], took[off, "frames"], unit="frames/s"),
        _rate("blocks of 1 MiB from another host / bare TCP stream", took[off, "blocks"], took[off, "bare"]),
        _rate("blocks of 1 MiB from another host / ZeroMQ frames", took[off, "blocks"], took[off, "framed"]),
        _rate("encrypted blocks of 1 MiB from another host / frames with CURVE", took[on, "blocks"], took[on, "framed"]),
    ]
    for what in ("blocks", "values"):
        for how in ("attached", on):
            shown = "by tickets, in clear" if how == "attached" else "by tickets, encrypted"
            rows.append(_rate(f"{what} of 1 MiB from another host, {shown} / no keys", took[how, what], took[off, what]))
    return rows


def ssd_rows(bench: PoolBench, progress: Progress) -> list[Row]:
    """Measure demotion and promotion, checksums on, against bare direct I/O; see `bench.disk`."""
    return disk_rows(bench.disk_directory, rounds=bench.rounds, working_set_bytes=bench.working_set_bytes, progress=progress)


def load_rows(bench: PoolBench, progress: Progress) -> list[Row]:
    """Measure a prefix loaded from this host's pool into a sequence, verified, beside a plain copy; see `bench.pool_load`."""
    took = load_gb_per_s(bench.rounds, LOADED_BLOCKS, progress)
    what = f"load of {LOADED_BLOCKS * LAYOUT.block_tokens:,} tokens"
    return [_rate(f"{what}, {kind} / {COPY}", rates, took[COPY]) for kind, rates in took.items() if kind != COPY]


PARTS: dict[str, Callable[[PoolBench, Progress], list[Row]]] = {
    "local": local_rows,
    "remote": remote_rows,
    "exist": exist_rows,
    "lease": lease_rows,
    "load": load_rows,
    "keys": keys_rows,
    "ssd": ssd_rows,
    "index": index_rows,
}


def _segment_bytes(bench: PoolBench) -> int:
    """Return room for a round's values however an allocator rounds them up; evicting is not measured here."""
    return bench.working_set_bytes * 3 // 2 + 64 * MIB


def _remote_stores(bench: PoolBench, stack: ExitStack) -> dict[str, Peer]:
    """Return a client of each available store, none of which can map its owner's memory."""
    owned = {"segment_bytes": _segment_bytes(bench)}
    clients = {OURS: _client(bench, OURS, stack.enter_context(_owner(bench, OURS, **owned)), client={"share_memory": False})}
    if bench.mooncake_python:
        owner = stack.enter_context(_owner(bench, MOONCAKE, **owned))
        clients[MOONCAKE] = _client(bench, MOONCAKE, owner, segment_bytes=0)
    return {name: stack.enter_context(client) for name, client in clients.items()}


def _stream(bench: PoolBench, stack: ExitStack, *, connections: int) -> Peer:
    owner = stack.enter_context(_owner(bench, STREAM, connections=connections))
    return stack.enter_context(_client(bench, STREAM, owner))


def _owner(bench: PoolBench, store: str, **settings: Any) -> AbstractContextManager[Peer]:
    return _peer(bench, store, role="owner", **settings)


def _client(bench: PoolBench, store: str, owner: Peer, **settings: Any) -> AbstractContextManager[Peer]:
    return _peer(bench, store, role="client", at=owner.ready, **settings)


def _peer(bench: PoolBench, store: str, **settings: Any) -> AbstractContextManager[Peer]:
    python = (bench.mooncake_python if store == MOONCAKE else None) or sys.executable
    order = {"store": store, "working_set_bytes": bench.working_set_bytes, "seed": SEED, **settings}
    return peer(order, python=python)


def _rounds(
    bench: PoolBench, progress: Progress, what: str, sides: Mapping[str, Peer], method: str, **arguments: Any
) -> dict[tuple[str, str], list[float]]:
    """Let every side do a round in its turn: (side, figure's name) -> the figure of each counted round."""
    took: dict[tuple[str, str], list[float]] = {}
    for number in range(bench.rounds + 1):
        progress(f"{what}, round {number} of {bench.rounds}" if number else f"{what}, warming up")
        for name, side in sides.items():
            for figure, value in side.ask(method, **arguments).items():
                if number:
                    took.setdefault((name, figure), []).append(value)
    return took


def _rate(name: str, ours: Sequence[float], reference: Sequence[float], *, unit: str = "GB/s") -> Row:
    return Row(name, unit, median(ours), median(reference), higher=True)


def _cost(name: str, unit: str, ours: Sequence[float], reference: Sequence[float]) -> Row:
    return Row(name, unit, median(ours), median(reference))


def _shown(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size >> 10} KiB"
