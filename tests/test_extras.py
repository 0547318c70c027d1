"""Dependencies: a connector in somebody's vLLM needs the base alone, and a command that lacks an extra names it."""

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mooncake_zmq.extras import command, installing

ROOT = Path(__file__).parent.parent
WITHOUT_EXTRAS = """
import sys
sys.modules.update(dict.fromkeys({blocked!r}))  # as if they were not installed: no import and no search finds them
"""


def base() -> set[str]:
    """Distributions that the project's own dependencies lead to, without any extra."""
    found: set[str] = set()
    left = ["mooncake-zmq"]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        for requirement in map(Requirement, importlib.metadata.requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(canonicalize_name(requirement.name))
    return found


def run_without_extras(code: str) -> "subprocess.CompletedProcess[str]":
    """Run `code` where no module of any other distribution can be imported."""
    kept = base()
    brings = importlib.metadata.packages_distributions()
    blocked = {module for module, names in brings.items() if not any(canonicalize_name(name) in kept for name in names)}
    text = WITHOUT_EXTRAS.format(blocked=blocked) + code
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)


def test_the_base_is_small() -> None:
    declared = [Requirement(text) for text in importlib.metadata.requires("mooncake-zmq") or ()]
    assert {each.name for each in declared if each.marker is None} == {
        *("click", "cryptography", "msgspec", "numpy", "pyzmq", "structlog", "xxhash")
    }


def test_what_a_connector_imports_needs_the_base_alone() -> None:
    tree = ast.parse((ROOT / "mooncake_zmq/vllm/connector.py").read_text())
    modules = [each.module for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) and each.module]
    with_torch = {"mooncake_zmq.vllm.staged_memory", "mooncake_zmq.vllm.codes"}  # vLLM brings it
    ours = [module for module in modules if module.startswith("mooncake_zmq.") and module not in with_torch]
    assert ours
    done = run_without_extras("".join(f"import {module}\n" for module in [*ours, "mooncake_zmq.store.client.api"]))
    assert done.returncode == 0, done.stderr


def test_a_store_serves_with_the_base_alone(tmp_path: Path) -> None:
    command = ["store", "--bytes", "64MiB", "--listen", f"ipc://{tmp_path}/store.sock", "--set", "cluster.log_format=json"]
    command += [part for name in ("runtime_dir", "shm_dir") for part in ("--set", f"cluster.{name}={tmp_path}")]
    ends_once_ready = """
import os, signal
from mooncake_zmq.runtime.node_process import NodeProcess
ready = NodeProcess.report_ready
NodeProcess.report_ready = lambda self: (ready(self), os.kill(os.getpid(), signal.SIGTERM))
"""
    done = run_without_extras(f"{ends_once_ready}\nfrom mooncake_zmq.cli import main\nmain({command!r})")
    assert done.returncode == 0, done.stderr
    assert '"event": "ready"' in done.stderr + done.stdout


@pytest.mark.parametrize(
    "command",
    [
        "prefill --node prefill-a --model dummy:tiny --set model.cache_dir={new}",
        "gateway --node gateway-0",
        "up",
        "sim",
        "simtest",
        "bench serve",
        "doctor",
        "status",
    ],
)
def test_a_command_that_lacks_an_extra_names_it(command: str, tmp_path: Path) -> None:
    arguments = command.format(new=tmp_path / "models").split()
    done = run_without_extras(f"from mooncake_zmq.cli import main\nmain({arguments!r})")
    assert done.returncode == 2
    assert done.stderr.startswith("mooncake-zmq: ")
    assert "is not installed: " in done.stderr
    assert done.stderr.endswith(f"{installing('server')}\n"), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        ({}, "py -m pip install 'mooncake-zmq[lab]'"),
        ({"url": "file://HERE/a%20b", "dir_info": {"editable": True}}, "py -m pip install -e 'HERE/a b[lab]'"),
        ({"url": "file://HERE/a%20b", "dir_info": {}}, "py -m pip install 'HERE/a b[lab]'"),
        ({"url": "file://HERE/gone", "dir_info": {}}, "bin/install --extra lab"),
        ({"url": "https://x.example/m.whl"}, "py -m pip install 'mooncake-zmq[lab] @ https://x.example/m.whl'"),
    ],
)
def test_an_extra_is_installed_from_where_the_program_came_from(origin: dict, said: str, tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    placed = {key: value.replace("HERE", str(tmp_path)) if key == "url" else value for key, value in origin.items()}
    assert command("lab", placed, "py") == said.replace("HERE", str(tmp_path))


def test_a_module_that_no_extra_brings_is_a_fault_of_ours() -> None:
    code = "import mooncake_zmq.cli as cli\nimport importlib\n"
    code += "cli.main.commands['sbom'].callback = lambda **_: importlib.import_module('no_such_module')\ncli.main(['sbom'])"
    done = run_without_extras(code)
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'no_such_module'\n")
