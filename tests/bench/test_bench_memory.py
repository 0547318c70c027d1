"""Memory and CPU time as the kernel counts them."""

import mmap
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import click
import pytest

from mooncake_zmq.bench import memory
from mooncake_zmq.bench.memory import await_idle, cpu_s, footprint, shared_files

MIB = 1 << 20


def test_private_memory_is_counted_and_stays_in_the_peak_when_given_back():
    before = footprint("own", os.getpid())
    taken = mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    taken.write(bytes(64 * MIB))
    during = footprint("own", os.getpid())
    taken.close()
    after = footprint("own", os.getpid())
    assert during.private_bytes - before.private_bytes > 60 * MIB
    assert during.private_bytes - after.private_bytes > 60 * MIB
    assert after.peak_bytes >= during.private_bytes + during.file_bytes - MIB, "the kernel adds up a core's pages at times"


def test_mapped_files_of_a_tmpfs_count_whole_however_little_was_touched(tmp_path):
    file = tmp_path / "segment"
    file.write_bytes(bytes(MIB))
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 4096):
        found = shared_files(os.getpid(), str(tmp_path))
    assert list(found) == [str(file)]
    assert found[str(file)] >= MIB
    assert shared_files(os.getpid(), str(tmp_path / "none")) == {}


def test_a_process_that_is_gone_has_no_memory_and_uses_no_cpu():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(ProcessLookupError, match="the child"):
        footprint("the child", child.pid)
    assert cpu_s(child.pid) == 0


def test_the_cpu_time_of_children_counts():
    """The outer process only waits for the inner, which computes until it has used more than a tick or two."""
    inner = "import os, sys\nwhile sum(os.times()[:2]) < 0.2: pass\nprint(flush=True); sys.stdin.read()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    child = subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        assert Path(f"/proc/{child.pid}/stat").exists()
        assert cpu_s(child.pid) >= 0.2
        child.communicate()


def test_a_side_that_computes_unasked_ends_the_run(monkeypatch):
    seconds = count()
    monkeypatch.setattr(memory, "cpu_s", lambda pid: next(seconds))
    with pytest.raises(click.ClickException, match="ours computes without a request"):
        await_idle({"ours": 1}, 0.0, 0.015, 0.3)
    monkeypatch.setattr(memory, "cpu_s", lambda pid: 7.0)
    await_idle({"ours": 1}, 0.0, 0.015, 0.3)
