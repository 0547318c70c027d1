"""Machine code for what a decision goes through: the same modules, compiled by mypyc where there is a C compiler.

What `mypyc_build` makes lies in `__mypyc__` beside the sources, as `__pycache__` does, in a folder named after this Python and
the sources. Sources that changed are never shadowed: they run as Python until they are compiled anew. Without any of it the
decisions are the same, and a quarter as many in a second. Constants that every decision reads are `Final`: they then stand in
the code, instead of being looked up by name.
"""

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import xxhash

PACKAGE = Path(__file__).parent
MODULES = (
    *(f"core.{name}" for name in ("costs", "gaps", "shell")),
    *(f"conductor.{name}" for name in ("admission", "arrivals", "balance", "batches", "bookings", "choices", "conductor")),
    *(f"conductor.{name}" for name in ("corrections", "decodes", "membership", "placement", "plans", "prefills")),
    *(f"conductor.{name}" for name in ("prefix_index", "ranking", "recent", "routing", "sources", "transfers")),
)
"""Not among them: modules whose classes are msgspec's, which mypyc does not know."""
ROOMS = ("core", "conductor", "kv")
"""What those modules are made of: a change in any of it makes them stale."""
SWITCH = "MOONCAKE_ZMQ_MYPYC"
"""The environment variable that turns it off, as 0: tests replace parts of classes, which machine code does not allow."""
HOME = PACKAGE / "__mypyc__"
EXTENSION = importlib.machinery.EXTENSION_SUFFIXES[0]
TAG = EXTENSION.split(".")[1]
"""This Python and machine."""


class _Finder:
    """On `sys.meta_path`. Its base class in `importlib.abc` would take every start of a command 10 ms, with all it imports."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        file = self._files.get(fullname)
        return importlib.util.spec_from_file_location(fullname, file) if file is not None and file.exists() else None


def use() -> None:
    """Import the compiled modules from here on, if they are there and not stale. Before any of them is imported."""
    if os.environ.get(SWITCH) != "0" and HOME.is_dir():
        files = compiled_files(folder(PACKAGE))
        if is_complete(files):
            sys.meta_path.insert(0, _Finder(files))


def in_use() -> bool:
    """Whether this process decides by machine code."""
    return str(importlib.import_module(f"{__package__}.conductor.routing").__file__).endswith(EXTENSION)


def folder(package: Path) -> Path:
    """Where the compiled modules of a package's sources are, or would be."""
    digest = xxhash.xxh3_128(repr(MODULES).encode())
    for room in ROOMS:
        for path in sorted((package / room).glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return HOME / f"{TAG}-{digest.hexdigest()[:16]}"


def compiled_files(folder: Path) -> dict[str, Path]:
    """The modules in a folder, by full name."""
    return {path.name.removesuffix(EXTENSION): path for path in folder.glob(f"*{EXTENSION}")}


def is_complete(files: dict[str, Path]) -> bool:
    """Whether all modules are there, and the library that has their code."""
    wanted = {f"{__package__}.{name}" for name in MODULES}
    return wanted <= files.keys() and any(name.endswith("__mypyc") for name in files)
