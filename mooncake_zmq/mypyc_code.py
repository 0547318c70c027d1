"""Machine code for what a decision goes through, or a replayed trace: the same modules, compiled by mypyc where there is a C
compiler.

What `mypyc_build` makes lies in `__mypyc__` beside the sources, as `__pycache__` does, in a folder named after this Python,
the sources and what compiled them: one for conductors, and one for the laboratory's own processes, where whatever a trace goes
through is machine code. No other process runs that: simulations replace parts of actors, which machine code does not allow.
Sources that changed are never shadowed: they run as Python until they are compiled anew. Without any of it the decisions are
the same, and a quarter as many in a second. Constants that every decision reads are `Final`: they then stand in the code,
instead of being looked up by name.
"""

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import xxhash

PACKAGE = Path(__file__).parent


class Part(NamedTuple):
    """What is compiled together. `rooms`: what its modules are made of: a change in any of it makes them stale."""

    name: str
    modules: tuple[str, ...]
    rooms: tuple[str, ...]
    optimize: str
    """The compiler's level, unless MYPYC_OPT_LEVEL says another, for trials: the higher, the longer it takes."""


_DECISIONS = (
    *(f"core.{name}" for name in ("costs", "gaps", "shell")),
    *(f"conductor.{name}" for name in ("admission", "arrivals", "balance", "batches", "bookings", "choices", "conductor")),
    *(f"conductor.{name}" for name in ("corrections", "decodes", "membership", "placement", "plans", "prefills")),
    *(f"conductor.{name}" for name in ("prefix_index", "ranking", "recent", "routing", "sources", "transfers")),
)
"""Not among them: modules whose classes are msgspec's, which mypyc does not know."""
_REPLAYS = (
    *(f"core.{name}" for name in ("leaving", "moves", "order", "pace", "reactions", "reports")),
    *(f"kv.{name}" for name in ("block_hash", "checksum", "key_table", "shares", "slots")),
    *(f"prefill.{name}" for name in ("chunking", "prefill", "queue", "workload")),
    *(f"decode.{name}" for name in ("batch", "decode", "request")),
    *(f"cache_node.{name}" for name in ("announcer", "cache_node", "chains", "client", "contents", "gathering")),
    *(f"laboratory.{name}" for name in ("gaps", "keys", "machine", "recorder", "resources")),
    *(f"simulation.{name}" for name in ("links", "world")),
)
DECISIONS = Part("decisions", _DECISIONS, ("core", "conductor", "kv"), "3")
LABORATORY = Part(
    "laboratory",
    (*_DECISIONS, *_REPLAYS),
    (*DECISIONS.rooms, "prefill", "decode", "cache_node", "laboratory", "simulation"),
    "1",
)
PARTS = (DECISIONS, LABORATORY)
SWITCH = "MOONCAKE_ZMQ_MYPYC"
"""The environment variable that turns it off, as 0: tests replace parts of classes, which machine code does not allow. As the
name of the laboratory's part, that one is used in the laboratory's own workers, where it is there."""
WORKER = ["-m", f"{__package__}.laboratory"]
"""How these are started."""
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
    switch = os.environ.get(SWITCH)
    if switch == "0" or not HOME.is_dir():
        return
    for part in parts_for(switch, sys.orig_argv[1:]):
        files = compiled_files(folder(PACKAGE, part))
        if is_complete(files, part):
            sys.meta_path.insert(0, _Finder(files))
            return


def parts_for(switch: str | None, arguments: list[str]) -> tuple[Part, ...]:
    """The parts of which a process of these arguments is to use the first that is there."""
    return (LABORATORY, DECISIONS) if switch == LABORATORY.name and arguments == WORKER else (DECISIONS,)


def in_use() -> bool:
    """Whether this process decides by machine code."""
    return str(importlib.import_module(f"{__package__}.conductor.routing").__file__).endswith(EXTENSION)


def folder(package: Path, part: Part) -> Path:
    """Where the compiled modules of a package's sources are, or would be: other sources, another way to compile them or another
    mypyc make another one."""
    digest = xxhash.xxh3_128(repr(part).encode())
    digest.update((package / "mypyc_build.py").read_bytes() + compiler_version())
    for room in part.rooms:
        for path in sorted((package / room).glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return HOME / f"{TAG}-{digest.hexdigest()[:16]}"


def compiler_version() -> bytes:
    """What mypyc says of its version; nothing where it is missing: what it made elsewhere is not used then."""
    spec = importlib.util.find_spec("mypy")  # importlib.metadata would take each start of a command 10 ms
    said = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    return said.read_bytes() if said is not None and said.exists() else b""


def compiled_files(folder: Path) -> dict[str, Path]:
    """The modules in a folder, by full name."""
    return {path.name.removesuffix(EXTENSION): path for path in folder.glob(f"*{EXTENSION}")}


def is_complete(files: dict[str, Path], part: Part) -> bool:
    """Whether all modules are there, and the library that has their code."""
    wanted = {f"{__package__}.{name}" for name in part.modules}
    return wanted <= files.keys() and any(name.endswith("__mypyc") for name in files)
