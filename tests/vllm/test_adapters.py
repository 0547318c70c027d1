"""An adapter has an identity only while its files are certainly what the engine has loaded."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from waiting import eventually

from mooncake_zmq.vllm import adapters
from mooncake_zmq.vllm.adapters import Adapters


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "adapter", 1.0)


def write(directory: Path, weight: float) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text('{"r": 8}')
    save_file({"a": np.full((8, 4096), weight, np.float32)}, directory / "adapter_model.safetensors")
    return directory


def engine_started_after(*paths: Path) -> Adapters:
    """An engine that starts once all of this is there: file times are coarser than the clock."""
    changed = [max(each.lstat().st_ctime_ns for each in (path, *path.glob("*"))) for path in paths]
    return Adapters(max(changed) + 1)


def at_a_later_file_time(engine: Adapters, probe: Path) -> None:
    """Wait until what changes now has a file time after the engine's start."""

    def is_later() -> bool:
        probe.write_text("")
        return probe.stat().st_ctime_ns > engine.since_ns

    eventually(is_later)


def test_an_adapter_trained_again_in_its_place_is_another_after_a_restart(path):
    before = engine_started_after(path).content(str(path))
    write(path, 2.0)
    after = engine_started_after(path).content(str(path))
    assert before
    assert after
    assert before != after


def test_one_weight_or_setting_makes_another_adapter(path):
    seen = [engine_started_after(path).content(str(path))]
    weights = np.full((8, 4096), 1.0, np.float32)
    weights[3, 1234] = 1.5
    save_file({"a": weights}, path / "adapter_model.safetensors")
    seen.append(engine_started_after(path).content(str(path)))
    (path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32}')
    seen.append(engine_started_after(path).content(str(path)))
    assert len(set(seen)) == 3


def test_the_same_files_elsewhere_are_the_same_adapter(path, tmp_path):
    copy = write(tmp_path / "copy", 1.0)
    engine = engine_started_after(path, copy)
    assert engine.content(str(path)) == engine.content(str(copy)) != ""


def test_an_adapter_that_changed_under_a_running_engine_has_no_identity(path, tmp_path):
    engine = engine_started_after(path)
    assert engine.content(str(path))
    at_a_later_file_time(engine, tmp_path / "probe")
    os.utime(path / "adapter_config.json")
    assert engine.content(str(path)) == "", "also where only a time of change shows it"
    assert Adapters(time.time_ns() - 10**12).content(str(path)) == "", "also where it is first asked for later"


def test_a_link_that_leads_to_another_adapter_than_at_the_start_has_no_identity(path, tmp_path):
    other, link = write(tmp_path / "other", 2.0), tmp_path / "latest"
    link.symlink_to(path)
    engine = engine_started_after(path, other, link)
    assert engine.content(str(link)) == engine.content(str(path))
    at_a_later_file_time(engine, tmp_path / "probe")
    link.unlink()
    link.symlink_to(other)
    assert engine.content(str(link)) == ""
    assert engine.content(str(path))


def test_an_adapter_below_a_directory_that_was_swapped_by_renames_has_no_identity(tmp_path):
    for name, weight in (("now", 1.0), ("next", 2.0)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "poet", weight)
    poet = tmp_path / "now/poet"
    engine = engine_started_after(poet, tmp_path / "next/poet", tmp_path)
    assert engine.content(str(poet))
    at_a_later_file_time(engine, tmp_path / "probe")
    (tmp_path / "now").rename(tmp_path / "before")
    (tmp_path / "next").rename(tmp_path / "now")
    assert engine.content(str(poet)) == ""
    assert engine_started_after(poet, tmp_path, tmp_path / "now").content(str(poet))


def test_no_adapter_has_an_identity_once_the_clock_was_set_back(path, monkeypatch):
    engine = engine_started_after(path)
    assert engine.content(str(path))
    ahead = adapters._ahead_ns()
    for seconds in (10, 0):
        monkeypatch.setattr(adapters, "_ahead_ns", lambda by=seconds: ahead - by * 10**9)
        assert engine.content(str(path)) == "", "its times of change mean nothing"


def test_a_start_is_not_after_what_changes_later(tmp_path):
    since = adapters.file_time_ns()
    (tmp_path / "file").write_text("")
    assert (tmp_path / "file").stat().st_ctime_ns >= since


def test_what_is_no_adapter_here_has_no_identity(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half/adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "file").write_text("")
    engine = Adapters(time.time_ns() + 10**12)
    for name in ("empty", "half", "file", "none"):
        assert engine.content(str(tmp_path / name)) == ""
    assert engine.content("nobody/no-such-adapter") == ""
    assert engine.content("tensors in memory") == ""


def test_each_content_is_read_once_and_few_are_kept(tmp_path, monkeypatch):
    paths = [write(tmp_path / str(number), number) for number in range(4)]
    reads = []
    content = adapters._content
    monkeypatch.setattr(adapters, "_content", lambda files: reads.append(files) or content(files))
    engine = Adapters(time.time_ns() + 10**12, most=3)
    for _ in range(2):
        engine.content(str(paths[0]))
    assert len(reads) == 1
    for each in paths:
        engine.content(str(each))
    assert len(engine) == 3
    engine.content(str(paths[0]))
    assert len(reads) == 5
