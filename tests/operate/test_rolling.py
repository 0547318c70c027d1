"""The plan of a rolling restart: whose turn is when, which node is the last of its role, and which command restarts it."""

import shlex
from collections.abc import Callable
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from rich.console import Console

from mooncake_zmq.cli import main
from mooncake_zmq.config.records import NodeSettings
from mooncake_zmq.operate.console import drain as draining
from mooncake_zmq.operate.console import rolling
from mooncake_zmq.operate.console.gateways import Gateways
from mooncake_zmq.operate.console.restart import _command_line
from mooncake_zmq.operate.console.rolling import BadPlan, Roll, Step, lasts, plan, words

ROLES = {
    "conductor-0": "conductor",
    "decode-a": "decode",
    "gateway-0": "gateway",
    "prefill-a": "prefill",
    "cache-a": "cache-node",
}
TWO = ROLES | {f"{name}2": role for name, role in ROLES.items()}
TWO_NAMES = list(TWO)
STEP = Step(NodeSettings(name="decode-a", role="decode", host="host-a"), last=False)
TOY = str(Path(__file__).parent.parent.parent / "configs/toy.toml")


def nodes(roles: dict[str, str]) -> list[NodeSettings]:
    return [NodeSettings(name=name, role=role, host="host-a") for name, role in roles.items()]


def snapshot(roles: dict[str, str], **states: str) -> dict[str, Any]:
    known = [
        {"name": name, "role": role, "state": states.get(name.replace("-", "_"), "ready"), "gauges": {}, "incarnation": 1}
        for name, role in roles.items()
    ]
    return {"status": "ok", "verdict": "All is well.", "nodes": known}


def test_caches_come_first_then_engines_then_gateways_and_conductors_last() -> None:
    assert [step.name for step in plan(nodes(ROLES), snapshot(ROLES))] == [
        *("cache-a", "prefill-a", "decode-a", "gateway-0", "conductor-0")
    ]


def test_only_names_the_nodes_and_an_unknown_name_is_refused() -> None:
    assert [step.name for step in plan(nodes(ROLES), snapshot(ROLES), ("gateway-0", "cache-a"))] == ["cache-a", "gateway-0"]
    with pytest.raises(BadPlan, match="there is no node decode-z here"):
        plan(nodes(ROLES), snapshot(ROLES), ("decode-z",))


def test_the_last_node_of_one_of_several_models_is_known() -> None:
    models = {
        "conductor-m": "m",
        "vllm-m": "m",
        "vllm-m2": "m",
        "conductor-n": "n",
        "vllm-n": "n",
        "gateway-0": "",
        "cache-a": "",
    }
    settings = [
        NodeSettings(name=name, role="cache-node" if name == "cache-a" else name.partition("-")[0], host="h", model=model)  # type: ignore[arg-type]
        for name, model in models.items()
    ]
    seen = snapshot({node.name: node.role for node in settings})
    for each in seen["nodes"]:
        each |= {"model": models[each["name"]]} if models[each["name"]] else {}
    assert sorted(lasts(plan(settings, seen))) == ["conductor-m", "conductor-n", "gateway-0", "vllm-n"]


@pytest.mark.parametrize(
    ("roles", "states", "last"),
    [
        (ROLES, {}, ["prefill-a", "decode-a", "gateway-0", "conductor-0"]),
        (TWO, {}, []),
        (TWO, {"decode_a2": "down"}, ["decode-a"]),
        (TWO, {"decode_a2": "drained", "conductor_0": "draining"}, ["decode-a", "conductor-02"]),
        (TWO, {"prefill_a": "degraded"}, []),
        (ROLES | {"vllm-a": "vllm"}, {}, ["gateway-0", "conductor-0"]),
        ({"vllm-a": "vllm", "prefill-a": "prefill"}, {}, ["vllm-a"]),
    ],
)
def test_the_last_node_of_a_role_is_known(roles: dict[str, str], states: dict[str, str], last: list[str]) -> None:
    assert sorted(lasts(plan(nodes(roles), snapshot(roles, **states)))) == sorted(last)


def test_a_command_has_the_nodes_names_and_one_that_cannot_be_filled_is_refused() -> None:
    assert words("ssh {host} systemctl restart {unit}", STEP, 0) == [
        *("ssh", "host-a", "systemctl", "restart", "mooncake-decode@decode-a.service")
    ]
    assert words("kill -TERM {pid}", STEP, 77) == ["kill", "-TERM", "77"]
    for command, why in (
        ("kill {pid}", "no process"),
        ("x {nod}", "known are"),
        ("x {", "known are"),
        ("x 'y", "known"),
        ("", "empty"),
    ):
        with pytest.raises(BadPlan, match=why):
            words(command, STEP, 0)


class World:
    """A gateway that drains at once; `answer` may change a node's record at each look."""

    def __init__(self, roles: dict[str, str], answer: Callable[[int, dict[str, Any]], None]) -> None:
        self.asked: list[str] = []
        self._roles, self._answer, self._looks = roles, answer, count()
        self.gateways = Gateways({"g": "http://g"}, transport=httpx.MockTransport(self._handle))

    def _handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path != "/cluster":
            self.asked.append(f"{request.method} {path}")
            return httpx.Response(200, json={"name": path.rpartition("/")[2], "state": "drained", "left": 0})
        told = snapshot(self._roles)
        self._answer(next(self._looks), told)
        return httpx.Response(200, json=told)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "EVERY_S", 0.0)
    monkeypatch.setattr(rolling, "EVERY_S", 0.0)


def rolled(
    world: World, *names: str, command: str = "true {node}", within_s: float = 30.0, takes_lasts: bool = False
) -> tuple[int, str]:
    output = StringIO()
    console = Console(file=output, width=400)
    roll = Roll(world.gateways, console, command, lambda _node: 0, within_s, takes_lasts=takes_lasts)
    steps = plan(nodes(TWO), snapshot(TWO), names)
    return roll.run(steps), output.getvalue()


def renewed(look: int, told: dict[str, Any]) -> None:
    """Each node has another incarnation at each look."""
    for node in told["nodes"]:
        node["incarnation"] = look


def test_each_node_is_drained_and_restarted_in_its_turn() -> None:
    world = World(TWO, renewed)
    code, said = rolled(world, "decode-a", "cache-a")
    assert (code, world.asked) == (0, ["POST /admin/drain/cache-a", "POST /admin/drain/decode-a"])
    assert said.index("true cache-a") < said.index("cache-a serves again") < said.index("true decode-a")
    assert "restarted 2 of 2 nodes" in said


def test_an_old_incarnation_is_not_taken_for_the_new_one() -> None:
    code, said = rolled(World(TWO, lambda _look, _told: None), "decode-a", "cache-a", within_s=0.2)
    assert code == 1
    assert "cache-a did not come back within 0.2 s" in said
    assert "--only cache-a --only decode-a" in said


def test_a_command_that_fails_ends_it_and_says_how_to_continue() -> None:
    def drained(_look: int, told: dict[str, Any]) -> None:
        told["nodes"][TWO_NAMES.index("cache-a")]["state"] = "drained"

    world = World(TWO, drained)
    code, said = rolled(world, "decode-a", "cache-a", command="false")
    assert (code, world.asked) == (1, ["POST /admin/drain/cache-a", "DELETE /admin/drain/cache-a"]), "it serves again"
    assert "false ended with 1" in said
    assert "journalctl -u mooncake-cache-node@cache-a.service" in said


def test_a_node_that_is_down_is_not_drained_and_a_new_gateway_must_listen() -> None:
    def down_at_first(look: int, told: dict[str, Any]) -> None:
        renewed(look, told)
        gateway = next(node for node in told["nodes"] if node["name"] == "gateway-0")
        gateway["gauges"] = {rolling.LISTENING: float(look > 5)}
        if look == 0:
            gateway["state"] = "down"

    world = World(TWO, down_at_first)
    code, _ = rolled(world, "gateway-0")
    assert (code, world.asked) == (0, [])
    assert next(world._looks) > 5 + rolling.SURE


def test_a_node_that_is_the_last_by_now_is_not_drained_unless_that_was_allowed() -> None:
    def other_fell(look: int, told: dict[str, Any]) -> None:
        renewed(look, told)
        told["nodes"][TWO_NAMES.index("decode-a2")]["state"] = "down"

    world = World(TWO, other_fell)
    code, said = rolled(world, "decode-a")
    assert (code, world.asked) == (1, [])
    assert "no other node does any more what decode-a does" in said
    assert rolled(World(TWO, other_fell), "decode-a", takes_lasts=True)[0] == 0


def test_a_drain_that_is_interrupted_is_undone() -> None:
    def interrupted(look: int, told: dict[str, Any]) -> None:
        told["nodes"][TWO_NAMES.index("decode-a")]["state"] = "drained"
        if look == 1:
            raise KeyboardInterrupt

    world = World(TWO, interrupted)
    with pytest.raises(KeyboardInterrupt):
        rolled(world, "decode-a")
    assert world.asked == ["POST /admin/drain/decode-a", "DELETE /admin/drain/decode-a"]


def test_what_is_printed_to_continue_has_the_options_that_were_given() -> None:
    words = _command_line("/etc/c.toml", ["a.b=1"], "", "ca.pem", "ssh {host} x", 60.0, yes=True)
    again = shlex.join([*words, "--only", "decode-a"])
    assert again == (
        "mooncake-zmq restart --rolling --config /etc/c.toml --ca ca.pem --command 'ssh {host} x' --set a.b=1 --wait 60 --yes "
        "--only decode-a"
    )


def test_without_a_gateway_or_with_a_wrong_command_nothing_is_done_and_it_is_2() -> None:
    done = CliRunner().invoke(main, ["restart", "--rolling", "--config", TOY, "--set", "gateway.http_port=9"])
    assert (done.exit_code, "gateway-0 at http://127.0.0.1:9" in done.output) == (2, True), done.output
    assert CliRunner().invoke(main, ["restart"]).exit_code == 2
