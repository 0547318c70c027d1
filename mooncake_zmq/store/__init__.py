"""A store for values of any size on a pool of cache-nodes, with the names and answers of Mooncake's Python store API.

`rules/` and `node.py` decide, `server/` carries out, `client/` is what applications import: found here by its names, and
loaded only then, as a cache-node or a simulation needs no client.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mooncake_zmq.store.client.api import BufferHandle, MooncakeDistributedStore
    from mooncake_zmq.store.client.replicas import (
        Descriptor,
        MemoryDescriptor,
        ObjectDataType,
        ReplicaDescriptor,
        ReplicaStatus,
        ReplicateConfig,
        SoftPinAction,
    )

__all__ = [
    "BufferHandle",
    "Descriptor",
    "MemoryDescriptor",
    "MooncakeDistributedStore",
    "ObjectDataType",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = "api" if name in ("BufferHandle", "MooncakeDistributedStore") else "replicas"
    return getattr(importlib.import_module(f"mooncake_zmq.store.client.{room}"), name)
