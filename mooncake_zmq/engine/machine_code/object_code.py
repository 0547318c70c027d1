"""Our machine code: compiled once for this kind of CPU, kept as one file of object code, called through ctypes.

A warm start reads that file and imports no compiler. Its name is a digest of all that the code depends on; a checksum in it
proves that it is complete. Code is run only from a file that this user alone can write, and no file is needed: any trouble with
it costs the seconds that making the code takes.
"""

import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import os
import platform
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import structlog

from mooncake_zmq.engine.kv_cache import KEY_TILE
from mooncake_zmq.engine.machine_code.step_layout import Coding, What
from mooncake_zmq.engine.matrices.panels import PANEL_COLUMNS

DIRECTORY = "machine-code"  # a folder of the models' cache directory
NAME = "run"
MAGIC = b"mooncake machine code\n"
CHECKSUM = hashlib.sha256
HEADER_BYTES = len(MAGIC) + CHECKSUM().digest_size
MAX_FILE_BYTES = 16 << 20  # ours has 0.2 MB: a larger file is not ours
UNUSED_S = 30 * 24 * 3600.0  # code of another version or CPU that no start has used for so long is removed
LEFTOVER_S = 3600.0  # writing takes milliseconds: an older temporary file is a dead process's

STEPS = "kernels"
"""The module whose `run` is the entry point of what engines do."""
CODECS = "coded_part_kernels"
"""The module whose `run` is the entry point of what they do with codecs beside it."""
_SHARED = ("attention_kernels", "memory_access", "object_code", "part_kernels", "products", "row_kernels", "step_layout")
_SOURCES = {
    STEPS: (
        *(*_SHARED, STEPS, "few_kernels", "prefill_kernels", "step_arrays", "../matrices/quantized"),
        "../selection/sizes",
    ),
    CODECS: (*_SHARED, CODECS, "codec_kernels", "../matrices/quantized", "../../kv/codec"),
}
_VERSIONS = [
    f"{package} {importlib.metadata.version(package)}" for package in ("numba", "numpy", "llvmlite")
]  # else ImportError

log = structlog.get_logger()


class MachineCode:
    """The `run` of a module of kernels, called without the GIL. Any thread may call it for as long as this object exists."""

    def __init__(self, code: bytes) -> None:
        """`code`: from `make`, complete and made for this kind of CPU: LLVM ends the process over anything else."""
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self.address: int = self._engine.get_function_address(NAME)
        self._call = ctypes.CFUNCTYPE(None, *3 * [ctypes.c_int64])(self.address)

    def __call__(self, what: What | Coding, table_address: int, thread: int = 0) -> None:
        self._call(what, thread, table_address)


def load(cache_dir: Path, entry: str = STEPS) -> MachineCode:
    """Load the code kept in `cache_dir`, or make it (some seconds) and keep it there if possible. `entry`: STEPS or CODECS."""
    return MachineCode(kept(_path(cache_dir, entry), functools.partial(make, entry)))


def is_kept(cache_dir: Path, entry: str = STEPS) -> bool:
    """Return whether there is a file of it; only `load` checks that it is complete."""
    return _path(cache_dir, entry).exists()


def keep(cache_dir: Path, entry: str = STEPS) -> None:
    """Make the code and keep it, if possible, without loading it."""
    kept(_path(cache_dir, entry), functools.partial(make, entry))


def _path(cache_dir: Path, entry: str) -> Path:
    return cache_dir / DIRECTORY / f"{digest(entry)}.o"


def digest(entry: str = STEPS) -> str:
    """Return a digest of all that the code depends on: this package's part, the compiler's versions, the kind of CPU."""
    sources = [(Path(__file__).parent / f"{name}.py").read_bytes() for name in _SOURCES[entry]]
    facts = [*_VERSIONS, f"{KEY_TILE} {PANEL_COLUMNS}", llvm.get_process_triple(), llvm.get_host_cpu_name(), _features()]
    parts = [*sources, *(fact.encode() for fact in facts)]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def kept(path: Path, make: Callable[[], bytes]) -> bytes:
    """Return the code in `path`; where it is missing or damaged, return the result of `make` and keep it there if possible."""
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    except ValueError as error:
        log.warning("stored machine code is made again", path=str(path), reason=str(error))
    except OSError as error:
        log.warning("stored machine code is not used: this process makes its own", path=str(path), reason=str(error))
        return make()
    code = make()
    try:
        _write(path, code)
    except OSError as error:
        log.warning("machine code cannot be kept: each start makes it again", path=str(path), reason=str(error))
    return code


def make(entry: str) -> bytes:
    """Compile the `run` of a module for this machine's CPU: some seconds, and the import of Numba."""
    from numba import cfunc, types

    from mooncake_zmq.engine.machine_code.products import OPTIONS

    run = importlib.import_module(f"{__package__}.{entry}").run
    function = cfunc(types.void(types.int64, types.int64, types.int64), **OPTIONS)(run)
    return _object_code(function.inspect_llvm(), function.native_name)


def _object_code(optimized: str, entry: str) -> bytes:
    """Return the object code of the function `entry` of a module, as NAME, and all that it calls; none of it may be Numba's
    own."""
    module = llvm.parse_assembly(optimized)
    module.get_function(entry).name = NAME
    for each in (*module.functions, *module.global_variables):
        if not each.is_declaration and each.name != NAME:
            each.linkage = llvm.Linkage.internal
    machine = _target_machine()
    passes = llvm.create_new_module_pass_manager()
    passes.add_ipsccp_pass()  # finds that no call ever fails: this removes the calls into Python that would report it
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_strip_dead_prototype_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3)))
    process = ctypes.CDLL(None)
    wanted = [each.name for each in module.functions if each.is_declaration and not each.name.startswith("llvm.")]
    unknown = [name for name in wanted if not hasattr(process, name)]
    assert not unknown, f"machine code would call {unknown}"  # LLVM ends the process that loads such code
    return bytes(machine.emit_object(module))


def _target_machine() -> Any:
    """Return LLVM's target for code that runs where it is made, under the assumptions of Numba's own."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    relocation = "static" if platform.machine() in ("x86_64", "AMD64") else "default"
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=_features(), opt=3, reloc=relocation, codemodel="jitdefault"
    )


def _features() -> str:
    return ",".join(sorted(llvm.get_host_cpu_features().flatten().split(",")))


def _read(path: Path) -> bytes:
    """Read the file. Raises ValueError for a damaged file, FileNotFoundError, and OSError for one that may not be read or
    trusted."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError("others can write it")
        content = file.read(MAX_FILE_BYTES + 1)
        with suppress(OSError):  # a read-only file system
            os.utime(file.fileno())
    code = content[HEADER_BYTES:]
    if len(content) > MAX_FILE_BYTES or content[:HEADER_BYTES] != MAGIC + CHECKSUM(code).digest():
        raise ValueError(f"its {len(content)} bytes do not have their checksum")
    return code


def _write(path: Path, code: bytes) -> None:
    """Write the whole file or none. Raises OSError and leaves nothing behind."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            file.write(MAGIC + CHECKSUM(code).digest() + code)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _sweep(path.parent)


def _sweep(directory: Path) -> None:
    """Remove unused files: code that no process has loaded for long, and files that dead processes were writing."""
    for pattern, age_s in (("*.o", UNUSED_S), (".*.tmp", LEFTOVER_S)):
        for path in directory.glob(pattern):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - age_s:
                    path.unlink()
