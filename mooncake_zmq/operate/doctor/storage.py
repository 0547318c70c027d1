"""Checks the directories of SSD tiers and of the model: whether they exist, are writable, have room, and allow direct I/O."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mooncake_zmq.core.roles import ENGINE_ROLES
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.prepare import is_prepared, located
from mooncake_zmq.operate.doctor.finding import Finding, Here
from mooncake_zmq.operate.doctor.memory import size
from mooncake_zmq.operate.doctor.places import UNIT_DIRECTORIES, units_installed
from mooncake_zmq.pool.ssd.disk_directory import allows_direct

AREA = "storage"
MODEL_ADVICE = "put the model where the nodes' user may read it, outside of home directories, and set model.path to it"
UNSEEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""Directories that a unit has not, or has its own of (ProtectHome=, PrivateTmp=)."""
WRITTEN = ("/var/lib/mooncake-zmq", "/var/cache/mooncake-zmq", "/run/mooncake-zmq")
"""Directories on disks that a unit may write to (ProtectSystem=, StateDirectory=)."""


def examine(here: Here) -> Iterator[Finding]:
    """Yield findings on the model, if a node here computes it, and on each directory in which a cache-node here keeps blocks or
    values."""
    if any(node.computes for node in here.of_role(*ENGINE_ROLES)):
        yield model(here.config.model.path, here.config.model.cache_dir)
    for node in here.of_role("cache-node"):
        section = here.section(node)
        if section.ssd.directory:
            yield from tier(Path(section.ssd.directory), node.name, section.ssd.bytes)
        if node.store_endpoint and section.objects.ssd.directory:
            yield from tier(Path(section.objects.ssd.directory), f"{node.name}.objects", section.objects.ssd.bytes)
    if units_installed():
        yield from of_units(here)


def of_units(here: Here, directories: Sequence[str] = UNIT_DIRECTORIES) -> Iterator[Finding]:
    """Yield a finding for each place that this user reaches and units do not. `directories`: of units and their drop-ins."""
    models = {here.config.model.path} if any(node.computes for node in here.of_role(*ENGINE_ROLES)) else set[str]()
    sections = [here.section(node) for node in here.of_role("cache-node")]
    tiers = {place for each in sections for place in (each.ssd.directory, each.objects.ssd.directory) if place}
    writable = (*WRITTEN, *_granted(directories))
    for place in sorted(models | tiers):
        if not Path(place).expanduser().is_absolute():  # a model's name
            continue
        where = Path(place).expanduser().resolve()
        if any(where.is_relative_to(each) for each in UNSEEN):
            found = f"{place} is not seen by units, which have no home directories and a /tmp of their own"
            yield Finding(AREA, "problem", found, f"a place below {WRITTEN[0]}")
        elif place in tiers and not any(where.is_relative_to(each) for each in writable):
            advice = f"a directory below {WRITTEN[0]}, or ReadWritePaths={place}: systemctl edit mooncake-cache-node@.service"
            yield Finding(AREA, "problem", f"{place} may not be written by units", advice)


def _granted(directories: Sequence[str]) -> Iterator[str]:
    """Yield the paths that drop-ins let units write to."""
    for file in (file for directory in directories for file in Path(directory).glob("mooncake-*.d/*.conf")):
        for line in file.read_text().splitlines() if os.access(file, os.R_OK) else ():
            if line.startswith("ReadWritePaths="):
                yield from (path.lstrip("-+") for path in line.partition("=")[2].split())


def model(path: str, cache_dir: str) -> Finding:
    """Check that a model is on this machine and that this user may read it, unless it is prepared already."""
    if path == "toy":
        return Finding(AREA, "ok", "the toy model needs no file")
    try:
        prepared = located(path, cache_dir)
    except ModelError as error:
        return Finding(AREA, "problem", f"model.path: {error}", MODEL_ADVICE)
    if is_prepared(prepared):
        return Finding(AREA, "ok", f"model {path} is prepared in {prepared}")
    source = Path(path).expanduser()  # of "default" and "dummy:" there is none
    files = [source] if source.is_file() else list(source.glob("*"))
    if unreadable := [str(file) for file in files if not os.access(file, os.R_OK)]:
        return Finding(AREA, "problem", f"model.path: this user may not read {unreadable[0]}", MODEL_ADVICE)
    return Finding(AREA, "ok", f"model {path} is prepared in {prepared.parent} by the first start")


def tier(directory: Path, name: str, wanted_bytes: int) -> Iterator[Finding]:
    """Yield findings on the directory of an SSD tier; `name` is that of the node's own directory below it."""
    there = next(path for path in (directory / name, directory, *directory.parents) if path.is_dir())
    if not os.access(there, os.W_OK | os.X_OK):
        advice = f"install -d -o mooncake -g mooncake -m 700 {directory} (and ReadWritePaths={directory} in the unit)"
        yield Finding(AREA, "problem", f"{there} is not writable by this user", advice)
        return
    held_bytes = _held(directory / name)
    free_bytes = shutil.disk_usage(there).free
    found = f"{directory / name} holds {size(held_bytes)} of {size(wanted_bytes)}; {size(free_bytes)} are free"
    if free_bytes >= wanted_bytes - held_bytes:
        yield Finding(AREA, "ok", found)
    else:
        yield Finding(AREA, "warning", found, f"free room below {there}, or lower ssd.bytes to {held_bytes + free_bytes}")
    yield direct(there)


def direct(directory: Path) -> Finding:
    """Check direct I/O in a temporary directory, so that the files of a running node stay untouched."""
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=directory) as probe:
        if allows_direct(Path(probe)):
            return Finding(AREA, "ok", f"{directory} is read and written past the page cache (O_DIRECT)")
    advice = "use a directory on ext4, xfs or a bare device's file system: copies in the page cache cost RAM and time"
    return Finding(AREA, "warning", f"{directory} knows no O_DIRECT", advice)


def _held(directory: Path) -> int:
    try:
        return sum(path.stat().st_blocks * 512 for path in directory.iterdir() if path.is_file())
    except OSError:
        return 0
