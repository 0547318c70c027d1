"""Finds the extra of the project that brings a package which is missing."""

import importlib.metadata
import re

DISTRIBUTION = "mooncake-zmq"
REQUIREMENT = re.compile(r"""([\w.-]+).*\bextra == ["']([\w-]+)["']""")
DISTRIBUTIONS = {"opentelemetry": "opentelemetry-sdk"}
"""Names that differ from those of their modules by more than a dash."""


def advice(error: ModuleNotFoundError) -> str | None:
    """Return what to install for a module that is missing; None where no extra brings it."""
    module = (error.name or "").partition(".")[0]
    wanted = DISTRIBUTIONS.get(module, module.replace("_", "-"))
    try:
        declared = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for found in map(REQUIREMENT.match, declared):
        if found is not None and found[1] == wanted:
            return f"{module} is not installed: pip install '{DISTRIBUTION}[{found[2]}]'"
    return None
