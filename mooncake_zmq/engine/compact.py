"""compact.bin of a prepared model: its matrices in their shortest exact forms, for engines that read those.

Beside weights.bin, not instead of it: prefill multiplies float32. It holds no matrix that has no shorter form, and is
made when a process first asks for it, under its final names only when whole.
"""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.quantized import Form, Panels, panel_arrays

FORMAT = 1
ALIGNMENT_BYTES = 64
COMPACT_FILE = "compact.bin"
TABLE_FILE = "compact.json"  # written last
GROUPS = (16, 32)
LEAST_SHORTER = 2  # compact.bin is at most half of weights.bin


def exists(directory: Path) -> bool:
    return (directory / TABLE_FILE).exists()


def write(directory: Path, matrices: Iterable[tuple[str, Panels]]) -> None:
    """Add compact.bin to a prepared model. The caller holds its lock."""
    table: dict[str, Any] = {}
    temporary = directory / f".{COMPACT_FILE}.tmp"
    try:
        with temporary.open("wb") as file:
            for name, panels in matrices:
                offsets = {}
                for part, array in panels.arrays().items():
                    file.write(bytes(-file.tell() % ALIGNMENT_BYTES))
                    offsets[part] = file.tell()
                    file.write(array.data.cast("B"))
                table[name] = {"form": panels.form.name, "group": panels.group, "offsets": offsets}
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(directory / COMPACT_FILE)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    temporary = directory / f".{TABLE_FILE}.tmp"
    temporary.write_text(json.dumps({"format": FORMAT, "matrices": table}, indent=1))
    temporary.rename(directory / TABLE_FILE)


def read(directory: Path, shapes: dict[str, tuple[int, int]]) -> dict[str, Panels]:
    """Map compact.bin. `shapes` are the model's matrices, [out, in], by name. Raises ModelError."""
    try:
        content = json.loads((directory / TABLE_FILE).read_text())
        if content["format"] != FORMAT:
            raise ValueError("it was written by another version")
        data: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        if content["matrices"]:
            data = np.memmap(directory / COMPACT_FILE, dtype=np.uint8, mode="r")
        return {name: _panels(data, entry, *shapes[name]) for name, entry in content["matrices"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{directory / TABLE_FILE} is damaged ({error!r}): delete it, it will be made again") from error


def _panels(data: NDArray[np.uint8], entry: dict[str, Any], rows: int, columns: int) -> Panels:
    form, group, offsets = Form[entry["form"]], entry["group"], entry["offsets"]
    if form is Form.FLOAT32 or (form is not Form.BFLOAT16 and (group not in GROUPS or columns % 32)):
        raise ValueError(f"a matrix of {columns} inputs cannot be {form.name} in groups of {group}")
    arrays = {}
    for part, (dtype, shape) in panel_arrays(form, rows, columns, group).items():
        start, size = offsets[part], int(np.prod(shape)) * np.dtype(dtype).itemsize
        if type(start) is not int or start < 0 or start % ALIGNMENT_BYTES or start + size > len(data):
            raise ValueError(f"{part} end beyond the file")
        arrays[part] = data[start : start + size].view(dtype).reshape(shape)
    return Panels(form, **arrays)


def check_space(cache_dir: Path, needed_bytes: int) -> None:
    """Raise ModelError unless that much is free."""
    free = shutil.disk_usage(cache_dir).free
    if free < needed_bytes:
        raise ModelError(
            f"{cache_dir} has {free >> 20} MiB free and backend 'compiled' needs {needed_bytes >> 20} MiB more there: "
            "free some, or set model.cache_dir elsewhere"
        )
