"""compact.bin of a prepared model: its matrices in their shortest exact forms, for engines that read those.

Beside weights.bin, not instead of it: prefill multiplies float32. It holds no matrix that has no shorter form, and is
made when a process first asks for it, under its final names only when whole.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.disk import sync
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.matrices.quantized import Form, Panels, panel_arrays

FORMAT = 1
ALIGNMENT_BYTES = 64
COMPACT_FILE = "compact.bin"
TABLE_FILE = "compact.json"  # written last
GROUPS = (16, 32)
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
LEAST_SHORTER = 2  # compact.bin is at most half of weights.bin


def exists(directory: Path) -> bool:
    """Return whether the file is there and of this format; else it is to be made, whatever lies there."""
    try:
        _read_table(directory)
    except _UNREADABLE:
        return False
    return (directory / COMPACT_FILE).exists()


def write(directory: Path, matrices: Iterable[tuple[str, Panels]]) -> None:
    """Add compact.bin to a prepared model. The caller holds its lock."""
    table: dict[str, Any] = {}
    temporary, described = directory / f".{COMPACT_FILE}.tmp", directory / f".{TABLE_FILE}.tmp"
    try:
        with temporary.open("wb") as file:
            for name, panels in matrices:
                offsets = {}
                for part, array in panels.arrays().items():
                    file.write(bytes(-file.tell() % ALIGNMENT_BYTES))
                    offsets[part] = file.tell()
                    file.write(array.data.cast("B"))
                table[name] = {"form": panels.form.name, "group": panels.group, "offsets": offsets}
        described.write_text(json.dumps({"format": FORMAT, "matrices": table}, indent=1))
        for written in (temporary, described):
            sync(written)
        (directory / TABLE_FILE).unlink(missing_ok=True)  # a table never describes another file
        temporary.rename(directory / COMPACT_FILE)
        described.rename(directory / TABLE_FILE)
        sync(directory)
    except BaseException:
        for written in (temporary, described):
            written.unlink(missing_ok=True)
        raise


def read(directory: Path, shapes: dict[str, tuple[int, int]]) -> dict[str, Panels]:
    """Map compact.bin. `shapes` are the model's matrices, [out, in], by name. Raises ModelError."""
    try:
        matrices = _read_table(directory)
        data: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        if matrices:
            data = np.memmap(directory / COMPACT_FILE, dtype=np.uint8, mode="r")
        return {name: _panels(data, entry, *shapes[name]) for name, entry in matrices.items()}
    except _UNREADABLE as error:
        raise ModelError(f"{directory / TABLE_FILE} is damaged ({error!r}): delete it, it will be made again") from error


def _read_table(directory: Path) -> dict[str, Any]:
    """Return the matrices of the file by name. Raises one of _UNREADABLE."""
    content = json.loads((directory / TABLE_FILE).read_text())
    if content["format"] != FORMAT:
        raise ValueError("it was written by another version")
    return dict(content["matrices"])


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
