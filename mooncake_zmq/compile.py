"""`mooncake-zmq compile`: has mypyc make machine code of `compiled.MODULES`."""

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from mooncake_zmq.compiled import EXTENSION, MODULES, PACKAGE, SWITCH, folder

CONFIG = "[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n"
TIMEOUT_S = 900.0


class CannotCompile(Exception):
    """Something is missing; the message says what."""


def compile_all() -> Path:
    """Compile, which takes about a minute, and drop what is stale. Returns the folder. Raises CannotCompile."""
    if find_spec("mypyc") is None or find_spec("setuptools") is None:
        raise CannotCompile("mypyc is missing: pip install 'mooncake-zmq[compiled]'")
    target = folder()
    try:
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="new-") as scratch:
            built = _build(Path(scratch))
            for other in target.parent.iterdir():
                if other != Path(scratch):
                    shutil.rmtree(other)
            built.rename(target)
    except OSError as error:
        raise CannotCompile(f"cannot write {target.parent}: {error}") from None
    return target


def _build(scratch: Path) -> Path:
    """A folder with every compiled module by its full name."""
    shutil.copytree(PACKAGE, scratch / "mooncake_zmq", ignore=shutil.ignore_patterns("__compiled__", "__pycache__", "plots"))
    (scratch / "mypy.ini").write_text(CONFIG)
    files = [f"mooncake_zmq/{name.replace('.', '/')}.py" for name in MODULES]
    environment = os.environ | {SWITCH: "0", "PYTHONPATH": str(scratch), "MYPYC_DEBUG_LEVEL": "0"}
    run = subprocess.run(
        [sys.executable, "-m", "mypyc", *files], cwd=scratch, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if run.returncode:
        raise CannotCompile(f"mypyc failed; it needs a C compiler and Python's headers:\n{(run.stdout + run.stderr)[-2000:]}")
    built = scratch / "built"
    built.mkdir()
    for path in [*scratch.glob(f"*{EXTENSION}"), *(scratch / "mooncake_zmq").rglob(f"*{EXTENSION}")]:
        name = ".".join(path.relative_to(scratch).parts).removesuffix(EXTENSION)
        shutil.move(path, built / f"{name}{EXTENSION}")
    return built
