"""Writes the deployment over attached servers as a TOML file. PURE except for `write`."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
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
class Deployment:
    """The content of the file. `store`: endpoint of the store of this machine; empty: there is none."""

    servers: tuple[Server, ...]
    name: str
    directory: Path
    gateway_port: int
    store: str
    store_bytes: int

    @property
    def max_model_len(self) -> int:
        """The most tokens of a request: what every server takes and a message carries."""
        block_tokens = self.servers[0].block_tokens
        return min(MAX_TOKENS, MAX_BLOCKS * block_tokens, *(server.max_model_len for server in self.servers))

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that every server has."""
        return [name for name in self.servers[0].adapters if all(name in server.adapters for server in self.servers)]

    def toml(self) -> str:
        """Return the text of the file."""
        parts = [
            f"{MARK} {' '.join(server.url for server in self.servers)}, which writes it anew.",
            "# To change it, copy it, and run `mooncake-zmq up --config COPY`.",
            "[cluster]",
            'name = "attached"',
            "",
            "[model]",
            'engine = "vllm"',
            f"name = {_text(self.name)}",
            f"path = {_text(str(self.directory))}",
            f"block_tokens = {self.servers[0].block_tokens}",
            f"max_model_len = {self.max_model_len}",
            *([f"adapters = {json.dumps(self.adapters, ensure_ascii=False)}"] if self.adapters else ()),
            "",
            "[gateway]",
            f"http_port = {self.gateway_port}",
            "",
            "[vllm]",
            f"max_running = {MAX_RUNNING}",
            "",
            *_node("conductor-0", "conductor"),
            *(self._store() if self.store else ()),
        ]
        for number, server in enumerate(self.servers):
            settings = f"url = {_text(server.url)}, capacity_tokens = {server.capacity_tokens}"
            if server.kv_events:
                settings += f", kv_events = {_text(server.kv_events)}"
            parts += _node(f"vllm-{number}", "vllm", *_host(server), f"settings = {{ {settings} }}")
        return "\n".join([*parts, *_node("gateway-0", "gateway")])

    def _store(self) -> list[str]:
        return [
            "[cache_node.objects]",
            f"object_bytes = {self.store_bytes}",
            "",
            *_node("cache-0", "cache-node", f"store_endpoint = {_text(self.store)}"),
        ]


def agreed_name(servers: Sequence[Server]) -> str:
    """Return the name by which clients ask for the model of all servers. Raises ServerError where they have none in common."""
    first = servers[0]
    for other in servers[1:]:
        if not set(first.names) & set(other.names):
            raise ServerError(
                f"{first.url} serves {first.names[0]} and {other.url} serves {other.names[0]}: a cluster has one model, so "
                "attach them to clusters of their own, or give both the same --served-model-name"
            )
    return next(name for name in first.names if all(name in server.names for server in servers))


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


def _host(server: Server) -> list[str]:
    """Return the line of a server on another machine: this machine's store is not its own."""
    return [] if is_here(server.url) else [f"host = {_text(re.sub('[^a-z0-9._-]', '-', host_of(server.url))[:63])}"]


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
