"""A live cluster as an operator sees it: `status` and its exit codes, and any node's state by a gateway."""

import json
import signal
import subprocess
import sys
from typing import Any

import pytest
import web
from toy_cluster import ToyCluster, eventually, expected_tokens, greedy

from mooncake_zmq.operate.console.gateways import Gateways

pytestmark = pytest.mark.timeout(120)
LONG = 3000


def status(cluster: ToyCluster) -> tuple[int, str]:
    command = [sys.executable, "-m", "mooncake_zmq", "status", "--url", cluster.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_status_is_0_then_1_while_a_cache_node_is_stopped_and_0_again(cluster: ToyCluster) -> None:
    gateways = Gateways({"gateway-0": cluster.url})

    def reasons() -> list[str]:
        return [each["reason"] for each in gateways.ask("/cluster")[1]["degraded"]]

    assert status(cluster)[0] == 0
    cluster.signal("cache-b", signal.SIGSTOP)
    try:
        eventually(lambda: reasons() == ["cache_node_down"], what="it is missed")
        code, told = status(cluster)
    finally:
        cluster.signal("cache-b", signal.SIGCONT)
    assert code == 1
    assert "cache-b (cache-node on host-b) does not answer" in told
    eventually(lambda: not reasons(), what="it is back")


def test_what_moves_is_reported_and_a_nodes_state_comes_through_the_gateway(cluster: ToyCluster) -> None:
    gateways = Gateways({"gateway-0": cluster.url})
    prompt = [(3 * position) % 250 for position in range(300)]
    served = cluster.complete_text(prompt=prompt, max_tokens=4)["mooncake"]
    flow = {"from": served["prefill"], "to": served["decode"], "kind": "handoff"}

    def handed_over() -> bool:
        flows = gateways.ask("/cluster")[1]["flows"]
        return any(flow.items() <= each.items() and each["bytes"] > 0 for each in flows)

    eventually(handed_over, what="the handoff is seen")
    state = gateways.ask(f"/cluster/state/{served['decode']}")[1]
    assert (state["node"], state["role"]) == (served["decode"], "decode")


def test_a_request_is_traced_by_its_clients_id_with_its_time_at_each_node(cluster: ToyCluster) -> None:
    body = {"model": "toy", "prompt": list(range(100)), "max_tokens": 6, "ignore_eos": True}
    answer = web.post(f"{cluster.url}/v1/completions", json=body, headers={"x-request-id": "traced"}, timeout=30)
    served = answer.json()["mooncake"]
    (found,) = Gateways({"gateway-0": cluster.url}).ask("/trace/traced")[1]["requests"]
    assert found["request_id"] == served["request"] == answer.headers["x-mooncake-request-id"]
    assert (found["outcome"], found["completion_tokens"]) == ("length", 6)
    (attempt,) = found["attempts"]
    assert (attempt["prefill"], attempt["decode"], attempt["steps"]) == (served["prefill"], served["decode"], 5)
    assert {span["name"] for span in found["spans"]} >= {"place", "queue", "prepare", "prefill", "handoff", "decode"}
    log = cluster.runtime_dir / "logs" / "gateway-0.log"

    def told() -> list[dict[str, Any]]:
        lines = map(json.loads, log.read_text().splitlines())
        return [each for each in lines if each["event"] == "request" and each["x_request_id"] == "traced"]

    eventually(told, what="the request is a line in the log")
    (line,) = told()
    assert (line["id"], line["attempts"], line["given_up"]) == (served["request"], 1, [])


def test_the_answers_of_a_drained_node_go_on_elsewhere_it_takes_nothing_and_serves_again(cluster: ToyCluster) -> None:
    body = greedy(prompt=[7] * 40, max_tokens=LONG, stream=True)
    body |= {"stream_options": {"include_usage": True}, "n": 8}
    gateways = Gateways({"gateway-0": cluster.url})
    with web.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        decode = eventually(lambda: _busy_decode(cluster), what="it runs in a decode")
        told = gateways.order(f"/admin/drain/{decode}", "POST")[1]
        assert told["cordoned"]
        others = {cluster.complete_text(prompt=[number] * 40, max_tokens=4)["mooncake"]["decode"] for number in range(4)}
        assert decode not in others
        command = [sys.executable, "-m", "mooncake_zmq", "drain", decode, "--url", cluster.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, f"{decode} is drained" in done.stdout) == (0, True), done.stderr
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    served = chunks[-1]["mooncake"]
    assert (served["decode"] != decode, served["attempts"], served["relocations"]) == (True, 1, 1)
    tokens: dict[int, list[int]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
    right = expected_tokens([7] * 40, LONG)
    assert [tokens[index] == right[-len(tokens[index]) :] for index in range(8)] == [True] * 8
    assert gateways.order(f"/admin/drain/{decode}", "DELETE")[1]["state"] == "ready"


def test_where_all_decodes_are_drained_it_does_not_serve_and_says_so(cluster: ToyCluster) -> None:
    gateways = Gateways({"gateway-0": cluster.url})
    decodes = web.get(f"{cluster.url}/health").json()["peers"]["decode"]
    for decode in decodes:
        assert web.get(f"{cluster.url}/health").status_code == 200
        gateways.order(f"/admin/drain/{decode}", "POST")
    try:
        eventually(lambda: web.get(f"{cluster.url}/ready").json()["missing"] == ["decode"], what="nobody decodes")
        code, told = status(cluster)
    finally:
        for decode in decodes:
            gateways.order(f"/admin/drain/{decode}", "DELETE")
    assert (code, "does not serve" in told, decodes[0] in told) == (2, True, True), told
    eventually(lambda: web.get(f"{cluster.url}/health").status_code == 200, what="it serves again")
    assert status(cluster)[0] == 0


def test_the_only_gateway_rests_and_is_told_itself_to_serve_again_and_the_only_conductor_does_not_rest(
    cluster: ToyCluster,
) -> None:
    def drain(node: str, *more: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "mooncake_zmq", "drain", node, "--url", cluster.url, *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    code, text = drain("conductor-0")
    assert (code, "would go on asking it" in text) == (2, True), text
    body = {"model": "toy", "prompt": [9] * 40, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with web.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        told = Gateways({"gateway-0": cluster.url}).order("/admin/drain/gateway-0", "POST")[1]
        assert told["cordoned"]
        assert web.get(f"{cluster.url}/health").json()["status"] == "draining"
        refused = web.post(f"{cluster.url}/v1/completions", json={**body, "stream": False}, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert "retry-after" in refused.headers
        assert [line for line in lines if line][-1] == "data: [DONE]", "what was open ends"
    code, text = drain("gateway-0")
    assert (code, "gateway-0 is drained" in text) == (0, True), text
    assert drain("gateway-0", "--undo")[0] == 0
    assert cluster.complete_text(prompt=[8] * 40, max_tokens=4)["choices"][0]["token_ids"]


def _busy_decode(cluster: ToyCluster) -> str | None:
    """A decode that runs requests: by its own state, as nodes report each second only, when a toy's answer may be over."""
    states = {name: each for name, each in cluster.dumps().items() if name.startswith("decode")}
    return next((name for name, each in states.items() if each["gauges"]["requests_running"]), None)
