"""Tensors as values: a header that says dtype and shape, then the elements, as they lie in memory. Nothing is unpickled.

NumPy's arrays always, torch's where torch is installed; what was put comes back. Where torch is missing, a tensor of it comes
as an array, unless NumPy has no such dtype.
"""

import importlib
import math
import re
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_zmq.store.memory import address_of
from mooncake_zmq.transfer.hashed_copy import Span

MAGIC = b"mztensor"
ALIGNMENT_BYTES = 64
MAX_DIMENSIONS = 32
_FIXED = struct.Struct("<8s5sBH16s")
"""Magic, library, dimensions, bytes of the header, dtype; the shape follows, as int64."""
_DTYPE = re.compile(r"[<>|]?[b-z][a-z]{0,9}[0-9]{0,3}")
_NUMPY_KINDS = "biufc"
"""Booleans, whole, real and complex numbers: elements that are their bytes."""


class NotATensor(ValueError):
    """The value given, or the one in the store, is no tensor that can be moved."""


class Encoded:
    """A tensor as spans of memory, which stays for as long as this does."""

    def __init__(self, tensor: Any) -> None:
        """Raises NotATensor."""
        library, self._kept, dtype, shape, elements = _parts(tensor)
        if len(shape) > MAX_DIMENSIONS:
            raise NotATensor(f"{len(shape)} dimensions")
        plain_bytes = _FIXED.size + 8 * len(shape)
        size = -(-plain_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        fixed = _FIXED.pack(MAGIC, library, len(shape), size, dtype)
        self._header = (fixed + struct.pack(f"<{len(shape)}q", *shape)).ljust(size, b"\0")
        self.spans: list[Span] = [(address_of(self._header), size), *([elements] if elements[1] else [])]


def decode(value: bytearray) -> Any:
    """The tensor that `value` holds, over that very memory. Raises NotATensor."""
    library, dtype, shape, header_bytes = _read_header(value)
    if library == b"torch":
        return _torch_tensor(value, dtype, shape, header_bytes)
    if library == b"numpy":
        return _array(value, dtype, shape, header_bytes)
    raise NotATensor(f"a tensor of {library!r}")


def _parts(tensor: Any) -> tuple[bytes, Any, bytes, Sequence[int], Span]:
    """(library, what keeps the memory, dtype, shape, elements)."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        host = tensor.detach().cpu().contiguous()
        name = str(host.dtype).removeprefix("torch.").encode()
        if host.is_quantized or len(name) > 16:
            raise NotATensor(f"a tensor of {host.dtype}")
        return b"torch", host, name, tuple(host.shape), (host.data_ptr(), host.numel() * host.element_size())
    if isinstance(tensor, np.ndarray) and tensor.dtype.kind in _NUMPY_KINDS:
        array = tensor if tensor.flags.c_contiguous else np.ascontiguousarray(tensor)
        return b"numpy", array, array.dtype.str.encode(), array.shape, (array.ctypes.data, array.nbytes)
    raise NotATensor(f"{type(tensor).__name__} is no tensor that can be stored")


def _read_header(value: bytearray) -> tuple[bytes, str, tuple[int, ...], int]:
    if len(value) < _FIXED.size:
        raise NotATensor(f"a value of {len(value)} bytes")
    magic, library, dimensions, header_bytes, dtype = _FIXED.unpack_from(value)
    if magic != MAGIC or dimensions > MAX_DIMENSIONS or not _FIXED.size + 8 * dimensions <= header_bytes <= len(value):
        raise NotATensor("the value has no tensor's header")
    shape = struct.unpack_from(f"<{dimensions}q", value, _FIXED.size)
    if any(length < 0 for length in shape):
        raise NotATensor(f"a tensor of shape {shape}")
    return library.rstrip(b"\0"), dtype.rstrip(b"\0").decode("ascii", "replace"), shape, header_bytes


def _array(value: bytearray, name: str, shape: Sequence[int], start: int) -> Any:
    try:
        dtype = np.dtype(name if _DTYPE.fullmatch(name) else "unknown")
    except TypeError as error:
        raise NotATensor(f"a tensor of {name}") from error
    count = _count(value, shape, start, dtype.itemsize)
    if dtype.kind not in _NUMPY_KINDS:
        raise NotATensor(f"a tensor of {name}")
    return np.frombuffer(value, dtype, count, start if count else 0).reshape(shape)


def _torch_tensor(value: bytearray, name: str, shape: Sequence[int], start: int) -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return _array(value, name, shape, start)  # torch has NumPy's names for what both have
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise NotATensor(f"a tensor of {name}")
    count = _count(value, shape, start, dtype.itemsize)
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(value, dtype=dtype, count=count, offset=start).reshape(tuple(shape))


def _count(value: bytearray, shape: Sequence[int], start: int, item_bytes: int) -> int:
    """Elements; the value must hold just these. A shape beyond all memory but for a length of 0 is none."""
    count = math.prod(shape)
    if math.prod(length or 1 for length in shape) * item_bytes >= 1 << 63:
        raise NotATensor(f"a tensor of shape {tuple(shape)}")
    if not item_bytes or count * item_bytes != len(value) - start:
        raise NotATensor(f"{len(value) - start} bytes for a tensor of shape {tuple(shape)}")
    return count
