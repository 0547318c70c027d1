"""The modelled cluster of a `Setup`: its processes, their settings, their peers.

Each prefill and each decode has a host of its own with a cache-node, whose pool is the host's DRAM; decodes have one unless
`laboratory.decode_pools` is unset. It receives the prompts whose KV was handed to the decode, which loads them from there for
the next turn. The blocks that a decode completes are in no trace. A prefill reuses what its engine's memory still holds, as the
live one does; in the paper it does not (`prefill.own_reuse=false`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, get_type_hints

import msgspec

from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.actor import Actor
from mooncake_zmq.core.roles import BECOMES, Role
from mooncake_zmq.core.routes import may_connect
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.gateway.settings import RequestsSettings
from mooncake_zmq.kv.layout import BlockLayout, div_ceil
from mooncake_zmq.laboratory.keys import check_block_tokens
from mooncake_zmq.laboratory.machine import lab_layout
from mooncake_zmq.laboratory.study import Arrival, Setup
from mooncake_zmq.pool.node.disk_tier import DiskContents
from mooncake_zmq.pool.node.settings import CacheNodeSettings, SsdSettings
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.roles import make_actor
from mooncake_zmq.simulation.world import ProcessSpec

CONDUCTOR, GATEWAY = "conductor-1", "gateway-1"
OWN_HOST = "front"
"""The host of conductor and gateway."""
CHUNK_TOKENS = 2048
"""Assumed, as vLLM's default: a quarter of a second on the paper's nodes, for which a short prompt waits for a long one's
chunk, and others for its blocks."""
REPORT_S = 1.0
"""Assumed: nodes report their loads this often, since the conductor itself counts its placements in between. 0.25 s gives the
same decisions for a third more events."""
MAX_STEPS = 64
"""Decode steps in one work, which ends early when a request is ready to join."""
FETCH_TOKENS = 1024
"""Tokens that a cache-node requests from another one at a time: links serve by bytes and in order, so that the last layers of a
request would otherwise wait for most of another one's prefix."""
ORDERS = {"fcfs": 0.0, "shortest": 1.0}
"""`prefill.overtake` by name."""
QUEUED = 1 << 16
"""Jobs that a prefill queues: a replay is to show them waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSettings:
    """The settings of a run that are neither hardware nor an actor's."""

    decode_pools: bool = True
    """Whether the hosts of decodes have a cache-node too."""
    message_s: float = 0.0005
    """Seconds that a message takes between processes."""
    change_roles: bool = False
    """Whether every prefill may become a decode and every decode a prefill, see `conductor.role_change_after_s`. Each then has
    a cache-node beside it: without one a prefill would have nothing to reuse."""
    change_s: float = 20.0
    """Assumed: seconds from the end of a drained process to its first request in the other role, most of them to load the
    weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All inputs from which the processes of a run are made."""

    lab: LabSettings
    conductor: ConductorSettings
    prefill: PrefillSettings
    decode: DecodeSettings
    cache_node: CacheNodeSettings
    gateway: RequestsSettings
    layout: BlockLayout
    disk_blocks: int


def cluster_of(setup: Setup, arrivals: Sequence[Arrival]) -> Cluster:
    """Return the settings of a setup. Raises ValueError for an override of an unknown name or with an impossible value."""
    if setup.order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {setup.order!r}")
    layout, node = lab_layout(check_block_tokens(setup.block_tokens)), setup.hardware
    size, slot = layout.block_tokens, layout.slot_bytes
    longest = max((div_ceil(a.input_tokens + a.output_tokens, size) for a in arrivals), default=1)
    most = sum(div_ceil(a.input_tokens, size) for a in arrivals) + longest  # a larger pool would never be full
    pool_blocks = max(1, min(node.dram_tokens // size, most))
    disk_blocks = min(node.disk_tokens // size, most)
    cluster = Cluster(
        lab=LabSettings(),
        conductor=ConductorSettings(ttft_slo_s=setup.ttft_slo_s, tbt_slo_s=setup.tbt_slo_s),
        prefill=PrefillSettings(
            slab_bytes=max(node.decode_tokens // size, 2 * longest) * slot,
            chunk_tokens=max(size, CHUNK_TOKENS // size * size),
            max_queued=QUEUED,
            report_s=REPORT_S,
            overtake=ORDERS[setup.order],
        ),
        decode=DecodeSettings(
            capacity_tokens=node.decode_tokens,
            max_batch=node.max_batch,
            max_requests=4 * node.max_batch,
            report_s=REPORT_S,
            max_steps=MAX_STEPS,
            store_output=False,
        ),
        cache_node=CacheNodeSettings(
            pool_bytes=pool_blocks * slot,
            report_s=REPORT_S,
            fetch_batch_blocks=max(1, FETCH_TOKENS // size),
            ssd=SsdSettings(bytes=max(1, disk_blocks) * slot, write_s=600.0),
        ),
        gateway=RequestsSettings(conductors=(CONDUCTOR,), max_open=1 << 20),
        layout=layout,
        disk_blocks=disk_blocks,
    )
    named: dict[str, object] = {"conductor.policy": setup.policy, "conductor.admission": setup.admission}
    for name, value in (named | setup.overrides).items():
        cluster = _override(cluster, name.split("."), value, name)
    if cluster.prefill.blend:
        raise ValueError(
            "prefill.blend: a trace does not name the tokens in which parts are found; `mooncake-zmq bench blend` does"
        )
    if cluster.decode.choice:
        raise ValueError("decode.selection: its steps cost what no cost model knows; `mooncake-zmq bench select` measures them")
    return cluster


def _override(settings: Any, path: list[str], value: object, name: str) -> Any:
    """Return `settings` with one value changed, of theirs or of those within them."""
    head = {"cache-node": "cache_node", "laboratory": "lab"}.get(path[0], path[0])
    inner = getattr(settings, head, None)
    if head not in {field.name for field in fields(settings)} or (is_dataclass(inner) != (len(path) > 1)):
        raise ValueError(f"there is no setting {name}")
    if len(path) > 1:
        return replace(settings, **{head: _override(inner, path[1:], value, name)})
    try:
        return replace(settings, **{head: msgspec.convert(value, get_type_hints(type(settings))[head])})
    except msgspec.ValidationError as error:
        raise ValueError(f"{name} cannot be {value!r}: {error}") from None


def places(setup: Setup, lab: LabSettings) -> dict[str, tuple[Role, str]]:
    """Return the role and host of every process."""
    named: dict[str, tuple[Role, str]] = {CONDUCTOR: ("conductor", OWN_HOST), GATEWAY: ("gateway", OWN_HOST)}
    decode_pools = lab.decode_pools or lab.change_roles
    for role, count, pools in (("prefill", setup.prefill, True), ("decode", setup.decode, decode_pools)):
        for number in range(1, count + 1):
            host = f"{role[0]}{number}"
            named[f"{role}-{number}"] = ("prefill" if role == "prefill" else "decode", host)
            if pools:
                named[f"cache-node-{host}"] = ("cache-node", host)
    return named


def specs(setup: Setup, cluster: Cluster, gateway: Callable[[], Actor]) -> list[ProcessSpec]:
    """Return the processes, with `gateway` in the gateway's place."""
    named = places(setup, cluster.lab)
    roles = {name: roles_of(role, cluster.lab) for name, (role, _) in named.items()}
    are_peers = partial(may_connect, pipelines=cluster.conductor.pipeline_stages > 1)
    return [
        ProcessSpec(
            name=name,
            role=role,
            host=host,
            peers=tuple(
                other
                for other, (_, there) in named.items()
                if other != name and are_peers(roles[name], host, roles[other], there)
            ),
            make=partial(_make, setup, cluster, gateway, name, role, host),
            disk_slots=cluster.disk_blocks if role == "cache-node" else 0,
            may_become=BECOMES[role] if len(roles[name]) > 1 else "",
        )
        for name, (_, host) in named.items()
        for role in roles[name]
    ]


def roles_of(role: Role, lab: LabSettings) -> tuple[Role, ...]:
    """Return all roles that a process may have in turn, its first one first."""
    return (role, BECOMES[role]) if lab.change_roles and role in BECOMES else (role,)


def _make(
    setup: Setup,
    cluster: Cluster,
    gateway: Callable[[], Actor],
    name: str,
    role: Role,
    host: str,
    incarnation: int,
    disk: DiskContents,
) -> Actor:
    if role == "gateway":
        return gateway()
    settings: Mapping[Role, Any] = {
        "conductor": cluster.conductor,
        "prefill": cluster.prefill,
        "decode": cluster.decode,
        "cache-node": cluster.cache_node,
    }
    return make_actor(
        role,
        name=name,
        host=host,
        incarnation=incarnation,
        settings=settings[role],
        layout=cluster.layout,
        costs=setup.hardware.costs,
        disk=disk,
        may_become=BECOMES[role] if len(roles_of(role, cluster.lab)) > 1 else "",
    )
