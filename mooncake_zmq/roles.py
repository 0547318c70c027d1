"""The settings, the actor and the segment setting of each role, in one table for configuration, processes and simulation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_zmq.conductor.conductor import Conductor
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.actor import Actor
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.roles import Role
from mooncake_zmq.decode.decode import Decode
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.gateway.requests.requests import Requests
from mooncake_zmq.gateway.settings import RequestsSettings
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.node.cache_node import CacheNode
from mooncake_zmq.pool.node.disk_tier import DiskContents
from mooncake_zmq.pool.node.settings import CacheNodeSettings
from mooncake_zmq.prefill.prefill import Prefill
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.vllm_node.settings import VllmSettings
from mooncake_zmq.vllm_node.vllm_node import VllmNode


@dataclass(frozen=True, slots=True)
class Parts:
    """The classes of a role. `actor` is built from name, host, incarnation, settings and layout; `segment_setting` names the
    setting with the bytes of its segment, if it has one."""

    settings: type[Any]
    actor: Callable[..., Actor]
    segment_setting: str = ""
    costs: bool = False
    """Whether the actor predicts times and is therefore given the costs."""

    def segment_slots(self, settings: Any, layout: BlockLayout) -> int:
        """Return the slots of a node with these settings; 0 for a role without a segment."""
        return getattr(settings, self.segment_setting) // layout.slot_bytes if self.segment_setting else 0


PARTS: Mapping[Role, Parts] = {
    "conductor": Parts(ConductorSettings, Conductor, costs=True),
    "prefill": Parts(PrefillSettings, Prefill, "slab_bytes", costs=True),
    "decode": Parts(DecodeSettings, Decode, costs=True),
    "cache-node": Parts(CacheNodeSettings, CacheNode, "pool_bytes"),
    "vllm": Parts(VllmSettings, VllmNode, costs=True),
    "gateway": Parts(RequestsSettings, Requests),
}


def make_actor(
    role: Role,
    *,
    name: str,
    host: str,
    incarnation: int,
    settings: Any,
    layout: BlockLayout,
    costs: Costs,
    disk: DiskContents | None = None,
    may_become: str = "",
) -> Actor:
    """Return the actor for one incarnation of a node. `disk`: the contents of a cache-node's SSD; `may_become`: see
    `core.drain`."""
    parts = PARTS[role]
    more: dict[str, Any] = {"costs": costs} if parts.costs else {}
    if disk is not None and role == "cache-node":
        more["disk"] = disk
    if may_become:
        more["may_become"] = may_become
    return parts.actor(name=name, host=host, incarnation=incarnation, settings=settings, layout=layout, **more)
