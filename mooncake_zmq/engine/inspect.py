"""A model, its needs, and whether it runs on this host. This reads headers only; it allocates, converts and writes nothing."""

import math
import shutil
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from mooncake_zmq.engine import tokenizer
from mooncake_zmq.engine.building import open_source
from mooncake_zmq.engine.download import DEFAULT_NAME, DEFAULT_PACKAGE, DEFAULT_SIZE_BYTES
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.prepare import default_cache_dir, locate
from mooncake_zmq.engine.prepared_files import HEADER_FILE, WEIGHTS_FILE, prepared_bytes, preparing_bytes, read_spec
from mooncake_zmq.engine.sources.dummy import DUMMY_SHAPES
from mooncake_zmq.engine.sources.source import Source, expected_shapes
from mooncake_zmq.engine.spec import ModelSpec, check_spec
from mooncake_zmq.engine.toy import TOY_SPEC

WORKING_TOKENS = 1024  # the model does not run if the KV of so short a conversation does not fit beside the weights
_CGROUP = Path("/sys/fs/cgroup")
_DEFAULT_SPEC = replace(DUMMY_SHAPES["135m"], name=DEFAULT_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The resources of this machine."""

    memory_available_bytes: int
    disk_free_bytes: int | None
    """None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """One model on one host. It runs if there are no `problems`; `notes` are other facts that its user should know."""

    model: str
    origin: str
    spec: ModelSpec
    parameters: int
    formats: dict[str, int]
    """Bytes of the tensors in the file, by number format."""
    tokenizer: str
    chat_template: bool
    prepared: Path | None
    prepared_bytes: int
    """Bytes on disk, and once in the page cache for all processes of the host."""
    host: Host
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def runs(self) -> bool:
        return not self.problems

    @property
    def context_that_fits(self) -> int:
        """Tokens of KV, of all sequences together, for which this host has memory beside the weights."""
        available = self.host.memory_available_bytes
        return max(0, available - self.prepared_bytes) // self.spec.kv_bytes_per_token

    def as_json(self) -> dict[str, Any]:
        kv_bytes = self.spec.kv_bytes_per_token
        return {
            "model": self.model,
            "origin": self.origin,
            "runs": self.runs,
            "problems": self.problems,
            "notes": self.notes,
            "spec": {name: value for name, value in asdict(self.spec).items() if name != "fingerprint"},
            "parameters": self.parameters,
            "formats": self.formats,
            "tokenizer": self.tokenizer,
            "chat_template": self.chat_template,
            "prepared": self.prepared and str(self.prepared),
            "prepared_bytes": self.prepared_bytes,
            "kv_bytes_per_token": kv_bytes,
            "kv_bytes_full_context": kv_bytes * self.spec.max_positions,
            "context_that_fits": self.context_that_fits,
            "host": asdict(self.host),
        }


def inspect(model: str, cache_dir: Path | str = "", host: Host | None = None) -> Inspection:
    """Describe `model`, anything that `prepare` takes or a prepared directory. Raises ModelError if it is not supported."""
    cache_dir = Path(cache_dir) if cache_dir else default_cache_dir()
    host = host or measure_host(cache_dir)
    if model == "toy":
        return _inspection(model, "the toy engine of the tests", TOY_SPEC, tokenizer.byte_parts(), None, host)
    path = Path(model).expanduser()
    if _is_prepared(path):
        return _inspect_prepared(model, "a prepared model", path, host)
    target = locate(model, cache_dir)
    prepared = target if _is_prepared(target) else None
    if model != "default":
        source, origin = open_source(model)
        return _inspection(model, origin, source.spec, source.read_tokenizer(), prepared, host, source)
    origin = f"{DEFAULT_PACKAGE} of the Python package index"
    if prepared:
        return _inspect_prepared(model, origin, prepared, host)
    parts = tokenizer.TokenizerParts("GGUF, byte-level BPE (smollm)", None, tokenizer.BYTE_CONVERSATION)
    found = _inspection(model, origin, _DEFAULT_SPEC, parts, None, host)
    megabytes = f"{DEFAULT_SIZE_BYTES / 1e6:.1f} MB"
    return replace(found, notes=(*found.notes, f"not downloaded yet ({megabytes}): described as published"))


def measure_host(cache_dir: Path) -> Host:
    """Return available memory, within this process's control group, and the free space where models are prepared."""
    there = next((path for path in (cache_dir, *cache_dir.absolute().parents) if path.is_dir()), None)
    try:
        free = shutil.disk_usage(there).free if there else None
    except OSError:
        free = None
    available, left = psutil.virtual_memory().available, _group_memory()
    return Host(memory_available_bytes=available if left is None else min(available, left), disk_free_bytes=free)


def _group_memory() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        return None if limit == "max" else max(0, int(limit) - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        return None


def _is_prepared(path: Path) -> bool:
    try:
        return (path / HEADER_FILE).is_file()
    except (OSError, ValueError) as error:
        raise ModelError(f"{str(path)[:200]} cannot be read: {error}") from error


def _inspect_prepared(model: str, origin: str, path: Path, host: Host) -> Inspection:
    spec, conversation = read_spec(path), tokenizer.read_conversation(path)
    parts = tokenizer.TokenizerParts("bytes" if conversation is tokenizer.BYTE_CONVERSATION else "BPE", None, conversation)
    found = _inspection(model, origin, spec, parts, path, host)
    try:
        whole = (path / WEIGHTS_FILE).stat().st_size == found.prepared_bytes
    except OSError:
        whole = False
    damaged = () if whole else (f"{path / WEIGHTS_FILE} is damaged: delete the directory, it will be made again",)
    return replace(found, problems=(*found.problems, *damaged))


def _inspection(
    model: str,
    origin: str,
    spec: ModelSpec,
    parts: tokenizer.TokenizerParts,
    prepared: Path | None,
    host: Host,
    source: Source | None = None,
) -> Inspection:
    check_spec(spec)
    template = parts.conversation.chat_template()
    shapes = expected_shapes(spec)
    formats: Counter[str] = Counter()
    for tensor in source.stored.values() if source else ():
        formats[tensor.kind] += tensor.size_bytes
    is_toy = spec is TOY_SPEC
    found = Inspection(
        model=model,
        origin=origin,
        spec=spec,
        parameters=0 if is_toy else sum(math.prod(shape) for name, shape in shapes.items() if name != "inv_freq"),
        formats=dict(formats.most_common()),
        tokenizer=parts.kind,
        chat_template=template is not None,
        prepared=prepared,
        prepared_bytes=0 if is_toy else prepared_bytes(spec),
        host=host,
        notes=(),
        problems=(),
    )
    return replace(found, notes=tuple(_notes(found)), problems=tuple(_problems(found)))


def _notes(found: Inspection) -> list[str]:
    spec, notes = found.spec, []
    if spec.sliding_window is not None:
        notes.append(f"at most {spec.max_positions} tokens: its context is cut to its sliding window of {spec.sliding_window}")
    if not found.chat_template:
        notes.append("no chat template: /v1/completions only")
    fitting = found.context_that_fits
    if WORKING_TOKENS <= fitting < spec.max_positions:
        notes.append(f"memory for {fitting} tokens of KV at once, less than its whole context")
    return notes


def _problems(found: Inspection) -> list[str]:
    problems, host = [], found.host
    working = found.spec.kv_bytes_per_token * min(WORKING_TOKENS, found.spec.max_positions)
    needs = {f"its weights and {WORKING_TOKENS} tokens of KV": found.prepared_bytes + working}
    if not found.prepared:
        needs["preparing it"] = preparing_bytes(found.spec)
    available, free = host.memory_available_bytes, host.disk_free_bytes
    for what, needed in needs.items():
        if needed > available:
            problems.append(f"{what} need {_mib(needed)} MiB of memory, and {_mib(available)} MiB are available")
    if not found.prepared and free is not None and found.prepared_bytes > free:
        problems.append(f"preparing it needs {_mib(found.prepared_bytes)} MiB of disk, and {_mib(free)} MiB are free")
    return problems


def _mib(size_bytes: int) -> str:
    return f"{-(-size_bytes >> 20):,}"
