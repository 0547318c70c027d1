"""`mooncake-zmq compile`: compiles one part of `mypyc_code` with mypyc."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from mooncake_zmq.extras import installing
from mooncake_zmq.native.mypyc_code import (
    EXTENSION,
    HOME,
    PACKAGE,
    PARTS,
    SWITCH,
    TAG,
    Part,
    compiled_files,
    folder,
    is_complete,
)
from mooncake_zmq.refused import Refused

CONFIG = "[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n"
LOCK = "lock"
NEW = f"{TAG}-new-"
SLOTTED = re.compile(r"^@dataclass\((frozen=True)?(?:, )?slots=True\)$", re.MULTILINE)
"""The decorators from which `slots` is removed in the compiled copy: mypyc makes native classes, which have no dictionary
anyway, only of dataclasses without it. Dataclasses made by keywords alone keep it: msgspec makes some of them from files."""
EXACT = "-ffp-contract=off"
"""The option that keeps a multiplication and an addition from being fused, so that results equal Python's to the last
digit."""


def compile_part(part: Part) -> Path:
    """Compile a part, which takes minutes, unless that was done already; then remove what this Python has of other sources. A
    second call waits for the first. Returns the folder. Raises Refused."""
    if lacking := hindrance():
        raise Refused(lacking)
    try:
        with locked():
            target = folder(PACKAGE, part)
            if not is_complete(compiled_files(target), part):
                target = _install(part)
            kept = [folder(PACKAGE, each) for each in PARTS]
            for other in HOME.glob(f"{TAG}-*"):
                if other not in kept:
                    shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        raise Refused(f"cannot write {HOME}: {error}") from None
    return target


def hindrance() -> str:
    """Return what this machine lacks to compile; empty if it lacks nothing."""
    if find_spec("mypyc") is None or find_spec("setuptools") is None:
        return f"mypyc is missing: {installing('mypyc')}"
    if not shutil.which(str(sysconfig.get_config_var("CC")).split()[0]):
        return "there is no C compiler: install gcc"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers are missing: install python3-dev"
    return "" if os.access(HOME if HOME.exists() else HOME.parent, os.W_OK) else f"{HOME} cannot be written"


@contextmanager
def locked(*, wait: bool = True) -> Iterator[None]:
    """Hold the lock under which one process at a time compiles. Raises BlockingIOError if another has it and `wait` is off."""
    HOME.mkdir(exist_ok=True)
    with (HOME / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def is_being_compiled() -> bool:
    """Return whether another process compiles at this moment."""
    try:
        with locked(wait=False):
            return False
    except OSError as error:
        return isinstance(error, BlockingIOError)


def _install(part: Part) -> Path:
    """Build in a folder that is removed again, whatever happens."""
    with tempfile.TemporaryDirectory(dir=HOME, prefix=NEW, ignore_cleanup_errors=True) as scratch:
        return _install_from(Path(scratch), part)


def _install_from(scratch: Path, part: Part) -> Path:
    """Build from a copy of the sources; an existing folder of that name is incomplete and is replaced."""
    package = scratch / PACKAGE.name
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns(HOME.name, "__pycache__", "plots"))
    target = HOME / folder(package, part).name
    for name in part.modules:
        _without_slots(_source(package, name))
    built = _build(scratch, package, part)
    if target.exists():
        target.rename(scratch / "incomplete")
    built.rename(target)
    return target


def _source(package: Path, name: str) -> Path:
    return package / f"{name.replace('.', '/')}.py"


def _without_slots(source: Path) -> None:
    source.write_text(SLOTTED.sub(r"@dataclass(\1)", source.read_text()))


def _build(scratch: Path, package: Path, part: Part) -> Path:
    """Return a folder with every compiled module by its full name."""
    (scratch / "mypy.ini").write_text(CONFIG)
    files = [str(_source(package, name).relative_to(scratch)) for name in part.modules]
    paths = os.pathsep.join(filter(None, (str(scratch), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {SWITCH: "0", "PYTHONPATH": paths, "MYPYC_DEBUG_LEVEL": "0"}
    environment.setdefault("MYPYC_OPT_LEVEL", part.optimize)
    environment["CFLAGS"] = f"{EXACT} {os.environ.get('CFLAGS', '')}"
    run = subprocess.run([sys.executable, "-m", "mypyc", *files], cwd=scratch, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise Refused(f"mypyc failed; it needs a C compiler and Python's headers:\n{(run.stdout + run.stderr)[-2000:]}")
    built = scratch / "built"
    built.mkdir()
    for path in [*scratch.glob(f"*{EXTENSION}"), *package.rglob(f"*{EXTENSION}")]:
        name = ".".join(path.relative_to(scratch).parts)
        path.rename(built / name)
    if not is_complete(compiled_files(built), part):
        raise Refused("mypyc left out modules; run it by hand to see why: python -m mypyc " + " ".join(files))
    return built
