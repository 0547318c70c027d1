"""Python and what the project needs of it."""

import importlib.metadata
import re
import sys
from collections.abc import Iterator

from mooncake_zmq.core.messages import PROTOCOL_VERSION
from mooncake_zmq.doctor.finding import Finding, Here

AREA = "packages"
DISTRIBUTION = "mooncake-zmq"
OLDEST = (3, 11)
INSTALL = "bin/install again, or: {python} -m pip install --upgrade {distribution}"


def examine(here: Here) -> Iterator[Finding]:
    """The versions of Python, of the project and of its packages."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= OLDEST:
        yield Finding(AREA, "ok", f"Python {version}")
    else:
        yield Finding(AREA, "problem", f"Python {version}", "install Python 3.11 or newer, then bin/install again")
    advice = INSTALL.format(python=sys.executable, distribution=DISTRIBUTION)
    wrong = list(unmet())
    for what in wrong:
        yield Finding(AREA, "problem", what, advice)
    if not wrong:
        own = importlib.metadata.version(DISTRIBUTION)
        shown = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("pyzmq", "numpy", "tokenizers", "uvicorn"))
        yield Finding(AREA, "ok", f"{DISTRIBUTION} {own}, protocol {PROTOCOL_VERSION}; {shown}")


def unmet() -> Iterator[str]:
    """What the installed project declares that it needs, and is not there or too old. Extras are nobody's need."""
    try:
        needed = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield f"{DISTRIBUTION} is not installed"
        return
    for requirement in needed:
        parts = re.fullmatch(r"([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9.]+))?", requirement)
        if parts is None:  # an extra's
            continue
        try:
            found = importlib.metadata.version(parts[1])
        except importlib.metadata.PackageNotFoundError:
            yield f"{parts[1]} is missing"
            continue
        if parts[2] and _numbers(found) < _numbers(parts[2]):
            yield f"{parts[1]} is {found}, older than {parts[2]}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
