"""The cluster of every seed: the live actors with settings small enough that pools evict, decodes preempt, leases expire."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.actor import Actor
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import MAX_TOKENS, Part
from mooncake_zmq.core.roles import BECOMES, ROLES, Role
from mooncake_zmq.core.routes import may_connect
from mooncake_zmq.core.session import SessionSettings
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.gateway.settings import RequestsSettings
from mooncake_zmq.kv.events import Medium
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.node.client import PoolClientSettings
from mooncake_zmq.pool.node.disk_tier import DiskContents
from mooncake_zmq.pool.node.settings import CacheNodeSettings, KvEventsSettings, SsdSettings
from mooncake_zmq.pool.rules.tenants import PoolTenant
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.roles import PARTS, make_actor
from mooncake_zmq.simulation.engine import sim_layout
from mooncake_zmq.simulation.models import MODELS, OF_ONE, OF_SEVERAL, Computes
from mooncake_zmq.simulation.world import ProcessSpec
from mooncake_zmq.vllm_node.settings import VllmSettings

BLOCK_TOKENS = 8
SLOT_BYTES = sim_layout(BLOCK_TOKENS).slot_bytes
HOSTS = ("a", "b", "c")
CONDUCTORS = ("conductor-1", "conductor-2")
POOLS = tuple(f"cache-node-{host}" for host in HOSTS)
MEMBERS = tuple(f"{role}-{host}" for role in ("prefill", "decode", "cache-node") for host in HOSTS)
VLLMS: Mapping[str, Part] = {"b": "both", "c": "both"}
VLLMS_DISAGGREGATED: Mapping[str, Part] = {"a": "decode", "b": "prefill", "c": "decode"}
VLLM_PAIR: Mapping[str, Part] = {"a": "decode", "b": "prefill"}
"""The hosts whose vLLMs only prefill or only decode: each of them is the only one of its part, and stands in for the other."""
VLLMS_OF_MODELS = {f"{host}{number}": model for number, model in enumerate(MODELS, 1) for host in HOSTS[:2]}
"""The model of each vLLM where there are several models: every one is on both of two hosts. A place begins with its host."""
CONDUCTORS_OF_MODELS = {f"conductor-{number}": model for number, model in enumerate(MODELS, 1)}
CHANGEABLE = tuple(f"{role}-{host}" for role in BECOMES for host in HOSTS[:2])
"""Prefills and decodes that may change their role: not all of them, so that there is always one of each."""
LITTLE_TOKENS = 160
"""The KV of each decode where they lend: many prompts have no room in it."""
LONGEST_OF_LITTLE = 2 * LITTLE_TOKENS
"""No request of theirs has more prompt and output: two decodes hold it."""
LENDER_TIMEOUT_S = 1.0
CHOSEN_TOKENS = 60
"""The tokens that decodes choose where they do: many prompts have more, with the first and last ones."""
GRACE_S = 0.05
"""The grace of a drain, which many answers outlast."""
POOL = PoolClientSettings(lease_ttl_s=3.0, fetch_s=1.0, max_puts=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Sizes and times of the simulated cluster."""

    session: SessionSettings = SessionSettings(heartbeat_s=0.4, peer_timeout_s=1.3, retransmit_s=0.3)
    gateway: RequestsSettings = RequestsSettings(
        conductors=CONDUCTORS, deadline_s=30.0, placement_wait_s=4.0, stall_s=4.0, max_attempts=40, backoff_max_s=0.5
    )
    conductor: ConductorSettings = ConductorSettings(
        members=MEMBERS,
        ttft_slo_s=6.0,
        expected_output_tokens=8,
        booking_ttl_s=5.0,
        role_change_after_s=1.0,
    )
    costs: Costs = Costs(
        prefill_token_s=1e-3,
        kv_bytes_per_token=48,
        load_bytes_per_s=4e5,
        transfer_bytes_per_s=1.3e5,
        decode_step_s=0.0139,
        decode_request_s=0.0011,
    )
    prefill: PrefillSettings = PrefillSettings(
        slab_bytes=48 * SLOT_BYTES,
        chunk_tokens=32,
        meet=True,
        meet_chunk_tokens=2 * BLOCK_TOKENS,
        blend_least_tokens=BLOCK_TOKENS,
        max_active=3,
        overtake=1.0,
        work_deadline_s=6.0,
        drain_grace_s=GRACE_S,
        pool=POOL,
    )
    decode: DecodeSettings = DecodeSettings(
        capacity_tokens=304,
        max_batch=6,
        max_requests=8,
        pull_deadline_s=3.0,
        step_deadline_s=5.0,
        drain_grace_s=GRACE_S,
        pool=POOL,
    )
    cache_node: CacheNodeSettings = CacheNodeSettings(
        pool_bytes=32 * SLOT_BYTES,
        max_lease_s=8.0,
        fetch_lease_s=3.0,
        fetch_batch_blocks=4,
        probe_s=0.5,
        ssd=SsdSettings(bytes=40 * SLOT_BYTES, ahead=0.5, batch_blocks=6, write_s=3.0, retry_max_s=2.0),
        tenants=(
            PoolTenant(name="blue", dram_bytes=8 * SLOT_BYTES, ssd_bytes=10 * SLOT_BYTES),
            PoolTenant(name="red", dram_bytes=6 * SLOT_BYTES),
        ),
        kv_events=KvEventsSettings(endpoint="the checkers"),
    )
    vllm: VllmSettings = VllmSettings(
        max_running=1, max_queued=3, capacity_tokens=600, probe_s=0.5, probe_timeout_s=0.5, quiet_s=5.0, drain_grace_s=GRACE_S
    )
    vllm_parts: Mapping[str, Part] = field(default_factory=dict)
    """The part of each vLLM, by its host or by a name that begins with it where several are on a host."""
    hosts: tuple[str, ...] = HOSTS
    watched: bool = False
    """Whether an operator looks at the cluster by its gateways."""
    starved: bool = False
    """Whether its processes get no CPU now and then, and no conversation ends."""
    suspended: bool = False
    """Whether some of its hosts are suspended and go on."""
    vllms_alone: bool = False
    """Whether only vLLMs compute."""
    computes: tuple[Computes, ...] = (("", ""),)
    """The models and adapters that chats ask for."""
    models: Mapping[str, str] = field(default_factory=dict)
    """The model of each conductor and vLLM where there are several, behind the same gateways and on the same pools."""
    layout: BlockLayout = field(default_factory=lambda: sim_layout(BLOCK_TOKENS))

    @classmethod
    def of_seed(cls, seed: int, *, of_models: bool = False, lending: bool = False) -> "ClusterSettings":
        """Return the settings of a seed. Of three seeds one has vLLMs among the others, or in a third of these seeds alone,
        which in half of them prefill and decode separately, and otherwise, where they are alone, are of several models; one
        computes longer prompts in pipelines of up to three prefills, one decodes several steps in a work, and in half of these
        seeds its prefills blend, while in the other half its decodes choose what they attend to. Of five, one is watched. Of
        eight, one is starved. Of four, one has hosts that are suspended. `of_models`: all are of several models. `lending`:
        decodes lend each other all of their little KV, and of four seeds one has prompts elsewhere whole."""
        plain = cls(watched=seed % 5 == 4, starved=seed % 8 == 6, suspended=seed % 4 == 1)
        if lending:
            little = replace(plain.decode, capacity_tokens=LITTLE_TOKENS, lend_tokens=LITTLE_TOKENS, borrow=True)
            little = replace(little, max_steps=1 + seed % 2 * 4, own_tokens=0 if seed % 4 == 3 else MAX_TOKENS)
            little = replace(little, lender_timeout_s=LENDER_TIMEOUT_S)
            conductor = replace(plain.conductor, longest_request=LONGEST_OF_LITTLE)
            return replace(plain, watched=False, decode=little, conductor=conductor)
        if of_models or seed % 18 == 6:
            return plain._with_models()
        if seed % 3 == 2:
            blend = seed % 2 == 1
            decode = replace(plain.decode, max_steps=5, selection="none" if blend else "kcache", selection_tokens=CHOSEN_TOKENS)
            return replace(plain, decode=decode, prefill=replace(plain.prefill, blend=blend))
        if seed % 3 == 0:
            parts = (VLLM_PAIR if seed % 4 == 1 else VLLMS_DISAGGREGATED) if seed % 2 else VLLMS
            alone = seed % 9 == 6
            others = POOLS if alone else MEMBERS
            members = (*others, *(f"vllm-{host}" for host in parts))
            conductor = replace(plain.conductor, members=members)
            plain = replace(plain, vllm_parts=parts, vllms_alone=alone, conductor=conductor)
            if not alone:
                return plain
            return replace(plain, computes=OF_ONE, vllm=plain._roomier())
        conductor = replace(
            plain.conductor,
            pipeline_stages=3,
            pipeline_min_tokens=3 * BLOCK_TOKENS,
            pipeline_chunk_tokens=2 * BLOCK_TOKENS,
        )
        return replace(plain, conductor=conductor, prefill=replace(plain.prefill, chunk_tokens=2 * BLOCK_TOKENS))

    def _with_models(self) -> "ClusterSettings":
        """Return these settings with three models and 20 adapters on two hosts, which vLLMs alone compute."""
        hosts = HOSTS[:2]
        members = (*(f"cache-node-{host}" for host in hosts), *(f"vllm-{place}" for place in VLLMS_OF_MODELS))
        return replace(
            self,
            hosts=hosts,
            vllm_parts=dict.fromkeys(VLLMS_OF_MODELS, "both"),
            vllms_alone=True,
            models=CONDUCTORS_OF_MODELS | {f"vllm-{place}": model for place, model in VLLMS_OF_MODELS.items()},
            computes=OF_SEVERAL,
            gateway=replace(self.gateway, conductors=tuple(CONDUCTORS_OF_MODELS)),
            conductor=replace(self.conductor, members=members),
            vllm=self._roomier(),
        )

    def _roomier(self) -> VllmSettings:
        """Return the settings of vLLMs that compute alone: a single one may have some model or adapter."""
        return replace(self.vllm, max_running=2, max_queued=8)

    def of_role(self, role: Role) -> Any:
        """Return the settings of one role's nodes."""
        return getattr(self, role.replace("-", "_"))


def shares_of(settings: CacheNodeSettings) -> dict[Medium, dict[str, int]]:
    """Return the number of blocks that each tenant may have of each tier of a pool."""
    return {
        Medium.CPU: {each.name: each.dram_bytes // SLOT_BYTES for each in settings.tenants if each.dram_bytes},
        Medium.DISK: {each.name: each.ssd_bytes // SLOT_BYTES for each in settings.tenants if each.ssd_bytes},
    }


def processes(settings: ClusterSettings) -> list[ProcessSpec]:
    """Return the specs of 2 gateways, the conductors, on each host a cache-node and, unless vLLMs compute alone, a prefill and
    a decode, and on some a vLLM or several."""
    hosts, conductors = settings.hosts, settings.gateway.conductors
    places = {f"gateway-{i + 1}": hosts[i] for i in range(2)}
    places |= {name: hosts[i % len(hosts)] for i, name in enumerate(conductors)}
    for role in ("cache-node",) if settings.vllms_alone else ("prefill", "decode", "cache-node"):
        places |= {f"{role}-{host}": host for host in hosts}
    parts = {f"vllm-{place}": part for place, part in settings.vllm_parts.items()}
    places |= {f"vllm-{place}": place[0] for place in settings.vllm_parts}
    connected = partial(
        may_connect,
        pipelines=settings.conductor.pipeline_stages > 1,
        watched=settings.watched,
        disaggregated=len(set(parts.values())) > 1,
        lending=settings.decode.borrow,
    )
    return [
        ProcessSpec(
            name=name,
            role=role,
            host=host,
            peers=tuple(
                other
                for other, there in places.items()
                if other != name
                and connected(_roles_of(name), host, _roles_of(other), there)
                and _together(settings.models, name, other)
            ),
            make=partial(_make, settings, role, name, host),
            slots=PARTS[role].segment_slots(settings.of_role(role), settings.layout),
            disk_slots=settings.cache_node.ssd.bytes // SLOT_BYTES if role == "cache-node" else 0,
            may_become=BECOMES[role] if name in CHANGEABLE else "",
            part=parts.get(name, "both"),
            model=settings.models.get(name, ""),
        )
        for name, host in places.items()
        for role in _roles_of(name)
    ]


def _together(models: Mapping[str, str], one: str, other: str) -> bool:
    """Return whether two nodes have to do with each other: both are for one model, or either is for all."""
    mine, theirs = models.get(one, ""), models.get(other, "")
    return mine == theirs or not (mine and theirs)


def _roles_of(name: str) -> tuple[Role, ...]:
    """Return the roles of a node, the configured one first."""
    role = next(role for role in ROLES if name.startswith(f"{role}-"))
    return (role, BECOMES[role]) if name in CHANGEABLE else (role,)


def _make(settings: ClusterSettings, role: Role, name: str, host: str, incarnation: int, disk: DiskContents) -> Actor:
    return make_actor(
        role,
        name=name,
        host=host,
        incarnation=incarnation,
        settings=_settings_of(settings, role, name),
        layout=settings.layout,
        costs=settings.costs,
        disk=disk,
        may_become=BECOMES[role] if name in CHANGEABLE else "",
        models=dict.fromkeys(settings.models.values(), settings.layout) or None,
    )


def _settings_of(settings: ClusterSettings, role: Role, name: str) -> Any:
    """Return the settings of a node: those of its role, as far as they are for all nodes of that."""
    if role == "vllm":
        return replace(settings.vllm, part=settings.vllm_parts[name.removeprefix("vllm-")])
    if role == "conductor" and settings.models:
        members = tuple(each for each in settings.conductor.members if _together(settings.models, name, each))
        return replace(settings.conductor, members=members)
    return settings.of_role(role)
