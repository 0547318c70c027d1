"""The identity of a model's weights, from its embeddings and three samples of every other tensor in its files, without reading
all of them.

It also finds out whether a model has biases of keys, for which codecs are worse.

Two models that differ in one whole tensor, or in the embedding of one token, have different identities; so has the same model
in other files. Of weights whose files are not at hand there is none.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from mooncake_zmq.kv.block_hash import KEY_BYTES

SAMPLE_BYTES = 4096
SAMPLES = 1024
"""Number of samples of a file whose tensors are unknown."""
PIECE_BYTES = 1 << 20
EMBEDDINGS = ("emb", "wte")
"""Parts of the names of embeddings in safetensors files, of which a few rows alone may be trained; they are read wholly."""
MAX_HEADER_BYTES = 100 << 20
PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
SETTINGS = ("config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files that say how text and images become what the tensors compute."""
BIASED = (
    *("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias", "qkv_proj_bias", "add_bias_linear"),
    *("use_bias", "enable_bias"),
)
"""Fields of configurations that say so where they are true."""
BIASED_TYPES = ("qwen2", "qwen", "gpt2", "gpt_bigcode", "opt", "bloom", "phi", "gpt_neox")
"""Types of models that have such biases without a field that says so."""
KEY_BIAS = re.compile(r"\b(k_proj|qkv_proj|c_attn|query_key_value|wqkv|Wqkv|key)\.bias$")
OTHERS = re.compile(r"vis|audio|image|(?<!transformer\.)encoder")
"""Parts of the names of tensors that compute no KV of ours; ChatGLM names its decoder's layers transformer.encoder."""
FROM_FILES = frozenset(
    (
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "runai_streamer_sharded"),
        *("pt", "npcache", "mistral", "sharded_state", "bitsandbytes", "gguf"),
    )
)
"""Load formats of vLLM that read the files of the model's directory."""


def identity(model: Any, load_format: str, download_dir: str | None = None) -> str:
    """Return the identity of the weights of vLLM's `ModelConfig`, or "" if nothing at hand shows it. `download_dir`: where vLLM
    downloads to, if not to Hugging Face's own place. Raises OSError."""
    if load_format == "dummy":
        return f"dummy {model.seed}"
    if load_format not in FROM_FILES or model.model_weights:
        return ""
    place = local_copy(model.model, model.revision, download_dir)
    if place is not None and _weight_files(place):
        return fingerprint(place)
    commit = getattr(model.hf_config, "_commit_hash", None) if model.hf_config_path is None else None
    return f"{model.model}@{commit}" if commit else ""


def local_copy(name: str, revision: str | None = None, download_dir: str | None = None) -> Path | None:
    """Return where the files are that vLLM reads for a path, or for a name at Hugging Face; None if they are not here."""
    place = Path(name).expanduser()
    if place.exists():
        return place
    if place.is_absolute():
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=download_dir, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None


def has_key_biases(model: Any, download_dir: str | None = None) -> bool:
    """Return whether the language model of vLLM's `ModelConfig` has biases of keys, by its configuration or by the names in its
    safetensors files. One that cannot be read says nothing."""
    config = model.hf_text_config
    kind = str(getattr(config, "model_type", ""))
    if kind in BIASED_TYPES or kind.startswith("qwen2_") or any(getattr(config, name, None) is True for name in BIASED):
        return True
    place = local_copy(model.model, model.revision, download_dir)
    files = [] if place is None else [path for path in _weight_files(place) if path.suffix == ".safetensors"]
    for path in files:
        with suppress(OSError), path.open("rb") as file:
            if any(KEY_BIAS.search(name) and not OTHERS.search(name) for name in _header(file, path.stat().st_size)[1]):
                return True
    return False


def fingerprint(model: Path) -> str:
    """Return the identity of a directory in Hugging Face's layout, or of one file: 128 bits in hexadecimal. Raises OSError."""
    hasher = hashlib.sha256()
    for settings in (*(model / name for name in SETTINGS), *sorted(model.glob("*.py"))):
        if settings.is_file():
            content = settings.read_bytes()
            hasher.update(f"\0{settings.name}\0{len(content)}\0".encode() + content)
    for path in _weight_files(model):
        hasher.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            for start, length in _samples(file, path.stat().st_size, path.suffix == ".safetensors"):
                file.seek(start)
                while piece := file.read(min(length, PIECE_BYTES)):
                    hasher.update(piece)
                    length -= len(piece)
    return hasher.hexdigest()[: 2 * KEY_BYTES]


def _weight_files(model: Path) -> list[Path]:
    return [model] if model.is_file() else sorted({path for pattern in PATTERNS for path in model.glob(pattern)})


def _samples(file: BinaryIO, size: int, is_safetensors: bool) -> Iterator[tuple[int, int]]:
    """Yield (start, bytes) of what is hashed."""
    tensors = _tensors(file, size) if is_safetensors else None
    if tensors is None:
        yield from ((size * number // SAMPLES, SAMPLE_BYTES) for number in range(SAMPLES))
        yield max(0, size - SAMPLE_BYTES), SAMPLE_BYTES
        return
    data, places = tensors
    yield 0, data
    for start, stop, is_whole in places:
        if is_whole:
            yield data + start, stop - start
            continue
        last = max(start, stop - SAMPLE_BYTES)
        for place in sorted({start, (start + last) // 2, last}):
            yield data + place, min(SAMPLE_BYTES, stop - place)


def _tensors(file: BinaryIO, size: int) -> tuple[int, list[tuple[int, int, bool]]] | None:
    """Return where a safetensors file's data begin, and each tensor in them with whether it is read wholly; None if its header
    is invalid."""
    data, header = _header(file, size)
    try:
        found = [(any(part in name for part in EMBEDDINGS), *map(int, each["data_offsets"])) for name, each in header.items()]
        return (data, sorted((start, stop, bool(is_whole)) for is_whole, start, stop in found)) if data else None
    except (ValueError, KeyError, TypeError):
        return None


def _header(file: BinaryIO, size: int) -> tuple[int, dict[str, Any]]:
    """Return where a safetensors file's data begin, and what its header has of each tensor; 0 and nothing if it is invalid."""
    file.seek(0, os.SEEK_SET)
    length = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(length)) if length <= min(size, MAX_HEADER_BYTES) else None
    except (ValueError, RecursionError):
        return 0, {}
    if not isinstance(header, dict):
        return 0, {}
    return 8 + length, {name: each for name, each in header.items() if name != "__metadata__"}
