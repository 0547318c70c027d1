"""One safetensors file, read by hand because NumPy has no bfloat16: a length, a JSON header, then the tensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.sources.source import StoredTensor

HEADER_BYTES_MAX = 100_000_000  # the format's own limit

_READERS: dict[str, tuple[str, Callable[[NDArray[Any]], NDArray[Any]]]] = {
    "F32": ("<f4", lambda raw: raw),
    "F16": ("<f2", lambda raw: raw.astype(np.float32)),
    "BF16": ("<u2", lambda raw: (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)),  # its upper half, exactly
    "F64": ("<f8", lambda raw: raw.astype(np.float32)),
}
READABLE = tuple(_READERS)


class SafetensorsFile:
    """The tensors of one file, by name. Raises ModelError unless each lies within the file and is as long as its shape says."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                header_size = int.from_bytes(file.read(8), "little")
                if header_size > min(size - 8, HEADER_BYTES_MAX):
                    raise ModelError(f"{path} is truncated or not a safetensors file; obtain it again")
                header = json.loads(file.read(header_size))
            header.pop("__metadata__", None)
            self._begins = {name: entry["data_offsets"][0] + 8 + header_size for name, entry in header.items()}
            self.tensors = {name: _tensor(entry) for name, entry in header.items()}
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise ModelError(f"{path} is not a safetensors file: {error}") from error
        end = max((self._begins[name] + tensor.size_bytes for name, tensor in self.tensors.items()), default=0)
        if end > size:
            raise ModelError(f"{path} is truncated: {size} bytes of {end}; obtain it again")

    def read(self, name: str) -> NDArray[np.float32]:
        """Return one tensor; float32 ones are a view of the mapped file. Its kind must be in READABLE."""
        tensor = self.tensors[name]
        dtype, to_float32 = _READERS[tensor.kind]
        raw = np.memmap(self._path, dtype=np.uint8, mode="r", offset=self._begins[name], shape=(tensor.size_bytes,))
        return to_float32(raw.view(dtype).reshape(tensor.shape))


def _tensor(entry: dict[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape, kind = tuple(entry["shape"]), entry["dtype"]
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)) or end < begin:
        raise ValueError(f"a tensor of shape {shape} at {begin}..{end}")
    elements = 1
    for size in shape:
        elements *= size
    if kind in _READERS and elements * np.dtype(_READERS[kind][0]).itemsize != end - begin:
        raise ValueError(f"{end - begin} bytes do not fit the shape {shape} of {kind}")
    return StoredTensor(shape, str(kind), end - begin)
