"""Checks Python and the packages that the project needs."""

import importlib.metadata
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement

from mooncake_zmq.core.messages import OLDEST_PROTOCOL, PROTOCOL_VERSION
from mooncake_zmq.extras import DISTRIBUTION, installing
from mooncake_zmq.native.mypyc_build import hindrance
from mooncake_zmq.native.mypyc_code import NODES, Code, code
from mooncake_zmq.operate.compilation import shown
from mooncake_zmq.operate.doctor.finding import Finding, Here

AREA = "packages"
OLDEST = (3, 11)
SHOWN = ("pyzmq", "numpy", "tokenizers", "uvicorn")


def examine(here: Here) -> Iterator[Finding]:
    """Yield findings on the versions of Python, of the project and of its packages, and on its machine code."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= OLDEST:
        yield Finding(AREA, "ok", f"Python {version}")
    else:
        yield Finding(AREA, "problem", f"Python {version}", "install Python 3.11 or newer, then bin/install again")
    advice = f"bin/install again, or: {installing('server')}"
    wrong = list(unmet())
    for what in wrong:
        yield Finding(AREA, "problem", what, advice)
    if not wrong:
        own = importlib.metadata.version(DISTRIBUTION)
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in SHOWN)
        yield Finding(AREA, "ok", f"{DISTRIBUTION} {own}, protocols {OLDEST_PROTOCOL} to {PROTOCOL_VERSION}; {versions}")
    yield compiled_modules(code(NODES), hindrance())


def compiled_modules(found: Code, lacking: str) -> Finding:
    """Check whether nodes run the project's own modules as machine code. `lacking`: what this machine lacks to compile."""
    if found in ("machine", "off"):
        return Finding(AREA, "ok", shown(found, lacking))
    return Finding(AREA, "warning", shown(found, ""), lacking or "mooncake-zmq compile, then restart the nodes")


def unmet() -> Iterator[str]:
    """Yield the requirements of the installed project with its extra `server` that are missing or of another version."""
    try:
        needed = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield f"{DISTRIBUTION} is not installed"
        return
    for requirement in map(Requirement, needed):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": "server"}):
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{requirement.name} is missing"
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield f"{requirement.name} is {found}, not {requirement.specifier}"
