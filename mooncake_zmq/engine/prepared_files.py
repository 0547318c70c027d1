"""The files of a prepared model: what each holds, and how large it is.

A prepared model is a directory: header.json (spec, tensor table), weights.bin (float32, matrices as `panels`), the
tokenizer's files, and for decode in machine code compact.bin. `prepare` finds or makes it, `weights` maps it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.matrices.panels import PANEL_COLUMNS, panel_count
from mooncake_zmq.engine.spec import FAMILIES, ModelSpec, check_spec

FORMAT = 4  # version of the prepared directory: a change here converts every model again
ALIGNMENT_BYTES = 4096
ITEM_BYTES = 4  # float32
HEADER_FILE = "header.json"
WEIGHTS_FILE = "weights.bin"

_FUSED = {"qkv": ("q", "k", "v"), "out": ("out",), "gate_up": ("gate", "up"), "down": ("down",)}


def read_spec(path: Path) -> ModelSpec:
    """Return the spec of a prepared directory, without mapping its weights."""
    return read_header(path)[0]


def read_header(path: Path) -> tuple[ModelSpec, dict[str, tuple[int, tuple[int, ...]]]]:
    """Return the spec of a prepared directory, and the offset and shape of each tensor of weights.bin. Raises ModelError."""
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
