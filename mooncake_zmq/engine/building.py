"""The making of a prepared model: the download of the default one, and the conversion of any source. `prepare` calls it under
the model's lock; what it imports is needed nowhere else."""

import fcntl
import shutil
from dataclasses import replace
from pathlib import Path

from mooncake_zmq.engine.convert import compact_matrices, write_weights
from mooncake_zmq.engine.disk import check_space, sync
from mooncake_zmq.engine.download import DEFAULT_NAME, Progress, obtain_default
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.matrices import compact
from mooncake_zmq.engine.prepared_files import HEADER_FILE, prepared_bytes
from mooncake_zmq.engine.sources.dummy import DummySource
from mooncake_zmq.engine.sources.gguf_file import GgufSource
from mooncake_zmq.engine.sources.hugging_face import HuggingFaceSource
from mooncake_zmq.engine.sources.source import Source
from mooncake_zmq.engine.tokenizer import write_parts


def open_source(model: str) -> tuple[Source, str]:
    """Return the source of any model but "default", and a description of it. Raises ModelError: not supported, damaged."""
    if model.startswith("dummy:"):
        return DummySource(model.removeprefix("dummy:")), "random weights"
    path = Path(model).expanduser()
    if path.is_dir():
        return HuggingFaceSource(path), "a Hugging Face directory"
    return GgufSource(path), "a GGUF file"


def build(model: str, target: Path, progress: Progress, *, compacted: bool) -> None:
    """Convert into a temporary neighbour, then rename. We hold the lock, so a leftover neighbour is a dead process's.

    A directory that lacks only its compact form gets it.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    known = (target / HEADER_FILE).exists()
    if target.exists() and not known:  # an interrupted delete
        shutil.rmtree(target)
    _sweep(target.parent, own=temporary)
    scratch = temporary / "scratch"
    scratch.mkdir(parents=True)
    try:
        source = _default_source(scratch, progress, again=known) if model == "default" else open_source(model)[0]
        size_bytes = prepared_bytes(source.spec)
        if not known:
            check_space(target.parent, size_bytes, source.spec.name)
            write_parts(temporary, source.read_tokenizer(), source.spec.vocab_size)
            write_weights(source, temporary, lambda share: progress("converting the weights", 0.3 + 0.7 * share))
        if compacted:
            check_space(target.parent, size_bytes // compact.LEAST_SHORTER, "backend 'compiled'")
            progress("packing the weights", 0.9)
            compact.write(target if known else temporary, compact_matrices(source))
        shutil.rmtree(scratch)
        if known:
            temporary.rmdir()
            return
        for written in (*temporary.iterdir(), temporary):
            sync(written)
        temporary.rename(target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _default_source(scratch: Path, progress: Progress, *, again: bool) -> Source:
    """Download the source; `again`: for the integers that a conversion to float32 did not keep."""
    why = "once more: backend 'compiled' packs the file's own integers" if again else ""
    try:
        source = GgufSource(obtain_default(scratch, progress, why=why))
    except ModelError as error:
        if not again:
            raise
        raise ModelError(
            f"backend 'compiled' needs the default model's file, which is not kept: {error}; "
            "backend 'numpy' runs with what is prepared already"
        ) from error
    source.spec = replace(source.spec, name=DEFAULT_NAME)
    return source


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
