"""The gates: what a module, a class, a function and an import must keep to. Each is a function from sources to breaches."""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dialect import Hit, in_names, in_prose
from floors import floor_by_room
from sources import Definition, Source, Sources, imported_modules, room_of

MAX_CLASS_LINES = 450
MAX_CLASS_METHODS = 35
MAX_MODULE_LINES = 650
MAX_FUNCTION_LINES = 60

EXEMPT_FUNCTIONS = {
    f"engine/machine_code/{name}": "Numba kernels: a loop nest is compiled as one function, and a call in it costs registers"
    for name in ("attention_kernels", "kernels", "memory_access", "prefill_kernels", "products", "row_kernels", "step_arrays")
}
"""Modules whose functions may be as long as they need, with the reason."""

PROCESS = "runtime/process"
IMPORTED_BY_PROCESS = {
    "config/load": "its `main` is given a loaded file",
    "core/roles": "its `main` is given a role",
    "telemetry/log": "it configures the log before anything else",
}
"""What `runtime/process.py` imports beside its own room, which builds all parts, with the reason."""


@dataclass(frozen=True)
class Breach:
    """How large a breach is, as the list of exceptions counts it, and where it stands, for the reader of a failed test."""

    number: int
    where: str


Found = dict[str, Breach]
"""Breaches by name. A name begins with its module: `kv/slots:Slots`, `config -> gateway/http/tls`."""


@dataclass(frozen=True)
class Gate:
    """One rule with the function that finds its breaches."""

    name: str
    rule: str
    find: Callable[[Sources], Found]


def long_classes(sources: Sources) -> Found:
    return _larger(_definitions(sources, ast.ClassDef), _lines, MAX_CLASS_LINES)


def classes_with_many_methods(sources: Sources) -> Found:
    return _larger(_definitions(sources, ast.ClassDef), _methods, MAX_CLASS_METHODS)


def long_modules(sources: Sources) -> Found:
    lines = {module: len(source.text.splitlines()) for module, source in sources.items()}
    return {module: Breach(count, "the whole file") for module, count in lines.items() if count > MAX_MODULE_LINES}


def long_functions(sources: Sources) -> Found:
    watched = {module: source for module, source in sources.items() if module not in EXEMPT_FUNCTIONS}
    return _larger(_definitions(watched, ast.FunctionDef, ast.AsyncFunctionDef), _lines, MAX_FUNCTION_LINES)


def modules_in_circles(sources: Sources) -> Found:
    """Modules that import each other, however far round; the number is that of the modules in the circle."""
    return _circles(imported_modules(sources))


def rooms_in_circles(sources: Sources) -> Found:
    """Rooms that import each other, however far round; the number is that of the rooms in the circle."""
    return _circles(_rooms(sources))


def upward_imports(sources: Sources, floors: Mapping[str, int] | None = None) -> Found:
    """Imports of another room that is not on a lower floor."""
    floors = floor_by_room() if floors is None else floors
    found: Found = {}
    for module, targets in imported_modules(sources).items():
        for target, line in targets.items():
            room, below = room_of(module), room_of(target)
            ends = floors.get(room, 0), floors.get(below, len(floors))
            if room != below and ends[0] <= ends[1]:
                found[f"{module} -> {target}"] = Breach(1, f"line {line}: from floor {ends[0]} to floor {ends[1]}")
    return found


def imports_of_process(sources: Sources) -> Found:
    """Modules of other rooms that `runtime/process.py` imports: each ties one more part to that file."""
    targets = imported_modules(sources).get(PROCESS, {})
    return {
        f"{PROCESS} -> {target}": Breach(1, f"line {line}")
        for target, line in targets.items()
        if room_of(target) != room_of(PROCESS) and target not in IMPORTED_BY_PROCESS
    }


def swallowed_exceptions(sources: Sources) -> Found:
    """Handlers of everything, KeyboardInterrupt and SystemExit among it, in which these may be lost.

    They are kept where the handler raises again, hands the error to the thread that waits for it, or stands below a handler of
    these two that raises.
    """
    found: Found = {}
    for module, source in sources.items():
        handlers = [
            each.lineno
            for attempt in source.nodes(ast.Try, ast.TryStar)
            for place, each in enumerate(attempt.handlers)
            if _catches_everything(each.type)
            and not _raises_again(each)
            and not _hands_over(each)
            and not any(map(_lets_exits_pass, attempt.handlers[:place]))
        ]
        lines = handlers + [each.lineno for each in source.nodes(ast.Call) if _suppresses_everything(each)]
        if lines:
            found[module] = Breach(len(lines), "line " + ", ".join(map(str, lines)))
    return found


def dialect_in_names(sources: Sources) -> Found:
    """Names that a module gives and that hold a word of `dialect.WORDS`."""
    return _dialect(sources, in_names)


def dialect_in_prose(sources: Sources) -> Found:
    """Words of `dialect.WORDS` in docstrings and comments, and docstrings that begin with `dialect.OPENING`."""
    return _dialect(sources, in_prose)


GATES = (
    Gate("class_lines", f"a class has at most {MAX_CLASS_LINES} lines", long_classes),
    Gate("class_methods", f"a class has at most {MAX_CLASS_METHODS} methods", classes_with_many_methods),
    Gate("module_lines", f"a module has at most {MAX_MODULE_LINES} lines", long_modules),
    Gate("function_lines", f"a function has at most {MAX_FUNCTION_LINES} lines", long_functions),
    Gate("module_circles", "modules do not import each other in a circle", modules_in_circles),
    Gate("room_circles", "rooms do not import each other in a circle", rooms_in_circles),
    Gate("upward_imports", "a room imports rooms of lower floors only (floors.py)", upward_imports),
    Gate("process_imports", f"{PROCESS}.py imports its own room, and IMPORTED_BY_PROCESS", imports_of_process),
    Gate(
        "swallowed_exceptions",
        "`except BaseException` raises what it caught, or hands it over",
        swallowed_exceptions,
    ),
    Gate("dialect_names", "a name is the field's term (dialect.py)", dialect_in_names),
    Gate("dialect_prose", "a docstring or comment is plain English (dialect.py)", dialect_in_prose),
)


def _lines(node: Definition) -> int:
    """From `class` or `def` to its end; decorators are not counted."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _methods(node: Definition) -> int:
    return sum(isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) for inner in node.body)


def _definitions(sources: Sources, *kinds: type[Definition]) -> Iterator[tuple[str, Definition]]:
    """Every definition of these kinds with its full name, such as `kv/slots:Slots.free`."""
    for module, source in sources.items():
        for name, node in _defined_in(source.tree, ""):
            if isinstance(node, kinds):
                yield f"{module}:{name}", node


def _defined_in(node: ast.AST, within: str) -> Iterator[tuple[str, Definition]]:
    for child in ast.iter_child_nodes(node):
        inside = within
        if isinstance(child, Definition):
            inside = f"{within}.{child.name}".lstrip(".")
            yield inside, child
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _defined_in(child, inside)


def _larger(definitions: Iterator[tuple[str, Definition]], measure: Callable[[Definition], int], limit: int) -> Found:
    """Those that measure more than the limit; of several of one name (a property and its setter) the largest."""
    found: Found = {}
    for name, node in definitions:
        number = measure(node)
        if number > max(limit, found[name].number if name in found else 0):
            found[name] = Breach(number, f"line {node.lineno}")
    return found


def _rooms(sources: Sources) -> dict[str, dict[str, int]]:
    arrows: dict[str, dict[str, int]] = {}
    for module, targets in imported_modules(sources).items():
        room = arrows.setdefault(room_of(module), {})
        room.update((room_of(target), 1) for target in targets if room_of(target) != room_of(module))
    return arrows


def _circles(arrows: Mapping[str, Mapping[str, int]]) -> Found:
    """What can be come back to by the arrows: each with the size of the largest set that reaches each other."""
    reached = {start: _reached(start, arrows) for start in arrows}
    found: Found = {}
    for start, targets in reached.items():
        circle = sorted(each for each in targets if start in reached.get(each, ()))
        if start in targets:
            found[start] = Breach(len(circle), "with " + ", ".join(each for each in circle if each != start))
    return found


def _reached(start: str, arrows: Mapping[str, Mapping[str, int]]) -> set[str]:
    reached: set[str] = set()
    ahead = [start]
    while ahead:
        for target in arrows.get(ahead.pop(), ()):
            if target not in reached:
                reached.add(target)
                ahead.append(target)
    return reached


def _suppresses_everything(call: ast.Call) -> bool:
    """`suppress(BaseException)`."""
    is_suppress = isinstance(call.func, ast.Name | ast.Attribute) and "suppress" in (
        getattr(call.func, "id", ""),
        getattr(call.func, "attr", ""),
    )
    return is_suppress and any(_catches_everything(each) for each in call.args)


def _catches_everything(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(_catches_everything(each) for each in kind.elts)
    return kind is None or ast.unparse(kind).rpartition(".")[2] == "BaseException"


def _raises_again(handler: ast.ExceptHandler) -> bool:
    """The handler's last statement raises what was caught, and nothing leaves the handler earlier but another raise."""
    last = handler.body[-1]
    raises = isinstance(last, ast.Raise) and (
        last.exc is None or (isinstance(last.exc, ast.Name) and last.exc.id == handler.name)
    )
    return raises and not any(isinstance(node, ast.Return | ast.Break | ast.Continue) for node in ast.walk(handler))


def _hands_over(handler: ast.ExceptHandler) -> bool:
    """The handler passes what it caught to a future's `set_exception`."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "set_exception"
        and [ast.unparse(each) for each in node.args] == [handler.name]
        for statement in handler.body
        for node in ast.walk(statement)
        if isinstance(statement, ast.Expr)
    )


def _lets_exits_pass(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else []
    return {ast.unparse(each) for each in kinds} == {"KeyboardInterrupt", "SystemExit"} and _raises_again(handler)


def _dialect(sources: Sources, hits_in: Callable[[Source], list[Hit]]) -> Found:
    found: Found = {}
    for module, source in sources.items():
        hits = hits_in(source)
        if hits:
            found[module] = Breach(len(hits), "\n    " + "\n    ".join(map(str, hits)))
    return found
