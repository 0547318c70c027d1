"""What bin/install puts where, and whether systemd would take the units: parsed, ordered, and closed up."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
UNITS = "usr/local/lib/systemd/system"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60, cwd="/")


def install(root: Path, *more: str) -> str:
    done = run(ROOT / "bin/install", "--root", root, "--python", sys.executable, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(root: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    install(tmp_path / "root", "--gpu")
    return tmp_path / "root"


def test_a_second_install_writes_nothing_and_keeps_what_the_operator_made(installed: Path) -> None:
    (installed / "etc/mooncake-zmq/cluster.toml").write_text("mine")
    before = contents(installed)
    assert "wrote" not in install(installed)
    assert contents(installed) == before
    unit = installed / UNITS / "mooncake-prefill@.service"
    unit.write_text("of an older version")
    assert install(installed).count("wrote") == 1
    assert unit.read_text() == (ROOT / "systemd/mooncake-prefill@.service").read_text()


def test_the_launcher_runs_the_program_whatever_the_directory_holds(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "mooncake_zmq.py").write_text("raise SystemExit('not the program')")
    launcher = [
        installed / "opt/mooncake-zmq/bin/mooncake-zmq",
        "config",
        "units",
        ROOT / "configs/toy.toml",
        "--host",
        "host-a",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        launcher, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60, check=True
    ).stdout
    assert said.splitlines() == [
        "mooncake-cache-node@cache-a.service",
        "mooncake-prefill@prefill-a.service",
        "mooncake-decode@decode-a.service",
    ]


def test_a_python_may_be_named_from_here_and_by_a_name_with_spaces(tmp_path: Path) -> None:
    python = tmp_path / "an environment/python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho ran\n")
    python.chmod(0o755)
    command = [ROOT / "bin/install", "--root", tmp_path / "root", "--python", "an environment/python"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    assert run(tmp_path / "root/opt/mooncake-zmq/bin/mooncake-zmq").stdout == "ran\n"


def test_an_environment_in_a_home_is_refused_though_its_python_is_not_there(tmp_path: Path) -> None:
    """`mktemp` ends an installation on this machine itself before its first file, should the check be missing."""
    fakes = {"id": "echo 0", "systemd-sysusers": "exit 9", "mktemp": "exit 9"}
    for name, does in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
    venv = tmp_path / "python"
    environment = "import sys; sys.executable, sys.prefix = '/usr/bin/env', '/home/a/venv'; exec(sys.argv[2])"
    venv.write_text(f"#!{sys.executable}\n{environment}\n")
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    refused = subprocess.run(
        [ROOT / "bin/install", "--python", venv],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (refused.returncode, "is in a home directory" in refused.stderr) == (2, True)


def test_uninstall_leaves_settings_and_data_and_purge_leaves_nothing(installed: Path) -> None:
    kept = [installed / "etc/mooncake-zmq/cluster.toml", installed / "var/lib/mooncake-zmq/kv"]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    enabled = installed / "etc/systemd/system/mooncake-workers.target.wants/mooncake-decode@d.service"
    enabled.parent.mkdir(parents=True)
    enabled.symlink_to("/usr/local/lib/systemd/system/mooncake-decode@.service")
    wanted = installed / "etc/systemd/system/multi-user.target.wants/mooncake.target"
    wanted.parent.mkdir()
    wanted.symlink_to("/usr/local/lib/systemd/system/mooncake.target")
    assert run(ROOT / "bin/uninstall", "--root", installed).returncode == 0
    assert [path for path in installed.rglob("*") if path.is_file() or path.is_symlink()] == sorted(kept)
    assert run(ROOT / "bin/uninstall", "--root", installed, "--purge").returncode == 0
    assert [path for path in installed.rglob("*") if path.is_file() or path.is_symlink()] == []


@pytest.mark.parametrize("program", ["install", "uninstall"])
def test_a_mistake_is_told_and_changes_nothing(program: str, tmp_path: Path) -> None:
    assert run(ROOT / "bin" / program, "--rot", tmp_path).returncode == 2
    assert list(tmp_path.iterdir()) == []


def checked(root: Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed here")
    return run(ROOT / "systemd/check", root)


def test_units_verify_and_are_closed_up(installed: Path) -> None:
    before = contents(installed)
    result = checked(installed)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("mooncake-") == 8  # six roles, and two of them with a GPU
    assert contents(installed) == before


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("mooncake-.service.d/10-common.conf", "ProtectSystem=strict", "ProtectSytem=strict", "ProtectSytem"),
        ("mooncake.target", "After=mooncake-workers.target", "", "ordering cycle"),
        ("mooncake-.service.d/10-common.conf", "PrivateUsers=yes\n", "[X-Forgotten]\n", "exposure level"),
        ("mooncake-gateway@.service", "/opt/mooncake-zmq/bin/", "/opt/elsewhere/", "is not executable"),
    ],
)
def test_the_check_finds_a_planted_fault(installed: Path, file: str, old: str, new: str, said: str) -> None:
    path = installed / UNITS / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    result = checked(installed)
    assert result.returncode == 1
    assert said in result.stderr


def test_what_clients_make_a_node_do_leaves_the_machine_some_memory(installed: Path) -> None:
    for name in ("mooncake-gateway@.service", "mooncake-conductor@.service", "mooncake.slice"):
        text = (installed / UNITS / name).read_text()
        assert "MemoryHigh=" in text, name
        assert "MemoryMax=" in text, name


def test_what_libzmq_aborts_without_is_allowed(installed: Path) -> None:
    common = (installed / UNITS / "mooncake-.service.d/10-common.conf").read_text().splitlines()
    families = next(line for line in common if line.startswith("RestrictAddressFamilies="))
    assert "AF_NETLINK" in families, "zmq_bind lists the network's interfaces"
    filters = [line for line in common if line.startswith("SystemCallFilter=")]
    assert filters[-1] == "SystemCallFilter=sched_setscheduler", "its threads set the policy that they have"


def test_nodes_see_in_proc_which_of_their_peers_wait_for_a_cpu(installed: Path) -> None:
    """With users of their own, processes of the same user count as others', which ProtectProc= hides."""
    for path in [installed / UNITS / "mooncake-.service.d/10-common.conf", *(installed / UNITS).glob("mooncake-*@.service")]:
        lines = path.read_text().splitlines()
        assert {line for line in lines if line.startswith("ProtectProc=")} <= {"ProtectProc=default"}, path.name


BASE = """#!/bin/sh
for last; do :; done
case "$*" in
    --version) echo Python 3.13.0 ;;
    "-m venv "*) mkdir -p "$last/bin" && cp "$0" "$last/bin/python" ;;
    *--requirement*) cp "$last" "$(dirname "$0")/../lines" ;;
esac
"""


def test_an_upgrade_keeps_the_extras_that_were_asked_for(tmp_path: Path) -> None:
    base, root = tmp_path / "python", tmp_path / "root"
    base.write_text(BASE)
    base.chmod(0o755)

    def upgraded(*more: str) -> set[str]:
        command = [ROOT / "bin/install", "--root", root, "--no-compile", *more]
        subprocess.run(command, env={**os.environ, "PYTHON": str(base)}, check=True, capture_output=True, timeout=60)
        launched = (root / "opt/mooncake-zmq/bin/mooncake-zmq").read_text().partition('exec "')[2].partition("/bin/python")[0]
        lines = (root / launched.lstrip("/") / "lines").read_text()
        return {name for name in ("llvmlite", "opentelemetry-sdk") if f"\n{name}==" in lines}

    assert upgraded() == set()
    assert upgraded("--extra", "otel") == upgraded() == {"opentelemetry-sdk"}
    both = {"llvmlite", "opentelemetry-sdk"}
    assert upgraded("--extra", "compiled") == upgraded("--extra", "compiled", "--extra", "otel") == upgraded() == both
    assert run(ROOT / "bin/uninstall", "--root", root).returncode == 0
    assert upgraded() == set()


def test_an_environment_of_which_a_process_runs_stays_and_others_go(installed: Path) -> None:
    used, unused = (installed / f"opt/mooncake-zmq/venv-{number}" for number in (111, 222))
    for venv in (used, unused):
        (venv / "bin").mkdir(parents=True)
        (venv / "bin/python").symlink_to("/bin/sleep")
    node = subprocess.Popen([used / "bin/python", "60"])
    try:
        said = install(installed)
    finally:
        node.kill()
        node.wait()
    assert used.exists()
    assert not unused.exists()
    assert "removed /opt/mooncake-zmq/venv-222, which nothing uses" in said
