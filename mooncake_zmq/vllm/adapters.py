"""The identity of a LoRA adapter by the content of its files, while these are certainly what the engine has loaded.

The engine loads an adapter at some time after its start, and again once it had to make room. Files that have not changed since
its start are what it has loaded; of others nothing is known, nor of any once the clock was set back.
"""

import hashlib
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from mooncake_zmq.kv.block_hash import KEY_BYTES
from mooncake_zmq.vllm.weights import local_copy

MOST_ADAPTERS = 1024
"""Most adapters whose digests are kept; others are read again."""
CONFIG = "adapter_config.json"
SET_BACK_NS = 1_000_000_000
"""By how much less the clock is ahead of the monotonic one once it was set back; the two are read one after the other."""
PATTERNS = ("adapter_model*", "new_embeddings*")

Signature = tuple[tuple[str, int, int, int, int], ...]


class Adapters:
    """Digests of adapters' files. An adapter is read wholly when it is first asked for, which takes some 0.1 s for 200 MB."""

    def __init__(self, since_ns: int, most: int = MOST_ADAPTERS) -> None:
        """`since_ns`: when the engine started, by the clock of the file system."""
        self.since_ns = since_ns
        self._ahead_ns = _ahead_ns()
        self._most = most
        self._digests: OrderedDict[Signature, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def content(self, path: str) -> str:
        """Return the digest of the files of the adapter at `path`, or "" if they are not here, or changed since the start."""
        try:
            place = local_copy(path)
            if place is None or self._has_changed(place):
                return ""
            files = _files(place)
            return self._digest(files) if len(files) > 1 else ""
        except OSError:
            return ""

    def _has_changed(self, place: Path) -> bool:
        if _ahead_ns() < self._ahead_ns - SET_BACK_NS:
            self.since_ns = 0
        seen = chain([place], place.iterdir(), _pointers(place))
        times = chain((max(each.stat().st_ctime_ns, each.lstat().st_ctime_ns) for each in seen), _renames(place))
        return any(time_ns >= self.since_ns for time_ns in times)

    def _digest(self, files: list[Path]) -> str:
        signature = tuple(_signature(file) for file in files)
        digest = self._digests.get(signature)
        if digest is None:
            digest = self._digests[signature] = _content(files)
            if len(self._digests) > self._most:
                self._digests.popitem(last=False)
        self._digests.move_to_end(signature)
        return digest


def _files(place: Path) -> list[Path]:
    """Return the adapter's configuration and what vLLM reads beside it."""
    found = {each for pattern in PATTERNS for each in place.glob(pattern) if each.is_file()}
    return [place / CONFIG, *sorted(found)]


def _pointers(place: Path) -> Iterator[Path]:
    """Yield what may lead to another directory under the same name: links on the way, and the branches of a download."""
    yield from (each for each in place.absolute().parents if each.is_symlink())
    if place.parent.name == "snapshots":
        yield from (place.parent.parent / "refs").glob("*")


def _renames(place: Path) -> Iterator[int]:
    """Yield when directories above this one got their names, as far as that shows: their content changed before that."""
    found = (each.stat() for each in chain(place.absolute().parents, place.resolve().parents))
    yield from (each.st_ctime_ns for each in found if each.st_ctime_ns > each.st_mtime_ns)


def file_time_ns() -> int:
    """Return the present time as file systems have it, which is coarser than the clock."""
    with tempfile.TemporaryFile() as probe:
        return os.fstat(probe.fileno()).st_ctime_ns


def _ahead_ns() -> int:
    """Return by how much the clock is ahead of the monotonic one."""
    return time.time_ns() - time.monotonic_ns()


def _signature(file: Path) -> tuple[str, int, int, int, int]:
    found = file.stat()
    return str(file), found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _content(files: list[Path]) -> str:
    hasher = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").digest()
        hasher.update(f"{file.name}\0".encode() + digest)
    return hasher.hexdigest()[: 2 * KEY_BYTES]
