"""Settings in `kv_connector_extra_config`. PURE except for the key variables of a store's client."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mooncake_zmq.kv.codec import CODECS, EXACT, Codec
from mooncake_zmq.store.client.api import read_setup
from mooncake_zmq.store.client.peer import ClientSettings
from mooncake_zmq.vllm.ledger import HOLD_LEFT_S

STAGING_BYTES = 64 << 20
MOST_COPY_THREADS = 8
LOOKUP_TIMEOUT_S = 0.5
COMING_TIMEOUT_S = 1.0
MOVE_TIMEOUT_S = 2.0
LOAD = ("faster", "always")
IMAGES = ("gateways", "all")


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """`endpoints`: given as `stores`, in the form of `MooncakeDistributedStore.setup`. `client`: each of its settings by
    name; its `timeout_s`, by default 2, is the longest silence of a store while blocks are copied."""

    endpoints: tuple[str, ...]
    client: ClientSettings
    prefix: str = ""
    """Prefix of every name: a tenant's namespace."""
    model: str = ""
    """Identity of the weights, where their files do not show it; two models must not have the same."""
    staging_bytes: int = STAGING_BYTES
    """Pinned host memory for loads, and as much for saves, where the KV is on a GPU."""
    codec: Codec | None = None
    """How blocks are stored; None: as they are."""
    copy_threads: int = 0
    """Threads that copy one load in parallel, and as many for a save; 0: one, or for KV on a GPU a quarter of the cores, at
    most four."""
    lookup_timeout_s: float = LOOKUP_TIMEOUT_S
    """Timeout of a lookup; a store that exceeds it counts as empty, and is not asked again until it answers a ping. It
    delays one request by that time, and the engine not at all."""
    load: str = "faster"
    """Which blocks of the pool are loaded: "faster", those for which loading is faster than computing, or "always", all."""
    images: str = "gateways"
    """Prompts with images that are looked up and saved: "gateways", those of a gateway of ours, which names no image, or "all".
    A client may name an image by `uuid`, of which vLLM makes what looks like a digest of the image."""
    copies: int = 1
    """Hosts in whose stores each block is saved: this one and, of the others, the next. With 2, the KV of an answer outlives
    its host."""
    coming_timeout_s: float = COMING_TIMEOUT_S
    """How long a request that another engine prefilled waits for blocks that are still being saved, before it computes them."""

    @property
    def asking(self) -> ClientSettings:
        """Settings of the client for lookups, which touch no values."""
        return replace(self.client, timeout_s=self.lookup_timeout_s, share_memory=False)


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Parse the settings; raises ValueError for invalid ones."""
    values = dict(extra)
    stores = values.pop("stores", "")
    addresses = stores if isinstance(stores, str) else ",".join(map(str, stores))
    own: dict[str, Any] = {"prefix": str(values.pop("prefix", "")), "model": str(values.pop("model", ""))}
    own["staging_bytes"] = int(values.pop("staging_bytes", STAGING_BYTES))
    own["copy_threads"] = int(values.pop("copy_threads", 0))
    if not 0 <= own["copy_threads"] <= MOST_COPY_THREADS:
        raise ValueError(f"copy_threads: {own['copy_threads']} is not within 0 to {MOST_COPY_THREADS}")
    own["load"] = str(values.pop("load", "faster"))
    if own["load"] not in LOAD:
        raise ValueError(f"load: {own['load']!r} is none of {', '.join(LOAD)}")
    own["images"] = str(values.pop("images", "gateways"))
    if own["images"] not in IMAGES:
        raise ValueError(f"images: {own['images']!r} is none of {', '.join(IMAGES)}")
    codec = str(values.pop("kv_codec", EXACT))
    if codec not in (EXACT, *CODECS):
        raise ValueError(f"kv_codec: {codec!r} is none of {EXACT}, {', '.join(CODECS)}")
    own["codec"] = CODECS.get(codec)
    own["lookup_timeout_s"] = float(values.pop("lookup_timeout_s", LOOKUP_TIMEOUT_S))
    own["coming_timeout_s"] = float(values.pop("coming_timeout_s", COMING_TIMEOUT_S))
    if not addresses:
        raise ValueError("stores: names no store")
    own["copies"] = int(values.pop("copies", 1))
    _, endpoints, client = read_setup({"master_server_addr": addresses, "timeout_s": MOVE_TIMEOUT_S, **values})
    if client.ttl_s < (least_s := HOLD_LEFT_S + 2 * own["lookup_timeout_s"]):
        raise ValueError(f"ttl_s: {client.ttl_s:g} is less than {least_s:g}, so that no promise would hold until it is read")
    if not 1 <= own["copies"] <= len(endpoints):
        raise ValueError(f"copies: {own['copies']} is not within 1 to {len(endpoints)}, the number of stores")
    return ConnectorSettings(tuple(endpoints), client, **own)
