"""What the launchers install: the project, what an operator asked for, and what can be had."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PYTHON = """#!/bin/sh
case "$*" in *--version*) exit 0 ;; esac
touch "$(dirname "$0")/mooncake-zmq" && chmod +x "$(dirname "$0")/mooncake-zmq"
for last; do :; done
case "$*" in
    *--requirement*) what=locked; cp "$last" "$(dirname "$0")/../lines" ;;
    *) what=project ;;
esac
! grep -q ^llvmlite== "$last" 2>/dev/null || what="locked compiled"
echo "$what $*" >>"$(dirname "$0")/../asked"
[ "$what" != "locked compiled" ] || exit {code}
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


def start(root: Path, **more: str) -> tuple[list[str], str]:
    done = subprocess.run([root / "bin/up", "--no-such"], env=os.environ | more, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return (root / ".venv/asked").read_text().splitlines(), done.stderr


def kinds(asked: list[str]) -> list[str]:
    return [line.partition(" -I ")[0] for line in asked]


def test_what_is_installed_is_what_the_lock_has_the_hashes_of(tmp_path: Path) -> None:
    root = place(tmp_path, 0)
    asked, _ = start(root)
    assert kinds(asked) == ["locked", "project", *(["locked compiled", "project"] * 2)], "compiled, then mypyc with it"
    for line in asked:
        by_hash, project = {"--only-binary=:all:", "--require-hashes"}, {"--no-deps", "--no-build-isolation"}
        assert (by_hash if line.startswith("locked") else project) <= set(line.split())
    lines = (root / ".venv/lines").read_text().splitlines()
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines)
    assert not any(line.startswith("pytest==") for line in lines)
    assert start(root)[0] == asked


def test_a_changed_lock_is_installed(tmp_path: Path) -> None:
    root = place(tmp_path, 0)
    before = start(root)[0]
    with (root / "bin/requirements.lock").open("a") as lock:
        lock.write("# changed\n")
    assert len(start(root)[0]) > len(before)


def test_developers_may_have_what_the_project_allows(tmp_path: Path) -> None:
    asked, _ = start(place(tmp_path, 0), UNLOCKED="1")
    assert kinds(asked) == ["project"] * 3
    assert asked[2].endswith("[compiled,mypyc,server]")


def test_the_lock_has_all_that_the_project_asks_for_and_names_no_place() -> None:
    text = (ROOT / "bin/requirements.lock").read_text()
    assert "://" not in text
    pins = {line.partition("==")[0]: line for line in text.splitlines() if not line.startswith("#")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {"base": project["dependencies"]}
    wanted |= {
        extra: project["optional-dependencies"][extra] for extra in ("compiled", "dev", "lab", "mypyc", "otel", "server")
    }
    for extra, requirements in wanted.items():
        for requirement in map(Requirement, requirements):
            line = pins[canonicalize_name(requirement.name)]
            assert extra in line.partition(" # ")[2].split()
            assert requirement.specifier.contains(line.partition("==")[2].partition(" ")[0])


def test_up_goes_on_without_the_compiler_and_asks_no_more(tmp_path: Path) -> None:
    root = place(tmp_path, 1)
    asked, told = start(root)
    assert kinds(asked) == ["locked", "project", "locked compiled", "locked", "project"], "and with mypyc without it"
    assert "goes on without the extra compiled" in told
    assert start(root) == (asked, "")
    (root / ".venv/.without-compiled").unlink()
    assert kinds(start(root)[0])[len(asked) :] == ["locked compiled"]


def test_an_environment_whose_python_is_gone_is_made_again_with_its_extras(tmp_path: Path) -> None:
    root = place(tmp_path, 0)
    before = kinds(start(root)[0])
    python, other = root / ".venv/bin/python", root / "python3"
    python.rename(root / "former")
    python.symlink_to(root / "gone")
    other.write_text(
        '#!/bin/sh\nfor last; do :; done\ncase "$*" in "-m venv "*) ln -s "$last/../former" "$last/bin/python" ;; esac\n'
    )
    other.chmod(0o755)
    asked, told = start(root, PYTHON=str(other))
    assert "making" in told
    assert kinds(asked) == [*before, "locked compiled", "project"]


def test_a_python_that_the_lock_has_files_for_is_preferred_and_one_that_is_named_is_taken(tmp_path: Path) -> None:
    for name, minor in (("python3", 14), ("python3.12", 12)):
        as_if = f"import sys; sys.version_info, sys.argv = (3, {minor}, 0), sys.argv[1:]; exec(sys.stdin.read())"
        (tmp_path / name).write_text(f"#!{sys.executable}\n{as_if}\n")
        (tmp_path / name).chmod(0o755)

    def found(**more: str) -> str:
        script = f". {ROOT}/bin/_python; _find_python"
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **more}
        return subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True).stdout.strip()

    newest = str(tmp_path / "python3")
    assert found() != newest
    assert found(PYTHON=newest) == newest


def test_a_user_who_may_not_write_takes_what_is_installed(tmp_path: Path) -> None:
    """As in another user's clone, or on a disk that is mounted read-only."""
    with tempfile.TemporaryDirectory() as directory:  # which any user may enter, unlike `tmp_path`
        Path(directory).chmod(0o755)
        root = place(Path(directory) / "clone", 0)
        asked, _ = start(root)
        (root / ".venv/bin/mooncake-zmq").write_text("#!/bin/sh\necho served\n")
        (root / ".venv").chmod(0o555)
        user = {} if os.geteuid() else {"user": 65534, "group": 65534, "extra_groups": []}
        done = subprocess.run([root / "bin/up"], capture_output=True, text=True, check=False, **user)
        assert done.stdout == "served\n", done.stderr
        assert (root / ".venv/asked").read_text().splitlines() == asked
        with (root / "pyproject.toml").open("a") as project:
            project.write("# changed\n")
        assert subprocess.run([root / "bin/up"], capture_output=True, check=False, **user).returncode, "it lacks something"
        (root / ".venv").chmod(0o755)


@pytest.mark.parametrize("launcher", ["conductor", "cache-node", "gateway"])
def test_what_does_not_compute_asks_for_no_compiler(launcher: str) -> None:
    assert "WISH" not in (ROOT / "bin" / launcher).read_text()
