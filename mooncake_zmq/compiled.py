"""Machine code for what a decision goes through: the same modules, compiled by mypyc where there is a C compiler.

What is compiled lies in `__compiled__` beside the sources, as `__pycache__` does, in a folder named after the sources and this
Python. Sources that changed are never shadowed: they run as Python until they are compiled anew. Without any
of it everything is the same, at half the speed.
"""

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parent
MODULES = (
    *(f"core.{name}" for name in ("costs", "gaps", "shell")),
    *(f"conductor.{name}" for name in ("admission", "arrivals", "batches", "conductor", "corrections", "decodes", "placement")),
    *(f"conductor.{name}" for name in ("plans", "prefills", "prefix_index", "ranking", "recent", "routing", "sources")),
    "conductor.transfers",
)
"""Not among them: modules whose classes are msgspec's, which mypyc does not know."""
ROOMS = ("core", "conductor", "kv")
"""What those modules are made of: a change in any of it makes them stale."""
SWITCH = "MOONCAKE_ZMQ_COMPILED"
"""The environment variable that turns it off, as 0: tests replace parts of classes, which machine code does not allow."""
EXTENSION = importlib.machinery.EXTENSION_SUFFIXES[0]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, folder: Path) -> None:
        self._files = {path.name.removesuffix(EXTENSION): path for path in folder.glob(f"*{EXTENSION}")}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        file = self._files.get(fullname)
        return None if file is None else importlib.util.spec_from_file_location(fullname, file)


def use() -> None:
    """Import the compiled modules from here on, if they are there and not stale. Before any of them is imported."""
    if os.environ.get(SWITCH) != "0" and (PACKAGE / "__compiled__").is_dir() and folder().is_dir():
        sys.meta_path.insert(0, _Finder(folder()))


def in_use() -> bool:
    """Whether this process runs machine code."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


@cache
def folder() -> Path:
    """Where the compiled modules of these sources are, or would be."""
    digest = hashlib.sha256(f"{EXTENSION} {MODULES}".encode())
    for room in ROOMS:
        for path in sorted((PACKAGE / room).glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return PACKAGE / "__compiled__" / digest.hexdigest()[:16]
