"""What the backend "auto" is: machine code where it can be made and run."""

import importlib.util
import mmap
import subprocess
import sys

import pytest

from mooncake_zmq.engine import cpu

DENIED = """
import ctypes, sys
PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1
if ctypes.CDLL(None).prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0):
    sys.exit(77)
from mooncake_zmq.engine import cpu
print(cpu.chosen("auto"), cpu.chosen("numpy"), cpu.chosen("compiled"), cpu.lacking())
"""


@pytest.fixture(autouse=True)
def forgotten():
    cpu.lacking.cache_clear()
    yield
    cpu.lacking.cache_clear()


def test_auto_is_machine_code_where_that_can_be_had(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert cpu.chosen("auto") == "compiled"
    assert cpu.chosen("numpy") == "numpy"


def test_without_the_compiler_auto_is_numpy_and_says_why(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba" else name)
    assert cpu.chosen("auto") == "numpy"
    assert cpu.lacking() == "numba not installed: the extra 'compiled' has it"
    assert cpu.chosen("compiled") == "compiled", "what an operator names is not replaced"


def test_where_memory_cannot_be_written_and_run_auto_is_numpy(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(mmap, "mmap", refuse)
    assert cpu.chosen("auto") == "numpy"
    assert "MemoryDenyWriteExecute" in cpu.lacking()


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs Numba")
def test_a_process_under_the_kernels_own_rule_falls_back():
    done = subprocess.run([sys.executable, "-c", DENIED], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this kernel has no such rule")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("numpy numpy compiled this process may not run")
