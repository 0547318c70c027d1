"""What an operator says in `kv_connector_extra_config`. PURE but for the key variables of a store's client."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mooncake_zmq.store.client.api import read_setup
from mooncake_zmq.store.client.peer import ClientSettings

STAGING_BYTES = 64 << 20
MOST_COPY_THREADS = 8
LOOKUP_TIMEOUT_S = 0.5
COMING_TIMEOUT_S = 1.0
MOVE_TIMEOUT_S = 2.0
LOAD = ("faster", "always")


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """`endpoints`: said as `stores`, as `MooncakeDistributedStore.setup` takes them. `client`: each of its settings by name;
    its `timeout_s`, 2 unless said, is the longest silence of a store while blocks are copied."""

    endpoints: tuple[str, ...]
    client: ClientSettings
    prefix: str = ""
    """Before every name: a tenant's namespace."""
    model: str = ""
    """Identity of the weights, where their files do not tell; two models must not have the same."""
    staging_bytes: int = STAGING_BYTES
    """Pinned host memory for loads, and as much for saves, where the KV is on a GPU."""
    copy_threads: int = 0
    """Of a load, side by side, and as many of a save; 0: one, or with KV on a GPU a quarter of the cores, four at most."""
    lookup_timeout_s: float = LOOKUP_TIMEOUT_S
    """Of a question; a store that takes longer has nothing, and is asked nothing more until it answers a ping. It costs one
    request so much, the engine nothing."""
    load: str = "faster"
    """Which blocks of the pool are loaded: those that are sooner there for it, or "always" all."""
    coming_timeout_s: float = COMING_TIMEOUT_S
    """How long a request that another engine prefilled waits for blocks that are still being saved; then it computes them."""

    @property
    def asking(self) -> ClientSettings:
        """For lookups, which touch no values."""
        return replace(self.client, timeout_s=self.lookup_timeout_s, share_memory=False)


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Raises ValueError for what cannot be followed."""
    told = dict(extra)
    stores = told.pop("stores", "")
    addresses = stores if isinstance(stores, str) else ",".join(map(str, stores))
    own: dict[str, Any] = {"prefix": str(told.pop("prefix", "")), "model": str(told.pop("model", ""))}
    own["staging_bytes"] = int(told.pop("staging_bytes", STAGING_BYTES))
    own["copy_threads"] = int(told.pop("copy_threads", 0))
    if not 0 <= own["copy_threads"] <= MOST_COPY_THREADS:
        raise ValueError(f"copy_threads: {own['copy_threads']} is not within 0 to {MOST_COPY_THREADS}")
    own["load"] = str(told.pop("load", "faster"))
    if own["load"] not in LOAD:
        raise ValueError(f"load: {own['load']!r} is none of {', '.join(LOAD)}")
    own["lookup_timeout_s"] = float(told.pop("lookup_timeout_s", LOOKUP_TIMEOUT_S))
    own["coming_timeout_s"] = float(told.pop("coming_timeout_s", COMING_TIMEOUT_S))
    if not addresses:
        raise ValueError("stores: names no store")
    _, endpoints, client = read_setup({"master_server_addr": addresses, "timeout_s": MOVE_TIMEOUT_S, **told})
    return ConnectorSettings(tuple(endpoints), client, **own)
