"""Shows where the time of one request went: in a terminal, as JSON, or as a file for Perfetto."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console

from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.operate.console import tables
from mooncake_zmq.operate.console.gateways import Gateways, NoGateway

MICROSECONDS = 1e6


def show(gateways: Gateways, wanted: str, console: Console, as_json: bool, perfetto: str | None) -> int:
    """Print the requests known by this id; return 0 if there are any. Raises ConfigError."""
    try:
        found = gateways.ask(f"/trace/{quote(wanted, safe='')}")[1]["requests"]
    except NoGateway as error:
        raise ConfigError(str(error)) from None
    if perfetto is not None:
        try:
            Path(perfetto).write_text(json.dumps({"traceEvents": events(found)}), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{perfetto}: {error.strerror or error}") from None
    if as_json:
        console.out(json.dumps(found, indent=1), highlight=False)
    else:
        for request in found:
            console.print(tables.request(request))
    return 0


def events(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return Chrome trace events, with a process for each node and a thread in it for each request."""
    nodes: dict[str, int] = {}
    slices: list[dict[str, Any]] = []
    for thread, request in enumerate(found, 1):
        for span in request["spans"]:
            process = nodes.setdefault(span["node"], len(nodes) + 1)
            arguments = {"request": request["request_id"], "attempt": span["attempt"]}
            place = {"pid": process, "tid": thread, "ts": span["start_s"] * MICROSECONDS}
            slices.append(
                {"name": span["name"], "ph": "X", "dur": span["duration_s"] * MICROSECONDS, **place, "args": arguments}
            )
    named = [{"name": "process_name", "ph": "M", "pid": process, "args": {"name": node}} for node, process in nodes.items()]
    return [*named, *slices]
