"""The settings, the actor and the segment setting of each role, in one table for configuration, processes and simulation. An
actor's module is imported when one is made: a node starts without those of the other roles."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.actor import Actor
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.roles import Role
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.gateway.settings import RequestsSettings
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.node.disk_tier import DiskContents
from mooncake_zmq.pool.node.settings import CacheNodeSettings
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.vllm_node.settings import VllmSettings


@dataclass(frozen=True, slots=True)
class Parts:
    """The classes of a role. `module` and `actor` name the class that is built from name, host, incarnation, settings and
    layout; `segment_setting` names the setting with the bytes of its segment, if it has one."""

    settings: type[Any]
    module: str
    actor: str
    segment_setting: str = ""
    costs: bool = False
    """Whether the actor predicts times and is therefore given the costs."""

    def made(self, **arguments: Any) -> Actor:
        """Return an actor of the role."""
        actor: Callable[..., Actor] = getattr(importlib.import_module(f"{__package__}.{self.module}"), self.actor)
        return actor(**arguments)

    def segment_slots(self, settings: Any, layout: BlockLayout) -> int:
        """Return the slots of a node with these settings; 0 for a role without a segment."""
        return getattr(settings, self.segment_setting) // layout.slot_bytes if self.segment_setting else 0


PARTS: Mapping[Role, Parts] = {
    "conductor": Parts(ConductorSettings, "conductor.conductor", "Conductor", costs=True),
    "prefill": Parts(PrefillSettings, "prefill.prefill", "Prefill", "slab_bytes", costs=True),
    "decode": Parts(DecodeSettings, "decode.decode", "Decode", costs=True),
    "cache-node": Parts(CacheNodeSettings, "pool.node.cache_node", "CacheNode", "pool_bytes"),
    "vllm": Parts(VllmSettings, "vllm_node.vllm_node", "VllmNode", costs=True),
    "gateway": Parts(RequestsSettings, "gateway.requests.requests", "Requests"),
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
    models: Mapping[str, BlockLayout] | None = None,
) -> Actor:
    """Return the actor for one incarnation of a node. `disk`: the contents of a cache-node's SSD; `may_become`: see
    `core.drain`. `models`: the layouts of several models, by identity, that a gateway serves."""
    parts = PARTS[role]
    more: dict[str, Any] = {"costs": costs} if parts.costs else {}
    if disk is not None and role == "cache-node":
        more["disk"] = disk
    if may_become:
        more["may_become"] = may_become
    if models is not None and role == "gateway":
        more["models"] = models
    return parts.made(name=name, host=host, incarnation=incarnation, settings=settings, layout=layout, **more)
