"""Conversion of a source's tensors to the arrays that engines read: fused, reordered, in panels; and weights.bin of them."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.matrices.panels import to_panels
from mooncake_zmq.engine.matrices.quantized import Panels, bfloat16_panels, concatenate, quantized_panels
from mooncake_zmq.engine.prepared_files import ALIGNMENT_BYTES, WEIGHTS_FILE, fused_matrices, write_header
from mooncake_zmq.engine.sources.source import Source, expected_shapes
from mooncake_zmq.engine.spec import FAMILIES

_Item = TypeVar("_Item", bound=np.generic)


def write_weights(source: Source, directory: Path, progress: Callable[[float], None]) -> None:
    """Write weights.bin, then header.json, which makes the directory a model. Call `progress` with the share that is done."""
    spec = source.spec
    hasher = hashlib.sha256(json.dumps(asdict(replace(spec, name="", fingerprint="")), sort_keys=True).encode())
    table: dict[str, Any] = {}
    with (directory / WEIGHTS_FILE).open("wb") as file:
        for layer, name, tensor in _stored_tensors(source):
            file.write(bytes(-file.tell() % ALIGNMENT_BYTES))
            table[name] = {"offset": file.tell(), "shape": list(tensor.shape)}
            content = tensor.data.cast("B")
            file.write(content)
            hasher.update(content)
            progress(layer / spec.layers)
    write_header(directory, replace(spec, fingerprint=hasher.hexdigest()[:32]), table)


def _stored_tensors(source: Source) -> Iterator[tuple[int, str, NDArray[np.float32]]]:
    """Yield (layer, name, tensor) as the engine reads them: matrices that share an input fused, then cut into panels."""
    spec, shapes = source.spec, expected_shapes(source.spec)

    def tensor(name: str) -> NDArray[np.float32]:
        found = source.tensor(name)
        if found.shape != shapes[name]:
            raise ModelError(f"{spec.name}: tensor {name} has shape {found.shape}, expected {shapes[name]}")
        if not np.isfinite((found.min(), found.max())).all():
            raise ModelError(f"{spec.name}: tensor {name} has values that are not finite: the file is damaged")
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


def compact_matrices(source: Source) -> Iterator[tuple[str, Panels]]:
    """Yield the matrices of `_stored_tensors` that have a shorter exact form, under the same names."""
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

    for name, parts in fused_matrices(spec).items():
        found = panels(*parts)
        if found is not None:
            yield name, found


def rotation_pairs(weights: NDArray[_Item], heads: int) -> NDArray[_Item]:
    """Reorder rows (0, 1, .. d-1) of each head to (0, d/2, 1, d/2+1, ..): the two rows that RoPE rotates together lie side by
    side.

    Scores do not change when Q and K are permuted alike; a rotation becomes one complex product. Biases and norms, of one
    axis, go the same way.
    """
    rows, *columns = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, *columns).swapaxes(1, 2).reshape(weights.shape)
