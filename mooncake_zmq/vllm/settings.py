"""What an operator says in `kv_connector_extra_config`. PURE but for the key variables of a store's client."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mooncake_zmq.store.client.api import read_setup
from mooncake_zmq.store.client.peer import ClientSettings

LOOKUP_TIMEOUT_S = 0.25
"""Of a question; a store that takes longer has nothing. It costs a request this much once a second, and the engine nothing."""
STAGING_BYTES = 64 << 20
MOVE_TIMEOUT_S = 2.0
"""Longest silence of a store while blocks are copied; a load then ends as far as it came."""


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """`endpoints`: said as `stores`, as `MooncakeDistributedStore.setup` takes them. `client`: each of its settings by name."""

    endpoints: tuple[str, ...]
    client: ClientSettings
    prefix: str = ""
    """Before every name: a tenant's namespace."""
    model: str = ""
    """Identity of the weights, where their files do not tell; two models must not have the same."""
    staging_bytes: int = STAGING_BYTES
    """Pinned host memory for loads, and as much for saves, where the KV is on a GPU."""

    @property
    def asking(self) -> ClientSettings:
        """For lookups."""
        return replace(self.client, timeout_s=min(self.client.timeout_s, LOOKUP_TIMEOUT_S), share_memory=False)

    @property
    def moving(self) -> ClientSettings:
        """For loads and saves."""
        return replace(self.client, timeout_s=min(self.client.timeout_s, MOVE_TIMEOUT_S))


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Raises ValueError for what cannot be followed."""
    told = dict(extra)
    stores = told.pop("stores", "")
    addresses = stores if isinstance(stores, str) else ",".join(map(str, stores))
    own: dict[str, Any] = {"prefix": str(told.pop("prefix", "")), "model": str(told.pop("model", ""))}
    own["staging_bytes"] = int(told.pop("staging_bytes", STAGING_BYTES))
    if not addresses:
        raise ValueError("stores: names no store")
    _, endpoints, client = read_setup({"master_server_addr": addresses, **told})
    return ConnectorSettings(tuple(endpoints), client, **own)
