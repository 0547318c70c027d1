"""The prepared directory of a model in the cache: found by the model's name, or made; directories of former versions are
removed.

It is built once under a file lock in a temporary directory and renamed, so under its final name it is always complete. What
builds it (`building.py`) is imported only then: every node looks for its model here as it starts.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import structlog

from mooncake_zmq.engine import card as cards
from mooncake_zmq.engine.cpu import Backend, chosen, found_broken
from mooncake_zmq.engine.download import DEFAULT_NAME, DEFAULT_SHA256, Progress
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.matrices import compact
from mooncake_zmq.engine.prepared_files import FORMAT, HEADER_FILE, WEIGHTS_FILE
from mooncake_zmq.engine.sources.dummy import DummySource
from mooncake_zmq.engine.spec import ModelSpec
from mooncake_zmq.kv.codec import EXACT

log = structlog.get_logger()


def default_cache_dir() -> Path:
    """Return the default directory of prepared models: mooncake_zmq in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mooncake_zmq"


def prepare(
    model: str,
    cache_dir: Path | str,
    progress: Progress = lambda what, share: None,
    *,
    backend: Backend = "numpy",
    kernels: bool = True,
    codec: str = EXACT,
) -> Path:
    """Return the prepared directory of `model`, made if needed. Raises ModelError.

    `model` is "default", a .gguf file, a Hugging Face directory, "dummy:SHAPE" or "toy" (nothing to prepare). `cache_dir`: as
    in the setting `model.cache_dir`; empty: the default one. `backend`: "compiled" adds compact.bin, for which a model prepared
    earlier needs its source again, and, with `kernels`, the machine code, and that of codecs if `codec`
    names one. Where "auto" means "compiled" and the source is not
    available again, compact.bin is left out.
    """
    if model == "toy":
        return Path("toy")
    cache_dir = Path(cache_dir) if cache_dir else default_cache_dir()
    compacted = chosen(backend) == "compiled"
    try:
        target = _prepared(model, cache_dir, progress, compacted=compacted)
    except ModelError as error:
        target = locate(model, cache_dir)
        if not (backend == "auto" and compacted and is_prepared(target)):
            raise
        log.warning("decode reads float32: the model has no shorter form here", path=str(target), reason=error.message)
    if compacted and kernels:
        try:
            _make_kernels(cache_dir, progress, coded=codec != EXACT)
        except ImportError as error:
            if backend != "auto":
                raise ModelError(f"backend 'compiled' needs Numba, which cannot be imported: {error}") from error
            found_broken(f"Numba cannot be imported: {error}")
    return target


def _make_kernels(cache_dir: Path, progress: Progress, *, coded: bool = False) -> None:
    """Make the machine code and keep it beside the models, so that no engine makes it during a request. `coded`: that of codecs
    too."""
    try:
        from mooncake_zmq.engine.machine_code import object_code
    except ImportError:  # the process that loads the engine reports it
        return
    entries = (object_code.STEPS, object_code.CODECS) if coded else (object_code.STEPS,)
    if all(object_code.is_kept(cache_dir, entry) for entry in entries):
        return
    waiting = "waiting for another process that compiles the kernels"
    with contextlib.suppress(OSError), _locked(cache_dir / f".{object_code.DIRECTORY}.lock", progress, waiting):
        # Where no code can be kept, each engine makes its own as it is loaded.
        for entry in entries:
            if not object_code.is_kept(cache_dir, entry):
                progress("compiling the kernels for this CPU: half a minute, once", 0.0)
                object_code.keep(cache_dir, entry)


def _prepared(model: str, cache_dir: Path, progress: Progress, *, compacted: bool) -> Path:
    target = locate(model, cache_dir)
    if is_prepared(target, compacted=compacted):
        return target
    from mooncake_zmq.engine.building import build
    from mooncake_zmq.engine.weights import compiled_engine

    if compacted:
        compiled_engine()  # a missing library is reported now, not after a download
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".{target.name}.lock", progress):
            if not is_prepared(target, compacted=compacted):
                build(model, target, progress, compacted=compacted)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(f"no space left in {cache_dir}: free some, or set model.cache_dir elsewhere") from error
        raise ModelError(f"{error.filename or cache_dir} cannot be used: {error.strerror or error}") from error
    progress("model ready", 1.0)
    return target


def locate(model: str, cache_dir: Path) -> Path:
    """Return where `prepare` puts `model`, whether or not it is there already."""
    try:
        label, key = _identify(model)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model[:200]} cannot be read: {error}") from error
    return cache_dir / f"{label}-{key}"


def located(model: str, cache_dir: Path | str) -> Path:
    """Return `locate` for the arguments of `prepare`; nothing is made."""
    return locate(model, Path(cache_dir) if cache_dir else default_cache_dir())


def known_shape(model: str, cache_dir: Path | str, card: str) -> ModelSpec:
    """Return the shape of a model whose card is named, or which is on this machine, prepared or not. Raises ModelError."""
    if card:
        return cards.read(Path(card).expanduser()).spec
    prepared = Path("toy") if model == "toy" else located(model, cache_dir)
    if model in ("toy", "default") or is_prepared(prepared):
        return cards.of_prepared(prepared).spec
    from mooncake_zmq.engine.building import open_source

    return open_source(model)[0].spec


def remove_former(prepared: Path) -> list[Path]:
    """Remove the directories that earlier versions prepared of models of this name and no process of this version has open;
    return those removed. A process of an older version, which held no lock, keeps its mapping; started again it would prepare
    the model again.

    Beside `prepared`, under the same name but for the key, of an older format: this version would not read it.
    """
    removed = []
    name = glob.escape(prepared.name.rpartition("-")[0])
    for former in sorted(prepared.parent.glob(f"{name}-{12 * '[0-9a-f]'}")):
        if former != prepared and _is_former(former):
            with contextlib.suppress(OSError):  # in use, or not ours to remove: it stays
                _remove(former)
                removed.append(former)
    return removed


def _is_former(directory: Path) -> bool:
    try:
        return int(json.loads((directory / HEADER_FILE).read_text())["format"]) < FORMAT
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _remove(former: Path) -> None:
    """Remove a directory. Raises BlockingIOError while a process prepares it or maps its weights."""
    with former.with_name(f".{former.name}.lock").open("a") as lock, (former / WEIGHTS_FILE).open("rb") as opened:
        for file in (lock, opened):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        leftover = former.rename(former.with_name(f".{former.name}.tmp"))  # a model's name never stands for half a model
        shutil.rmtree(leftover, ignore_errors=True)


def _identify(model: str) -> tuple[str, str]:
    """Return a label and a key that changes whenever the converted result could."""
    if model == "default":
        return DEFAULT_NAME, _digest(DEFAULT_SHA256)
    if model.startswith("dummy:"):
        spec = DummySource(model.removeprefix("dummy:")).spec
        return spec.name, _digest(json.dumps(asdict(spec), sort_keys=True))
    path = Path(model).expanduser()
    if not path.exists():
        raise ModelError(f"{model} does not exist: give a .gguf file, a Hugging Face directory, 'default' or 'dummy:tiny'")
    files = [path] if path.is_file() else sorted(entry for entry in path.iterdir() if entry.is_file())
    states = [(str(file.resolve()), *_state(file.stat())) for file in files]
    label = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in path.resolve().name)
    return label[:80], _digest(json.dumps(states))


def _state(stat: os.stat_result) -> tuple[int, ...]:
    """Return what differs between two contents of a file, though both have one size and time, as packages may give them."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _digest(identity: str) -> str:
    return hashlib.sha256(f"{FORMAT} {identity}".encode()).hexdigest()[:12]


@contextlib.contextmanager
def _locked(
    path: Path, progress: Progress, waiting: str = "waiting for another process that prepares this model"
) -> Iterator[None]:
    """Hold the lock file; the kernel frees it if we die. The file itself stays, so that all lock the same one."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(waiting, 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_prepared(target: Path, *, compacted: bool = False) -> bool:
    """Return whether there is a complete model, with its compact form if requested."""
    return (target / HEADER_FILE).exists() and (not compacted or compact.exists(target))
