"""Writes the deployment over attached servers as a TOML file. PURE except for `write`."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.core.messages import MAX_BLOCKS, MAX_TOKENS
from mooncake_zmq.operate.attach.place import host_of, is_here
from mooncake_zmq.operate.attach.server import Server
from mooncake_zmq.runtime.mistakes import ServerError

MARK = "# Written by `mooncake-zmq attach`"
MAX_RUNNING = 128
"""The smallest default of vLLM's `--max-num-seqs` in a server, which no answer reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedModel:
    """A model, and the servers that have it."""

    servers: tuple[Server, ...]
    name: str
    directory: Path

    @property
    def max_model_len(self) -> int:
        """The most tokens of a request: what every server takes and a message carries."""
        most = MAX_BLOCKS * self.servers[0].block_tokens
        return min(MAX_TOKENS, most, *(server.max_model_len for server in self.servers))

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that any server has."""
        return list(dict.fromkeys(name for server in self.servers for name in server.adapters))

    def settings(self) -> list[str]:
        """Return the lines of its table."""
        return [
            f"name = {_text(self.name)}",
            f"path = {_text(str(self.directory))}",
            f"block_tokens = {self.servers[0].block_tokens}",
            f"max_model_len = {self.max_model_len}",
            *([f"adapters = {json.dumps(self.adapters, ensure_ascii=False)}"] if self.adapters else ()),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The content of the file. `store`: endpoint of the store of this machine; empty: there is none."""

    models: tuple[AttachedModel, ...]
    gateway_port: int
    store: str
    store_bytes: int

    def toml(self) -> str:
        """Return the text of the file: with one model the only one, with several a table and a conductor for each."""
        urls = [server.url for model in self.models for server in model.servers]
        tables = tables_of([model.name for model in self.models]) if len(self.models) > 1 else [""]
        parts = [
            f"{MARK} {' '.join(urls)}, which writes it anew.",
            "# To change it, copy it, and run `mooncake-zmq up --config COPY`.",
            "[cluster]",
            'name = "attached"',
            "",
            "[model]",
            'engine = "vllm"',
        ]
        for model, table in zip(self.models, tables, strict=True):
            parts += [*(("", f"[models.{_text(table)}]") if table else ()), *model.settings()]
        parts += [
            "",
            "[gateway]",
            f"http_port = {self.gateway_port}",
            "",
            "[vllm]",
            f"max_running = {MAX_RUNNING}",
            "",
        ]
        for number, table in enumerate(tables):
            parts += _node(f"conductor-{number}", "conductor", *_of(table))
        parts += self._store() if self.store else ()
        of_server = [(server, table) for model, table in zip(self.models, tables, strict=True) for server in model.servers]
        for number, (server, table) in enumerate(of_server):
            settings = f"url = {_text(server.url)}, capacity_tokens = {server.capacity_tokens}"
            if server.kv_events:
                settings += f", kv_events = {_text(server.kv_events)}"
            parts += _node(f"vllm-{number}", "vllm", *_of(table), *_host(server), f"settings = {{ {settings} }}")
        return "\n".join([*parts, *_node("gateway-0", "gateway")])

    def _store(self) -> list[str]:
        return [
            "[cache_node.objects]",
            f"object_bytes = {self.store_bytes}",
            "",
            *_node("cache-0", "cache-node", f"store_endpoint = {_text(self.store)}"),
        ]


def by_model(servers: Sequence[Server]) -> list[tuple[str, tuple[Server, ...]]]:
    """Return the servers of each model, with the name by which clients ask for it: servers with a name in common have one
    model. Raises ServerError where a server shares names with two others that have none in common."""
    groups: list[list[Server]] = []
    for server in servers:
        mine = [group for group in groups if any(set(server.names) & set(other.names) for other in group)]
        groups = [group for group in groups if group not in mine] + [[*(each for group in mine for each in group), server]]
    order = [server.url for server in servers]
    sorted_groups = [sorted(group, key=lambda server: order.index(server.url)) for group in groups]
    sorted_groups.sort(key=lambda group: order.index(group[0].url))
    return [(_agreed_name(group), tuple(group)) for group in sorted_groups]


def _agreed_name(servers: Sequence[Server]) -> str:
    """Return the first name that all of these servers have. Raises ServerError."""
    shared = [name for name in servers[0].names if all(name in server.names for server in servers)]
    if not shared:
        names = "; ".join(f"{server.url} serves {', '.join(server.names)}" for server in servers)
        raise ServerError(f"{names}: give each model names of its own by --served-model-name")
    return shared[0]


def tables_of(names: Sequence[str]) -> list[str]:
    """Return a different name of a table in [models] for each model."""
    found: list[str] = []
    for name in names:
        plain = re.sub("[^a-z0-9_-]", "-", name.lower())[:48].strip("_-") or "model"  # no dot: it would part a path of --set
        free = (each for each in chain((plain,), (f"{plain}-{number}" for number in count(2))) if each not in found)
        found.append(next(free))
    return found


def write(path: Path, text: str) -> None:
    """Write the file, in place of one that was written so before. Raises ConfigError."""
    try:
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(MARK):
            raise ConfigError(f"{path} is there and attach did not write it: name another file by --to")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def _node(name: str, role: str, *lines: str) -> list[str]:
    return ["[[nodes]]", f"name = {_text(name)}", f"role = {_text(role)}", *lines, ""]


def _of(table: str) -> list[str]:
    """Return the line of a node that is for one of several models."""
    return [f"model = {_text(table)}"] if table else []


def _host(server: Server) -> list[str]:
    """Return the line of a server on another machine: this machine's store is not its own."""
    return [] if is_here(server.url) else [f"host = {_text(re.sub('[^a-z0-9._-]', '-', host_of(server.url))[:63])}"]


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
