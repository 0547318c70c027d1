"""The records of a deployment's settings: one for each section of its file, and one for each node."""

import os
import re
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Literal, cast, get_args

from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.keys import NAME_PATTERN
from mooncake_zmq.core.messages import MAX_BLOCKS, MAX_TOKENS
from mooncake_zmq.core.roles import BECOMES, ENGINE_ROLES, Role
from mooncake_zmq.core.session import SessionSettings
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.engine.cpu import Backend, Device
from mooncake_zmq.gateway.settings import ConnectionSettings, EdgeSettings, RequestsSettings
from mooncake_zmq.pool.node.settings import CacheNodeSettings
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.telemetry.log import LEVELS, LogFormat
from mooncake_zmq.transfer.sockets import BadEndpoint, check_endpoint
from mooncake_zmq.vllm_node.settings import VllmSettings

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")
"""Of a page, as browsers write it."""
ENDPOINT = re.compile(r"https?://[^/?#\s]+")
"""Of a collector of spans."""


class ConfigError(Exception):
    """The operator's mistake, in one line that names where it is."""


def default_runtime_dir() -> str:
    """Short, private to the user, and gone at reboot: it holds locks, sockets and logs. A systemd unit says which it is."""
    if given := os.environ.get("RUNTIME_DIRECTORY"):
        return given.partition(":")[0]
    base = os.environ.get("XDG_RUNTIME_DIR")
    return f"{base}/mooncake_zmq" if base and Path(base).is_dir() else f"/tmp/mooncake_zmq-{os.getuid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """The deployment as a whole."""

    name: str = "local"
    runtime_dir: str = field(default_factory=default_runtime_dir)
    """Locks, ipc sockets, logs and state dumps. ipc paths must stay below 107 bytes, so keep it short."""
    shm_dir: str = "/dev/shm"
    """Where segments of KV blocks are made: a tmpfs."""
    drain_timeout_s: float = 30.0
    """A process that was asked to stop ends after this even if requests still run; prefills and decodes then hand theirs over,
    which takes a second at most. systemd waits 90 s."""
    log_format: LogFormat = "json"
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not NAME_PATTERN.fullmatch(self.name):
            raise ValueError("name must be 1 to 63 of a-z, 0-9, '.', '_', '-'")
        if not Path(self.runtime_dir).is_absolute() or not Path(self.shm_dir).is_absolute():
            raise ValueError("runtime_dir and shm_dir must be absolute paths")
        if self.drain_timeout_s <= 0:
            raise ValueError("drain_timeout_s must be positive")
        if self.log_level not in LEVELS:
            raise ValueError(f"log_level must be one of {', '.join(LEVELS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The one model of the cluster."""

    path: str = "default"
    """"default", "toy", "dummy:CONFIG", a GGUF file or a Hugging Face directory."""
    engine: Literal["own", "vllm"] = "own"
    """"vllm": vLLM alone computes. Only config.json, tokenizer and chat template are read, of any model that vLLM knows, from
    the Hugging Face directory `path`, which every host needs without its weights."""
    cache_dir: str = ""
    """Where converted weights are kept; empty: the user's cache directory."""
    card: str = ""
    """What `mooncake-zmq model card MODEL` printed where the model is. From it conductors, cache-nodes and gateways learn shape
    and fingerprints on hosts without the model; a gateway needs the tokenizer beside it (`--to DIR` writes both). Prefills and
    decodes do not read it. Empty: the others read what an engine of their host has prepared, and wait for that."""
    block_tokens: int = 32
    """Tokens in a block. 32 of the default model are 1.41 MiB, exactly 360 pages, so a slot wastes nothing; a request computes
    half a block again on average, while keys, index and messages stay small."""
    max_model_len: int = 8192
    """Most tokens of a request, prompt and output; the model's own limit if that is lower."""

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= 4096:
            raise ValueError("block_tokens must be between 1 and 4096")
        if self.engine == "vllm" and self.card:
            raise ValueError('card is for models that our own engine computes: with engine "vllm" leave it out')
        if self.max_model_len < 2:
            raise ValueError("max_model_len must be at least 2")
        most = min(MAX_TOKENS, MAX_BLOCKS * self.block_tokens)
        if self.max_model_len > most:
            raise ValueError(f"max_model_len must be at most {most}: a message carries no more tokens or blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """One process. `settings` replace keys of its role's section for this node alone."""

    name: str
    role: Role
    host: str = "localhost"
    """Nodes with the same host share memory; those on different ones use the network, even on one machine."""
    endpoint: str = ""
    """Control plane: "tcp://ADDRESS:PORT" or "ipc://PATH". The node listens there and the others connect to the same text, so
    ADDRESS is an IPv4 address of its machine, no name and no wildcard. Empty: an ipc socket in runtime_dir. That serves nodes
    of different `host`s too, while all run on one machine, which nothing here can tell; across machines, give addresses."""
    data_endpoint: str = ""
    """Data plane; likewise."""
    data_stream_port: int = 0
    """TCP port for the bytes of blocks, at the address of `data_endpoint`. 0: any free one; set it where a firewall has to let
    it through."""
    store_endpoint: str = ""
    """Cache-nodes: where store clients (`mooncake_zmq.store`) connect; likewise. Empty: no store, and no memory for it."""
    store_stream_port: int = 0
    """TCP port for the bytes of stored values, at the address of `store_endpoint`. 0: any free one; set it where a firewall
    has to let it through."""
    threads: int = 1
    """Threads that compute; with the backend "numpy", decode uses more than one for its largest products alone."""
    backend: str = "auto"
    """What a prefill or decode computes with. "compiled" is machine code made for this CPU: decode is several times faster; it
    needs the extra of that name. "numpy" needs nothing. "auto" is "compiled" where that can be had, else "numpy".
    "modelled:PROFILE" computes nothing, but takes the time that other hardware would, with KV of the model's layout: to try a
    deployment under load. PROFILE: a file that `mooncake-zmq profile` wrote there, or a name as a800-llama3-70b."""
    device: Device = "cpu"
    """Where a prefill or decode computes and keeps its KV, a prefill its slab too. "cuda" is the first GPU that the process
    sees (CUDA_VISIBLE_DEVICES) and needs the extra gpu-cu12 or gpu-cu13. Written without a GPU at hand, not yet run on one."""
    metrics_host: str = "127.0.0.1"
    """IPv4 address where Prometheus finds the node. One beyond loopback needs `security.allow_open_metrics`, and a network or
    firewall that lets only Prometheus through: nothing asks who calls there."""
    metrics_port: int = 0
    """Prometheus finds /metrics on `metrics_host` at this port; 0: none. A gateway shows its metrics at its own /metrics in any
    case."""
    may_become: Role | Literal[""] = ""
    """The other role of a prefill ("decode") or of a decode ("prefill"): a conductor may then ask it to finish what it has and
    come back as that, and back again; see `conductor.role_change_after_s` and `mooncake-zmq role`. A process that starts, after
    a crash too, has `role`. As the other it has that role's section as it stands, without `settings`."""
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what in ("name", "host"):
            if not NAME_PATTERN.fullmatch(getattr(self, what)):
                raise ValueError(f"{what} must be 1 to 63 of a-z, 0-9, '.', '_', '-'")
        if not _is_ipv4(self.metrics_host):
            raise ValueError("metrics_host must be an IPv4 address")
        if self.store_endpoint and self.role != "cache-node":
            raise ValueError("store_endpoint is for cache-nodes")
        if self.data_stream_port and not self.data_endpoint.startswith("tcp://"):
            raise ValueError("data_stream_port goes with a data_endpoint of tcp://")
        if self.store_stream_port and not self.store_endpoint.startswith("tcp://"):
            raise ValueError("store_stream_port goes with a store_endpoint of tcp://")
        if self.backend not in get_args(Backend) and not self.modelled:
            raise ValueError(f"{self.name}: backend {self.backend!r} is none of auto, numpy, compiled, modelled:PROFILE")
        if self.backend not in ("auto", "numpy") and self.role not in ENGINE_ROLES:
            raise ValueError(
                f"{self.name}: backend {self.backend!r} is for prefill and decode nodes, and this is a {self.role}"
            )
        if self.may_become and BECOMES.get(self.role) != self.may_become:
            raise ValueError(f"{self.name}: a {self.role} cannot become a {self.may_become}: only prefill and decode change")
        if self.device != "cpu":
            self._check_device()
        if not 1 <= self.threads <= 1024:
            raise ValueError("threads must be between 1 and 1024")
        for what in ("metrics_port", "data_stream_port", "store_stream_port"):
            if not 0 <= getattr(self, what) < 65536:
                raise ValueError(f"{what} must be between 0 and 65535")

    @property
    def roles(self) -> tuple[Role, ...]:
        """All that it may be in turn."""
        return (self.role, self.may_become) if self.may_become else (self.role,)

    def in_role(self, role: Role) -> "NodeSettings":
        """The node as it is in one of its roles."""
        return self if role == self.role else replace(self, role=role, may_become=self.role, settings={})

    @property
    def modelled(self) -> str:
        """The profile by which it models an engine; empty: it computes."""
        kind, _, profile = self.backend.partition(":")
        return profile if kind == "modelled" else ""

    @property
    def prepared_for(self) -> Backend:
        """The form in which it needs the model's weights."""
        if self.modelled or self.device != "cpu" or self.role not in ENGINE_ROLES:
            return "numpy"
        return cast(Backend, self.backend)

    @property
    def computes(self) -> bool:
        """Does it hold the model's weights?"""
        return self.role in ENGINE_ROLES and not self.modelled

    def _check_device(self) -> None:
        if self.role not in ENGINE_ROLES:
            raise ValueError(f"{self.name}: device {self.device!r} is for prefill and decode nodes, and this is a {self.role}")
        if self.backend not in ("auto", "numpy"):
            raise ValueError(f"{self.name}: device {self.device!r} needs backend 'numpy'; {self.backend!r} computes on the CPU")
        if self.threads != 1:
            raise ValueError(f"{self.name}: device {self.device!r} computes from one thread; leave threads at 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuritySettings:
    """Who may talk over TCP. `ipc://` sockets lie in `cluster.runtime_dir`, which is this user's alone, and need no keys."""

    keys: str = ""
    """Directory of `mooncake-zmq keys make`: `public_keys` and the node's NAME.secret, unless the unit's credential `node.key`
    is that. Empty: none, or the unit's credential `public_keys`. With keys every ZeroMQ socket over TCP is encrypted and lets
    in whom they name, loopback's too. The streams of blocks and values let in whom those sockets gave a ticket."""
    allow_plain_tcp: bool = False
    """Without keys, TCP beyond loopback is refused, unless this says that nobody else is on the network."""
    allow_open_metrics: bool = False
    """Nothing asks who calls at a node's `metrics_port`. A node whose `metrics_host` is beyond loopback does not start, unless
    this says that whoever reaches it may read its metrics, names of tenants among them."""
    encrypt_bulk: bool = True
    """With keys, blocks and values that this node serves over TCP are encrypted (AES-256-GCM). False: only who attaches a
    stream is asked for his ticket; whoever can listen on the network reads what passes, and who can change it under way may put
    something else in its place. Faster where encrypting is what bounds it (`mooncake-zmq bench pool --only keys`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """A gateway's parts: where it serves HTTP, the limits of connections and of calls, its requests."""

    http_host: str = "127.0.0.1"
    http_port: int = 8000
    reuse_port: bool = False
    """Gateways of one host and user may listen at one address: the kernel deals new connections out among those that run, and
    one that drains leaves first. To tell them apart, `/health` names who answers, and `metrics_port` is each one's own."""
    api_keys: str = ""
    """File of `mooncake-zmq keys api`: who may call, how often, and how much. Read anew when it changes. Empty: the unit's
    credential `api_keys`. Without one a gateway is for its own machine: it listens on loopback, and is called by that name."""
    allow_open: bool = False
    """Without `api_keys`: whoever reaches it may call it, from other machines and by any name (of a proxy, say), and see its
    metrics. `/cluster` and `/trace` then answer its own machine alone, and what was reused is told for a `cache_salt` alone, as
    both tell what others have asked. Beyond loopback a gateway without keys does not start unless this says so."""
    tls_certificate: str = ""
    """PEM file of the certificate and its chain: HTTPS, of TLS 1.2 and newer, in place of HTTP. Both files are read anew when
    they change. Empty: the unit's credentials `tls.crt` and `tls.key`; without them it is HTTP."""
    tls_key: str = ""
    """PEM file of its private key, unencrypted, which not everybody may read."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages in a browser may call this gateway and read what it answers: "https://chat.example.org", or "*" for
    all. A call that needs an API key needs it from there too. Empty: none."""
    otlp_endpoint: str = ""
    """Where spans of requests go as OTLP over HTTP: a collector, "http://HOST:4318". Needs the extra `otel`. Empty: nowhere."""
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    edge: EdgeSettings = field(default_factory=EdgeSettings)
    requests: RequestsSettings = field(default_factory=RequestsSettings)
    """`conductors` empty: those of this file, in its order."""

    def __post_init__(self) -> None:
        if not 1 <= self.http_port < 65536:
            raise ValueError("http_port must be between 1 and 65535")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key go together: set both")
        if self.edge.max_choices > self.requests.max_open:
            raise ValueError("edge.max_choices must not exceed requests.max_open, or such a call could never be served")
        if self.otlp_endpoint and not ENDPOINT.match(self.otlp_endpoint):
            raise ValueError(f"otlp_endpoint: {self.otlp_endpoint!r} is no URL of a collector: write http://HOST:4318")
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(f"cors_origins: {origin!r} is no origin: write SCHEME://HOST[:PORT], without a path, or *")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole deployment. An actor is handed its own section only."""

    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    session: SessionSettings = field(default_factory=SessionSettings)
    security: SecuritySettings = field(default_factory=SecuritySettings)
    costs: Costs = field(default_factory=Costs)
    conductor: ConductorSettings = field(default_factory=ConductorSettings)
    prefill: PrefillSettings = field(default_factory=PrefillSettings)
    decode: DecodeSettings = field(default_factory=DecodeSettings)
    cache_node: CacheNodeSettings = field(default_factory=CacheNodeSettings)
    vllm: VllmSettings = field(default_factory=VllmSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    nodes: tuple[NodeSettings, ...] = ()

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"nodes: the name {repeated[0]} is given twice")
        pools = [node.host for node in self.nodes if node.role == "cache-node"]
        if repeated := sorted({host for host in pools if pools.count(host) > 1}):
            raise ValueError(f"nodes: host {repeated[0]} has two cache-nodes; one process owns a host's pool")
        endpoints = [where for node in self.nodes for where in self.listens(node)]
        for endpoint in endpoints:
            try:
                check_endpoint(endpoint)
            except BadEndpoint as error:
                raise ValueError(f"nodes: {error}") from error
            if endpoints.count(endpoint) > 1:
                raise ValueError(f"nodes: two of them listen on {endpoint}")
        if self.model.path == "toy" and any(node.device != "cpu" for node in self.nodes):
            raise ValueError("nodes: the toy model computes on the CPU alone: leave device out")
        if self.model.engine == "vllm" and (own := self.of_role(*ENGINE_ROLES)):
            raise ValueError(f'nodes: {own[0].name} is a {own[0].role}, and with model.engine "vllm" only vllm nodes compute')
        if self.prefill.chunk_tokens % self.model.block_tokens:
            raise ValueError(f"prefill.chunk_tokens must be a multiple of model.block_tokens, {self.model.block_tokens}")
        self._check_ladder()

    def _check_ladder(self) -> None:
        """heartbeat_s * 3 <= peer_timeout_s (asserted in SessionSettings) < lease_ttl_s <= max_lease_s."""
        for role, client in (("prefill", self.prefill.pool), ("decode", self.decode.pool)):
            if not self.session.peer_timeout_s < client.lease_ttl_s:
                raise ValueError(f"{role}.pool.lease_ttl_s must be above session.peer_timeout_s")
            if not client.lease_ttl_s <= self.cache_node.max_lease_s:
                raise ValueError(f"{role}.pool.lease_ttl_s must be at most cache_node.max_lease_s")

    def node(self, name: str) -> NodeSettings:
        """The node called `name`; raises ConfigError with the names there are."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise ConfigError(f"there is no node {name!r}; there are {', '.join(node.name for node in self.nodes) or 'none'}")

    def of_role(self, *roles: Role) -> list[NodeSettings]:
        """The nodes with one of `roles`, in the file's order: the order in which gateways try conductors."""
        return [node for node in self.nodes if node.role in roles]

    @property
    def backend(self) -> Backend:
        """What the model is to be prepared for: "compiled" if any node computes with that, else "auto" if one does."""
        wanted = {node.prepared_for for node in self.nodes}
        return "compiled" if "compiled" in wanted else "auto" if "auto" in wanted else "numpy"

    def endpoint(self, node: NodeSettings) -> str:
        """Where `node` listens for messages."""
        return node.endpoint or f"ipc://{self.cluster.runtime_dir}/{node.name}.ipc"

    def listens(self, node: NodeSettings) -> list[str]:
        """All places where `node` listens by ZeroMQ."""
        return [self.endpoint(node), self.data_endpoint(node), *([node.store_endpoint] if node.store_endpoint else [])]

    def data_endpoint(self, node: NodeSettings) -> str:
        """Where `node` serves its blocks to other hosts."""
        return node.data_endpoint or f"ipc://{self.cluster.runtime_dir}/{node.name}.data.ipc"


def _is_ipv4(text: str) -> bool:
    try:
        return bool(IPv4Address(text))
    except ValueError:
        return False
