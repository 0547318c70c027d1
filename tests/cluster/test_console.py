"""A live cluster as an operator sees it: `status` and its exit codes, and any node's state by a gateway."""

import signal
import subprocess
import sys

import pytest
from toy_cluster import ToyCluster, eventually

from mooncake_zmq.console.gateways import Gateways

pytestmark = pytest.mark.timeout(120)


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
