"""Drains a node through a gateway, and prints how many requests it has left until there are none."""

import time
from typing import Any
from urllib.parse import quote

from rich.console import Console

from mooncake_zmq.operate.console.gateways import Gateways, NoGateway

DONE, UNDONE, REFUSED = 0, 1, 2
EVERY_S = 0.5
SURE = 5
"""The number of polls in a row that find the node serving before that is believed: reports arrive once a second."""


def drain(gateways: Gateways, node: str, console: Console, *, within_s: float) -> int:
    """Drain a node and wait until nothing is left, for at most `within_s` seconds; it continues to drain afterwards. Return
    the exit code."""
    try:
        gateway, state = gateways.order(_path(node), "POST")
        console.print(f"{node} takes nothing new, as {gateway} sees it", highlight=False)
        _warn_of_gap(gateways, state.get("role", ""), console)
        ends_at, said, serving = time.monotonic() + within_s, None, 0
        while state["state"] != "drained" and time.monotonic() < ends_at:
            if state.get("left") != said:
                said = state.get("left")
                console.print(f"{said or 0:.0f} left to finish", highlight=False)
            time.sleep(EVERY_S)
            state = _node(gateways, node)
            serving = serving + 1 if state.get("cordoned") is False else 0  # a poll may reach another, outdated gateway
            if serving == SURE:
                console.print(f"{node} is no longer cordoned: it is {state['state']}", highlight=False)
                return UNDONE
    except NoGateway as error:
        return _refused(console, error)
    if state["state"] != "drained":
        console.print(f"{node} is not done yet: {state.get('left') or 0:.0f} left to finish", highlight=False)
        return UNDONE
    console.print(f"{node} is drained; it runs, and serves again after --undo or a restart", highlight=False)
    return DONE


ONLY_DOES = {"prefill": "computes prompts", "decode": "decodes"}


def _warn_of_gap(gateways: Gateways, role: str, console: Console) -> None:
    """Print what no node does any more, if this was the last one of its role that took requests."""
    nodes = gateways.snapshot()[1]["nodes"] if role in ONLY_DOES else []
    if nodes and not any(node["role"] in (role, "vllm") and node["state"] in ("ready", "degraded") for node in nodes):
        text = f"nothing {ONLY_DOES[role]} now: the cluster serves no request until a node does again"
        console.print(text, style="yellow", highlight=False)


def undo(gateways: Gateways, node: str, console: Console) -> int:
    """Make a drained node serve again; return the exit code."""
    try:
        gateways.order(_path(node), "DELETE")
    except NoGateway as error:
        return _refused(console, error)
    console.print(f"{node} serves again", highlight=False)
    return DONE


def _path(node: str) -> str:
    return f"/admin/drain/{quote(node, safe='')}"


def _node(gateways: Gateways, node: str) -> Any:
    return next(each for each in gateways.snapshot()[1]["nodes"] if each["name"] == node)


def _refused(console: Console, error: NoGateway) -> int:
    console.print(f"mooncake-zmq: {error}", style="red", highlight=False, markup=False)
    return REFUSED
