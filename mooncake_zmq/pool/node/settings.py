"""The settings of a cache-node."""

from dataclasses import dataclass, field

from mooncake_zmq.core.messages import MAX_BLOCKS, MAX_FETCHED_BLOCKS, MAX_SECONDS
from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.rules.tenants import PoolTenant, check_shares

RETRY_S = 1.0
"""The first pause before a disk that is full or fails is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdSettings:
    """The pool's second tier: files on this host's SSD, found again after a restart."""

    directory: str = ""
    """Where the files lie, each node's in a directory of its name below this one. Empty: no SSD tier."""
    bytes: int = 16 << 30
    """Room for blocks on the SSD. Files grow to this as they fill."""
    threads: int = 4
    """Reads and writes in flight at the disk."""
    ahead: float = 0.25
    """The coldest share of the DRAM pool that is kept on SSD as well, so that making room there never waits for a write.
    1: everything is written as soon as the disk is idle, and survives a crash; else what DRAM alone held is lost with it."""
    batch_blocks: int = 64
    """Blocks written at a time. Each batch costs two syncs, which small blocks do not outweigh in small ones."""
    write_s: float = 60.0
    """A batch that takes longer has failed."""
    retry_max_s: float = 60.0
    """A disk that is full or fails is tried again after a second, then after twice as long each time, up to this."""

    def __post_init__(self) -> None:
        if self.bytes <= 0:
            raise ValueError("ssd.bytes must be positive")
        if not 1 <= self.threads <= 256:
            raise ValueError("ssd.threads must be between 1 and 256")
        if not 0 <= self.ahead <= 1:
            raise ValueError("ssd.ahead must be between 0 and 1")
        if not 1 <= self.batch_blocks <= MAX_BLOCKS:
            raise ValueError(f"ssd.batch_blocks must be in 1..{MAX_BLOCKS}")
        if self.write_s <= 0:
            raise ValueError("ssd.write_s must be positive")
        if self.retry_max_s < RETRY_S:
            raise ValueError(f"ssd.retry_max_s must be at least {RETRY_S:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsSettings:
    """KV events in vLLM's format, for routers outside the cluster."""

    endpoint: str = ""
    """Where subscribers connect, such as "tcp://*:5557". Empty: no events."""
    replay_endpoint: str = ""
    """Where a subscriber asks for what it missed, such as "tcp://*:5558". Empty: no replay."""
    topic: str = ""
    tokens: bool = True
    """Events carry the token ids of the blocks that come: of all tenants' prompts. Without, they carry keys alone, by which no
    router can match a prompt, and no tokens are kept in the pool or in the index on SSD."""
    format: str = "map"
    """"map": as vLLM since June 2026; "array": as before, and as SGLang."""

    def __post_init__(self) -> None:
        if self.format not in ("map", "array"):
            raise ValueError('kv_events.format must be "map" or "array"')


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNodeSettings:
    """The pool of one host."""

    pool_bytes: int = 1 << 30
    """DRAM for blocks. 1 GiB holds about 23,000 tokens of the default model."""
    max_lease_s: float = 60.0
    """Longest lease granted, whatever was asked: a holder that hangs keeps blocks no longer."""
    fetch_lease_s: float = 20.0
    """Lease taken at another cache-node for the time of a fetch."""
    fetch_batch_blocks: int = 32
    """Blocks asked of a source at a time; the answer must fit a message. Several sources, two batches each, are under way for
    one lease."""
    probe_s: float = 1.0
    """How often a writer past its lease is asked again, and its process's lock looked at."""
    max_leases_per_client: int = 1024
    """Leases one client may hold; a further one is answered with no blocks."""
    max_put_share: float = 0.5
    """Part of the pool that one client may have reserved, or in quarantine after it ran late; past it its puts are denied."""
    report_s: float = 0.5
    """How often the conductors are sent what fetching takes, while anything is fetched and for half a minute after. A fetch
    takes from milliseconds to seconds, and one report averages several of them."""
    max_requested_copies: int = 8
    """Copies requested by conductors that are made at a time; further requests are ignored."""
    ssd: SsdSettings = field(default_factory=SsdSettings)
    tenants: tuple[PoolTenant, ...] = ()
    """Shares of the pool, by the names of API keys. Blocks of all other keys have no owner."""
    kv_events: KvEventsSettings = field(default_factory=KvEventsSettings)
    objects: ObjectSettings = field(default_factory=ObjectSettings)
    """Settings of the store for other engines, which a node serves if it has a `store_endpoint`."""

    def __post_init__(self) -> None:
        if self.pool_bytes <= 0:
            raise ValueError("pool_bytes must be positive")
        check_shares(self.tenants, self.pool_bytes, self.ssd.bytes if self.ssd.directory else 0)
        if min(self.max_lease_s, self.fetch_lease_s, self.probe_s, self.report_s) <= 0:
            raise ValueError("max_lease_s, fetch_lease_s, probe_s and report_s must be positive")
        if self.fetch_lease_s > self.max_lease_s:
            raise ValueError("fetch_lease_s must be at most max_lease_s, or the granter stops before the holder")
        if self.max_lease_s > MAX_SECONDS:
            raise ValueError(f"max_lease_s must be at most {MAX_SECONDS:g}")
        if not 1 <= self.fetch_batch_blocks <= MAX_FETCHED_BLOCKS:
            raise ValueError(f"fetch_batch_blocks must be in 1..{MAX_FETCHED_BLOCKS}")
        if min(self.max_leases_per_client, self.max_requested_copies) < 1:
            raise ValueError("max_leases_per_client and max_requested_copies must be at least 1")
        if not 0 < self.max_put_share <= 1:
            raise ValueError("max_put_share must be above 0 and at most 1")
