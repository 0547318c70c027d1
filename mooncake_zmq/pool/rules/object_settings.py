"""Settings of the store half of a pool. PURE."""

from dataclasses import dataclass, field

from mooncake_zmq.kv.layout import PAGE_BYTES
from mooncake_zmq.pool.rules.object_log import MIN_SEGMENTS, SEGMENT_BYTES, ObjectSsdSettings
from mooncake_zmq.pool.rules.tenants import StoreTenant, check_tenants


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings:
    """The second half of a cache-node: values of any size for store clients."""

    object_bytes: int = 1 << 30
    """Shared memory for values."""
    slab_bytes: int = 64 << 20
    """The largest value, and what classes of values above 1/128 of it take of the memory at a time; of smaller ones 1/16.
    64 MiB: a value of 4 KiB to 10 MiB wastes at most a seventh of its cell, one of 16 MiB nothing."""
    max_objects: int = 1 << 20
    """About 60 bytes of process memory each once in use, besides key and dict."""
    max_ttl_s: float = 30.0
    """Longest time for a put or a lease, whatever was asked."""
    max_leases_per_client: int = 1024
    """Leases of all clients with one key together, as a key may call itself by many names; a client without a key counts for
    itself. 1024: four streams of each of 256 engines."""
    max_puts_per_client: int = 1024
    """Counted in the same way."""
    max_client_share: float = 0.5
    """Part of the memory that one client may hold reserved or in quarantine; all clients with one key count as one."""
    ssd: ObjectSsdSettings = field(default_factory=ObjectSsdSettings)
    tenants: tuple[StoreTenant, ...] = ()
    """Tenants: who may use which keys over TCP, and how much they may take up. None: any key of the kind `store` may use all.
    Otherwise a key may use only its tenant's values; a client that connects by `ipc://`, as this user of the machine, may still
    use all."""

    def __post_init__(self) -> None:
        check_tenants(self.tenants)
        if self.slab_bytes < 1 << 16 or self.object_bytes < self.slab_bytes:
            raise ValueError("slab_bytes must be at least 65536 and object_bytes at least slab_bytes")
        if self.max_objects < 1 or min(self.max_leases_per_client, self.max_puts_per_client) < 1:
            raise ValueError("max_objects, max_leases_per_client and max_puts_per_client must be at least 1")
        if self.max_ttl_s <= 0 or not 0 < self.max_client_share <= 1:
            raise ValueError("max_ttl_s must be positive and max_client_share in (0, 1]")
        if self.ssd.directory and self.ssd.max_objects < 2 * self.max_objects:
            raise ValueError("objects.ssd.max_objects must be at least twice objects.max_objects")
        if self.ssd.directory and self.slab_bytes + PAGE_BYTES > SEGMENT_BYTES:
            raise ValueError(f"slab_bytes must be at most {SEGMENT_BYTES - PAGE_BYTES} where values go to disk")
        if self.ssd.directory and self.ssd.segment_bytes < self.slab_bytes + PAGE_BYTES:
            least = MIN_SEGMENTS * (self.slab_bytes + PAGE_BYTES)
            raise ValueError(f"objects.ssd.bytes must be at least {least}, eight values of slab_bytes; or lower slab_bytes")
