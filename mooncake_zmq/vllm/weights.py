"""The identity of a model's weights, from three samples of every tensor in its files, without reading all of them.

Two models that differ in one whole tensor anywhere have different identities; so has the same model in other files.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mooncake_zmq.kv.block_hash import KEY_BYTES

SAMPLE_BYTES = 4096
SAMPLES = 1024
"""Number of samples of a file whose tensors are unknown."""
MAX_HEADER_BYTES = 100 << 20
PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def fingerprint(model: Path) -> str:
    """Return the identity of a directory in Hugging Face's layout, or of one file: 128 bits in hexadecimal. Raises OSError."""
    hasher = hashlib.sha256()
    config = model / "config.json"
    if config.is_file():
        hasher.update(config.read_bytes())
    files = [model] if model.is_file() else sorted({path for pattern in PATTERNS for path in model.glob(pattern)})
    for path in files:
        hasher.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            for start, length in _samples(file, path.stat().st_size, path.suffix == ".safetensors"):
                file.seek(start)
                hasher.update(file.read(length))
    return hasher.hexdigest()[: 2 * KEY_BYTES]


def _samples(file: BinaryIO, size: int, is_safetensors: bool) -> Iterator[tuple[int, int]]:
    """Yield (start, bytes) of what is hashed."""
    tensors = _tensors(file, size) if is_safetensors else None
    if tensors is None:
        yield from ((size * number // SAMPLES, SAMPLE_BYTES) for number in range(SAMPLES))
        yield max(0, size - SAMPLE_BYTES), SAMPLE_BYTES
        return
    data, places = tensors
    yield 0, data
    for start, stop in places:
        last = max(start, stop - SAMPLE_BYTES)
        for place in sorted({start, (start + last) // 2, last}):
            yield data + place, min(SAMPLE_BYTES, stop - place)


def _tensors(file: BinaryIO, size: int) -> tuple[int, list[tuple[int, int]]] | None:
    """Return where a safetensors file's data begin, and each tensor in them; None if its header is invalid."""
    file.seek(0, os.SEEK_SET)
    length = int.from_bytes(file.read(8), "little")
    if length > min(size, MAX_HEADER_BYTES):
        return None
    try:
        header = json.loads(file.read(length))
        places = [tuple(map(int, each["data_offsets"])) for name, each in header.items() if name != "__metadata__"]
        return 8 + length, sorted((start, stop) for start, stop in places)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
