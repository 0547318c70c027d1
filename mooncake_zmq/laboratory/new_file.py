"""Replaces a file of results only once all of the new one is written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def new_of(path: Path) -> Path:
    """Return the name under which the new content of a file is written."""
    return path.with_name(f"{path.name}.new")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path to write to; at the end it replaces `path`. If the writing fails, that stays as it is, and nothing else is
    left. Raises OSError."""
    new = new_of(path)
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
