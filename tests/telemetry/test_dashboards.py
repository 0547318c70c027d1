"""What dashboards and alerts ask for is told by some node, and what nodes tell has a meaning."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from cuda_stand_in import FakeCupy, Gpu
from store_servers import store_server

from mooncake_zmq.gateway.http.metrics import EdgeMetrics
from mooncake_zmq.gateway.requests import otlp
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.node.disk_tier import DiskContents
from mooncake_zmq.pool.ssd.disk import Disk
from mooncake_zmq.runtime.kv_events import KvEventPublisher
from mooncake_zmq.runtime.kv_subscriber import KvSubscriber
from mooncake_zmq.simulation.cluster import ClusterSettings, processes
from mooncake_zmq.telemetry.metric_texts import TEXTS
from mooncake_zmq.telemetry.metrics import as_vllm, exposed_name, parse_name
from mooncake_zmq.transfer.cuda import Cuda
from mooncake_zmq.transfer.data_server import DataServer
from mooncake_zmq.transfer.network import RemoteReader
from mooncake_zmq.transfer.shared_memory import Segment
from mooncake_zmq.transfer.sockets import Sockets

CONFIGS = Path(__file__).parents[2] / "configs"
PACKAGE = Path(__file__).parents[2] / "mooncake_zmq"
ROLES = ("conductor", "prefill", "decode", "cache_node", "gateway", "vllm_node")
SESSIONS = (PACKAGE / "core/session.py", PACKAGE / "core/watch.py")
"""They count what is told of a process's session."""
COUNTED = re.compile(r'counts\.add\(\s*f?"([a-z_]+)')
DASHBOARD = json.loads((CONFIGS / "grafana.json").read_text())
RULES = yaml.safe_load((CONFIGS / "alerts.yml").read_text())["groups"][0]["rules"]
OPERATING = (PACKAGE / "docs/operating.md").read_text()
NAME = re.compile(r"\b((?:mooncake_|vllm:)\w+)")


LAYOUT = BlockLayout(layers=1, kv_heads=1, head_dim=2, block_tokens=4)
ANYWHERE = "tcp://127.0.0.1:*"


def counted() -> set[str]:
    """By actors, and by the sessions of their processes."""
    return {
        f"session_{name}" if path in SESSIONS else name
        for room in (*ROLES, "core")
        for path in (PACKAGE / room).rglob("*.py")
        for name in COUNTED.findall(path.read_text())
    }


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[set[str]]:
    """The names of what is told by the parts of a process that run beside its actor."""
    told = {"on_crash": pytest.fail}
    sockets = Sockets()
    with ExitStack() as stack:
        disk = stack.enter_context(closing(Disk.open(tmp_path / "blocks", LAYOUT, 1 << 20)))
        segment = stack.enter_context(closing(Segment.create(tmp_path, "test", "c0", LAYOUT, 1, 1)))
        store = stack.enter_context(closing(store_server(tmp_path, slabs=4, slab_bytes=1 << 18, ssd={})))
        subscriber = KvSubscriber(ANYWHERE.replace("*", "9"), replay_endpoint="", topic="", on_events=Mock(), **told)
        parts = {
            "disk": disk,
            "data_server": stack.enter_context(closing(DataServer(segment, ANYWHERE, sockets=sockets, **told))),
            "data_reader": stack.enter_context(closing(RemoteReader(LAYOUT, **told))),
            "kv_events": stack.enter_context(closing(KvEventPublisher(ANYWHERE, block_tokens=4, **told))),
            "kv_subscriber": stack.enter_context(closing(subscriber)),
            "cuda": stack.enter_context(closing(Cuda(FakeCupy(Gpu(), ()), LAYOUT))),
            "connections": sockets,
            "store": store,
        }
        names = {f"{part}_{name}" for part, each in parts.items() for name in each.counts}
        yield names | {f"store_{name}" for name in store.gauges()} | {f"otlp_{name}" for name in otlp.COUNTED}


def exported() -> Iterator[str]:
    """Of all nodes together, as Prometheus has them."""
    for plain in TEXTS:
        yield from (exposed_name(plain), f"{exposed_name(plain)}_total")
    edge = EdgeMetrics({"": "m"}, waiting_and_running=lambda _model: (0, 0), counts=dict, gauges=dict)
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
        assert rule["annotations"].keys() == {"summary", "action", "runbook_url"}, rule["alert"]
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert f"\n## {anchor.capitalize()}\n" in (PACKAGE.parent / page).read_text(), rule["alert"]


def test_a_summary_that_names_a_node_has_its_label() -> None:
    for rule in RULES:
        labels = set(re.findall(r"\$labels\.(node|host)", rule["annotations"]["summary"]))
        assert all(label in rule["expr"] for label in labels), rule["alert"]


def test_the_first_row_has_the_four_numbers_and_each_panel_keeps_to_the_nodes_chosen() -> None:
    stats = [panel for panel in DASHBOARD["panels"] if panel["type"] == "stat"]
    assert [panel["gridPos"]["y"] for panel in stats] == [0] * 4
    assert [len(panel["targets"]) for panel in stats] == [2] * 4
    assert {each["name"] for each in DASHBOARD["templating"]["list"]} == {"source", "host", "node"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            assert len(NAME.findall(target["expr"])) == target["expr"].count('{instance=~"$node"'), panel["title"]


def test_the_manual_has_every_alert_and_no_other() -> None:
    assert set(re.findall(r"`(Mooncake[A-Z]\w+)`", OPERATING)) == {rule["alert"] for rule in RULES}


def test_every_gauge_of_an_actor_has_a_meaning() -> None:
    settings = ClusterSettings.of_seed(0)
    for spec in processes(settings):
        actor = spec.make(1, DiskContents())
        assert [name for name in actor.gauges(0.0) if parse_name(name)[0] not in TEXTS] == [], spec.role


def test_every_counter_of_an_actor_has_a_meaning() -> None:
    assert len(counted()) > 80
    assert sorted(counted() - TEXTS.keys()) == []


def test_what_is_told_beside_an_actor_has_a_meaning(beside: set[str]) -> None:
    assert len(beside) > 80
    assert sorted({parse_name(name)[0] for name in beside} - TEXTS.keys()) == []


def test_a_name_is_counted_by_one_part_alone(beside: set[str]) -> None:
    """Else its sum would count things twice."""
    assert beside & counted() == set()
