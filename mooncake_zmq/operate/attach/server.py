"""Asks a running vLLM server over HTTP what a deployment needs to know of it. Nothing is started or changed."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from mooncake_zmq.operate.attach.probe import probe
from mooncake_zmq.runtime.embedding import EMBEDDINGS, ONE_TEXT
from mooncake_zmq.runtime.mistakes import ServerError
from mooncake_zmq.runtime.vllm_answers import Model, models_in
from mooncake_zmq.runtime.vllm_server import NoScaleOut, answered, check_generation, client_of
from mooncake_zmq.vllm_node.settings import VllmSettings

ASK_S = 30.0
"""Longest silence of a server that is asked; a busy one answers late."""
CACHE_INFO = "vllm:cache_config_info"
CONNECTOR_INFO = "vllm:mooncake_zmq_stores_info"
TESTED_TEXT = "The quick brown fox jumps over 13 lazy dogs; naïve café – 東京."
"""A text whose tokens show whether two tokenizers are the same."""
GUARDED = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A vLLM server, as far as its answers show it."""

    url: str
    version: str
    names: tuple[str, ...]
    """Names of its model, without those of adapters."""
    adapters: tuple[str, ...]
    """Names of its adapters."""
    root: str
    """Its model: a directory on its machine, or a name at Hugging Face."""
    max_model_len: int
    block_tokens: int
    capacity_tokens: int
    """Tokens of KV that its engines have room for."""
    caches_prefixes: bool
    takes_tokens: bool
    """Whether it takes token ids at the address where a node sends them."""
    reports_reuse: bool
    """Whether an answer has the number of prompt tokens that were not computed."""
    connector: bool
    """Whether it runs with the project's connector."""
    stores: tuple[str, ...]
    """Endpoints of the stores of its connector."""
    kv_events: str
    """Endpoint at which its KV events were received; empty if none were."""


def ask(url: str, endpoints: Sequence[str]) -> Server:
    """Return what a healthy server is. Raises ServerError, also where it is no vLLM. `endpoints`: where its KV events may
    be."""
    settings = VllmSettings(url=url)
    try:
        with client_of(url, ASK_S) as client:
            models, adapters = _models(client, url)
            cache, connector = _metrics(client, url)
            takes_tokens = _takes_tokens(client, settings)
            if not takes_tokens:
                _check_generates(client, url)
            block_tokens = _whole(cache[0], "block_size", url)
            found = probe(client, block_tokens, endpoints) if takes_tokens else None
            _, version = answered(client, "GET", "/version")
    except httpx.HTTPError as error:
        raise ServerError(f"{url} does not answer: {type(error).__name__} {error}".rstrip()) from error
    base = models[0]
    assert base.max_model_len is not None
    return Server(
        url=url,
        version=_version(version),
        names=tuple(model.id for model in models),
        adapters=tuple(model.id for model in adapters),
        root=base.root or base.id,
        max_model_len=base.max_model_len,
        block_tokens=block_tokens,
        capacity_tokens=sum(_capacity(labels, url) for labels in cache),
        caches_prefixes=cache[0].get("enable_prefix_caching") != "False",
        takes_tokens=takes_tokens,
        reports_reuse=found is not None and found.reports_reuse,
        connector=connector is not None,
        stores=tuple(filter(None, (connector or "").split(","))),
        kv_events=found.kv_events if found is not None else "",
    )


def tokens_of(url: str, name: str, text: str) -> list[int] | None:
    """Return a text's tokens by the server's own tokenizer, nothing being put before it; None where it does not say."""
    try:
        with client_of(url, ASK_S) as client:
            asked = {"model": name, "prompt": text, "add_special_tokens": False}
            status, content = answered(client, "POST", "/tokenize", asked)
            tokens = json.loads(content)["tokens"] if status == httpx.codes.OK else None
    except (httpx.HTTPError, ServerError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return tokens if isinstance(tokens, list) and all(type(token) is int for token in tokens) else None


def _models(client: httpx.Client, url: str) -> tuple[list[Model], list[Model]]:
    """Return the names of its model, and its adapters. Raises ServerError."""
    status, content = answered(client, "GET", "/v1/models")
    if status in GUARDED:
        raise ServerError(f"{url} wants an API key, which nodes do not send: start it without --api-key, on its own network")
    models = models_in(status, content) or []
    own = [model for model in models if model.parent is None and model.max_model_len]
    if not own:
        raise ServerError(f"{url} is no vLLM server: its /v1/models names no model with a max_model_len (it answers {status})")
    return own, [model for model in models if model.parent is not None]


def _metrics(client: httpx.Client, url: str) -> tuple[list[dict[str, str]], str | None]:
    """Return the labels of its KV cache, by engine, and the stores of its connector; None without the connector."""
    status, content = answered(client, "GET", "/metrics")
    caches: list[dict[str, str]] = []
    stores: str | None = None
    try:
        for name, labels in _samples(content.decode()) if status == httpx.codes.OK else ():
            if name == CACHE_INFO:
                caches.append(labels)
            elif name == CONNECTOR_INFO:
                stores = labels.get("stores", "")
    except ValueError as error:
        raise ServerError(f"{url}/metrics cannot be read: {error}") from error
    if not caches:
        raise ServerError(f"{url}/metrics has no {CACHE_INFO}: start it without --disable-log-stats")
    return caches, stores


def _samples(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels


def _capacity(labels: dict[str, str], url: str) -> int:
    """Return an engine's tokens of KV: its own count, which knows of groups of layers, or that of its blocks."""
    if labels.get("kv_cache_size_tokens", "").isdigit():
        return max(1, int(labels["kv_cache_size_tokens"]))
    return _whole(labels, "num_gpu_blocks", url) * _whole(labels, "block_size", url)


def _whole(labels: dict[str, str], name: str, url: str) -> int:
    """Return a positive number; what vLLM has not set is the text None."""
    value = labels.get(name, "")
    if not value.isdigit() or not int(value):
        raise ServerError(f"{url}/metrics: {CACHE_INFO} has no {name}, but {value!r}")
    return int(value)


def _takes_tokens(client: httpx.Client, settings: VllmSettings) -> bool:
    try:
        check_generation(client, settings)
    except NoScaleOut:
        return False
    return True


def _check_generates(client: httpx.Client, url: str) -> None:
    """Check that a server that takes no token ids is not one that embeds. Raises ServerError."""
    status, content = answered(client, "POST", EMBEDDINGS, ONE_TEXT)
    if status == httpx.codes.OK and b'"embedding"' in content:
        instead = 'name it in the configuration of a deployment with model.task = "embed"'
        raise ServerError(f"{url} embeds texts and generates nothing, so that attach cannot use it: {instead}")


def _version(content: bytes) -> str:
    try:
        found: Any = json.loads(content)["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""
