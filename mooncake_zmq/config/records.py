"""The records of a deployment's settings: one for each section of its file, and one for each node."""

import os
import re
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Literal, cast, get_args

from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.keys import NAME_PATTERN
from mooncake_zmq.core.messages import MAX_BLOCKS, MAX_MODEL_NAME, MAX_MODELS, MAX_TOKENS
from mooncake_zmq.core.roles import BECOMES, ENGINE_ROLES, Role
from mooncake_zmq.core.session import SessionSettings
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.engine.cpu import Backend, Device
from mooncake_zmq.gateway.settings import AnswersSettings, ConnectionSettings, EdgeSettings, RequestsSettings
from mooncake_zmq.pool.node.settings import CacheNodeSettings
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.telemetry.log import LEVELS, LogFormat
from mooncake_zmq.transfer.sockets import BadEndpoint, check_endpoint
from mooncake_zmq.vllm_node.settings import VllmSettings

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")
"""The origin of a page, as browsers write it."""
ENDPOINT = re.compile(r"https?://[^/?#\s]+")
"""The URL of a collector of spans."""


OF_ONE_MODEL: tuple[Role, ...] = ("conductor", "vllm")
"""Roles that each of several models has nodes of its own of."""


def default_runtime_dir() -> str:
    """Return the default runtime directory: short, private to the user, and removed at reboot; it holds locks, sockets and
    logs. A systemd unit sets another one."""
    if given := os.environ.get("RUNTIME_DIRECTORY"):
        return given.partition(":")[0]
    base = os.environ.get("XDG_RUNTIME_DIR")
    return f"{base}/mooncake_zmq" if base and Path(base).is_dir() else f"/tmp/mooncake_zmq-{os.getuid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Settings of the deployment as a whole."""

    name: str = "local"
    runtime_dir: str = field(default_factory=default_runtime_dir)
    """The directory of locks, ipc sockets, logs and state dumps. ipc paths must stay below 107 bytes, so keep it short."""
    shm_dir: str = "/dev/shm"
    """The tmpfs in which segments of KV blocks are created."""
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
    """Settings of the one model of the cluster."""

    path: str = "default"
    """The model: "default", "toy", "dummy:CONFIG", a GGUF file or a Hugging Face directory."""
    engine: Literal["own", "vllm", "none"] = "own"
    """Which engine computes. "vllm": only vLLM does. Then only config.json, tokenizer and chat template are read, of any model
    that vLLM supports, from the Hugging Face directory `path`, which every host needs without its weights. "none": no node
    computes; cache-nodes store the values of engines that are no part of this deployment, and `path` is not read."""
    name: str = ""
    """The name by which clients ask for the model: printable text without spaces. Empty: that of its directory or file. With
    engine "vllm" it is also the name that nodes compare instead of the directory's."""
    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters that vLLMs serve with the model (`--enable-lora --lora-modules NAME=DIRECTORY`); each is a model
    of its own to clients. Requests for one go to the vLLMs that list it, which a node asks with each health check."""
    task: Literal["generate", "embed"] = "generate"
    """The work of the model. "embed": its vLLMs give vectors of texts (`vllm serve MODEL --runner pooling`), which clients
    get at `/v1/embeddings` alone; nothing of it is in a pool."""
    cache_dir: str = ""
    """The directory of converted weights; empty: the user's cache directory."""
    card: str = ""
    """The output of `mooncake-zmq model card MODEL` on a host with the model. From it conductors, cache-nodes and gateways get
    shape and fingerprints on hosts without the model; a gateway needs the tokenizer beside it (`--to DIR` writes both).
    Prefills and decodes do not read it. Empty: the other nodes read what an engine of their host has prepared, and wait for
    that."""
    block_tokens: int = 32
    """The tokens in a block. 32 of the default model are 1.41 MiB, exactly 360 pages, so a slot wastes nothing; a request
    computes half a block again on average, while keys, index and messages stay small."""
    kv_codec: Literal["exact", "int8", "k8v4", "int4"] = "exact"
    """How blocks hold KV, in slots, on SSDs and between nodes: as it is computed, or rounded to 8.25, 6.25 or 4.25 bits a
    number (head_dim 64) instead of 32. With int8 and k8v4 an answer from the pool is the one without it, as KV is rounded when
    it is computed; with int4 it may be another one. For our own engine on CPUs; one codec for a whole deployment."""
    max_model_len: int = 8192
    """The most tokens of a request, prompt and output; the model's own limit if that is lower."""

    def __post_init__(self) -> None:
        if self.name and not _is_model_name(self.name):
            raise ValueError(f"name must be printable text without spaces, of at most {MAX_MODEL_NAME} characters")
        if self.adapters and self.engine != "vllm":
            raise ValueError('adapters are for engine "vllm"')
        if self.task == "embed" and self.engine != "vllm":
            raise ValueError('task "embed" is for engine "vllm"')
        if not all(map(_is_model_name, self.adapters)):
            raise ValueError(f"adapters have names of printable text without spaces, of at most {MAX_MODEL_NAME} characters")
        if len(set(self.adapters)) < len(self.adapters) or self.name in self.adapters:
            raise ValueError("adapters: a name is given twice")
        if not 1 <= self.block_tokens <= 4096:
            raise ValueError("block_tokens must be between 1 and 4096")
        if self.engine != "own" and self.card:
            raise ValueError(f'card is for models that our own engine computes: with engine "{self.engine}" leave it out')
        if self.engine != "own" and self.kv_codec != "exact":
            raise ValueError('kv_codec is for blocks of our own engine: with another engine leave it "exact"')
        if self.kv_codec != "exact" and self.path == "toy":
            raise ValueError("kv_codec: the toy engine computes with whole numbers, which no codec keeps")
        if self.max_model_len < 2:
            raise ValueError("max_model_len must be at least 2")
        most = min(MAX_TOKENS, MAX_BLOCKS * self.block_tokens)
        if self.max_model_len > most:
            raise ValueError(f"max_model_len must be at most {most}: a message carries no more tokens or blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class OneOfModels(ModelSettings):
    """Settings of one of several models; [model] has those that it leaves out."""

    costs: dict[str, Any] = field(default_factory=dict)
    """The costs of this model. With a `profile` among them nothing of [costs] is used, otherwise what they leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Settings of one node. `settings` replaces keys of its role's section for this node only."""

    name: str
    role: Role
    model: str = ""
    """The one of `models` that a conductor or vLLM is for; gateways and cache-nodes are for all. Empty: the deployment has one
    model."""
    host: str = "localhost"
    """The host of the node. Nodes with the same host share memory; those on different ones use the network, even on one
    machine."""
    endpoint: str = ""
    """The address of the control plane: "tcp://ADDRESS:PORT" or "ipc://PATH". The node listens there and other nodes connect
    to the same text, so ADDRESS is an IPv4 address of its machine, no name and no wildcard. Empty: an ipc socket in
    runtime_dir. That also serves nodes of different `host`s while all run on one machine, which cannot be checked here; across
    machines, set addresses."""
    data_endpoint: str = ""
    """The address of the data plane, in the same form."""
    data_stream_port: int = 0
    """The TCP port for the bytes of blocks, at the address of `data_endpoint`. 0: any free one; set it where a firewall must
    allow it."""
    store_endpoint: str = ""
    """The address to which store clients (`mooncake_zmq.store`) of a cache-node connect, in the same form. Empty: no store,
    and no memory for it."""
    store_stream_port: int = 0
    """The TCP port for the bytes of stored values, at the address of `store_endpoint`. 0: any free one; set it where a
    firewall must allow it."""
    threads: int = 1
    """The number of threads that compute; with the backend "numpy", decode uses more than one for its largest products
    only."""
    backend: str = "auto"
    """The backend of a prefill or decode. "compiled" is machine code made for this CPU: decode is several times faster; it
    needs the extra of that name. "numpy" needs nothing. "auto" is "compiled" where that is available, otherwise "numpy".
    "modelled:PROFILE" computes nothing, but takes the time that other hardware would, with KV of the model's layout, to try a
    deployment under load. PROFILE is a file that `mooncake-zmq profile` wrote there, or a name such as a800-llama3-70b."""
    device: Device = "cpu"
    """The device on which a prefill or decode computes and keeps its KV, and a prefill its slab. "cuda" is the first GPU that
    the process sees (CUDA_VISIBLE_DEVICES) and needs the extra gpu-cu12 or gpu-cu13. Written without a GPU at hand, not yet
    run on one."""
    metrics_host: str = "127.0.0.1"
    """The IPv4 address at which the node serves metrics to Prometheus. One beyond loopback needs
    `security.allow_open_metrics`, and a network or firewall that lets only Prometheus through: callers are not
    authenticated."""
    metrics_port: int = 0
    """The port of /metrics on `metrics_host`; 0: none. A gateway always serves its metrics at its own /metrics too."""
    may_become: Role | Literal[""] = ""
    """The other role of a prefill ("decode") or of a decode ("prefill"): a conductor may then ask it to finish its requests
    and restart in that role, and back again; see `conductor.role_change_after_s` and `mooncake-zmq role`. A process that
    starts, after a crash too, has `role`. In the other role it has that role's section without `settings`."""
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what in ("name", "host"):
            if not NAME_PATTERN.fullmatch(getattr(self, what)):
                raise ValueError(f"{what} must be 1 to 63 of a-z, 0-9, '.', '_', '-'")
        if self.name == "up":
            raise ValueError("up is the name by which `mooncake-zmq up` locks its directory: name the node otherwise")
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
        """The roles that it may have, one at a time."""
        return (self.role, self.may_become) if self.may_become else (self.role,)

    def in_role(self, role: Role) -> "NodeSettings":
        """Return the settings of the node in one of its roles."""
        return self if role == self.role else replace(self, role=role, may_become=self.role, settings={})

    @property
    def modelled(self) -> str:
        """The profile by which it models an engine; empty if it computes."""
        kind, _, profile = self.backend.partition(":")
        return profile if kind == "modelled" else ""

    @property
    def prepared_for(self) -> Backend:
        """The backend for which it needs the model's weights."""
        if self.modelled or self.device != "cpu" or self.role not in ENGINE_ROLES:
            return "numpy"
        return cast(Backend, self.backend)

    @property
    def computes(self) -> bool:
        """Whether it holds the model's weights."""
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
    """Settings of who may connect over TCP. `ipc://` sockets are in `cluster.runtime_dir`, which only this user can enter, and
    need no keys."""

    keys: str = ""
    """The directory that `mooncake-zmq keys make` wrote: `public_keys` and the node's NAME.secret, unless the unit's
    credential `node.key` is that. Empty: no keys, or the unit's credential `public_keys`. With keys every ZeroMQ socket over
    TCP is encrypted and admits only peers named in them, on loopback too. The streams of blocks and values admit holders of a
    ticket from those sockets."""
    allow_plain_tcp: bool = False
    """Whether TCP beyond loopback is allowed without keys, because no one else is on the network."""
    allow_open_metrics: bool = False
    """Whether a node may serve metrics beyond loopback. Callers at `metrics_port` are not authenticated, so this allows anyone
    who can connect to read the node's metrics, which include names of tenants."""
    encrypt_bulk: bool = True
    """Whether blocks and values that this node serves over TCP are encrypted (AES-256-GCM), if there are keys. Without it only
    the opening of a stream is authenticated, by a ticket: anyone who can read the network's traffic can read them, and anyone
    who can alter it can replace them. That is faster where encryption is the bottleneck (`mooncake-zmq bench pool --only
    keys`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Settings of a gateway: its HTTP address, the limits of connections and calls, its requests."""

    http_host: str = "127.0.0.1"
    http_port: int = 8000
    reuse_port: bool = False
    """Whether gateways of one host and user may listen on one address: the kernel distributes new connections among those that
    run, and a gateway that drains stops listening first. To distinguish them, `/health` names the gateway, and each has its
    own `metrics_port`."""
    api_keys: str = ""
    """The file that `mooncake-zmq keys api` wrote: which callers are allowed, how often, and how much. It is read again when
    it changes. Empty: the unit's credential `api_keys`. Without one a gateway serves its own machine only: it listens on
    loopback and accepts only that name."""
    allow_open: bool = False
    """Whether anyone who can connect may call a gateway without `api_keys`, from other machines and by any host name (that of
    a proxy, say), and read its metrics. `/cluster` and `/trace` then answer its own machine only, and the number of reused
    tokens is reported only for calls with a `cache_salt`, as both reveal what other clients asked. A gateway without keys does
    not start beyond loopback unless this is set."""
    tls_certificate: str = ""
    """The PEM file of the certificate and its chain, for HTTPS (TLS 1.2 and newer) in place of HTTP. Both files are read again
    when they change. Empty: the unit's credentials `tls.crt` and `tls.key`; without them it serves HTTP."""
    tls_key: str = ""
    """The PEM file of its private key, unencrypted, which must not be readable by everyone."""
    cors_origins: tuple[str, ...] = ()
    """The origins whose pages in a browser may call this gateway and read its answers: "https://chat.example.org", or "*" for
    all. A call that needs an API key needs it from there too. Empty: none."""
    usage_directory: str = ""
    """The directory in which the gateway counts the calls and tokens of each API key by day, for `mooncake-zmq usage`; it is
    made if it does not exist. A line is appended each second in which calls ended. Empty: none."""
    otlp_endpoint: str = ""
    """The collector that receives spans of requests as OTLP over HTTP: "http://HOST:4318". Needs the extra `otel`. Empty:
    none."""
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    edge: EdgeSettings = field(default_factory=EdgeSettings)
    answers: AnswersSettings = field(default_factory=AnswersSettings)
    requests: RequestsSettings = field(default_factory=RequestsSettings)
    """The settings of requests; if `conductors` is empty, it is those of this file, in its order."""

    def __post_init__(self) -> None:
        if not 1 <= self.http_port < 65536:
            raise ValueError("http_port must be between 1 and 65535")
        if self.http_host.startswith("["):
            raise ValueError(f"http_host: write {self.http_host.strip('[]')}, without brackets")
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
    """Settings of a whole deployment. An actor receives its own section only."""

    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    models: dict[str, OneOfModels] = field(default_factory=dict)
    """Models behind the same gateways and on the same stores, each with conductors and vLLMs of its own. Empty: [model] is the
    only one."""
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
        for node in self.nodes if self.model.kv_codec != "exact" else ():
            if node.device != "cpu" or node.modelled:
                raise ValueError(
                    f"model.kv_codec {self.model.kv_codec!r} is for engines that compute on a CPU: node {node.name} has "
                    f"{'a modelled engine' if node.modelled else f'device {node.device!r}'}"
                )
        self._check_selection()
        self._check_kv_budget()
        if self.model.path == "toy" and any(node.device != "cpu" for node in self.nodes):
            raise ValueError("nodes: the toy model computes on the CPU alone: leave device out")
        if self.model.engine == "vllm" and (own := self.of_role(*ENGINE_ROLES)):
            raise ValueError(f'nodes: {own[0].name} is a {own[0].role}, and with model.engine "vllm" only vllm nodes compute')
        if self.model.engine == "none":
            for node in self.nodes:
                if node.role != "cache-node" or not node.store_endpoint:
                    raise ValueError(f'nodes: {node.name}: with model.engine "none" all are cache-nodes with a store_endpoint')
        if self.prefill.chunk_tokens % self.model.block_tokens:
            raise ValueError(f"prefill.chunk_tokens must be a multiple of model.block_tokens, {self.model.block_tokens}")
        self._check_models()
        self._check_ladder()

    def _check_selection(self) -> None:
        """Check that decodes which choose what they attend to compute with floats on a CPU."""
        for node in self.nodes:
            section = {"selection": self.decode.selection, **(node.settings if node.role == "decode" else {})}
            if "decode" not in node.roles or section["selection"] == "none":
                continue
            why = f"node {node.name} has a modelled engine" if node.modelled else ""
            why = why or ("the toy engine attends to nothing" if self.model.path == "toy" else "")
            if why := why or self._not_exact_on_cpu(node):
                raise ValueError(f"decode.selection is for exact KV that our own engine computes on a CPU: {why}")

    def _check_kv_budget(self) -> None:
        """Check that where requests may have KV dropped all engines are our own, on CPUs, with exact KV."""
        own = [(node.name, node.settings.get("edge", {})) for node in self.of_role("gateway")]
        default = self.gateway.edge.kv_budget
        allowing = [name for name, edge in own if (edge.get("kv_budget", default) if isinstance(edge, dict) else default)]
        for node in self.of_role(*ENGINE_ROLES, "vllm") if allowing else ():
            why = f"node {node.name} is a vLLM" if node.role == "vllm" else self._not_exact_on_cpu(node)
            if why:
                text = f"gateway.edge.kv_budget of {allowing[0]} is for exact KV that our own engine computes on a CPU"
                raise ValueError(f"{text}: {why}")

    def _not_exact_on_cpu(self, node: NodeSettings) -> str:
        """Return why the KV of a node is not exact KV in the memory of a CPU; empty: it is."""
        if node.device != "cpu":
            return f"node {node.name} has device {node.device!r}"
        return f"model.kv_codec is {self.model.kv_codec!r}" if self.model.kv_codec != "exact" else ""

    def _check_models(self) -> None:
        """Check that each node is for one of the models, or for all of them."""
        if self.models and any(each.engine != "vllm" for each in (self.model, *self.models.values())):
            raise ValueError('models: several models need model.engine = "vllm": the pool of our own engine has blocks of one')
        if len(self.models) > MAX_MODELS:
            raise ValueError(f"models: {len(self.models)} are more than {MAX_MODELS}")
        for name in self.models:
            if not NAME_PATTERN.fullmatch(name):
                raise ValueError(f"models: {name!r}: a table's name must be 1 to 63 of a-z, 0-9, '.', '_', '-'")
        there = ", ".join(self.models) or "none"
        for node in self.nodes:
            if node.model and node.model not in self.models:
                raise ValueError(f"nodes: {node.name}: there is no model {node.model!r} in [models]; there are {there}")
            if node.model and node.role not in OF_ONE_MODEL:
                raise ValueError(f"nodes: {node.name}: a {node.role} is for all models: leave model out")
            if self.models and not node.model and node.role in OF_ONE_MODEL:
                raise ValueError(f"nodes: {node.name}: say which model this {node.role} is for: model is one of {there}")
        for name in self.models:
            lacking = [role for role in OF_ONE_MODEL if not any(n.model == name and n.role == role for n in self.nodes)]
            if lacking:
                raise ValueError(f"nodes: no {lacking[0]} has model = {name!r}: each model needs a conductor and a vllm")
        given = [name for each in self.models.values() for name in (each.name, *each.adapters) if name]
        if repeated := sorted({name for name in given if given.count(name) > 1}):
            raise ValueError(f"models: two of them are called {repeated[0]!r}: give one of them another name")

    def _check_ladder(self) -> None:
        """Check that heartbeat_s * 3 <= peer_timeout_s (asserted in SessionSettings) < lease_ttl_s <= max_lease_s."""
        for role, client in (("prefill", self.prefill.pool), ("decode", self.decode.pool)):
            if not self.session.peer_timeout_s < client.lease_ttl_s:
                raise ValueError(f"{role}.pool.lease_ttl_s must be above session.peer_timeout_s")
            if not client.lease_ttl_s <= self.cache_node.max_lease_s:
                raise ValueError(f"{role}.pool.lease_ttl_s must be at most cache_node.max_lease_s")

    def node(self, name: str) -> NodeSettings:
        """Return the node called `name`; raises ConfigError with the names that exist."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise ConfigError(f"there is no node {name!r}; there are {', '.join(node.name for node in self.nodes) or 'none'}")

    def of_role(self, *roles: Role) -> list[NodeSettings]:
        """Return the nodes with one of `roles`, in the file's order: the order in which gateways try conductors."""
        return [node for node in self.nodes if node.role in roles]

    @property
    def backend(self) -> Backend:
        """The backend for which the model must be prepared: "compiled" if any node computes with it, otherwise "auto" if one
        does."""
        wanted = {node.prepared_for for node in self.nodes}
        return "compiled" if "compiled" in wanted else "auto" if "auto" in wanted else "numpy"

    def endpoint(self, node: NodeSettings) -> str:
        """Return the address on which `node` listens for messages."""
        return node.endpoint or f"ipc://{self.cluster.runtime_dir}/{node.name}.ipc"

    def listens(self, node: NodeSettings) -> list[str]:
        """Return all ZeroMQ addresses on which `node` listens."""
        return [self.endpoint(node), self.data_endpoint(node), *([node.store_endpoint] if node.store_endpoint else [])]

    def data_endpoint(self, node: NodeSettings) -> str:
        """Return the address at which `node` serves its blocks to other hosts."""
        return node.data_endpoint or f"ipc://{self.cluster.runtime_dir}/{node.name}.data.ipc"


def _is_ipv4(text: str) -> bool:
    try:
        return bool(IPv4Address(text))
    except ValueError:
        return False


def _is_model_name(text: str) -> bool:
    return 0 < len(text) <= MAX_MODEL_NAME and text.isprintable() and " " not in text
