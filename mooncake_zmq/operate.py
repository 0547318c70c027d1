"""What an operator asks of a deployment on this machine: the state of its nodes, and whether the machine is fit for it."""

import importlib.metadata
import json
import os
import re
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mooncake_zmq.config import ConfigError, Loaded
from mooncake_zmq.core.asks import Answer, Ask, encode
from mooncake_zmq.runtime.process import PortInUse, listen, make_private
from mooncake_zmq.transfer.own_files import read_own, replace_own
from mooncake_zmq.transfer.process_lock import holder

DUMP_TIMEOUT_S, DUMP_AGAIN_S = 5.0, 0.5
ASK_TIMEOUT_S = 5.0
POLL_S = 0.01
DISTRIBUTION = "mooncake-zmq"


def collect_dumps(runtime_dir: Path, names: Sequence[str]) -> dict[str, Any]:
    """Ask running nodes for their state; those that do not run or do not answer are left out.

    A node renames a new file over its last one. Nobody else removes it: others may be collecting at the same time.
    """
    dumps: dict[str, Any] = {}
    waiting = {name: runtime_dir / f"{name}.dump.json" for name in names}
    before = {name: _identity(path) for name, path in waiting.items()}
    deadline = time.monotonic() + DUMP_TIMEOUT_S
    while waiting and time.monotonic() < deadline:
        # Asked again now and then: a process that is just starting does not listen yet.
        waiting = {name: path for name, path in waiting.items() if _ask_for_dump(runtime_dir, name)}
        again_at = time.monotonic() + DUMP_AGAIN_S
        while waiting and time.monotonic() < again_at:
            for name, path in list(waiting.items()):
                if _identity(path) not in (None, before[name]):
                    with suppress(OSError):  # an `up` that ends sweeps it away
                        dumps[name] = json.loads(read_own(path))
                        del waiting[name]
            time.sleep(POLL_S)
    return dumps


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        state = path.lstat()
    except OSError:  # there is none, or the directory is another user's
        return None
    return state.st_ino, state.st_mtime_ns


def _ask_for_dump(runtime_dir: Path, name: str) -> bool:
    """False when the node does not run."""
    pid = holder(runtime_dir, name)
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    return pid is not None


def ask(runtime_dir: Path, name: str, wish: Ask) -> Answer:
    """Ask a node of this machine for something, and wait for its answer. Raises ConfigError if it does not run or answer."""
    pid = holder(runtime_dir, name)
    if not pid:
        raise ConfigError(f"{name} does not run on this machine: ask where it does")
    ask_id = secrets.token_hex(8)
    question, answer = (runtime_dir / f"{name}.{what}.{ask_id}.json" for what in ("ask", "answer"))
    try:
        replace_own(question, encode(wish))
    except OSError as error:
        raise ConfigError(f"cannot ask in {runtime_dir}: {error.strerror}") from error
    deadline = time.monotonic() + ASK_TIMEOUT_S
    try:
        while time.monotonic() < deadline:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
            again_at = time.monotonic() + DUMP_AGAIN_S
            while time.monotonic() < again_at:
                with suppress(FileNotFoundError):
                    told: Answer = json.loads(read_own(answer))
                    return told
                time.sleep(POLL_S)
    finally:
        question.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
    raise ConfigError(f"{name} did not answer within {ASK_TIMEOUT_S:g} s")


def examine(loaded: Loaded) -> Iterator[tuple[bool, str]]:
    """Is this machine fit for the deployment? (good, what was looked at) each."""
    config = loaded.config
    version = ".".join(map(str, sys.version_info[:3]))
    yield sys.version_info >= (3, 11), f"Python {version} (3.11 or newer)"
    missing = list(missing_packages())
    yield not missing, f"packages{': missing ' + ', '.join(missing) if missing else ''}"
    sections = [loaded.section(node.in_role(role)) for node in config.nodes for role in node.roles]
    needed = sum(getattr(section, "pool_bytes", 0) + getattr(section, "slab_bytes", 0) for section in sections)
    try:
        free = shutil.disk_usage(config.cluster.shm_dir).free
    except OSError as error:
        yield False, f"{config.cluster.shm_dir}: {error.strerror}"
    else:
        yield free >= needed, f"{config.cluster.shm_dir}: {free >> 20:,} MiB free, {needed >> 20:,} MiB needed"
    cores = len(os.sched_getaffinity(0))
    threads = max((node.threads for node in config.nodes), default=1)
    yield threads <= cores, f"{cores} cores; the engine with most threads has {threads}"
    try:
        make_private(Path(config.cluster.runtime_dir))
    except ConfigError as error:
        yield False, str(error)
    else:
        yield True, f"runtime directory {config.cluster.runtime_dir}"
    for node in config.of_role("gateway"):
        settings = loaded.section(node)
        try:
            listen(settings.http_host, settings.http_port).close()
        except PortInUse as error:
            yield False, str(error)
        else:
            yield True, f"port {settings.http_port} on {settings.http_host} is free"


def missing_packages() -> Iterator[str]:
    """What the installed project declares that it needs, and is not there. Extras are nobody's need."""
    try:
        needed = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield DISTRIBUTION
        return
    for requirement in needed:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        if name is None or "extra ==" in requirement:
            continue
        try:
            importlib.metadata.version(name[0])
        except importlib.metadata.PackageNotFoundError:
            yield name[0]
