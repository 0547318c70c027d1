"""`import mooncake.store` resolves to our store when told to, and never over an installed Mooncake."""

import subprocess
import sys

import pytest

from mooncake_zmq import store
from mooncake_zmq.store import shim


@pytest.fixture
def clean(monkeypatch):
    """What the test activates is gone afterwards."""
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.delitem(sys.modules, "mooncake")
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    monkeypatch.delitem(sys.modules, "mooncake.store")


def in_python(code, directory):
    result = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(directory)}, capture_output=True, text=True)
    return result.returncode, result.stdout.strip()


def test_an_activated_shim_is_our_store(clean):
    shim.activate()
    shim.activate()
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    assert MooncakeDistributedStore is store.MooncakeDistributedStore
    assert ReplicateConfig().replica_num == 1


def test_an_installed_shim_is_our_store_until_it_is_uninstalled(tmp_path):
    code = "import mooncake.store as s; print(s.MooncakeDistributedStore.__module__)"
    assert in_python(code, tmp_path)[0] == 1
    shim.install(tmp_path)
    shim.install(tmp_path)
    assert in_python(code, tmp_path) == (0, "mooncake_zmq.store.client.api")
    assert shim.uninstall(tmp_path)
    assert not shim.uninstall(tmp_path)
    assert in_python(code, tmp_path)[0] == 1
    assert not list(tmp_path.iterdir())


def test_an_installed_mooncake_is_never_hidden_unasked(clean, tmp_path, monkeypatch):
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(shim.ShimRefused, match="is installed at"):
        shim.activate()
    with pytest.raises(shim.ShimRefused):
        shim.install(tmp_path)
    assert not shim.uninstall(tmp_path)
    assert (package / "__init__.py").read_text() == "real = True\n"
    shim.activate(over=True)
    import mooncake.store

    assert mooncake.store is store
