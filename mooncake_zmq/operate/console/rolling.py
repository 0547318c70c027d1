"""Restarts the nodes of a cluster one after the other: each is drained, restarted, and serves again before the next one's turn.

What to do is a plan made by `plan` from the configuration and a gateway's snapshot; `roll` carries it out.
"""

import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from mooncake_zmq.config.records import NodeSettings
from mooncake_zmq.gateway.http.reuse_port import LISTENING
from mooncake_zmq.operate.console import drain as draining
from mooncake_zmq.operate.console.gateways import SERVING, Gateways, NoGateway

DONE, STOPPED = 0, 1
ORDER = ("cache-node", "prefill", "decode", "vllm", "gateway", "conductor")
"""Roles in the order of their restart: requests reach a new gateway or conductor only when all that it needs runs."""
NEEDED = ("prefill", "decode", "gateway", "conductor")
"""Roles without which no request is served; a vLLM is a prefill and a decode."""
SYSTEMD = "systemctl restart {unit}"
EVERY_S = 0.5
SURE = 4
"""The number of polls in a row that must find a node serving before the next one's turn, so that all gateways and conductors
are connected to it as well."""
Snapshot = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """The restart of one node."""

    node: NodeSettings
    last: bool
    """Whether no other node of its role serves its model: it is not drained first, as that would only lengthen the pause."""

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def role(self) -> str:
        return self.node.role

    @property
    def host(self) -> str:
        return self.node.host

    @property
    def unit(self) -> str:
        """Return the systemd unit of the node."""
        return f"mooncake-{self.role}@{self.name}.service"


class BadPlan(Exception):
    """Raised where the restart cannot be planned; the message is one line."""


def plan(nodes: Sequence[NodeSettings], snapshot: Snapshot, only: Sequence[str] = ()) -> list[Step]:
    """Return the steps in their order, for the nodes named by `only` or all of `nodes`. Raises BadPlan."""
    names = [node.name for node in nodes]
    if unknown := [name for name in only if name not in names]:
        raise BadPlan(f"there is no node {unknown[0]} here: there are {', '.join(names)}")
    serving = _serving(snapshot)
    chosen = [node for node in nodes if not only or node.name in only]
    chosen.sort(key=lambda node: ORDER.index(node.role))
    return [Step(node, _is_last(node, serving)) for node in chosen]


def _serving(snapshot: Snapshot) -> list[Mapping[str, Any]]:
    return [node for node in snapshot["nodes"] if node["state"] in ("ready", "degraded")]


def _found(snapshot: Snapshot, name: str) -> Mapping[str, Any]:
    """Return the record of a node. Raises NoGateway."""
    for node in snapshot["nodes"]:
        if node["name"] == name:
            return dict(node)
    raise NoGateway(f"the gateway's configuration has no node {name}")


def _is_last(node: NodeSettings, serving: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a role that requests for its model need has only this node. `serving`: the nodes that serve."""
    role = next((each["role"] for each in serving if each["name"] == node.name), node.role)
    roles = ("prefill", "decode") if role == "vllm" else (role,)
    of_model = [each for each in serving if each.get("model", node.model) == node.model]
    others = {each["role"] for each in of_model if each["name"] != node.name}
    return any(
        needed in NEEDED and needed not in others and not (needed in ("prefill", "decode") and "vllm" in others)
        for needed in roles
    )


def lasts(steps: Sequence[Step]) -> list[str]:
    """Return the nodes whose restart is a pause for clients."""
    return [step.name for step in steps if step.last]


def words(command: str, step: Step, pid: int) -> list[str]:
    """Return the command that restarts a node, as words. Raises BadPlan."""
    if "{pid}" in command and not pid:
        raise BadPlan(f"--command {command}: {step.name} has no process on this machine, so there is no {{pid}}")
    known = {"node": step.name, "host": step.host, "unit": step.unit, "role": step.role, "pid": pid}
    try:
        filled = [word.format_map(known) for word in shlex.split(command)]
    except (LookupError, ValueError) as error:
        raise BadPlan(f"--command {command}: {error}; known are {{node}}, {{host}}, {{unit}}, {{role}} and {{pid}}") from None
    if not filled:
        raise BadPlan("--command is empty")
    return filled


@dataclass(frozen=True, slots=True)
class Roll:
    """A rolling restart. `pid_of` returns the process of a node on this machine, 0 for none."""

    gateways: Gateways
    console: Console
    command: str
    pid_of: Callable[[str], int]
    within_s: float
    """The time within which each node must be drained, and after its restart serve again."""
    again: Sequence[str] = ("mooncake-zmq", "restart", "--rolling")
    """The command line that was given, without the nodes."""
    takes_lasts: bool = True
    """Whether nodes that no other one stands in for are restarted too."""

    def show(self, steps: Sequence[Step]) -> None:
        """Print what would be done."""
        for step in steps:
            before = "no other serves, a pause" if step.last else "drain, then"
            self._say(f"{step.name} ({step.role} on {step.host}): {before}: {shlex.join(self._words(step))}")

    def run(self, steps: Sequence[Step]) -> int:
        """Restart the nodes in their order; return the exit code. It ends at the first one that does not come back."""
        for number, step in enumerate(steps):
            self._say(f"[{number + 1}/{len(steps)}] {step.name}")
            try:
                problem = self._drained(step) or self._restarted(step)
            except (NoGateway, BadPlan) as error:
                problem = str(error)
            except BaseException:  # Ctrl-C in a drain, say
                self._serve_again(step.name)
                raise
            if problem:
                self._explain(problem, step, [left.name for left in steps[number:]])
                self._serve_again(step.name)
                return STOPPED
        self._say(f"restarted {len(steps)} of {len(steps)} nodes")
        return DONE

    def _drained(self, step: Step) -> str:
        """Drain a node before its restart; return what went wrong."""
        if step.last:
            return ""
        snapshot = self.gateways.snapshot()[1]
        state = _found(snapshot, step.name)
        if state["state"] == "down":
            return ""
        if not self.takes_lasts and _is_last(step.node, _serving(snapshot)):
            return f"no other node does any more what {step.name} does; --yes allows the pause"
        code = draining.drain(self.gateways, step.name, self.console, within_s=self.within_s)
        return "" if code == draining.DONE else f"{step.name} could not be drained"

    def _serve_again(self, name: str) -> None:
        """Make a node that was drained and not restarted serve again."""
        with suppress(NoGateway):
            if self._node(name)[1]["state"] in ("draining", "drained"):
                draining.undo(self.gateways, name, self.console)

    def _restarted(self, step: Step) -> str:
        """Restart a node and wait until a new incarnation serves; return what went wrong."""
        before = self._node(step.name)[1].get("incarnation")
        command = self._words(step)
        self._say(shlex.join(command))
        began_at = time.monotonic()
        try:
            done = subprocess.run(command, check=False, timeout=self.within_s, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{shlex.join(command)}: {error}"
        if done.returncode:
            return f"{shlex.join(command)} ended with {done.returncode}"
        in_a_row = 0
        while in_a_row < SURE:
            if time.monotonic() - began_at > self.within_s:
                return f"{step.name} did not come back within {self.within_s:g} s"
            time.sleep(EVERY_S)
            in_a_row = in_a_row + 1 if self._serves_anew(step.name, before) else 0
        self._say(f"{step.name} serves again after {time.monotonic() - began_at:.1f} s")
        return ""

    def _serves_anew(self, name: str, before: int | None) -> bool:
        """Return whether the cluster serves with a new incarnation of the node. No answer counts as no: the node may be the
        only gateway."""
        try:
            status, node = self._node(name)
        except NoGateway:
            return False
        anew = node.get("incarnation") not in (None, before) and node["gauges"].get(LISTENING, 1)
        return bool(anew) and node["state"] in ("ready", "degraded") and status in SERVING

    def _node(self, name: str) -> tuple[str, Snapshot]:
        """Return the status of the cluster, and the record of a node in it. Raises NoGateway."""
        snapshot = self.gateways.snapshot()[1]
        return str(snapshot["status"]), _found(snapshot, name)

    def _words(self, step: Step) -> list[str]:
        return words(self.command, step, self.pid_of(step.name) if "{pid}" in self.command else 0)

    def _explain(self, problem: str, step: Step, left: Sequence[str]) -> None:
        """Print why it ends here, and how to continue."""
        self._say(f"mooncake-zmq: {problem}; no other node was touched since", style="red")
        self._say(f"see `systemctl status {step.unit}` and `journalctl -u {step.unit}` on {step.host}")
        again = shlex.join([*self.again, *(word for name in left for word in ("--only", name))])
        self._say(f"once {step.name} is mended, continue by: {again}")

    def _say(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style, highlight=False, markup=False)
