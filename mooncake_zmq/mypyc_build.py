"""`mooncake-zmq compile`: has mypyc make machine code of `mypyc_code.MODULES`."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from mooncake_zmq.mypyc_code import EXTENSION, HOME, MODULES, PACKAGE, SWITCH, TAG, compiled_files, folder, is_complete

CONFIG = "[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n"
LOCK = "lock"
NEW = f"{TAG}-new-"


class CannotCompile(Exception):
    """Something is missing; the message says what."""


def compile_all() -> Path:
    """Compile, which takes about a minute, unless that was done; then drop what this Python has of other sources. Returns the
    folder. A second one waits for the first. Raises CannotCompile."""
    if find_spec("mypyc") is None or find_spec("setuptools") is None:
        raise CannotCompile("mypyc is missing: pip install 'mooncake-zmq[mypyc]'")
    try:
        HOME.mkdir(exist_ok=True)
        with (HOME / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            target = folder(PACKAGE)
            if not is_complete(compiled_files(target)):
                target = _install()
            for other in HOME.glob(f"{TAG}-*"):
                if other != target:
                    shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        raise CannotCompile(f"cannot write {HOME}: {error}") from None
    return target


def _install() -> Path:
    """Build from a copy of the sources; what is there under its name already is incomplete."""
    scratch = Path(tempfile.mkdtemp(dir=HOME, prefix=NEW))
    package = scratch / PACKAGE.name
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns(HOME.name, "__pycache__", "plots"))
    target, built = folder(package), _build(scratch, package)
    if target.exists():
        target.rename(scratch / "incomplete")
    built.rename(target)
    return target


def _build(scratch: Path, package: Path) -> Path:
    """A folder with every compiled module by its full name."""
    (scratch / "mypy.ini").write_text(CONFIG)
    files = [str((package / f"{name.replace('.', '/')}.py").relative_to(scratch)) for name in MODULES]
    paths = os.pathsep.join(filter(None, (str(scratch), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {SWITCH: "0", "PYTHONPATH": paths, "MYPYC_DEBUG_LEVEL": "0"}
    run = subprocess.run([sys.executable, "-m", "mypyc", *files], cwd=scratch, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise CannotCompile(f"mypyc failed; it needs a C compiler and Python's headers:\n{(run.stdout + run.stderr)[-2000:]}")
    built = scratch / "built"
    built.mkdir()
    for path in [*scratch.glob(f"*{EXTENSION}"), *package.rglob(f"*{EXTENSION}")]:
        name = ".".join(path.relative_to(scratch).parts)
        path.rename(built / name)
    if not is_complete(compiled_files(built)):
        raise CannotCompile("mypyc left out modules; run it by hand to see why: python -m mypyc " + " ".join(files))
    return built
