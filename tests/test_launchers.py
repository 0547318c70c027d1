"""What the launchers install: the project, what an operator asked for, and what can be had."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON = """#!/bin/sh
case "$*" in *--version*) exit 0 ;; esac
echo "$PIP_ONLY_BINARY $*" >>"$(dirname "$0")/../asked"
touch "$(dirname "$0")/mooncake-zmq" && chmod +x "$(dirname "$0")/mooncake-zmq"
case "$*" in *compiled*) exit {code} ;; esac
"""


def place(tmp_path: Path, code: int) -> Path:
    """A checkout whose pip only notes what it is asked for; `code`: how it ends when asked for the extra."""
    shutil.copytree(ROOT / "bin", tmp_path / "bin")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(code=code))
    python.chmod(0o755)
    return tmp_path


def start(root: Path) -> tuple[list[str], str]:
    environment = os.environ | {"PIP_ONLY_BINARY": ""}
    done = subprocess.run([root / "bin/up", "--no-such"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return (root / ".venv/asked").read_text().splitlines(), done.stderr


def test_up_takes_the_compiler_from_wheels_alone_and_once(tmp_path: Path) -> None:
    root = place(tmp_path, 0)
    asked, _ = start(root)
    assert [line.partition(" ")[0] for line in asked] == ["", "llvmlite,numba"]
    assert asked[1].endswith("[compiled]")
    assert start(root)[0] == asked


def test_up_goes_on_without_the_compiler_and_asks_no_more(tmp_path: Path) -> None:
    root = place(tmp_path, 1)
    asked, told = start(root)
    assert len(asked) == 2
    assert "goes on without the extra compiled" in told
    assert start(root) == (asked, "")
    (root / ".venv/.without-compiled").unlink()
    assert len(start(root)[0]) == 3


@pytest.mark.parametrize("launcher", ["conductor", "cache-node", "gateway"])
def test_what_does_not_compute_asks_for_no_compiler(launcher: str) -> None:
    assert "WISH" not in (ROOT / "bin" / launcher).read_text()
