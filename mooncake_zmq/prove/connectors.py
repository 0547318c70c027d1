"""The connectors that can be proved by name: how vLLM is started with each, and where it keeps KV beyond a process."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.server.server import StoreServer
from mooncake_zmq.prove.planted_names import PLANTED_VARIABLE
from mooncake_zmq.store.shim import install

ROOT = Path(__file__).parents[2]
OBJECT_BYTES, SLAB_BYTES = 32 << 20, 1 << 20
"""Memory of a store of ours: less than all prompts need, so that it evicts."""
FLIPS = 20
"""The number of bits that are flipped at a time."""
MIN_FILE_BYTES = 4096
"""Files below this hold no KV, so none of their bytes is flipped."""
OURS = "MooncakeZmqConnector"

UNVERIFIED = "trust_all_bytes"
PLANTED = (UNVERIFIED, "names_ignore_engine", "keys_forget_prefix")
"""The bugs that can be planted in our connector: it does not verify what it loads; engines of another model share names with
this one; a block's name does not cover what stands before it."""

Flip = Callable[[Random], bool]
"""Flips some bits of the stored KV; returns whether there was any."""


def _no_storage(_random: Random) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Storage:
    """The part of a connector that outlives its engines. `transfer`: the `--kv-transfer-config`; `flip`: see `Flip`."""

    transfer: Mapping[str, Any] | None
    environment: Mapping[str, str] = field(default_factory=dict)
    flip: Flip = _no_storage


@contextmanager
def _without(_scratch: Path, _planted: str) -> Iterator[Storage]:
    yield Storage(None)


@contextmanager
def _ours(scratch: Path, planted: str) -> Iterator[Storage]:
    with _store(scratch) as (endpoint, flip):
        extra: dict[str, Any] = {"stores": endpoint, "load": "always", "lookup_timeout_s": 5.0, "timeout_s": 5.0}
        extra |= {"verify_local": False} if planted == UNVERIFIED else {}
        module = f"mooncake_zmq.{'prove.planted' if planted else 'vllm.connector'}"
        transfer = _both(OURS) | {"kv_connector_module_path": module, "kv_connector_extra_config": extra}
        yield Storage(transfer, {PLANTED_VARIABLE: planted}, flip)


@contextmanager
def _mooncake(scratch: Path, _planted: str) -> Iterator[Storage]:
    """vLLM's connector for Mooncake's store, over ours."""
    with _store(scratch) as (endpoint, flip):
        shim = scratch / "shim"
        shim.mkdir()
        install(shim)
        config = {"metadata_server": "", "master_server_address": endpoint, "protocol": "tcp", "local_buffer_size": 1 << 20}
        (scratch / "mooncake.json").write_text(json.dumps(config))
        environment = {"MOONCAKE_CONFIG_PATH": str(scratch / "mooncake.json"), "PYTHONPATH": f"{ROOT}{os.pathsep}{shim}"}
        yield Storage(_both("MooncakeStoreConnector"), environment, flip)


@contextmanager
def _lmcache(scratch: Path, _planted: str) -> Iterator[Storage]:
    """LMCache in the engine's process, with a directory as its disk."""
    directory = scratch / "lmcache"
    directory.mkdir()
    environment = {
        "LMCACHE_CHUNK_SIZE": "32",
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.25",
        "LMCACHE_LOCAL_DISK": f"file://{directory}/",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "1",
    }
    yield Storage(_both("LMCacheConnectorV1"), environment, partial(_flip_files, directory))


CONNECTORS = {"none": _without, OURS: _ours, "MooncakeStoreConnector": _mooncake, "LMCacheConnectorV1": _lmcache}
"""Connectors by name; "none" is the engine's own prefix cache."""


def _both(name: str) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both"}


@contextmanager
def _store(scratch: Path) -> Iterator[tuple[str, Flip]]:
    """Serve a store of ours in this process; yields its endpoint."""
    with TemporaryDirectory(prefix="mczmq-prove-", dir="/dev/shm") as memory:
        store = StoreServer(
            settings=ObjectSettings(object_bytes=OBJECT_BYTES, slab_bytes=SLAB_BYTES),
            directory=memory,
            cluster="prove",
            node="store",
            incarnation=1,
            endpoint=f"ipc://{scratch}/store.sock",
            on_crash=lambda _: None,
        )
        try:
            yield store.endpoint, partial(_flip_files, Path(memory), last_bytes=OBJECT_BYTES)
        finally:
            store.close()


def _flip_files(directory: Path, random: Random, *, last_bytes: int = 0) -> bool:
    """Flip bits in the files below a directory. `last_bytes`: only there; 0: in all of a file."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.stat().st_size >= MIN_FILE_BYTES]
    for _ in range(FLIPS if files else 0):
        with random.choice(files).open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            at = random.randrange(max(0, size - last_bytes) if last_bytes else 0, size)
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << random.randrange(8)]))
    return bool(files)
