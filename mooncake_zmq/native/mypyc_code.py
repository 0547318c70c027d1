"""Uses compiled modules for what a node runs at each message and token, or for a replayed trace: the same modules, compiled by
mypyc where there is a C compiler.

`mypyc_build` writes them to `__mypyc__` beside the sources, as Python does with `__pycache__`, in a folder named after this
Python and the sources: one part for nodes, and one for the laboratory's own processes, in which all that a trace
passes through is compiled. A process that uses them says so before it imports their modules, and no other does: simulations
replace methods of actors, which compiled classes do not allow. A source that changed runs as Python until it is compiled
again. Without compiled modules the decisions are the same, and a quarter as many per second. Constants that every decision
reads are `Final`: they are then part of the code, instead of being looked up by name.
"""

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

import xxhash

PACKAGE = Path(__file__).parents[1]


class Part(NamedTuple):
    """Modules that are compiled together. `rooms` are the folders whose sources they depend on: a change there makes them
    stale."""

    name: str
    modules: tuple[str, ...]
    rooms: tuple[str, ...]
    optimize: str
    """The compiler's optimization level, unless MYPYC_OPT_LEVEL sets another for experiments: a higher one takes longer."""


_ACTORS = (
    *(
        f"core.{name}"
        for name in ("chunking", "costs", "gaps", "drain", "handlers", "links", "order", "speed", "transfer_stats")
    ),
    *(f"core.{name}" for name in ("actor_parts", "reports", "timers", "turns")),
    *(f"kv.{name}" for name in ("block_hash", "checksum", "key_table", "shares", "slot_table", "slots")),
    *(
        f"conductor.{name}"
        for name in ("adapters", "admission", "arrivals", "balance", "batches", "booking", "bookings", "chain")
    ),
    *(f"conductor.{name}" for name in ("choices", "coming", "conductor", "copies", "corrections", "decodes", "handovers")),
    *(f"conductor.{name}" for name in ("inventory", "membership")),
    *(f"conductor.{name}" for name in ("placement", "plans", "prefills", "prefix_index", "ranking", "recent", "routing")),
    *(f"conductor.{name}" for name in ("sources", "transfers", "waits")),
    *(f"prefill.{name}" for name in ("admission", "computing", "ends", "handoff", "jobs", "leading", "offers", "prefill")),
    *(f"prefill.{name}" for name in ("queue", "reuse", "slab", "slab_announcer", "waiting", "workload")),
    *(f"decode.{name}" for name in ("admission", "batch", "budget", "decode", "ends", "flight", "forks", "handoff", "offers")),
    *(f"decode.{name}" for name in ("kept", "request", "requests", "steps")),
    *(f"pool.node.{name}" for name in ("announcer", "block_leases", "block_puts", "cache_node", "chains")),
    *(f"pool.node.{name}" for name in ("client", "conductors", "contents", "gathering", "parts", "peers")),
    *(f"pool.rules.{name}" for name in ("holders", "table")),
)
"""Modules with msgspec classes are left out, as mypyc cannot compile those."""
_AROUND_THEM = (
    *(f"core.{name}" for name in ("node", "session", "watch")),
    *(f"gateway.http.{name}" for name in ("calls", "edge", "ended_requests", "loop_turns", "metrics", "sse")),
    *(f"gateway.openai.{name}" for name in ("detokenizer", "responses", "token_stream")),
    *(f"gateway.requests.{name}" for name in ("answer", "families", "request", "request_log", "requests", "token_gaps")),
    "gateway.requests.traces",
    "runtime.peer_sockets",
    "runtime.zmq_runtime",
)
_REPLAYS = (
    *(f"laboratory.{name}" for name in ("gaps", "keys", "machine", "recorder", "resources")),
    *(f"simulation.{name}" for name in ("links", "world")),
)
_ROOMS = ("core", "kv", "conductor", "prefill", "decode", "pool/node", "pool/rules")
NODES = Part("nodes", (*_ACTORS, *_AROUND_THEM), (*_ROOMS, "gateway", "runtime"), "3")
LABORATORY = Part("laboratory", (*_ACTORS, *_REPLAYS), (*_ROOMS, "laboratory", "simulation"), "1")
PARTS = (NODES, LABORATORY)
SWITCH = "MOONCAKE_ZMQ_MYPYC"
"""The environment variable that turns it off if it is 0: tests replace methods of classes, which compiled classes do not
allow."""
Code = Literal["machine", "off", "stale", "none"]
"""The code that a part's modules run as: machine code; or Python, because machine code is turned off, of other sources, or
missing."""
NOT_COMPILED = "the nodes are not compiled, or their sources have changed since: run mooncake-zmq compile"
HOME = PACKAGE / "__mypyc__"
EXTENSION = importlib.machinery.EXTENSION_SUFFIXES[0]
TAG = EXTENSION.split(".")[1]
"""The tag of this Python and machine."""


class _Finder:
    """Finds compiled modules on `sys.meta_path`. Its base class in `importlib.abc` would cost every start of a command 10 ms,
    with all that it imports."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        file = self._files.get(fullname)
        return importlib.util.spec_from_file_location(fullname, file) if file is not None and file.exists() else None


def use(part: Part) -> None:
    """Import a part's compiled modules from here on, if they exist and are not stale. If any of its modules is imported
    already, none is used, as compiled modules depend on each other's internals."""
    files = usable(part)
    if files and not files.keys() & sys.modules.keys():
        sys.meta_path.insert(0, _Finder(files))


def usable(part: Part) -> dict[str, Path]:
    """Return the compiled modules of a part by full name; empty if it is not compiled, is stale or is turned off."""
    if os.environ.get(SWITCH) == "0" or not HOME.is_dir():
        return {}
    files = compiled_files(folder(PACKAGE, part))
    return files if is_complete(files, part) else {}


def code(part: Part) -> Code:
    """Return what a process that starts now runs of a part."""
    if os.environ.get(SWITCH) == "0":
        return "off"
    if usable(part):
        return "machine"
    return "stale" if any(is_complete(compiled_files(other), part) for other in HOME.glob(f"{TAG}-*")) else "none"


def in_use() -> bool:
    """Return whether this process uses compiled modules."""
    return str(importlib.import_module(f"{PACKAGE.name}.conductor.routing").__file__).endswith(EXTENSION)


def folder(package: Path, part: Part) -> Path:
    """Return the folder of the compiled modules of a package's sources; other sources or another way to compile them have
    another folder. The compiler's version is no part of its name: a machine that has the modules need not have mypyc."""
    digest = xxhash.xxh3_128(repr(part).encode())
    digest.update((package / "native/mypyc_build.py").read_bytes())
    for room in part.rooms:
        for path in sorted((package / room).rglob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return HOME / f"{TAG}-{digest.hexdigest()[:16]}"


def compiled_files(folder: Path) -> dict[str, Path]:
    """Return the modules in a folder, by full name."""
    return {path.name.removesuffix(EXTENSION): path for path in folder.glob(f"*{EXTENSION}")}


def is_complete(files: dict[str, Path], part: Part) -> bool:
    """Return whether all modules of a part exist, and the library with their code."""
    wanted = {f"{PACKAGE.name}.{name}" for name in part.modules}
    return wanted <= files.keys() and any(name.endswith("__mypyc") for name in files)
