"""Engines over prepared models, whose files they map: one copy on a host serves all processes."""

import contextlib
import fcntl
import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.coded_kv import CodedSequenceKV
from mooncake_zmq.engine.cpu import Backend, Device, chosen
from mooncake_zmq.engine.device import DeviceLlama
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.kv_cache import NewSequence
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.engine.matrices import compact
from mooncake_zmq.engine.offsets import offsets_of
from mooncake_zmq.engine.prepared_files import ITEM_BYTES, WEIGHTS_FILE, fused_matrices, read_header
from mooncake_zmq.engine.sources.source import expected_shapes
from mooncake_zmq.engine.spec import Engine, ModelSpec
from mooncake_zmq.engine.toy import ToyEngine
from mooncake_zmq.kv.codec import Codec

if TYPE_CHECKING:
    from mooncake_zmq.engine.machine_code.compiled import CompiledLlama


def load_engine(
    model: Path | str,
    *,
    device: Device = "cpu",
    threads: int = 1,
    backend: Backend = "numpy",
    sequences: NewSequence | None = None,
    codec: Codec | None = None,
) -> Engine:
    """Return the engine of a directory prepared for `backend`, or of "toy". `sequences`: makes the sequences of a device;
    `codec`: of their blocks, on a CPU."""
    if str(model) == "toy":
        return ToyEngine()
    if chosen(backend) == "compiled":
        return open_compiled(Path(model), threads=threads, compacted=backend == "compiled", codec=codec)
    return open_model(Path(model), device=device, threads=threads, sequences=sequences, codec=codec)


def open_model(
    path: Path,
    *,
    device: Device = "cpu",
    threads: int = 1,
    sequences: NewSequence | None = None,
    codec: Codec | None = None,
) -> Llama:
    """Map a prepared model. Takes milliseconds; pages come in as they are read and are shared by all processes."""
    spec, tensors = _map_tensors(path)
    if codec is not None:
        sequences = functools.partial(CodedSequenceKV, codec, offsets_of(spec, tensors, codec))
    if device == "cuda":
        return DeviceLlama(spec, tensors, sequences=sequences)
    return Llama(spec, tensors, threads=threads, sequences=sequences)


def open_compiled(path: Path, *, threads: int = 1, compacted: bool = True, codec: Codec | None = None) -> "CompiledLlama":
    """Map a prepared model as `open_model` does, for machine code; takes seconds where no process on this machine has made that
    yet. `compacted`: the model must have its compact form; else, where it has none, decode reads float32."""
    engine = compiled_engine()
    spec, tensors = _map_tensors(path)
    panels = compact.read(path, _matrix_shapes(spec)) if compacted or compact.exists(path) else {}
    return engine(spec, tensors, panels, threads=threads, codec=codec, cache_dir=path.parent)


def compiled_engine() -> "type[CompiledLlama]":
    """Return the engine of backend "compiled". Raises ModelError where its library is missing."""
    try:
        from mooncake_zmq.engine.machine_code.compiled import CompiledLlama
    except ImportError as error:
        raise ModelError(f"backend 'compiled' needs Numba ({error}): install the extra 'compiled'") from error
    return CompiledLlama


def _map_tensors(path: Path) -> tuple[ModelSpec, dict[str, NDArray[np.float32]]]:
    spec, table = read_header(path)
    try:
        with (path / WEIGHTS_FILE).open("rb") as file:
            with contextlib.suppress(OSError):  # a file system without locks: then only `remove_former` cannot see this process
                fcntl.flock(file, fcntl.LOCK_SH)  # the mapping's own descriptor holds it as long as the mapping exists
            data: NDArray[np.uint8] = np.memmap(file, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path / WEIGHTS_FILE} cannot be mapped: {error}") from error
    tensors = {}
    for name, (offset, shape) in table.items():
        end = offset + ITEM_BYTES * math.prod(shape)
        if end > len(data):
            raise ModelError(f"{path} is damaged ({name} ends beyond the file): delete it, it will be made again")
        tensors[name] = data[offset:end].view(np.float32).reshape(shape)
    return spec, tensors


def _matrix_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return [out, in] of every one of `fused_matrices`, unpadded."""
    shapes = expected_shapes(spec)
    return {name: (sum(shapes[part][0] for part in parts), shapes[parts[0]][1]) for name, parts in fused_matrices(spec).items()}
