"""`up` compiles what nodes run beside the cluster: only once it serves, not twice, not longer than it, and with no harm."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from waiting import eventually

from mooncake_zmq.cli import main
from mooncake_zmq.native import mypyc_build
from mooncake_zmq.native.mypyc_code import Code
from mooncake_zmq.operate import compilation
from mooncake_zmq.operate.compilation import NICENESS, Compilation, plan, shown
from mooncake_zmq.operate.doctor.packages import compiled_modules

WRITES_AND_STAYS = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path("PIDS.new").write_text(f"{os.getpid()} {child.pid} {os.nice(0)}")
os.rename("PIDS.new", "PIDS")
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("found", "lacking", "is_busy", "begins", "words"),
    [
        ("machine", "", False, False, ""),
        ("off", "", False, False, ""),
        ("none", "", False, True, "compiling in the background"),
        ("stale", "", False, True, "changed since"),
        ("none", "there is no C compiler", False, False, "there is no C compiler"),
        ("none", "", True, False, "another process compiles"),
    ],
)
def test_it_is_compiled_where_that_is_of_use_and_possible(
    found: Code, lacking: str, is_busy: bool, begins: bool, words: str
) -> None:
    begun, line = plan(found, lacking, is_busy=is_busy)
    assert begun == begins
    assert words in line
    assert bool(words) == bool(line)


@pytest.mark.parametrize(("found", "level"), [("machine", "ok"), ("off", "ok"), ("stale", "warning"), ("none", "warning")])
def test_doctor_says_what_nodes_run_and_what_to_do(found: Code, level: str) -> None:
    assert compiled_modules(found, "").level == level
    assert compiled_modules(found, "").found == shown(found, "")
    if level == "warning":
        assert compiled_modules(found, "install gcc").advice == "install gcc"


@pytest.fixture
def can_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "code", lambda _part: "none")
    monkeypatch.setattr(compilation, "hindrance", lambda: "")
    monkeypatch.setattr(compilation, "is_being_compiled", lambda: False)


def compiling(tmp_path: Path, script: str) -> tuple[Compilation, list[str]]:
    said: list[str] = []
    return Compilation(tmp_path / "compile.log", said.append, [sys.executable, "-c", script]), said


def test_it_compiles_the_program_whatever_the_directory_holds(tmp_path: Path) -> None:
    (tmp_path / "mooncake_zmq.py").write_text("raise SystemExit('not the program')")
    asked = subprocess.run([*compilation.COMMAND, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "not the program" not in asked.stderr
    assert asked.returncode == 0


@pytest.mark.usefixtures("can_compile")
def test_a_stop_ends_all_of_it_and_it_ran_at_the_lowest_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    beside, said = compiling(tmp_path, WRITES_AND_STAYS)
    beside.begin()
    eventually((tmp_path / "PIDS").exists, what="the command's first words")
    beside.look()
    first, second, niceness = map(int, (tmp_path / "PIDS").read_text().split())
    assert niceness == NICENESS
    beside.stop()
    for pid in (first, second):
        eventually(lambda pid=pid: not is_running(pid), what="the end of the command and of what it started")
    beside.look()
    assert len(said) == 1, "the beginning alone"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("can_compile")
@pytest.mark.parametrize(("status", "words"), [(0, "from now on run machine code"), (1, "compile.log")])
def test_its_end_is_one_line(status: int, words: str, tmp_path: Path) -> None:
    beside, said = compiling(tmp_path, f"print('why', flush=True); raise SystemExit({status})")
    beside.begin()

    def ended() -> bool:
        beside.look()
        return len(said) > 1

    eventually(ended, what="the line about its end")
    beside.look()
    assert words in said[1]
    assert len(said) == 2
    assert (tmp_path / "compile.log").read_text() == "why\n"


def test_two_at_once_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mypyc_build, "HOME", tmp_path)
    assert not mypyc_build.is_being_compiled()
    with mypyc_build.locked():
        assert mypyc_build.is_being_compiled()
    assert not mypyc_build.is_being_compiled()


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mypyc_build.shutil, "which", lambda _name: None)
    assert "C compiler" in mypyc_build.hindrance()
    result = CliRunner().invoke(main, ["compile"])
    assert result.exit_code == 2
    assert "C compiler" in result.stderr


def test_only_the_launcher_asks_for_it() -> None:
    launcher = Path(__file__).parents[2] / "bin/up"
    last = shlex.split(launcher.read_text().splitlines()[-1])
    assert last[-3:] == ["up", "--compile", "$@"]
    assert os.access(launcher, os.X_OK)
