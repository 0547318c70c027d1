"""Makes `import mooncake.store` mean our store, so that connectors written for Mooncake's need not be changed. Opt-in.

    python -m mooncake_zmq.store.shim install      for every program of this Python environment
    python -m mooncake_zmq.store.shim uninstall
    mooncake_zmq.store.shim.activate()             for this process only

An installed Mooncake is never hidden, but by `activate(over=True)`.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import click

from mooncake_zmq import store

PACKAGE = "mooncake"
_INIT = '"""Stands for Mooncake: made by mooncake_zmq.store.shim, and removed by it."""\n\n__mooncake_zmq__ = True\n'
_STORE = '"""mooncake_zmq\'s store under the name of Mooncake\'s."""\n\nfrom mooncake_zmq.store import *  # noqa: F403\n'


class ShimRefused(Exception):
    """Mooncake itself is installed."""


def activate(*, over: bool = False) -> None:
    """From now on `mooncake.store` is our store in this process. Raises ShimRefused, unless `over`."""
    if not over and (where := installed()):
        raise ShimRefused(f"Mooncake is installed at {where}")
    package = ModuleType(PACKAGE, _INIT)
    package.__path__ = []
    package.__mooncake_zmq__ = True  # type: ignore[attr-defined]
    package.store = store  # type: ignore[attr-defined]
    sys.modules[PACKAGE] = package
    sys.modules[f"{PACKAGE}.store"] = store


def installed() -> str | None:
    """Where Mooncake itself is installed; None if it is not, or if what is there is this shim."""
    module = sys.modules.get(PACKAGE)
    if module is not None and getattr(module, "__mooncake_zmq__", False):
        return None
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or (spec.origin and _is_ours(Path(spec.origin))):
        return None
    return str(spec.origin or spec.submodule_search_locations)


def install(directory: Path | None = None) -> Path:
    """Write the package `mooncake` into this environment; returns where. Raises ShimRefused or OSError."""
    if where := installed():
        raise ShimRefused(f"Mooncake is installed at {where}")
    package = (directory or Path(sysconfig.get_path("purelib"))) / PACKAGE
    if package.exists() and not _is_ours(package / "__init__.py"):
        raise ShimRefused(f"{package} is not ours")
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(_INIT, encoding="ascii")
    (package / "store.py").write_text(_STORE, encoding="ascii")
    return package


def uninstall(directory: Path | None = None) -> bool:
    """Take our package away; False if there is none. Files that are not ours stay."""
    package = (directory or Path(sysconfig.get_path("purelib"))) / PACKAGE
    if not _is_ours(package / "__init__.py"):
        return False
    for name in ("__init__.py", "store.py"):
        (package / name).unlink(missing_ok=True)
        for compiled in (package / "__pycache__").glob(f"{Path(name).stem}.*.pyc"):
            compiled.unlink()
    for folder in (package / "__pycache__", package):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return True


def _is_ours(path: Path) -> bool:
    try:
        return path.read_text(encoding="utf-8") == _INIT
    except (OSError, UnicodeDecodeError):
        return False


@click.group(help="Make `import mooncake.store` mean mooncake_zmq's store in this Python environment.")
def main() -> None:
    """The command line."""


@main.command("install")
def _install() -> None:
    try:
        click.echo(f"installed {install()}")
    except (ShimRefused, OSError) as error:
        raise click.ClickException(f"{error}; nothing was changed") from error


@main.command("uninstall")
def _uninstall() -> None:
    click.echo("uninstalled" if uninstall() else "it was not installed")


if __name__ == "__main__":
    main()
