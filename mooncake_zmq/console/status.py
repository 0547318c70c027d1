"""How a cluster is: once, with an exit code, or again each second."""

import json
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from mooncake_zmq.console import tables
from mooncake_zmq.console.gateways import Gateways, NoGateway

OK, DEGRADED, DOWN = 0, 1, 2
EVERY_S = 1.0


def show(gateways: Gateways, console: Console, *, as_json: bool) -> int:
    """Print how the cluster is; the exit code says the same."""
    try:
        gateway, picture = gateways.picture()
    except NoGateway as error:
        if as_json:
            console.out(json.dumps({"status": "down", "verdict": f"No gateway answers: {error}"}, indent=1), highlight=False)
        else:
            console.print(Text(f"No gateway answers: {error}", style="red"))
        return DOWN
    if as_json:
        console.out(json.dumps(picture, indent=1), highlight=False)
    else:
        console.print(tables.overview(picture))
        console.print(Text(f"by {gateway}", style="dim"))
    return exit_code(picture)


def exit_code(picture: dict[str, Any]) -> int:
    """Of a picture: 0 all is well, 1 it serves and something is wrong, 2 it does not serve."""
    return {"ok": OK, "degraded": DEGRADED}.get(str(picture["status"]), DOWN)


def watch(gateways: Gateways, console: Console, *, times: int | None = None) -> int:
    """Show it again each second, `times` or until interrupted; the last exit code."""
    code = DOWN
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while times is None or times > 0:
            times = None if times is None else times - 1
            try:
                gateway, picture = gateways.picture()
                code = exit_code(picture)
                foot = Text(f"by {gateway}; Ctrl-C ends this", style="dim")
                live.update(Group(tables.overview(picture), Text(), tables.traffic(picture), foot), refresh=True)
            except NoGateway as error:
                code = DOWN
                live.update(Text(f"No gateway answers: {error}", style="red"), refresh=True)
            if times != 0:
                time.sleep(EVERY_S)
    return code
