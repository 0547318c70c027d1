"""`bench gpu`: copies of KV between GPU memory, DRAM and a neighbour process, and the engine that computes it.

Every path of blocks stands beside the best that the copy engines do with the same bytes: one copy of them between the GPU and
pinned host memory, or within the GPU's. The engine stands beside the GPU's own float32 product and memory rates. Answers are
compared with the CPU's and every block's bytes with those that were written before anything is timed.
"""

import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mooncake_zmq.bench.block_fetch import send_bare
from mooncake_zmq.bench.engine import head_weights, layer_weights, prefill_flops
from mooncake_zmq.bench.engine_timing import decode_step_s, prefill_times_s, random_prompt
from mooncake_zmq.bench.keys_driver import ANYWHERE, fail
from mooncake_zmq.bench.others.peers import Peer, driver_process
from mooncake_zmq.bench.report import Progress, Report, Row
from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import BlockLoad, SlotGrant
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.engine.prepared_files import read_spec
from mooncake_zmq.engine.spec import Engine, ModelSpec
from mooncake_zmq.engine.weights import open_model
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.refused import Refused
from mooncake_zmq.transfer.block_copy import copy_block, load_blocks, store_parts
from mooncake_zmq.transfer.cuda import Cuda, DeviceSegment, DeviceSequence
from mooncake_zmq.transfer.data_server import DataServer
from mooncake_zmq.transfer.segment_file import SharedMemoryError
from mooncake_zmq.transfer.shared_memory import Segment

BLOCK_TOKENS, BLOCKS = 32, 64
PREFILL_TOKENS = (512, 2048, 8192)
DECODE_BATCHES, DECODE_CONTEXT, DECODE_STEPS = (1, 8, 32), 1024, 16
CHECKED_TOKENS, LOGIT_ERROR = 130, 1e-2
GEMM_SIZE, COPIES = 8192, 20
NEIGHBOUR = Path(__file__).with_name("gpu_neighbour.py")
NODE, INCARNATION = "bench", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBench:
    """The parameters of a run."""

    model: str = "dummy:1b"
    cache_dir: str = ""
    rounds: int = 5


def bench_gpu(bench: GpuBench, *, parts: Sequence[str], progress: Progress) -> Report:
    """Run all of it. Raises click.ClickException where there is no GPU, no model, too little memory, or anything differs."""
    try:
        progress(f"preparing the model {bench.model}")
        path = prepare(bench.model, bench.cache_dir)
        if str(path) == "toy":
            raise ModelError("the toy engine has no weights: give another model")
        spec = read_spec(path)
        layout = BlockLayout(layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, block_tokens=BLOCK_TOKENS)
        with closing(Cuda.open(layout)) as cuda:
            report = Report("gpu", notes=[_device(cuda)])
            if "blocks" in parts:
                report.rows += _block_rows(cuda, layout, bench, progress)
            if "engine" in parts:
                report.rows += _engine_rows(cuda, path, spec, bench, progress)
    except (ValueError, SharedMemoryError) as error:
        raise Refused(str(error)) from None
    return report


# ------------------------------------------------------------------------------------------------------------ blocks


@dataclass(slots=True, kw_only=True)
class _Ways:
    """A sequence of BLOCKS blocks with room for another, a prefill's slab, both on the GPU, and a cache-node's pool in DRAM."""

    cuda: Cuda
    layout: BlockLayout
    computed: DeviceSequence
    room: DeviceSequence
    slab: DeviceSegment
    pool: Segment

    def store(self) -> None:
        """Store a sequence's blocks into granted slots of its slab, one layer after the other, as a prefill does."""
        with ExitStack() as stack:
            for slot in range(BLOCKS):
                stack.enter_context(_writing(self.slab, slot))
            for layer in range(self.layout.layers):
                parts = [(slot, layer, slot * BLOCK_TOKENS, BLOCK_TOKENS) for slot in range(BLOCKS)]
                store_parts(self.computed, self.slab, parts)

    def put(self) -> None:
        """Put the blocks into the cache-node's pool of the host, as a prefill does."""
        for block, source in enumerate(references(self.slab)):
            with _writing(self.pool, block) as grant:
                if copy_block(self.slab, source, self.pool, grant) != source.checksum:
                    raise ValueError(f"block {block} arrived in the pool as something else")

    def load(self, segment: Segment, *, verify: bool) -> None:
        """Load blocks as a prefill loads a prefix, or a decode a computed prompt."""
        load_all(self.room, segment, verify=verify)

    def compare(self, neighbour: Peer) -> None:
        """Take each way once, into memory that holds something else, and compare. Raises ValueError."""
        computed = digest(self.computed, self.layout)
        for what, segment in (("slab", self.slab), ("pool", self.pool)):
            for verify in (True, False):
                blank(self.room, self.layout)
                self.load(segment, verify=verify)
                if digest(self.room, self.layout) != computed:
                    raise ValueError(f"the {what}'s blocks are not what was computed")
        for way, options in (("load", {"verify": True}), ("load", {"verify": False}), ("fetch", {}), ("receive", {})):
            if neighbour.ask("digest", way=way, **options)["digest"] != computed:
                raise ValueError(f"the neighbour's blocks are not what was computed: {way}")


def _block_rows(cuda: Cuda, layout: BlockLayout, bench: GpuBench, progress: Progress) -> list[Row]:
    """Return the rows of GB/s of the blocks' bytes; every path and every reference takes its turn in each round."""
    with ExitStack() as stack:
        ways = _open_ways(cuda, layout, stack)
        progress(f"{BLOCKS} blocks of {layout.block_bytes >> 10} KiB, in {layout.layers} parts: each way once, compared")
        ways.store()
        ways.put()
        neighbour = stack.enter_context(_neighbour(ways, stack))
        ways.compare(neighbour)
        sides = _bare_copies(cuda, BLOCKS * layout.block_bytes) | {
            "store": lambda: _timed(ways.store),
            "put": lambda: _timed(ways.put),
            "load": lambda: _timed(lambda: ways.load(ways.pool, verify=True)),
            "load unverified": lambda: _timed(lambda: ways.load(ways.pool, verify=False)),
            "neighbour": lambda: float(neighbour.ask("load", verify=True)["s"]),
            "neighbour unverified": lambda: float(neighbour.ask("load", verify=False)["s"]),
            "fetch": lambda: float(neighbour.ask("fetch")["s"]),
            STREAM: lambda: float(neighbour.ask("receive")["s"]),
        }
        # The slab is not written while the neighbour reads: the sides take turns.
        took = _rounds(sides, bench.rounds, progress)
    rates = {name: BLOCKS * layout.block_bytes / median(values) / 1e9 for name, values in took.items()}
    return [Row(f"{what} / {against}", "GB/s", rates[way], rates[against], higher=True) for what, way, against in WAYS]


INTO, OUT_OF, WITHIN, STREAM = "pinned copy to the GPU", "pinned copy from the GPU", "copy within the GPU", "bare TCP stream"
WAYS = (
    ("sequence to slab, sealed", "store", OUT_OF),
    ("slab to pool in DRAM", "put", OUT_OF),
    ("pool in DRAM to sequence", "load", INTO),
    ("pool in DRAM to sequence, not verified", "load unverified", INTO),
    ("slab to a neighbour's sequence", "neighbour", OUT_OF),
    ("slab to a neighbour's sequence, not verified", "neighbour unverified", WITHIN),
    ("slab to another host, over loopback", "fetch", STREAM),
)
"""(what, side, the reference): verified copies between sequences are hashed in host memory, so they go out of the GPU once."""


def _open_ways(cuda: Cuda, layout: BlockLayout, stack: ExitStack) -> _Ways:
    directory = stack.enter_context(TemporaryDirectory(prefix="mooncake-bench-", dir="/dev/shm"))
    slab = DeviceSegment.allocate(cuda, directory, "bench", NODE, layout, BLOCKS, INCARNATION)
    stack.callback(slab.free)
    stack.callback(slab.close)
    owner = Segment.create(directory, "bench", "pool", layout, BLOCKS, INCARNATION)
    stack.callback(owner.close)
    pool = Segment.attach(owner.path, layout, INCARNATION, writable=True)
    cuda.pin(pool)
    if cuda.counts["pin_failures"]:
        raise ValueError("the pool's memory cannot be pinned: allow more locked memory (ulimit -l unlimited)")
    computed, room = new_sequence(cuda, layout), new_sequence(cuda, layout)
    random = np.random.default_rng(1)
    for start in range(0, BLOCKS * BLOCK_TOKENS, BLOCK_TOKENS):
        for layer in range(layout.layers):
            computed.write_part(layer, start, random.standard_normal(layout.part_shape, dtype=np.float32))
            computed.settle()
    return _Ways(cuda=cuda, layout=layout, computed=computed, room=room, slab=slab, pool=pool)


def new_sequence(cuda: Cuda, layout: BlockLayout) -> DeviceSequence:
    """Return a sequence with room for every block."""
    shape = {"layers": layout.layers, "kv_heads": layout.kv_heads, "head_dim": layout.head_dim}
    return DeviceSequence(cuda, **shape, capacity_tokens=BLOCKS * BLOCK_TOKENS)


def _each_part(layout: BlockLayout) -> Iterator[tuple[int, int]]:
    return ((layer, block * BLOCK_TOKENS) for block in range(BLOCKS) for layer in range(layout.layers))


def blank(sequence: DeviceSequence, layout: BlockLayout) -> None:
    """Fill a sequence with zeros."""
    part = np.zeros(layout.part_shape, np.float32)
    for layer, start in _each_part(layout):
        sequence.write_part(layer, start, part)
    sequence.settle()


def digest(sequence: DeviceSequence, layout: BlockLayout) -> str:
    """Return the digest of a sequence's KV as its blocks' bytes lie one after the other."""
    found, part = hashlib.sha256(), np.empty(layout.part_shape, np.float32)
    for layer, start in _each_part(layout):
        sequence.read_part(layer, start, start + BLOCK_TOKENS, part)
        found.update(part.tobytes())
    return found.hexdigest()


def load_all(sequence: DeviceSequence, segment: Segment, *, verify: bool) -> None:
    """Load all of a segment's blocks into a sequence. Raises ValueError where one is not what was stored."""
    layers = range(segment.layout.layers)
    loads = [
        (segment, BlockLoad(block, ref, layers.start, layers.stop, BLOCK_TOKENS), layers)
        for block, ref in enumerate(references(segment))
    ]
    for block, parts in enumerate(load_blocks(loads, sequence, verify_committed=verify)):
        if parts != segment.parts(block).tolist():
            raise ValueError(f"block {block} is not what was stored: {parts}")


def references(segment: Segment) -> list[SlotRef]:
    """Return a reference to every slot's present content."""
    return [
        SlotRef(
            node=NODE,
            incarnation=INCARNATION,
            slot=slot,
            generation=segment.generation(slot),
            checksum=block_checksum(segment.parts(slot).tolist()),
        )
        for slot in range(segment.slots)
    ]


@contextmanager
def _writing(segment: Segment, slot: int) -> Iterator[SlotGrant]:
    """Grant the slot for writing, and commit its content at the end."""
    generation = segment.generation(slot) + 1
    segment.set_generation(slot, generation)
    yield SlotGrant(NODE, INCARNATION, slot, generation)
    segment.set_generation(slot, generation + 1)


@contextmanager
def _neighbour(ways: _Ways, stack: ExitStack) -> Iterator[Peer]:
    """Run the neighbour process within the context; `stack` closes its data server."""
    slab, pool = ways.slab, ways.pool
    server = DataServer(slab, ANYWHERE, on_crash=fail)
    stack.callback(server.close)
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    blocks = [pool.layers_view(slot, 0, pool.layout.layers) for slot in range(pool.slots)]
    threading.Thread(target=send_bare, args=(listener, blocks), daemon=True).start()
    order = {
        "data": server.endpoint,
        "bare": listener.getsockname()[1],
        "path": str(slab.path),
        "device": slab.device.hex(),
        "handle": slab.handle.hex(),
        "layers": slab.layout.layers,
        "kv_heads": slab.layout.kv_heads,
        "head_dim": slab.layout.head_dim,
    }
    roots = os.pathsep.join([str(NEIGHBOUR.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": roots, "PYTHONSAFEPATH": "1"}  # not this folder: its modules would hide others
    what = "the neighbour process"
    with driver_process(
        NEIGHBOUR, order, python=sys.executable, what=what, timeout_s=120.0, environment=environment
    ) as neighbour:
        yield neighbour


def _bare_copies(cuda: Cuda, size_bytes: int) -> dict[str, Callable[[], float]]:
    """Return one copy of so many bytes in each direction."""
    xp, runtime = cuda.xp, cuda.xp.cuda.runtime
    device, other, host = xp.zeros(size_bytes, np.uint8), xp.zeros(size_bytes, np.uint8), cuda.pinned(size_bytes)
    host[:] = 1
    xp.cuda.get_current_stream().synchronize()
    stream = xp.cuda.Stream(non_blocking=True)

    def copy(target: int, source: int, kind: int) -> float:
        def once() -> None:
            runtime.memcpyAsync(target, source, size_bytes, kind, stream.ptr)
            stream.synchronize()

        return _timed(once)

    at = host.ctypes.data
    return {
        INTO: lambda: copy(device.data.ptr, at, runtime.memcpyHostToDevice),
        OUT_OF: lambda: copy(at, device.data.ptr, runtime.memcpyDeviceToHost),
        WITHIN: lambda: copy(other.data.ptr, device.data.ptr, runtime.memcpyDefault),
    }


# ------------------------------------------------------------------------------------------------------------ engine


def _engine_rows(cuda: Cuda, path: Path, spec: ModelSpec, bench: GpuBench, progress: Progress) -> list[Row]:
    """Return the rows of tokens per second beside the bound: operations over the GPU's float32 product rate, bytes over its
    memory's."""
    progress("moving the weights to the GPU")
    engine = open_model(path, device="cuda", sequences=lambda **shape: DeviceSequence(cuda, **shape))
    progress(f"{CHECKED_TOKENS} tokens on the CPU and on the GPU")
    _check_logits(open_model(path, threads=2), engine)
    random = np.random.default_rng(2)

    def prefill(tokens: int) -> float:
        return prefill_times_s(engine, random, [tokens], prefix=0, chunk_tokens=0)[0]

    def decode(batch: int) -> float:
        prompts = [random_prompt(random, DECODE_CONTEXT, spec.vocab_size) for _ in range(batch)]
        return decode_step_s(engine, prompts, steps=DECODE_STEPS)

    sides: dict[str, Callable[[], float]] = {f"prefill, {n:,} tokens": partial(prefill, n) for n in PREFILL_TOKENS}
    sides |= {f"decode, batch {n}, context {DECODE_CONTEXT:,}": partial(decode, n) for n in DECODE_BATCHES}
    took = _rounds(sides | _rates(cuda), bench.rounds, progress)
    flops = 2.0 * GEMM_SIZE**3 / median(took["product"])
    bytes_per_s = COPIES * 2.0 * 4 * GEMM_SIZE**2 / median(took["memory"])
    rows = []
    for tokens in PREFILL_TOKENS:
        name = f"prefill, {tokens:,} tokens"
        value, floor_s = tokens / median(took[name]), prefill_flops(spec, tokens) / flops
        rows.append(Row(f"{name} / {flops / 1e12:.0f} TFLOP/s", "tokens/s", value, tokens / floor_s, higher=True))
    kv_bytes = 4 * 2 * spec.layers * spec.kv_heads * spec.head_dim * DECODE_CONTEXT
    for batch in DECODE_BATCHES:
        name = f"decode, batch {batch}, context {DECODE_CONTEXT:,}"
        floor_s = (4 * (layer_weights(spec) + head_weights(spec)) + batch * kv_bytes) / bytes_per_s
        value = batch / median(took[name])
        rows.append(Row(f"{name} / {bytes_per_s / 1e9:,.0f} GB/s", "tokens/s", value, batch / floor_s, higher=True))
    return rows


def _check_logits(cpu: Engine, gpu: Engine) -> None:
    """Raise ValueError where the two engines differ by more than rounding."""
    prompt = random_prompt(np.random.default_rng(3), CHECKED_TOKENS, cpu.spec.vocab_size)
    logits = []
    for engine in (cpu, gpu):
        with closing(engine.new_sequence(CHECKED_TOKENS + 1)) as sequence:
            first = engine.prefill(sequence, prompt)
            assert first is not None
            logits.append(np.concatenate([first, engine.decode([sequence], prompt[:1])]))
    error = float(np.abs(logits[0] - logits[1]).max())
    if not error < LOGIT_ERROR:
        raise ValueError(f"the GPU's logits differ from the CPU's by {error:g}")


def _rates(cuda: Cuda) -> dict[str, Callable[[], float]]:
    """Return a large float32 product, and a copy within the GPU, which reads and writes its bytes."""
    xp = cuda.xp
    random = xp.asarray(np.random.default_rng(4).standard_normal((GEMM_SIZE, GEMM_SIZE), dtype=np.float32))
    out = xp.empty_like(random)

    def synchronized(work: Callable[[], Any]) -> float:
        def once() -> None:
            work()
            xp.cuda.get_current_stream().synchronize()

        return _timed(once)

    return {
        "product": lambda: synchronized(lambda: xp.matmul(random, random, out=out)),
        "memory": lambda: synchronized(lambda: [xp.copyto(out, random) for _ in range(COPIES)]),
    }


# ------------------------------------------------------------------------------------------------------------ both


def _rounds(sides: Mapping[str, Callable[[], float]], rounds: int, progress: Progress) -> dict[str, list[float]]:
    """Return the seconds of every side in each counted round; the first round is not counted."""
    took: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            took_s = side()
            progress(f"{f'round {number} of {rounds}' if number else 'warming up'}: {name}: {1e3 * took_s:.2f} ms")
            if number:
                took[name].append(took_s)
    return took


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _device(cuda: Cuda) -> str:
    runtime = cuda.xp.cuda.runtime
    name, version = runtime.getDeviceProperties(0)["name"].decode(), runtime.runtimeGetVersion()
    return f"{name}, CUDA {version // 1000}.{version % 1000 // 10}, CuPy {cuda.xp.__version__}"
