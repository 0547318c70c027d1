"""Checks of a node's vLLM server before the node serves: that it is up, accepts tokens, and takes requests of the
deployment's length. The node waits for a server that is still loading; an operator's mistake ends it with one line."""

import itertools
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import structlog

from mooncake_zmq.config.records import Config
from mooncake_zmq.runtime import notify
from mooncake_zmq.runtime.embedding import EMBEDDINGS, ONE_TEXT
from mooncake_zmq.runtime.generation import GENERATE, ONE_TOKEN
from mooncake_zmq.runtime.mistakes import ServerError
from mooncake_zmq.runtime.vllm_answers import Model, models_in, reason_of
from mooncake_zmq.vllm_node.settings import VllmSettings

log = structlog.get_logger()

POLL_S = 0.5
WAIT_S = 3600.0
"""How long a node waits for its server: a large model is downloaded, loaded and compiled."""
MAX_ANSWER_BYTES = 32 << 20
MEMORY_SHARE = 0.9
"""Share of a machine's memory, or its GPU's, that its servers take together. Each alone takes 92 % by default, on CPUs too."""


SCALE_OUT = "--enable-scale-out"
"""The flag with which vLLM takes token ids, as a node sends them."""
POOLING = "--runner pooling"
"""The option with which vLLM embeds texts."""
REUSE_REPORTED = "--enable-prompt-tokens-details"
"""The flag with which vLLM reports what it reused."""
CPUS = "VLLM_CPU_OMP_THREADS_BIND"
"""The variable with the CPUs of a vLLM that computes on them; others do not read it."""
RANKS = re.compile(r"--(tensor|pipeline|data)-parallel-size|-[tpd]p\b")
HERE = ("127.0.0.1", "localhost", "::1")
SHAPE = ("architectures", "hidden_size", "num_hidden_layers", "vocab_size")
"""Settings in a model's config.json by which a server with another model on this machine is recognized."""


class NoScaleOut(ServerError):
    """The server does not take token ids."""


def await_server(
    settings: VllmSettings,
    max_model_len: int,
    sleep: Callable[[float], None] = time.sleep,
    *,
    adapters: Sequence[str] = (),
    embeds: bool = False,
    model: str = "",
) -> str:
    """Return the name of its model once the server serves; "": it does not say. `model`: the directory of the deployment's
    model. Raises ServerError."""
    with client_of(settings.url, settings.probe_timeout_s) as client:
        until = time.monotonic() + WAIT_S
        logged = False
        while (why := unwell(client)) is not None:
            if time.monotonic() >= until:
                raise ServerError(f"vLLM at {settings.url} does not serve after {WAIT_S:.0f} s: {why}")
            if not logged:
                log.info("waiting_for_vllm", url=settings.url, why=why)
                notify.ready("waiting for vLLM")  # gateways start after this unit, and other vLLMs may serve
                logged = True
            notify.status(f"waiting for vLLM at {settings.url}: {why}")
            sleep(POLL_S)
        try:
            models = models_in(*answered(client, "GET", "/v1/models")) or []
            _check_models(models, settings, max_model_len, adapters, model)
            (check_embedding if embeds else check_generation)(client, settings)
        except httpx.HTTPError as error:
            raise ServerError(f"vLLM at {settings.url} does not answer: {error}") from error
        return next((each.id for each in models if each.parent is None), "")


def client_of(url: str, timeout_s: float) -> httpx.Client:
    """Return a client of a server, without the environment's proxies."""
    return httpx.Client(base_url=url, timeout=timeout_s, trust_env=False, headers={"accept-encoding": "identity"})


def answered(
    client: httpx.Client, method: str, path: str, body: Any = None, *, quiet_s: float | None = None
) -> tuple[int, bytes]:
    """Return the status and the body of an answer, as it came: a compressed one is not read. `quiet_s`: the longest silence, if
    not the client's. Raises ServerError for a long body, and httpx.HTTPError."""
    content = bytearray()
    timeout = client.timeout if quiet_s is None else quiet_s
    with client.stream(method, path, json=body, timeout=timeout) as response:
        for piece in response.iter_raw():
            content += piece
            if len(content) > MAX_ANSWER_BYTES:
                raise ServerError(f"{client.base_url}{path} answers more than {MAX_ANSWER_BYTES >> 20} MiB")
        return response.status_code, bytes(content)


def unwell(client: httpx.Client) -> str | None:
    """Return why a server does not serve, or None if it does."""
    try:
        status, _ = answered(client, "GET", "/health")
    except (httpx.HTTPError, ServerError) as error:
        return f"{error}" or type(error).__name__
    return None if status == httpx.codes.OK else f"its /health answers {status}"


def _check_models(
    models: Sequence[Model], settings: VllmSettings, max_model_len: int, adapters: Sequence[str], path: str
) -> None:
    if missing := [name for name in adapters if name not in {each.id for each in models}]:
        log.info("adapters_not_listed", url=settings.url, adapters=missing)
    if urlsplit(settings.url).hostname in HERE and (own := _shape(path)):
        for place in [each.root for each in models if each.parent is None and each.root]:
            if (theirs := _shape(place)) and theirs != own:
                raise ServerError(f"vLLM at {settings.url} serves another model than model.path {path}: {place} has {theirs}")
    longest = min((each.max_model_len for each in models if each.max_model_len is not None), default=None)
    if longest is not None and longest < max_model_len:
        raise ServerError(
            f"vLLM at {settings.url} takes {longest} tokens and model.max_model_len is {max_model_len}: start it with "
            f"--max-model-len {max_model_len}, or lower the setting"
        )


def check_embedding(client: httpx.Client, settings: VllmSettings) -> None:
    """Check that the server embeds. Raises ServerError and httpx.HTTPError."""
    status, content = answered(client, "POST", EMBEDDINGS, ONE_TEXT, quiet_s=settings.quiet_s)
    if status == httpx.codes.NOT_FOUND:
        raise ServerError(
            f'vLLM at {settings.url} does not serve {EMBEDDINGS}: start it with {POOLING}, or leave out task "embed"'
        )
    if status != httpx.codes.OK:
        raise ServerError(f"vLLM at {settings.url} answers {status} to {EMBEDDINGS}: {reason_of(content)}")


def check_generation(client: httpx.Client, settings: VllmSettings) -> None:
    """Check that the server takes token ids. Raises ServerError, which is NoScaleOut where only a flag is missing, and
    httpx.HTTPError."""
    status, content = answered(client, "POST", GENERATE, ONE_TOKEN, quiet_s=settings.quiet_s)
    if status in (httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND):
        raise NoScaleOut(f"vLLM at {settings.url} does not serve {GENERATE}: start it with {SCALE_OUT}")
    if status != httpx.codes.OK:
        raise ServerError(f"vLLM at {settings.url} answers {status} to {GENERATE}: {reason_of(content)}")


def _shape(directory: str) -> dict[str, Any]:
    """Return the settings by which a model in a directory is recognized; empty if it is not here."""
    path = Path(directory).expanduser()
    try:
        found = json.loads((path / "config.json").read_bytes()) if path.is_absolute() else None
        return {name: found[name] for name in SHAPE if name in found} if isinstance(found, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def server_command(python: str, config: Config, settings: VllmSettings, host: str = "", *, servers: int = 0) -> list[str]:
    """Return the command that starts such a server: by its own Python, for the deployment's model and lengths. With stores in
    the deployment it uses our connector, which that Python must have, over all of them, those of `host` first. All servers,
    `servers` or as many as the deployment has, share one machine."""
    place = urlsplit(settings.url)
    options = {
        "--model": config.model.path,
        "--served-model-name": config.model.name or Path(config.model.path).expanduser().resolve().name,
        "--host": place.hostname or "127.0.0.1",
        "--port": place.port or 80,
        "--max-model-len": config.model.max_model_len,
        "--block-size": config.model.block_tokens,
        "--max-num-seqs": settings.max_running,
    }
    if (servers := servers or len(config.of_role("vllm"))) > 1:
        options["--gpu-memory-utilization"] = round(MEMORY_SHARE / servers, 3)
    if settings.kv_events:
        more = {"replay_endpoint": settings.kv_events_replay or None, "topic": settings.kv_events_topic}
        options |= events_option(settings.kv_events, **more)
    if stores := _stores(config, host):
        options |= connector_option(stores, min(settings.copies, len(stores)))
    arguments = [str(part) for name, value in options.items() for part in (name, value)]
    flags = [SCALE_OUT, REUSE_REPORTED]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *arguments, *flags, *settings.serve_arguments]


def cpu_shares(servers: Sequence[VllmSettings]) -> list[dict[str, str]]:
    """Return for each server of one machine the variable that gives it CPUs of its own where it computes on CPUs. By default
    each computes on all, and waits for threads that others keep from running: two on two CPUs are tens of times as slow.
    Nothing where the user has set it, where there are fewer CPUs than servers, and where one has several ranks."""
    cpus, count = sorted(os.sched_getaffinity(0)), len(servers)
    ranks = any(RANKS.match(each) for server in servers for each in server.serve_arguments)
    if count < 2 or count > len(cpus) or ranks or CPUS in os.environ:
        return [{} for _ in servers]
    bounds = [len(cpus) * index // count for index in range(count + 1)]
    return [{CPUS: ",".join(map(str, cpus[start:stop]))} for start, stop in itertools.pairwise(bounds)]


def events_option(endpoint: str, **more: Any) -> dict[str, str]:
    """Return the option with which vLLM publishes its KV events at an endpoint. Its value has no space."""
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint} | more
    return {"--kv-events-config": _compact(events)}


def connector_option(stores: Sequence[str], copies: int = 1) -> dict[str, str]:
    """Return the option with which vLLM runs our connector over these stores, `copies` of which have each block. Its value has
    no space."""
    connector = {
        "kv_connector": "MooncakeZmqConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "mooncake_zmq.vllm.connector",
        "kv_connector_extra_config": {"stores": ",".join(stores)} | ({"copies": copies} if copies > 1 else {}),
    }
    return {"--kv-transfer-config": _compact(connector)}


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def check_python(python: str, config: Config) -> None:
    """Check that this Python can start the servers of a deployment. Raises ServerError."""
    packages = ["vllm", *(["mooncake_zmq"] if _stores(config) else [])]
    script = "import sys, importlib.util as u; print(*(name for name in sys.argv[1:] if u.find_spec(name) is None))"
    try:
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # as that of the servers
        command = [python, "-c", script, *packages]
        found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ServerError(f"--vllm-python {python} does not run: {error}") from error
    if missing := found.stdout.split():
        raise ServerError(f"--vllm-python {python} has no {' and no '.join(missing)}: install it with its pip")


def _stores(config: Config, host: str = "") -> list[str]:
    """Return the endpoints of all stores, those of `host` first."""
    stores = [node for node in config.of_role("cache-node") if node.store_endpoint]
    return [node.store_endpoint for node in sorted(stores, key=lambda node: node.host != host)]
