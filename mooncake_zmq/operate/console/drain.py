"""Has a node rest, by a gateway, and tells how much it has left until that is nothing."""

import time
from typing import Any
from urllib.parse import quote

from rich.console import Console

from mooncake_zmq.operate.console.gateways import Gateways, NoGateway

DONE, UNDONE, REFUSED = 0, 1, 2
EVERY_S = 0.5
SURE = 5
"""Looks in a row that find the node serving: reports come each second."""


def drain(gateways: Gateways, node: str, console: Console, *, within_s: float) -> int:
    """Until nothing is left, or for `within_s` seconds: then it goes on by itself."""
    try:
        gateway, told = gateways.order(_path(node), "POST")
        console.print(f"{node} takes nothing new, as {gateway} sees it", highlight=False)
        ends_at, said, serving = time.monotonic() + within_s, None, 0
        while told["state"] != "drained" and time.monotonic() < ends_at:
            if told.get("left") != said:
                said = told.get("left")
                console.print(f"{said or 0:.0f} left to finish", highlight=False)
            time.sleep(EVERY_S)
            told = _node(gateways, node)
            serving = serving + 1 if told.get("resting") is False else 0  # one look may be at another gateway, which heard less
            if serving == SURE:
                console.print(f"{node} rests no more: it is {told['state']}", highlight=False)
                return UNDONE
    except NoGateway as error:
        return _refused(console, error)
    if told["state"] != "drained":
        console.print(f"{node} is not done yet: {told.get('left') or 0:.0f} left to finish", highlight=False)
        return UNDONE
    console.print(f"{node} is drained; it runs, and serves again after --undo or a restart", highlight=False)
    return DONE


def undo(gateways: Gateways, node: str, console: Console) -> int:
    """Have it serve again."""
    try:
        gateways.order(_path(node), "DELETE")
    except NoGateway as error:
        return _refused(console, error)
    console.print(f"{node} serves again", highlight=False)
    return DONE


def _path(node: str) -> str:
    return f"/admin/drain/{quote(node, safe='')}"


def _node(gateways: Gateways, node: str) -> Any:
    return next(each for each in gateways.picture()[1]["nodes"] if each["name"] == node)


def _refused(console: Console, error: NoGateway) -> int:
    console.print(f"mooncake-zmq: {error}", style="red", highlight=False, markup=False)
    return REFUSED
