"""One TOML file per deployment, read once into nested frozen dataclasses; every error names the file and the path in it.

Precedence: command line, environment (`MOONCAKE_ZMQ_SECTION__KEY`), file, the profile of the costs, default. Unknown keys are
errors.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import structs

from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.hardware import HARDWARE
from mooncake_zmq.core.keys import NAME_PATTERN, KeysError
from mooncake_zmq.core.messages import MAX_BLOCKS, MAX_TOKENS
from mooncake_zmq.core.profile import Profile, ProfileError, decode, fit
from mooncake_zmq.core.roles import BECOMES, ENGINE_ROLES, ROLES, Role
from mooncake_zmq.core.session import SessionSettings
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.engine.backend import array_namespace
from mooncake_zmq.engine.cpu import Backend, Device, chosen
from mooncake_zmq.gateway.http.api_keys import api_keys_of
from mooncake_zmq.gateway.http.exposure import Judgement, judged, unasked
from mooncake_zmq.gateway.http.tls import tls_files_of
from mooncake_zmq.gateway.requests.otlp import OTEL, is_installed
from mooncake_zmq.gateway.settings import ConnectionSettings, EdgeSettings, RequestsSettings
from mooncake_zmq.pool.node.settings import CacheNodeSettings
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.telemetry.log import LEVELS, LogFormat
from mooncake_zmq.transfer.key_files import directory_of
from mooncake_zmq.transfer.shared_memory import needs_checksums
from mooncake_zmq.transfer.sockets import BadEndpoint, check_endpoint, is_loopback
from mooncake_zmq.vllm_node.settings import VllmSettings

ENVIRONMENT_PREFIX = "MOONCAKE_ZMQ_"
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


@dataclass(frozen=True, slots=True)
class Loaded:
    """A config and where each value that is no default came from, by dotted path."""

    path: str
    config: Config
    sources: Mapping[str, str]
    raw: Mapping[str, Any]

    def section(self, node: NodeSettings) -> Any:
        """The section of `node`'s role with its own `settings` laid over it."""
        name = node.role.replace("-", "_")
        if not node.settings:
            return getattr(self.config, name)
        kind = get_type_hints(Config)[name]
        where = f"nodes[{self.config.nodes.index(node)}].settings"
        _check_keys(node.settings, kind, self.path, f"{where}.")
        merged = _merge(self.raw.get(name, {}), node.settings)
        return _convert(merged, kind, self.path, self.sources, under=where)

    def check_addresses(self) -> None:
        """Raise ConfigError where gateways of a host listen at one address and not all of them share it, or a vLLM would where
        a node does."""
        taken: dict[tuple[str, str, int], str] = {}
        for node in self.config.of_role("gateway"):
            section = self.section(node)
            address = (node.host, section.http_host, section.http_port)
            shares = section.reuse_port and self.section(self.config.node(taken.get(address, node.name))).reuse_port
            if address in taken and not shares:
                raise ConfigError(
                    f"{self.path}: {taken[address]} and {node.name} listen on {address[1]}:{address[2]} of {node.host}: give "
                    "them ports of their own, or share it by gateway.reuse_port = true"
                )
            taken[address] = node.name
        own = {where: node.name for node in self.config.nodes for where in self.config.listens(node)}
        for node in self.config.of_role("vllm"):
            if (events := self.section(node).kv_events) in own:
                raise ConfigError(f"{self.path}: {node.name}: its vLLM would publish at {events}, where {own[events]} listens")

    def longest_request(self, max_model_len: int, block_tokens: int) -> int:
        """Tokens of prompt and output together: what the model takes, and the roomiest decode holds in whole blocks."""
        nodes = [self.section(node) for node in self.config.of_role("decode", "vllm")]
        blocks = [each.capacity_tokens // block_tokens for each in nodes if getattr(each, "part", "both") != "prefill"]
        return min(max_model_len, max(blocks) * block_tokens) if blocks else max_model_len


def load(path: str | Path, overrides: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> Loaded:
    """Read `path`, lay environment and command line (`overrides`, by dotted path) over it, check everything."""
    shown = str(path)
    raw = _read(Path(path), shown)
    _check_keys(raw, Config, shown, "")
    sources = {key: "file" for key in _paths(raw)}
    environment = os.environ if environment is None else environment
    for variable in sorted(environment):
        if variable.startswith(ENVIRONMENT_PREFIX) and "__" in variable:
            dotted = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            _override(raw, sources, dotted, environment[variable], f"environment {variable}")
    for dotted, value in (overrides or {}).items():
        _override(raw, sources, dotted, value, "command line")
    profiled = _profiled(raw.get("costs"), shown, "costs.profile")
    sources |= {f"costs.{key}": f"profile {raw['costs']['profile']}" for key in profiled}
    every_cost = asdict(Costs()) | profiled  # msgspec finds no defaults in a class of machine code
    config: Config = _convert(_merge({"costs": every_cost}, raw), Config, shown, sources)
    loaded = Loaded(shown, config, sources, raw)
    for position, node in enumerate(config.nodes):
        if node.modelled:
            costs_of(node.modelled, f"{shown}: nodes[{position}].backend")
        section = loaded.section(node)
        try:
            replace(config, **{node.role.replace("-", "_"): section})  # what holds for all must hold with its own settings too
        except ValueError as error:
            raise ConfigError(f"{shown}: nodes[{position}].settings: {error}") from None
    loaded.check_addresses()
    return loaded


def check_devices(nodes: Iterable[NodeSettings]) -> None:
    """Raise ConfigError where a node computes on a device that this machine does not have, or lacks the library for."""
    for node in nodes:
        try:
            array_namespace(node.device)
        except ValueError as error:
            raise ConfigError(f"{node.name}: {error}") from None


def check_local_reads(loaded: Loaded, nodes: Iterable[NodeSettings]) -> None:
    """Raise ConfigError where a node leaves out checksums that reads of shared memory need on this machine."""
    for node in nodes:
        for role in node.roles:
            if role not in ENGINE_ROLES or loaded.section(node.in_role(role)).pool.verify_local:
                continue
            if why := needs_checksums(f"{role}.pool.verify_local = false"):
                raise ConfigError(f"{loaded.path}: {node.name}: {why}")


def effective(loaded: Loaded) -> Iterator[tuple[str, Any, str]]:
    """Every setting as (dotted path, value, source)."""

    def walk(record: Any, under: str) -> Iterator[tuple[str, Any, str]]:
        for known in fields(record):
            value, dotted = getattr(record, known.name), f"{under}{known.name}"
            if is_dataclass(value):
                yield from walk(value, f"{dotted}.")
            elif dotted == "nodes":
                for position, node in enumerate(value):
                    yield from walk(node, f"nodes[{position}].")
            else:
                yield dotted, value, loaded.sources.get(dotted, "default")

    yield from walk(loaded.config, "")


def read_profile(path: str) -> Profile:
    """Raises ProfileError."""
    try:
        return decode(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise ProfileError(error.strerror or str(error)) from None


def costs_of(profile: str, where: str) -> Costs:
    """What a profile says that things cost: that in a file, or named hardware. Raises ConfigError."""
    return Costs(**_told(profile, where))


def _told(path: str, where: str) -> dict[str, Any]:
    if path in HARDWARE:
        found = asdict(HARDWARE[path]) | {"profile": path}
        del found["kv_bytes_per_token"]  # the model's here, not the one that was served there
        return found
    try:
        profile = read_profile(path)
        return structs.asdict(fit(profile)) | {"profiled_model": profile.fingerprint}
    except ProfileError as error:
        raise ConfigError(f"{where}: {path}: {error}") from None


def _profiled(costs: Any, shown: str, where: str) -> dict[str, Any]:
    """What the profile that the costs' section names says of the costs that the section leaves open."""
    path = costs.get("profile") if isinstance(costs, Mapping) else None
    if not path or not isinstance(path, str):
        return {}  # a value of another type is refused with the others
    return {key: value for key, value in _told(path, f"{shown}: {where}").items() if key not in costs}


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        merged[key] = _merge(lower, value) if isinstance(lower, Mapping) and isinstance(value, Mapping) else value
    return merged


def _read(path: Path, shown: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{shown}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{shown}: not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{shown}: not TOML: {error}") from None


def _check_keys(raw: Mapping[str, Any], kind: type[Any], shown: str, under: str) -> None:
    """Raise on a key that `kind` does not know. Values of the wrong shape are left to the conversion."""
    hints = get_type_hints(kind)
    for key, value in raw.items():
        path = f"{under}{key}"
        if key not in hints:
            near = ", ".join(sorted(hints))
            raise ConfigError(f"{shown}: {path}: unknown key; known here: {near}")
        if is_dataclass(hints[key]) and isinstance(value, Mapping):
            _check_keys(value, hints[key], shown, f"{path}.")
        elif (each := _record_of(hints[key])) is not None and isinstance(value, list):
            for position, record in enumerate(value):
                if isinstance(record, Mapping):
                    _check_keys(record, each, shown, f"{path}[{position}].")


def _record_of(kind: Any) -> type[Any] | None:
    """What a list of tables has in it, if `kind` is one."""
    found = next(iter(get_args(kind)), None) if get_origin(kind) is tuple else None
    return found if isinstance(found, type) and is_dataclass(found) else None


def _paths(raw: Mapping[str, Any], under: str = "") -> Iterator[str]:
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{under}{key}.")
        elif key == "nodes" and isinstance(value, list):
            for position, node in enumerate(value):
                if isinstance(node, Mapping):
                    yield from _paths(node, f"nodes[{position}].")
        else:
            yield f"{under}{key}"


def _override(raw: dict[str, Any], sources: dict[str, str], dotted: str, value: Any, source: str) -> None:
    kind: Any = Config
    inner = raw
    *sections, key = dotted.split(".")
    for section in sections:
        kind = get_type_hints(kind).get(section) if is_dataclass(kind) else None
        below = inner.get(section)
        # Copied on the way down: the caller's tables stay as they were read.
        inner[section] = inner = dict(below) if isinstance(below, Mapping) else {}
    hints = get_type_hints(kind) if is_dataclass(kind) else {}
    if key not in hints or is_dataclass(hints[key]) or dotted == "nodes":
        raise ConfigError(f"{source}: there is no setting {dotted}")
    words = _words(hints[key])
    if isinstance(value, str) and hints[key] is not str and value not in words:
        try:
            value = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            if words:
                raise ConfigError(f"{source}: {dotted}: {value!r} is none of {', '.join(words)}") from None
            raise ConfigError(f"{source}: {dotted}: cannot read {value!r}") from None
    inner[key] = value
    sources[dotted] = source


def _words(kind: Any) -> tuple[str, ...]:
    """The words that a setting of this type may be."""
    if get_origin(kind) is Literal:
        return tuple(each for each in get_args(kind) if isinstance(each, str))
    return tuple(word for part in get_args(kind) for word in _words(part))


def _convert(raw: Mapping[str, Any], kind: type[Any], shown: str, sources: Mapping[str, str], under: str = "") -> Any:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at `$")
        path = (under + at.rstrip("`")).lstrip(".")
        source = sources.get(path, "file")
        where = shown if source == "file" else source
        what = what.replace("`", "")
        what = what[0].lower() + what[1:] if what.startswith(("Expected", "Object", "Invalid")) else what
        raise ConfigError(f"{where}: {path}: {what}" if path else f"{where}: {what}") from None


def summary(loaded: Loaded) -> Iterator[str]:
    """What the deployment uses, line by line. Sizes of KV are exact once the model is prepared."""
    config, mib = loaded.config, 1 << 20
    totals = {"cpu": 0, "cuda": 0}
    yield f"cluster {config.cluster.name}: model {config.model.path}, blocks of {config.model.block_tokens} tokens"
    for node in config.nodes:
        section = loaded.section(node)
        what, size = "", 0
        match node.role:
            case "cache-node":
                size, what = section.pool_bytes, f"pool of {section.pool_bytes / mib:,.0f} MiB"
                if node.store_endpoint:
                    size += section.objects.object_bytes
                    what += f", store of {section.objects.object_bytes / mib:,.0f} MiB at {node.store_endpoint}"
                    if section.objects.tenants:
                        what += f" for {', '.join(tenant.name for tenant in section.objects.tenants)}"
                    if section.objects.ssd.directory:
                        what += f", its SSD {section.objects.ssd.bytes / mib:,.0f} MiB in {section.objects.ssd.directory}"
                if section.ssd.directory:
                    what += f", SSD {section.ssd.bytes / mib:,.0f} MiB in {section.ssd.directory}"
            case "prefill":
                tokens = section.max_active * config.model.max_model_len + section.short_lane * section.chunk_tokens
                running = tokens * config.costs.kv_bytes_per_token
                size, what = section.slab_bytes + running, f"slab of {section.slab_bytes / mib:,.0f} MiB"
                what += f", KV of running prompts {running / mib:,.0f} MiB"
            case "decode":
                size = section.capacity_tokens * config.costs.kv_bytes_per_token
                what = f"KV of {section.capacity_tokens:,} tokens, {size / mib:,.0f} MiB"
            case "vllm":
                what = f"vLLM at {section.url}, {section.max_running} requests at a time"
                what += f", {section.part} alone" if section.part != "both" else ""
            case "conductor":
                if config.costs.profile:
                    what = f"costs of {config.costs.profile}: " + ", ".join(_shown_costs(config.costs))
            case "gateway":
                what = f"{'https' if is_tls(section) else 'http'}://{section.http_host}:{section.http_port}"
                keys = api_keys_of(section.api_keys)
                what += f", API keys of {keys}" if keys else ", no API keys"
        totals[node.device] += size
        where = f"threads {node.threads}" if node.device == "cpu" else node.device
        computes = f", {where}, {node.prepared_for}" if node.computes else f", {node.backend}"
        engine = computes if node.role in ENGINE_ROLES else ""
        also = f", may become a {node.may_become}" if node.may_become else ""
        yield f"  {node.name:<16} {node.role:<10} on {node.host:<12} {what}{engine}{also}"
    ram, gpu = (f"{total / mib:,.0f} MiB" for total in totals.values())
    yield f"KV and stores take at most {ram} of RAM, beside the weights (one copy for all) and the processes"
    if totals["cuda"]:
        yield f"and {gpu} of GPU memory, beside the weights (one copy for each node)"


def _shown_costs(costs: Costs) -> Iterator[str]:
    yield f"prefill {1e3 * costs.prefill_token_s:.3g} ms per token"
    yield f"decode step {1e3 * costs.decode_step_s:.3g} ms + {1e3 * costs.decode_request_s:.3g} ms per request"
    yield f"{1e6 * costs.decode_context_s:.3g} us per token of KV"


def warnings(loaded: Loaded) -> Iterator[str]:
    """What works, but not well."""
    config = loaded.config
    threads = sum(node.threads for node in config.nodes if node.computes)
    cores = len(os.sched_getaffinity(0))
    if threads > cores:
        yield (
            f"the engines of {loaded.path} have {threads} threads and this machine {cores} cores: "
            "they will wait for each other when all are busy"
        )
    yield from _profile_warnings(loaded)
    yield from _plain_warnings(loaded)
    yield from _quota_warnings(loaded)
    for node in config.of_role("gateway"):
        if loaded.section(node).otlp_endpoint and not is_installed():
            yield f"{node.name}: otlp_endpoint needs the extra otel on its host, which is not here: {OTEL}"
        yield from (f"{node.name}: {text}" for text in gateway_warnings(loaded.section(node)))
    pools = {node.host for node in config.of_role("cache-node")}
    for node in config.of_role(*ENGINE_ROLES):
        if node.host not in pools:
            yield f"{node.name}: no cache-node on host {node.host}: it can neither reuse nor store blocks there"
    spared = ENGINE_ROLES if config.of_role("vllm") else ("vllm",)
    for role in ROLES:
        if role not in spared and not config.of_role(role):
            yield f"there is no {role}"
    yield from _apart_warnings(loaded)
    for node in config.of_role("decode", "vllm"):
        if loaded.section(node).capacity_tokens < config.model.max_model_len:
            yield f"{node.name}: capacity_tokens is below model.max_model_len: what does not fit into any decode is refused"


def is_tls(section: GatewaySettings) -> bool:
    """Does this gateway speak HTTPS here? Raises ConfigError."""
    try:
        return tls_files_of(section.tls_certificate, section.tls_key) is not None
    except KeysError as error:
        raise ConfigError(str(error)) from None


def gateway_warnings(section: GatewaySettings) -> Iterator[str]:
    """Who may call this gateway, and who listens in, where that is not well."""
    yield from (judgement.found for judgement in exposure_of(section) if judgement.level != "ok")
    if "*" in section.cors_origins and api_keys_of(section.api_keys) is None:
        yield "cors_origins is * and there are no API keys: any page that a browser which reaches it opens may call it"


def check_open(loaded: Loaded, nodes: Iterable[NodeSettings]) -> None:
    """Raise ConfigError if one of these would serve whoever reaches it, a gateway its answers or a node its metrics, and no
    setting says that this is meant."""
    for node in nodes:
        if _has_far_metrics(node) and not loaded.config.security.allow_open_metrics:
            raise ConfigError(
                f"{loaded.path}: {node.name}: metrics_host {node.metrics_host} is not loopback, and nothing asks who reads "
                "there: leave it out, and have Prometheus, or a proxy that asks, on that machine; or, where whoever reaches "
                "it may read its metrics, set security.allow_open_metrics = true"
            )
        if node.role == "gateway":
            section = loaded.section(node)
            why = unasked(http_host=section.http_host, api_keys=section.api_keys, allow_open=section.allow_open)
            if why:
                raise ConfigError(f"{loaded.path}: {node.name}: {why}")


def exposure_of(section: GatewaySettings) -> Iterator[Judgement]:
    """What it shows, and to whom."""
    return judged(
        http_host=section.http_host,
        api_keys=section.api_keys,
        allow_open=section.allow_open,
        tls_certificate=section.tls_certificate,
        tls_key=section.tls_key,
    )


def _quota_warnings(loaded: Loaded) -> Iterator[str]:
    """Quotas of a store's disk that are more than can be kept free of others."""
    for node in loaded.config.of_role("cache-node"):
        objects = loaded.section(node).objects
        quotas, promised = sum(each.ssd_bytes for each in objects.tenants), objects.ssd.promised_bytes(objects.slab_bytes)
        if node.store_endpoint and objects.ssd.directory and quotas > promised:
            yield (
                f"{node.name}: its store's tenants have disk quotas of {quotas} bytes, which are promises up to {promised} of "
                "these `ssd.bytes`: others may push out what is within them"
            )


def _is_ipv4(text: str) -> bool:
    try:
        return bool(IPv4Address(text))
    except ValueError:
        return False


def _plain_warnings(loaded: Loaded) -> Iterator[str]:
    """What of the deployment others on its networks can read, or will not start so that they cannot."""
    config, security = loaded.config, loaded.config.security
    keyed = directory_of(security.keys) is not None
    for node in config.nodes:
        if _has_far_metrics(node):
            yield f"{node.name}: whoever reaches {node.metrics_host} sees its metrics (security.allow_open_metrics)"
        far = [each for each in (node.endpoint, node.data_endpoint) if each.startswith("tcp://") and not is_loopback(each)]
        if far and not keyed and not security.allow_plain_tcp:
            yield f"{node.name}: no keys, so it will not start: {far[0]} is beyond this machine (security.keys)"
        if node.store_endpoint.startswith("tcp://") and loaded.section(node).objects.tenants and not keyed:
            yield f"{node.name}: its store has tenants and the cluster no keys: nobody is known there, and may use nothing"
        if keyed and security.encrypt_bulk:
            continue
        if node.data_endpoint.startswith("tcp://") and not is_loopback(node.data_endpoint) and keyed:
            yield f"{node.name}: its blocks go in clear to other hosts (security.encrypt_bulk)"
        if node.store_endpoint.startswith("tcp://") and not is_loopback(node.store_endpoint):
            yield f"{node.name}: values of its store go in clear to other hosts (security.keys, security.encrypt_bulk)"


def _has_far_metrics(node: NodeSettings) -> bool:
    return bool(node.metrics_port) and not is_loopback(f"tcp://{node.metrics_host}:0")


def _apart_warnings(loaded: Loaded) -> Iterator[str]:
    """Warn of vLLMs that do a part of the work where none does the other."""
    parts = {loaded.section(node).part for node in loaded.config.of_role("vllm")}
    for part, other in (("prefill", "decode"), ("decode", "prefill")):
        if part in parts and other not in parts:
            yield f'vllm nodes of part "{part}" get whole requests alone: there is none of part "{other}"'
    stores = any(node.store_endpoint for node in loaded.config.of_role("cache-node"))
    if parts - {"both"} and not stores:
        yield "no cache-node has a store_endpoint: what one vLLM prefills, another computes again to decode it"


def _profile_warnings(loaded: Loaded) -> Iterator[str]:
    """Whether profiles measured what runs here. The weights themselves are compared when the conductor starts."""
    model = loaded.config.model.path
    threads = sorted({node.threads for node in loaded.config.nodes if node.computes})
    backends = sorted({chosen(node.prepared_for) for node in loaded.config.nodes if node.computes})
    if (path := loaded.config.costs.profile) and path not in HARDWARE:
        profile = read_profile(path)
        if profile.model != model:
            yield f"{path} measured the model {profile.model}, and this deployment's is {model}: the conductor compares weights"
        if threads and threads != [profile.threads]:
            here = " and ".join(map(str, threads))
            yield f"{path} was measured with {profile.threads} threads, and the engines here have {here}"
        if backends and backends != [profile.backend]:
            here = " and ".join(backends)
            yield f"{path} was measured with backend {profile.backend}, and the engines here have {here}"
