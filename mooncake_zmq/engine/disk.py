"""The disk that holds prepared models: checks for space before they are begun, and durable writes before they get a name."""

import os
import shutil
from pathlib import Path

from mooncake_zmq.engine.errors import ModelError


def check_space(cache_dir: Path, needed_bytes: int, what: str) -> None:
    """Raise ModelError unless `cache_dir` has room for `what`."""
    free = shutil.disk_usage(cache_dir).free
    if free < needed_bytes:
        raise ModelError(
            f"{cache_dir} has {free >> 20} MiB free and {what} needs {needed_bytes >> 20} MiB there: "
            "free some, or set model.cache_dir elsewhere"
        )


def sync(path: Path) -> None:
    """Write a file's bytes, or a directory's names, to the disk. Call it before a rename: else after a power cut the name may
    exist without its bytes."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
