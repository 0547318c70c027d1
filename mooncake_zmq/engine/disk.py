"""The disk that prepared models lie on: room for them before they are begun, and bytes that stay once they have a name."""

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
    """Put a file's bytes, or a directory's names, on the disk. Before a rename: else the name may outlive a power cut alone."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
