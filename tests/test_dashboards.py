"""What dashboards and alerts ask for is told by some node, and what nodes tell has a meaning."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mooncake_zmq.cache_node.disk_tier import DiskContents
from mooncake_zmq.gateway.metrics import EdgeMetrics
from mooncake_zmq.runtime.metric_texts import TEXTS
from mooncake_zmq.runtime.metrics import as_vllm, parse_name
from mooncake_zmq.simulation.cluster import ClusterSettings, processes

CONFIGS = Path(__file__).parent.parent / "configs"
PACKAGE = Path(__file__).parent.parent / "mooncake_zmq"
ROLES = ("conductor", "prefill", "decode", "cache_node", "gateway", "vllm_node")
SESSIONS = (PACKAGE / "core/session.py", PACKAGE / "core/watch.py")
"""They count what is told of a process's session."""
COUNTED = re.compile(r'counts\.add\(\s*f?"([a-z_]+)')
DASHBOARD = json.loads((CONFIGS / "grafana.json").read_text())
RULES = yaml.safe_load((CONFIGS / "alerts.yml").read_text())["groups"][0]["rules"]
OPERATING = (PACKAGE / "docs/operating.md").read_text()
NAME = re.compile(r"\b((?:mooncake_|vllm:)\w+)")


def exported() -> Iterator[str]:
    """Of all nodes together, as Prometheus has them."""
    for plain in TEXTS:
        yield from (f"mooncake_{plain}", f"mooncake_{plain}_total")
    edge = EdgeMetrics("m", waiting_and_running=lambda: (0, 0), counts=dict, gauges=dict)
    for metric in (*edge.registry.collect(), *as_vllm("m", {}, {})):
        if metric.type == "histogram":
            yield from (f"{metric.name}_{part}" for part in ("bucket", "sum", "count"))
        else:
            yield f"{metric.name}_total" if metric.type == "counter" else metric.name


def asked() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (rule["expr"] for rule in RULES)


@pytest.mark.parametrize("expression", list(asked()))
def test_what_is_asked_for_some_node_tells(expression: str) -> None:
    names = NAME.findall(expression)
    assert names or expression.startswith("up{")
    assert set(names) <= set(exported())


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    for rule in RULES:
        assert rule["annotations"].keys() == {"summary", "action"}, rule["alert"]


def test_the_manual_has_every_alert_and_no_other() -> None:
    assert set(re.findall(r"`(Mooncake[A-Z]\w+)`", OPERATING)) == {rule["alert"] for rule in RULES}


def test_every_gauge_of_an_actor_has_a_meaning() -> None:
    settings = ClusterSettings.of_seed(0)
    for spec in processes(settings):
        actor = spec.make(1, DiskContents())
        assert [name for name in actor.gauges(0.0) if parse_name(name)[0] not in TEXTS] == [], spec.role


def test_every_counter_of_an_actor_has_a_meaning() -> None:
    counted = {
        f"session_{name}" if path in SESSIONS else name
        for room in (*ROLES, "core")
        for path in (PACKAGE / room).rglob("*.py")
        for name in COUNTED.findall(path.read_text())
    }
    assert len(counted) > 80
    assert counted - TEXTS.keys() == set()
