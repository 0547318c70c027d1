"""Reads the package's sources once, for all architecture tests. A module's name is its path: `kv/slots`, `store/__init__`."""

import ast
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar, cast

PACKAGE = Path(__file__).parents[2] / "mooncake_zmq"
NAME = "mooncake_zmq"

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
NodeT = TypeVar("NodeT", bound=ast.AST)


@dataclass(frozen=True)
class Source:
    """One module's text, with its syntax tree."""

    module: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def by_kind(self) -> dict[type[ast.AST], list[ast.AST]]:
        """All nodes of the tree."""
        nodes: dict[type[ast.AST], list[ast.AST]] = {}
        for node in ast.walk(self.tree):
            nodes.setdefault(type(node), []).append(node)
        return nodes

    def nodes(self, *kinds: type[NodeT]) -> Iterator[NodeT]:
        """All nodes of these classes, of one class after the other."""
        for kind in kinds:
            yield from cast(list[NodeT], self.by_kind.get(kind, []))

    @cached_property
    def imports(self) -> tuple[tuple[str, int], ...]:
        """(dotted name, line) of everything imported, wherever it stands."""
        return tuple(self._imports())

    def _imports(self) -> Iterator[tuple[str, int]]:
        for plain in self.nodes(ast.Import):
            for alias in plain.names:
                yield alias.name, plain.lineno
        for chosen in self.nodes(ast.ImportFrom):
            assert chosen.level == 0, f"{self.module}:{chosen.lineno}: a relative import"
            assert chosen.module is not None
            for alias in chosen.names:
                yield f"{chosen.module}.{alias.name}", chosen.lineno
        for call in self.nodes(ast.Call):
            match call:
                case ast.Call(
                    func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                    args=[ast.Constant(value=str(name)), *_],
                ):
                    yield name, call.lineno


Sources = Mapping[str, Source]


def sources_of(texts: Mapping[str, str]) -> dict[str, Source]:
    return {module: Source(module, text) for module, text in texts.items()}


@cache
def package() -> Sources:
    """All modules of the package, in the order of their names."""
    paths = sorted(path for path in PACKAGE.rglob("*.py") if "__mypyc__" not in path.parts)
    sources = sources_of({path.relative_to(PACKAGE).with_suffix("").as_posix(): path.read_text("utf-8") for path in paths})
    with _no_collection():
        for source in sources.values():
            _ = source.by_kind
    return sources


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from walking half-made trees again and again, which takes longer than to parse them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def module_of(dotted: str, sources: Sources) -> str | None:
    """The module of the package that an import of `dotted` reads; None for another package's."""
    top, *parts = dotted.split(".")
    if top != NAME:
        return None
    for end in (len(parts), len(parts) - 1):
        path = "/".join(parts[: max(end, 0)])
        for module in (path, f"{path}/__init__".removeprefix("/")):
            if module in sources:
                return module
    return None


def room_of(module: str) -> str:
    """The folder of the package that holds the module, or the module itself where it lies beside the folders."""
    return module.partition("/")[0]


def imported_modules(sources: Sources) -> dict[str, dict[str, int]]:
    """Each module's imports from the package: imported module -> line of the first import."""
    arrows: dict[str, dict[str, int]] = {}
    for module, source in sources.items():
        arrows[module] = {}
        for dotted, line in source.imports:
            target = module_of(dotted, sources)
            if target is not None and target != module:
                arrows[module].setdefault(target, line)
    return arrows
