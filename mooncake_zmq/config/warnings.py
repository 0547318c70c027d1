"""Warnings about settings that work, but not well."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator

from mooncake_zmq.config.checks import has_far_metrics
from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.config.kv_sizes import UNKNOWN, kv_of
from mooncake_zmq.config.load import Loaded, read_profile
from mooncake_zmq.config.records import GatewaySettings, NodeSettings
from mooncake_zmq.core.hardware import HARDWARE
from mooncake_zmq.core.keys import KeysError
from mooncake_zmq.core.roles import ENGINE_ROLES, ROLES
from mooncake_zmq.engine.backend import array_namespace
from mooncake_zmq.engine.cpu import chosen
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.extras import installing
from mooncake_zmq.gateway.http.api_keys import api_keys_of
from mooncake_zmq.gateway.http.exposure import Judgement, judged
from mooncake_zmq.gateway.http.tls import tls_files_of
from mooncake_zmq.gateway.requests.otlp import is_installed
from mooncake_zmq.kv.codec import bytes_in_blocks
from mooncake_zmq.transfer.key_files import directory_of
from mooncake_zmq.transfer.sockets import is_loopback


def warnings(loaded: Loaded) -> Iterator[str]:
    """Yield a warning for each setting that works, but not well."""
    config = loaded.config
    of_machines = Counter[str]()
    for node in config.nodes:
        endpoint = config.endpoint(node)  # without TCP all are on one machine, whatever their hosts
        of_machines[endpoint.rpartition(":")[0] if endpoint.startswith("tcp:") else ""] += node.threads * node.computes
    threads, cores = max(of_machines.values(), default=0), len(os.sched_getaffinity(0))
    if threads > cores:
        yield (
            f"the engines of one machine in {loaded.path} have {threads} threads and this machine {cores} cores: "
            "they will wait for each other when all are busy"
        )
    yield from device_warnings(config.nodes)
    for each in loaded.of_each:
        yield from _profile_warnings(each)
    yield from _plain_warnings(loaded)
    if config.model.engine == "own" and not config.model.card:
        yield from _model_warnings(config.model.path, config.model.cache_dir)
    yield from _room_warnings(loaded)
    yield from _quota_warnings(loaded)
    for node in config.of_role("gateway"):
        if loaded.section(node).otlp_endpoint and not is_installed():
            yield f"{node.name}: otlp_endpoint needs the extra otel on its host, which is not here: {installing('otel')}"
        yield from (f"{node.name}: {text}" for text in gateway_warnings(loaded.section(node)))
    pools = {node.host for node in config.of_role("cache-node")}
    for node in config.of_role(*ENGINE_ROLES):
        if node.host not in pools:
            yield f"{node.name}: no cache-node on host {node.host}: it can neither reuse nor store blocks there"
    spared = ENGINE_ROLES if config.of_role("vllm") else ("vllm",)
    for role in ROLES if config.model.engine != "none" else ():
        if role not in spared and not config.of_role(role):
            yield f"there is no {role}"
    for each in loaded.of_each:
        yield from _part_warnings(each)
    for node in config.of_role("decode", "vllm"):
        section, longest = loaded.section(node), loaded.of(node).config.model.max_model_len
        takes_more = getattr(section, "borrow", False) or not getattr(section, "max_batch", 1)
        if section.capacity_tokens < longest and not takes_more:
            yield f"{node.name}: capacity_tokens is below model.max_model_len: what does not fit into any decode is refused"
        if not (getattr(section, "max_batch", 1) or section.lend_tokens):
            yield f"{node.name}: max_batch = 0 and lend_tokens = 0: it neither takes requests nor lends"


def device_warnings(nodes: Iterable[NodeSettings]) -> Iterator[str]:
    """Yield a warning for each node whose device this machine does not have: the file may be for another machine."""
    for node in nodes:
        try:
            array_namespace(node.device)
        except ValueError as error:
            yield f"{node.name}: {error}; on the node's own machine 'mooncake-zmq doctor' checks it"


def is_tls(section: GatewaySettings) -> bool:
    """Return whether this gateway serves HTTPS on this machine. Raises ConfigError."""
    try:
        return tls_files_of(section.tls_certificate, section.tls_key) is not None
    except KeysError as error:
        raise ConfigError(str(error)) from None


def gateway_warnings(section: GatewaySettings) -> Iterator[str]:
    """Yield warnings about access to this gateway and eavesdropping."""
    yield from (judgement.found for judgement in exposure_of(section) if judgement.level != "ok")
    if "*" in section.cors_origins and api_keys_of(section.api_keys) is None:
        yield "cors_origins is * and there are no API keys: any page that a browser which reaches it opens may call it"


def exposure_of(section: GatewaySettings) -> Iterator[Judgement]:
    """Yield judgements of what a gateway exposes, and to which callers."""
    return judged(
        http_host=section.http_host,
        api_keys=section.api_keys,
        allow_open=section.allow_open,
        tls_certificate=section.tls_certificate,
        tls_key=section.tls_key,
    )


def _model_warnings(path: str, cache_dir: str) -> Iterator[str]:
    """Warn of a model that this machine does not have: the file may be for another machine."""
    from mooncake_zmq.engine.prepare import located

    try:
        located("default" if path == "toy" else path, cache_dir)
    except ModelError as error:
        yield f"model.path: {error}"


def _room_warnings(loaded: Loaded) -> Iterator[str]:
    """Warn of memory and disks of a pool that hold no block of the model: such a node will not start."""
    config = loaded.config
    kv_bytes, shape = kv_of(config)
    head_dims = [shape.head_dim] if shape else []
    block_bytes = config.model.block_tokens * bytes_in_blocks(config.model.kv_codec, kv_bytes, *head_dims)
    for node in config.of_role("cache-node", "prefill"):
        if node.role == "cache-node" and config.model.engine != "own":  # all KV is in the store
            continue
        section = loaded.section(node)
        rooms = {"slab_bytes": section.slab_bytes} if node.role == "prefill" else {"pool_bytes": section.pool_bytes}
        if node.role == "cache-node" and section.ssd.directory:
            rooms["ssd.bytes"] = section.ssd.bytes
        for setting, room in rooms.items():
            if room < block_bytes:
                yield (
                    f"{node.name}: {setting} = {room} holds no block of {config.model.block_tokens} tokens, which takes some "
                    f"{block_bytes} bytes{'' if shape else UNKNOWN}: a size may be written 4GiB"
                )


def _quota_warnings(loaded: Loaded) -> Iterator[str]:
    """Warn of disk quotas of a store that exceed what can be protected from other tenants."""
    for node in loaded.config.of_role("cache-node"):
        objects = loaded.section(node).objects
        quotas, promised = sum(each.ssd_bytes for each in objects.tenants), objects.ssd.promised_bytes(objects.slab_bytes)
        if node.store_endpoint and objects.ssd.directory and quotas > promised:
            yield (
                f"{node.name}: its store's tenants have disk quotas of {quotas} bytes, which are promises up to {promised} of "
                "these `ssd.bytes`: others may push out what is within them"
            )


def _plain_warnings(loaded: Loaded) -> Iterator[str]:
    """Warn of data that other users of the networks can read, and of nodes that will not start for this reason."""
    config, security = loaded.config, loaded.config.security
    keyed = directory_of(security.keys) is not None
    for node in config.nodes:
        if has_far_metrics(node):
            yield f"{node.name}: every client that reaches {node.metrics_host} sees its metrics (security.allow_open_metrics)"
        far = [each for each in (node.endpoint, node.data_endpoint) if each.startswith("tcp://") and not is_loopback(each)]
        if far and not keyed and not security.allow_plain_tcp:
            yield f"{node.name}: no keys, so it will not start: {far[0]} is beyond this machine (security.keys)"
        if node.store_endpoint.startswith("tcp://") and loaded.section(node).objects.tenants and not keyed:
            yield f"{node.name}: its store has tenants and the cluster no keys: no client is identified, so none has access"
        if keyed and security.encrypt_bulk:
            continue
        if node.data_endpoint.startswith("tcp://") and not is_loopback(node.data_endpoint) and keyed:
            yield f"{node.name}: its blocks go in clear to other hosts (security.encrypt_bulk)"
        if node.store_endpoint.startswith("tcp://") and not is_loopback(node.store_endpoint):
            yield f"{node.name}: values of its store go in clear to other hosts (security.keys, security.encrypt_bulk)"


def _part_warnings(loaded: Loaded) -> Iterator[str]:
    """Warn of vLLMs that do a part of the work if none does the other part."""
    parts = {loaded.section(node).part for node in loaded.config.of_role("vllm")}
    for part, other in (("prefill", "decode"), ("decode", "prefill")):
        if part in parts and other not in parts:
            yield f'vllm nodes of part "{part}" get whole requests alone: there is none of part "{other}"'
    stores = any(node.store_endpoint for node in loaded.config.of_role("cache-node"))
    if parts - {"both"} and not stores:
        yield "no cache-node has a store_endpoint: what one vLLM prefills, another computes again to decode it"


def _profile_warnings(loaded: Loaded) -> Iterator[str]:
    """Warn of profiles that measured something else than what runs here. The weights themselves are compared when the
    conductor starts."""
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
