"""Prepared models: the content and size of their files, and engines over them. One copy on a host serves all processes.

A prepared model is a directory: header.json (spec, tensor table), weights.bin (float32, matrices as `panels`), the
tokenizer's files, and for decode in machine code compact.bin. `prepare` makes it; this module only maps it.
"""

import contextlib
import fcntl
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.coded_kv import CodedSequenceKV
from mooncake_zmq.engine.cpu import Backend, Device, chosen
from mooncake_zmq.engine.device import DeviceLlama
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.kv_cache import NewSequence
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.engine.matrices import compact
from mooncake_zmq.engine.matrices.panels import PANEL_COLUMNS, panel_count
from mooncake_zmq.engine.sources import expected_shapes
from mooncake_zmq.engine.spec import FAMILIES, Engine, ModelSpec, check_spec
from mooncake_zmq.engine.toy import ToyEngine
from mooncake_zmq.kv.codec import Codec

if TYPE_CHECKING:
    from mooncake_zmq.engine.machine_code.compiled import CompiledLlama

FORMAT = 3  # version of the prepared directory: a change here converts every model again
ALIGNMENT_BYTES = 4096
ITEM_BYTES = 4  # float32
HEADER_FILE = "header.json"
WEIGHTS_FILE = "weights.bin"

_FUSED = {"qkv": ("q", "k", "v"), "out": ("out",), "gate_up": ("gate", "up"), "down": ("down",)}


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
    if codec is not None:
        sequences = functools.partial(CodedSequenceKV, codec)
    return open_model(Path(model), device=device, threads=threads, sequences=sequences)


def open_model(path: Path, *, device: Device = "cpu", threads: int = 1, sequences: NewSequence | None = None) -> Llama:
    """Map a prepared model. Takes milliseconds; pages come in as they are read and are shared by all processes."""
    spec, tensors = _map_tensors(path)
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
    spec, table = _read_header(path)
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


def read_spec(path: Path) -> ModelSpec:
    """Return the spec of a prepared directory, without mapping its weights."""
    return _read_header(path)[0]


def _read_header(path: Path) -> tuple[ModelSpec, dict[str, tuple[int, tuple[int, ...]]]]:
    try:
        header = json.loads((path / HEADER_FILE).read_text())
        if header["format"] != FORMAT:
            raise ModelError(f"{path} was prepared by another version: prepare it again")
        spec = ModelSpec(**(header["spec"] | {"eos_ids": tuple(header["spec"]["eos_ids"])}))
        check_spec(spec)
        table = {name: (entry["offset"], tuple(entry["shape"])) for name, entry in header["tensors"].items()}
        if {name: shape for name, (_, shape) in table.items()} != stored_shapes(spec):
            raise ValueError("its tensors are not those of its shape")
        if not all(type(offset) is int and offset >= 0 and offset % ALIGNMENT_BYTES == 0 for offset, _ in table.values()):
            raise ValueError("its tensors lie nowhere")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is not a prepared model: {error}") from error
    return spec, table


def write_header(directory: Path, spec: ModelSpec, tensors: Mapping[str, Any]) -> None:
    """Write the header. `tensors`: offset and shape in weights.bin by name, in the order of `stored_shapes`."""
    header = {"format": FORMAT, "spec": asdict(spec), "tensors": tensors}
    (directory / HEADER_FILE).write_text(json.dumps(header, indent=1))


def stored_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the tensors of weights.bin and their shapes, in float32: the output of `convert`, without a source."""
    query, kv, family = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, FAMILIES[spec.family]

    def panels(rows: int, columns: int) -> tuple[int, ...]:
        return panel_count(rows), columns, PANEL_COLUMNS

    layer: dict[str, tuple[int, ...]] = {"attn_norm": (spec.hidden,), "ffn_norm": (spec.hidden,)}
    layer["qkv"] = panels(query + 2 * kv, spec.hidden)
    if family.qkv_bias:
        layer["qkv_bias"] = (query + 2 * kv,)
    if family.qk_norm:
        layer["qk_norm"] = (spec.heads + spec.kv_heads, spec.head_dim)
    layer |= {"out": panels(spec.hidden, query), "gate_up": panels(2 * spec.ffn, spec.hidden)}
    layer["down"] = panels(spec.hidden, spec.ffn)
    shapes: dict[str, tuple[int, ...]] = {"inv_freq": (spec.head_dim // 2,)}
    shapes |= {f"{index}.{name}": shape for index in range(spec.layers) for name, shape in layer.items()}
    shapes |= {"final_norm": (spec.hidden,), "head": panels(spec.vocab_size, spec.hidden)}
    return shapes if spec.tied else shapes | {"embed": (spec.vocab_size, spec.hidden)}


def prepared_bytes(spec: ModelSpec) -> int:
    """Return the size of weights.bin: on disk once, and in the page cache once however many processes map it."""
    end = 0
    for shape in stored_shapes(spec).values():
        end += -end % ALIGNMENT_BYTES + ITEM_BYTES * math.prod(shape)
    return end


def preparing_bytes(spec: ModelSpec) -> int:
    """Return the peak allocation of a conversion: the largest tensor as it is read, fused, padded and cut into panels."""
    return 4 * ITEM_BYTES * max(math.prod(shape) for shape in stored_shapes(spec).values())


def fused_matrices(spec: ModelSpec) -> dict[str, list[str]]:
    """Return the matrices that a step multiplies with, each with the source's tensors that it is made of, one below the
    other."""
    layers = {
        f"{layer}.{name}": [f"{layer}.{part}" for part in parts]
        for layer in range(spec.layers)
        for name, parts in _FUSED.items()
    }
    return layers | {"head": ["embed" if spec.tied else "head"]}


def _matrix_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return [out, in] of every one of `fused_matrices`, unpadded."""
    shapes = expected_shapes(spec)
    return {name: (sum(shapes[part][0] for part in parts), shapes[parts[0]][1]) for name, parts in fused_matrices(spec).items()}
