"""Finds the extra of the project that brings a package which is missing, and the command that installs it."""

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "mooncake-zmq"
REQUIREMENT = re.compile(r"""([\w.-]+).*\bextra == ["']([\w-]+)["']""")
DISTRIBUTIONS = {"opentelemetry": "opentelemetry-sdk"}
"""Names that differ from those of their modules by more than a dash."""


def advice(error: ModuleNotFoundError) -> str | None:
    """Return what to install for a module that is missing; None where no extra brings it."""
    from importlib import metadata  # a twentieth of a node's start, for errors alone

    module = (error.name or "").partition(".")[0]
    wanted = DISTRIBUTIONS.get(module, module.replace("_", "-"))
    try:
        declared = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    for found in map(REQUIREMENT.match, declared):
        if found is not None and found[1] == wanted:
            return f"{module} is not installed: {installing(found[2])}"
    return None


def installing(extra: str) -> str:
    """Return the command that adds an extra where this program is installed: from the directory or file it came from."""
    from importlib import metadata

    origin: dict[str, Any] = {}
    with suppress(metadata.PackageNotFoundError, ValueError):
        origin = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    return command(extra, origin, sys.executable)


def command(extra: str, origin: dict[str, Any], python: str) -> str:
    """Return the command for a distribution of this origin, as pip records it; empty: it came from an index."""
    url = urlsplit(str(origin.get("url", "")))
    if not url.scheme:
        return f"{python} -m pip install '{DISTRIBUTION}[{extra}]'"
    if url.scheme != "file":
        return f"{python} -m pip install '{DISTRIBUTION}[{extra}] @ {origin['url']}'"
    path = unquote(url.path)
    if not Path(path).exists():  # bin/install copies the sources, and removes the copy
        return f"bin/install --extra {extra}"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"{python} -m pip install {editable}'{path}[{extra}]'"
