"""Writes bin/requirements.lock: NAME==VERSION with the hash of each wheel, and behind # the extras that need it, or base.

All targets have the versions resolved for the first one. The lock names no addresses of files: a hash is enough.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCKED_EXTRAS = ("compiled", "dev", "lab", "mypyc", "otel", "server")
TARGETS = [(python, machine) for machine in ("x86_64", "aarch64") for python in ("3.11", "3.12", "3.13")]
GLIBCS = [f"manylinux_2_{minor}" for minor in range(39, 4, -1)] + ["manylinux2014", "manylinux2010", "manylinux1"]
BUILD = "setuptools>=77"
"""The requirement that builds the project itself, in the environment where it is installed."""
HEAD = """\
# What bin/ installs, made by bin/lock: pip --require-hashes takes these files alone. Behind # are the extras that need a line.
"""


def resolved(python: str, machine: str, wanted: list[str]) -> list[dict]:
    """Return pip's report of the packages that it would install."""
    command = [sys.executable, "-I", "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    command += ["--only-binary=:all:", "--python-version", python]
    command += [part for each in GLIBCS for part in ("--platform", f"{each}_{machine}")]
    with tempfile.TemporaryDirectory() as nowhere:
        told = subprocess.run([*command, "--target", nowhere, *wanted], stdout=subprocess.PIPE, check=True)
    return json.loads(told.stdout)["install"]


def closure(wanted: list[str], needs: dict[str, list[str]]) -> set[str]:
    """All that these requirements lead to, by name."""
    found: set[str] = set()
    left = [Requirement(each) for each in wanted]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        asked = {"", *requirement.extras}
        if (key := f"{name}{sorted(asked)}") in found:
            continue
        found |= {name, key}
        for each in map(Requirement, needs.get(name, ())):
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in asked):
                left.append(each)
    return found


def main(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    by_extra = {"base": [*project["dependencies"], BUILD]}
    by_extra |= {extra: project["optional-dependencies"][extra] for extra in LOCKED_EXTRAS}
    wanted = [each for requirements in by_extra.values() for each in requirements]
    hashes: dict[tuple[str, str], set[str]] = defaultdict(set)
    needs: dict[str, list[str]] = {}
    for python, machine in TARGETS:
        sys.stderr.write(f"python {python} on {machine}\n")
        for each in resolved(python, machine, [*wanted, *(f"{name}=={version}" for name, version in sorted(hashes))]):
            name, version = canonicalize_name(each["metadata"]["name"]), each["metadata"]["version"]
            hashes[name, version].add(each["download_info"]["archive_info"]["hashes"]["sha256"])
            needs.setdefault(name, each["metadata"].get("requires_dist", []))
    reached = {extra: closure(requirements, needs) for extra, requirements in by_extra.items()}
    lines = [HEAD]
    for (name, version), digests in sorted(hashes.items()):
        extras = " ".join(extra for extra, names in reached.items() if name in names)
        lines.append(f"{name}=={version} {' '.join(f'--hash=sha256:{digest}' for digest in sorted(digests))} # {extras}\n")
    (root / "bin/requirements.lock").write_text("".join(lines))


main(Path(sys.argv[1]))
