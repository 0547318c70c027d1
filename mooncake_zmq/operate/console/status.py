"""Prints the state of a cluster: once, with an exit code, or again each second."""

import json
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from mooncake_zmq.operate.console import tables
from mooncake_zmq.operate.console.gateways import Gateways, KeyNeeded, NoGateway

OK, DEGRADED, DOWN, KEY_NEEDED = 0, 1, 2, 3
EVERY_S = 1.0


def show(gateways: Gateways, console: Console, *, as_json: bool) -> int:
    """Print the state of the cluster; the exit code says the same."""
    try:
        gateway, cluster = gateways.snapshot()
    except KeyNeeded as error:
        console.out(
            json.dumps({"status": "unknown", "verdict": str(error)}, indent=1) if as_json else str(error), highlight=False
        )
        return KEY_NEEDED
    except NoGateway as error:
        if as_json:
            console.out(json.dumps({"status": "down", "verdict": f"No gateway answers: {error}"}, indent=1), highlight=False)
        else:
            console.print(Text(f"No gateway answers: {error}", style="red"))
        return DOWN
    if as_json:
        console.out(json.dumps(cluster, indent=1), highlight=False)
    else:
        console.print(tables.overview(cluster))
        console.print(Text(f"by {gateway}", style="dim"))
    return exit_code(cluster)


def exit_code(cluster: dict[str, Any]) -> int:
    """Return the exit code for a cluster's state: 0 if all is well, 1 if it serves and something is wrong, 2 if it does not
    serve."""
    return {"ok": OK, "degraded": DEGRADED}.get(str(cluster["status"]), DOWN)


def watch(gateways: Gateways, console: Console, *, times: int | None = None) -> int:
    """Print the state each second, `times` or until interrupted or the output is closed, and return the last exit code. A
    terminal shows only the last state; a pipe receives each one."""
    if not console.is_terminal:
        return _watch(gateways, console, console.print, times)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        return _watch(gateways, console, partial(live.update, refresh=True), times)


def _watch(gateways: Gateways, console: Console, draw: Callable[[RenderableType], None], times: int | None) -> int:
    code = DOWN
    for left in count() if times is None else reversed(range(times)):
        code, cluster = _rendered(gateways)
        draw(cluster)
        if console.quiet:
            break
        if times is None or left:
            time.sleep(EVERY_S)
    return code


def _rendered(gateways: Gateways) -> tuple[int, RenderableType]:
    try:
        gateway, cluster = gateways.snapshot()
    except KeyNeeded as error:
        return KEY_NEEDED, Text(str(error), style="red")
    except NoGateway as error:
        return DOWN, Text(f"No gateway answers: {error}", style="red")
    foot = Text(f"by {gateway}; Ctrl-C ends this", style="dim")
    return exit_code(cluster), Group(tables.overview(cluster), Text(), tables.traffic(cluster), foot)
