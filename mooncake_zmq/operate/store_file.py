"""The text of a deployment that is one store, from the options of `mooncake-zmq store`."""

import json
from pathlib import Path
from typing import Any

from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.config.hints import size
from mooncake_zmq.operate.attach.place import store_bytes
from mooncake_zmq.transfer.sockets import BadEndpoint, check_endpoint, is_loopback

SHM_DIR = "/dev/shm"


def toml(
    name: str,
    *,
    listen: str,
    memory: str | None,
    ssd: str | None,
    ssd_bytes: str | None,
    keys: str | None,
    allow_plain_tcp: bool,
    stream_port: int | None,
    metrics: str | None,
) -> str:
    """Return the text of a deployment of one store. Raises ConfigError for options that do not go together."""
    endpoint = listen if "://" in listen else f"tcp://{listen}"
    if (ssd is None) != (ssd_bytes is None):
        raise ConfigError("--ssd and --ssd-bytes go together")
    try:
        check_endpoint(endpoint)
    except BadEndpoint:
        raise ConfigError(f"--listen {listen}: write ADDRESS:PORT with an IPv4 address of this machine, no wildcard") from None
    if endpoint.startswith("tcp://") and not (is_loopback(endpoint) or keys or allow_plain_tcp):
        raise ConfigError(
            f"--listen {listen} can be reached from other machines: give --keys DIR, which `mooncake-zmq keys make` writes, or "
            "--allow-plain-tcp where no one else is on the network"
        )
    try:
        free = store_bytes(SHM_DIR)
    except OSError as error:
        raise ConfigError(f"{SHM_DIR}: {error.strerror}") from None
    node: dict[str, Any] = {"name": name, "role": "cache-node", "store_endpoint": endpoint}
    if stream_port is not None:
        node["store_stream_port"] = stream_port
    if metrics is not None:
        node["metrics_host"], node["metrics_port"] = _address(metrics)
    sections: dict[str, dict[str, Any]] = {
        "cluster": {"name": name},
        "model": {"engine": "none"},
        "cache_node.objects": {"object_bytes": _size("--bytes", memory) if memory else free},
    }
    if ssd is not None and ssd_bytes is not None:
        sections["cache_node.objects.ssd"] = {
            "directory": str(Path(ssd).expanduser().resolve()),
            "bytes": _size("--ssd-bytes", ssd_bytes),
        }
    if keys is not None:
        sections["security"] = {"keys": str(Path(keys).expanduser().resolve())}
    if allow_plain_tcp:
        sections.setdefault("security", {})["allow_plain_tcp"] = True
    lines = ["# Written by `mooncake-zmq store --dry-run`"]
    for title, values in [*((f"[{title}]", values) for title, values in sections.items()), ("[[nodes]]", node)]:
        lines += [title, *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def _size(option: str, text: str) -> int:
    found = int(text) if text.isascii() and text.isdecimal() else size(text)
    if found is None:
        raise ConfigError(f"{option} {text}: write a size such as 4GiB")
    return found


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()):
        raise ConfigError(f"--metrics {text}: write ADDRESS:PORT")
    return host, int(port)
