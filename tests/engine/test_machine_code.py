"""The file that machine code is kept in: what is believed, what is made again, and what happens where nothing can be kept."""

import ast
import ctypes
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

machine_code = pytest.importorskip("mooncake_zmq.engine.machine_code.object_code", reason="needs Numba")
from mooncake_zmq.engine.machine_code.object_code import DIRECTORY, HEADER_BYTES, LEFTOVER_S, MAGIC, UNUSED_S, kept  # noqa: E402

CODE = bytes(range(256)) * 8


def never():
    raise AssertionError("made again")


@pytest.fixture
def path(tmp_path):
    return tmp_path / DIRECTORY / "decode-step-1.o"


@pytest.fixture
def stored(path):
    assert kept(path, lambda: CODE) == CODE
    return path


def test_code_is_made_once(stored):
    with capture_logs() as lines:
        assert kept(stored, never) == CODE
    assert not lines


def test_only_this_user_can_write_what_is_kept(stored):
    assert stat.S_IMODE(stored.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600


DAMAGES = {
    "empty": lambda content: b"",
    "cut within the header": lambda content: content[: HEADER_BYTES - 1],
    "no code": lambda content: content[:HEADER_BYTES],
    "cut": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
    "a byte of the code": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    "a byte of the checksum": lambda content: (
        content[: len(MAGIC)] + bytes([content[len(MAGIC)] ^ 128]) + content[len(MAGIC) + 1 :]
    ),
    "another format": lambda content: b"M" + content[1:],
    "zeros": lambda content: bytes(len(content)),
    "beyond any code's size": lambda content: content + bytes(machine_code.MAX_FILE_BYTES),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_again(stored, damage):
    whole = stored.read_bytes()
    stored.write_bytes(DAMAGES[damage](whole))
    with capture_logs() as lines:
        assert kept(stored, lambda: CODE) == CODE
    assert [line["log_level"] for line in lines] == ["warning"]
    assert stored.read_bytes() == whole
    assert kept(stored, never) == CODE


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_code_that_others_can_write_is_not_run(stored, mode):
    stored.chmod(mode)
    assert_only_own_code(stored)


def test_code_of_another_user_is_not_run(stored, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda user=os.geteuid(): user + 1)
    assert_only_own_code(stored)


def test_a_link_is_not_followed(stored):
    target = stored.with_name("target")
    stored.rename(target)
    stored.symlink_to(target)
    assert_only_own_code(stored)


def test_a_pipe_is_not_waited_for(path):
    path.parent.mkdir()
    os.mkfifo(path, 0o600)
    assert_only_own_code(path)


def test_a_file_where_the_directory_should_be(path):
    path.parent.write_bytes(b"")
    assert_only_own_code(path)


def test_a_directory_that_cannot_be_made():
    assert_only_own_code(Path("/proc") / DIRECTORY / "decode-step-1.o")  # where root cannot write either


def assert_only_own_code(path):
    """What the process makes is used, said in one line, and the file left as it is."""
    before = path.lstat() if os.path.lexists(path) else None
    with capture_logs() as lines:
        assert kept(path, lambda: b"own") == b"own"
    assert [line["log_level"] for line in lines] == ["warning"]
    if before is not None:
        assert path.lstat().st_mtime_ns == before.st_mtime_ns
        assert path.lstat().st_ino == before.st_ino


def test_a_full_disk_costs_the_file_only(path):
    script = f"""
import resource
from pathlib import Path
from mooncake_zmq.engine.machine_code.object_code import kept
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
assert kept(Path({str(path)!r}), lambda: bytes(1000)) == bytes(1000)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert "cannot be kept" in done.stdout
    assert list(path.parent.iterdir()) == []


def test_unused_code_and_leftovers_are_swept_when_code_is_written(path):
    now = time.time()
    ages = {"old.o": 2 * UNUSED_S, "recent.o": UNUSED_S / 2, ".dead.tmp": 2 * LEFTOVER_S, ".busy.tmp": 0.0}
    path.parent.mkdir()
    for name, age_s in ages.items():
        (path.parent / name).write_bytes(b"")
        os.utime(path.parent / name, (now - age_s, now - age_s))
    kept(path, lambda: CODE)
    assert {each.name for each in path.parent.iterdir()} == {"recent.o", ".busy.tmp", path.name}


def test_code_in_use_is_not_swept(stored):
    os.utime(stored, (0, 0))
    kept(stored, never)
    kept(stored.with_name("decode-step-2.o"), lambda: CODE)
    assert stored.exists()


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (machine_code, "KEY_TILE", 32),
        (machine_code, "PANEL_COLUMNS", 128),
        (machine_code, "_VERSIONS", ["numba 0.1"]),
        (machine_code, "_SOURCES", {"kernels": ("kernels",)}),
        (machine_code, "_features", lambda: "+sse"),
        (machine_code.llvm, "get_host_cpu_name", lambda: "i386"),
        (machine_code.llvm, "get_process_triple", lambda: "sparc-unknown-linux"),
    ],
)
def test_other_code_has_another_name(monkeypatch, where, name, value):
    before = machine_code.digest()
    monkeypatch.setattr(where, name, value)
    assert machine_code.digest() != before


@pytest.mark.parametrize("entry", [machine_code.STEPS, machine_code.CODECS])
def test_all_that_the_code_is_made_of_is_in_its_name(entry):
    """What a source imports of ours is itself a source, or a number that the digest has."""
    directory = Path(machine_code.__file__).parent
    known = {f"{Path(source).name}.py" for source in machine_code._SOURCES[entry]}
    for source in machine_code._SOURCES[entry]:
        for node in ast.walk(ast.parse((directory / f"{source}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("mooncake_zmq"):
                for alias in node.names:
                    names = {f"{node.module.rpartition('.')[2]}.py", f"{alias.name}.py"}
                    assert names & known or alias.name in ("KEY_TILE", "PANEL_COLUMNS"), alias.name


def test_object_code_is_callable():
    code = machine_code._object_code(
        """
        define void @entry(i64 %what, i64 %thread, i64 %table) {
          %at = inttoptr i64 %table to ptr
          store i64 %what, ptr %at
          ret void
        }
        """,
        "entry",
    )
    table = np.zeros(1, dtype=np.int64)
    machine_code.MachineCode(code)(17, table.ctypes.data)
    assert table[0] == 17


def test_code_that_calls_what_a_process_may_lack_is_never_made():
    assert not hasattr(ctypes.CDLL(None), "numba_unpickle")
    with pytest.raises(AssertionError, match="numba_unpickle"):
        machine_code._object_code(
            "declare void @numba_unpickle()\n"
            "define void @entry(i64 %thread, i64 %table) {\n call void @numba_unpickle()\n ret void\n}",
            "entry",
        )
