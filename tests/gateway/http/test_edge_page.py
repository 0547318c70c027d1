"""The page at the gateway's root: what it may do in a browser, and that it reads nothing that the gateway does not tell."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from scripted_actor import ScriptedActor, events, hello

import mooncake_zmq
from mooncake_zmq.conductor.prefix_index import PrefixIndex
from mooncake_zmq.conductor.recent import RecentChains
from mooncake_zmq.core.messages import Moved, RejectReason, Report
from mooncake_zmq.core.transfer_stats import KINDS
from mooncake_zmq.core.watch import PeerReport
from mooncake_zmq.gateway.http import web
from mooncake_zmq.gateway.requests import cluster_snapshot, history
from mooncake_zmq.gateway.requests.cluster_snapshot import Listed
from mooncake_zmq.gateway.requests.request import RequestState
from mooncake_zmq.gateway.requests.request_log import Attempt, RequestEntry, Span
from mooncake_zmq.gateway.requests.traces import ANSWERED
from mooncake_zmq.pool.node.misses import REASONS

SOURCE = web.sheet()
HOME = Path(mooncake_zmq.__file__).parent
ACTORS = {
    "gateway": "gateway/requests/requests.py",
    "conductor": "conductor/snapshot.py",
    "prefill": "prefill/prefill.py",
    "decode": "decode/decode.py",
    "vllm": "vllm_node/vllm_node.py",
    "cache-node": "pool/node/cache_node.py",
}


def table(name: str) -> dict[str, Any]:
    """A table of the script, all of which are JSON."""
    found = re.search(rf"^const {name} = (\{{.*?\}});$", SOURCE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def content(tag: str, text: str = SOURCE) -> str:
    (found,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return found


def test_it_tells_the_endpoint_and_leads_to_the_other_pages():
    answer = ScriptedActor(allow_open=True).call("GET", "/", headers={"host": "example:1"})
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "curl -N http://example:1/v1/chat/completions" in answer.text
    assert '<code id="model">toy</code>' in answer.text
    for path in ("v1/models", "health", "metrics"):
        assert f'href="{path}"' in answer.text
    assert "{{" not in answer.text.replace(content("script"), "")


def test_a_hostile_name_stays_text():
    served = ScriptedActor(allow_open=True).call("GET", "/", headers={"host": "<script>"}).text
    written = web.front_page("http://<script>/", '</code><script>alert(1)</script>"{{curl}}', 1)
    assert "http://&lt;script&gt;/v1" in written
    for text in (served, written):
        assert content("script", text) == content("script")


@pytest.mark.parametrize("tag", ["script", "style"])
def test_its_policy_lets_run_what_is_served_and_nothing_else(tag):
    answer = ScriptedActor().call("GET", "/")
    digest = base64.b64encode(hashlib.sha256(content(tag, answer.text).encode()).digest()).decode()
    policy = dict(each.split(" ", 1) for each in answer.headers["content-security-policy"].split("; "))
    assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert (policy["default-src"], policy["connect-src"], policy["base-uri"]) == ("'none'", "'self'", "'none'")
    assert policy["frame-ancestors"] == "'none'"


def test_it_needs_no_other_host_and_writes_no_markup():
    hosts = {host for host in re.findall(r"(?:https?:)?//[a-z0-9][\w.-]*\.\w+", SOURCE) if "www.w3.org" not in host}
    assert hosts == set()
    assert re.findall(r"<[^>]*\s(?:src|style|on\w+)=", SOURCE) == []
    writers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc|javascript:|localStorage"
    assert re.findall(writers, SOURCE) == []


@pytest.mark.skipif(shutil.which("node") is None, reason="no node is here to read it")
def test_its_script_is_one(tmp_path):
    script = tmp_path / "page.js"
    script.write_text(content("script"))
    subprocess.run(["node", "--check", script], check=True, timeout=60)


def test_every_element_that_it_looks_for_is_there_once():
    ids = re.findall(r'\bid="([\w-]+)"', SOURCE)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'\bat\("([\w-]+)"\)', SOURCE)) <= set(ids)


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """The snapshot and the list of requests, as full as they can be."""
    gauges = {"cached_blocks": 1.0, "capacity_blocks": 4.0}
    moved = (Moved(kind="load", peer="cache-0", bytes=5),)
    listed = [Listed(role, role, "h") for role in ("conductor", "prefill", "decode", "cache-node")]
    actor = ScriptedActor(listed=[*listed, Listed("gone", "decode", "h")])
    actor.up["cache-node"] = hello("cache-node")
    actor.reports = {"prefill": PeerReport(100.0, 1, Report(uptime_s=1.0, gauges=tuple(gauges.items()), moved=moved))}
    actor.edge.clock = lambda: 100.0
    attempt = Attempt(
        number=1, began_s=0.0, conductor="conductor", placed_s=0.1, prefill="prefill", decode="decode", first_s=0.5
    )
    entry = RequestEntry(request_id="gw-1", arrived_at=0.0, outcome="stop", duration_s=1.0, attempts=[attempt])
    actor.edge.ended.add(entry)
    actor.actor_counts["requests_failed[code=no_decode]"] = 1
    actor.edge.sample()
    return {"snapshot": actor.call("GET", "/cluster").json(), "list": actor.call("GET", "/cluster/requests").json()}


def of_kinds(answers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What each kind of record looks like, by the names that the script has for them."""
    snapshot = answers["snapshot"]
    (request,) = answers["list"]["recent"]
    node = next(node for node in snapshot["nodes"] if node.get("tiers"))
    return {
        **answers,
        "slow": snapshot["slow"][0],
        "number": snapshot["numbers"]["requests_per_s"],
        "process": node["process"],
        "degraded": snapshot["degraded"][0],
        "node": node,
        "tier": node["tiers"]["slab"],
        "flow": snapshot["flows"][0],
        "hits": snapshot["hits"],
        "requests": snapshot["requests"],
        "prediction": snapshot["predictions"]["ttft"],
        "request": request,
        "attempt": request["attempts"][0],
        "span": request["spans"][0],
    }


def test_a_replay_is_the_same_page_and_may_do_less():
    written = web.replay_page("<replay>", b"tape")
    live = ScriptedActor().call("GET", "/").text
    for tag in ("script", "style"):
        assert content(tag, written) == content(tag, live) == content(tag)
    (policy,) = re.findall(r'<meta http-equiv="content-security-policy" content="([^"]*)">', written)
    rules = dict(each.split(" ", 1) for each in policy.split("; "))
    for tag in ("script", "style"):
        assert rules[f"{tag}-src"] in web.headers()["content-security-policy"]
    assert (rules["default-src"], "connect-src" in rules) == ("'none'", False)
    assert '<script type="text/plain" id="tape">dGFwZQ==</script>' in written
    assert written.index(policy) < written.index("<style>")
    assert written.index('id="tape"') < written.index("<script>")
    assert "&lt;replay&gt;" in written
    assert 'id="tape"' not in live


def test_it_reads_only_what_the_cluster_tells(answers):
    reads, told = table("READS"), of_kinds(answers)
    about = reads.pop("about")
    assert sorted(reads) == sorted(told)
    for kind, fields in reads.items():
        assert [name for name in fields if name not in told[kind]] == [], kind
        for name, otherwise in fields.items():
            if otherwise is not None:
                number = isinstance(otherwise, int)
                assert isinstance(told[kind][name], (int, float) if number else type(otherwise)), (kind, name)
    process = (HOME / "runtime/gateway_process.py").read_text()
    assert [name for name in about if f'"{name}": ' not in process] == []


def test_it_uses_all_that_it_reads():
    script = content("script").partition("const READS_OF_OTHERS")[2]
    for fields in table("READS").values():
        for name in fields:
            used = name.replace("ttft", "${key}").replace("tbt", "${key}")
            assert re.search(rf"\.{name}\b", script) or used in script, name


def test_loads_are_gauges_of_their_roles():
    loads = table("LOADS")
    assert set(loads) == set(ACTORS)
    for role, gauges in loads.items():
        source = (HOME / ACTORS[role]).read_text()
        gauges_of = source.partition("def gauges")[2].partition("    def ")[0]
        states = [state.value for state in RequestState] if role == "gateway" else []
        for gauge in gauges:
            assert f'"{gauge}": ' in gauges_of or gauge.removeprefix("requests_") in states, (role, gauge)


def test_whatever_is_not_over_is_in_work():
    states = {f"requests_{state.value}" for state in RequestState if state is not RequestState.ENDED}
    assert set(table("LOADS")["gateway"]) == states


def test_it_has_words_for_every_reason_span_and_way():
    assert list(table("MISSES").keys() ^ cluster_snapshot.MISSES.keys()) == ["none"]
    assert set(cluster_snapshot.MISS_REASONS) == set(REASONS)
    assert set(table("WAYS")) <= set(KINDS)
    assert set(KINDS) - set(table("WAYS")) == {"reuse", "promote", "demote"}  # within a node
    accounts = (HOME / "gateway/requests/request_log.py").read_text()
    assert set(table("SPANS")) == set(re.findall(rf'{Span.__name__}\("([a-z ]+)"', accounts))
    states = (HOME / "gateway/requests/cluster_snapshot.py").read_text()
    assert [state for state in table("STATES") if f'"{state}"' not in states] == []
    assert {name for tile in table("TILES").values() for name in tile["numbers"]} == set(history.NUMBERS)
    assert set(table("OUTCOMES")) == set(ANSWERED)
    assert set(table("REFUSALS")) == {each.value for each in (RejectReason.TTFT, RejectReason.TBT, RejectReason.NO_ROOM)}


def test_what_it_reads_of_answers_and_of_conductors_is_there():
    others = table("READS_OF_OTHERS")
    streamed = events(ScriptedActor().chat(stream=True, stream_options={"include_usage": True}))
    last = next(each for each in reversed(streamed) if isinstance(each, dict))
    assert set(others["mooncake"]) <= set(last["mooncake"])
    assert set(others["usage"]) <= set(last["usage"])
    index = PrefixIndex(max_keys=8)
    (recent,) = _recent(index).dump(index, 1)
    assert set(others["chain"]) <= set(recent)
    dumped = (HOME / "conductor/snapshot.py").read_text()
    assert [name for name in others["replication"] if f'"{name}": self.' not in dumped] == []


def _recent(index: PrefixIndex) -> RecentChains:
    recent = RecentChains(4)
    recent.add([b"k" * 32], 1)
    return recent
