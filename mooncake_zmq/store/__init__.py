"""A store for values of any size on a pool of cache-nodes, with the names and answers of Mooncake's Python store API."""

from mooncake_zmq.store.api import BufferHandle, MooncakeDistributedStore
from mooncake_zmq.store.replicas import (
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
