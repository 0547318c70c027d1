"""What one gateway makes of its nodes' reports: who is missing, what is degraded, where KV moves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import mooncake_zmq
from mooncake_zmq.core.messages import Hello, Moved, Report
from mooncake_zmq.core.watch import STALE_S, PeerReport
from mooncake_zmq.gateway.requests.cluster_snapshot import (
    REASONS,
    Degraded,
    Listed,
    Seen,
    by_reason,
    degraded,
    snapshot,
    verdict,
)

LISTED = (
    Listed("k0", "conductor", "h0"),
    Listed("k1", "conductor", "h1"),
    Listed("p0", "prefill", "h0"),
    Listed("d0", "decode", "h1"),
    Listed("c0", "cache-node", "h0"),
    Listed("c1", "cache-node", "h1"),
    Listed("g0", "gateway", "h0"),
)
NOW = 100.0


def hello(node):
    return Hello(protocol=1, role=node.role, host=node.host, model="m", tokenizer="t", layout="l")


def told(*, at=NOW, **fields):
    levels = {name: tuple(fields.pop(name, {}).items()) for name in ("gauges", "counts")}
    return PeerReport(at, 7, Report(uptime_s=5.0, **levels, **fields))


def seen(*, without=(), refusals=None, departed=(), listed=LISTED, status="ok", **heard):
    peers = {node.name: hello(node) for node in listed if node.name not in ("g0", *without)}
    return Seen(
        now=NOW,
        gateway="g0",
        status=status,
        model="toy",
        listed=listed,
        peers=peers,
        refusals=refusals or {},
        departed=departed,
        last_reports=heard,
    )


def reasons(view):
    return [(each.reason, each.node) for each in degraded(view)]


def test_where_all_is_there_nothing_is_degraded():
    view = seen(c0=told(gauges={"disk_degraded[what=writes]": 0.0, "store_ssd_writable": 1.0}))
    assert degraded(view) == []
    assert snapshot(view)["status"] == "ok"
    assert snapshot(view)["verdict"] == "All is well."
    assert set(by_reason([]).values()) == {0}


def test_who_is_not_there_degrades_by_his_role():
    view = seen(without=("c1", "p0"))
    assert reasons(view) == [("prefill_down", "p0"), ("cache_node_down", "c1")]
    assert by_reason(degraded(view))["degraded[reason=cache_node_down]"] == 1
    states = {node["name"]: node["state"] for node in snapshot(view)["nodes"]}
    assert (states["p0"], states["c0"], states["g0"]) == ("down", "ready", "ready")


def test_a_conductor_that_is_alone_is_named():
    (found,) = degraded(seen(without=("k0",)))
    assert found.text == "k0 (conductor on h0) does not answer: k1 is alone"
    assert verdict("ok", [found]) == f"It serves, but {found.text}."
    assert "unavailable" in verdict("unavailable", [found])


def test_the_last_node_of_a_model_says_that_this_is_not_served():
    listed = [Listed(name, "vllm", "h0", model) for name, model in (("v0", "large"), ("v1", "large"), ("v2", "small"))]
    ends = lambda view: [each.text.partition(" does not answer")[2] for each in degraded(view)]  # noqa: E731
    assert ends(seen(listed=listed, without=("v0", "v2"))) == ["", ": small is not served"]
    assert ends(seen(listed=listed, without=("v0", "v1"))) == [": large is not served"] * 2


def test_what_is_down_says_since_when_and_what_to_do():
    view = replace(seen(without=("d0",)), since={("decode_down", "d0"): NOW - 12})
    (found,) = snapshot(view)["degraded"]
    assert (found["since_s"], found["action"].split(";")[0]) == (12.0, "on h1: systemctl start mooncake-decode@d0")
    assert "Alarms: decode_down" in found["action"]
    assert snapshot(view)["verdict"] == "It serves, but d0 (decode on h1) does not answer, for 12 s."


def test_every_reason_is_a_row_of_the_alarms():
    page = (Path(mooncake_zmq.__file__).parent / "docs/operating.md").read_text().partition("## Alarms")[2]
    assert [reason for reason in REASONS if f"`{reason}`" not in page] == []


def test_requests_that_fail_make_no_node_degraded_and_are_in_the_verdict():
    whole = snapshot(replace(seen(), steps=[{"requests_failed[code=no_decode]": 1}]))
    assert (whole["status"], whole["slow"][0]["number"]) == ("ok", "failed")
    assert whole["verdict"].startswith("It serves, but 1 request failed in the last minute (no_decode 1)")


def test_a_node_says_what_its_process_uses_and_runs():
    gauges = {"process_resident_bytes": 4096.0, "release[node=p0,host=h0,role=prefill,version=1.2,code=machine]": 1.0}
    view = seen(p0=told(gauges=gauges, counts={"process_cpu_seconds": 3.5}), d0=told())
    nodes = {node["name"]: node.get("process") for node in snapshot(view)["nodes"]}
    assert nodes["p0"] == {"cpu_s": 3.5, "resident_bytes": 4096.0, "release": "1.2", "code": "machine"}
    assert nodes["d0"] == {"cpu_s": None, "resident_bytes": None, "release": "", "code": ""}


def test_a_gateway_that_drains_speaks_of_itself():
    assert verdict("draining", []) == "This gateway takes no new calls: it is draining."


def test_who_rests_is_named_and_degrades_nothing():
    cordons = {"draining": True, "cordoned": True}
    view = seen(d0=told(**cordons))
    assert (snapshot(view)["status"], snapshot(view)["verdict"]) == ("ok", "All is well; d0 is drained.")
    view = seen(d0=told(gauges={"requests_running": 2.0}, **cordons), c0=told(**cordons))
    assert snapshot(view)["verdict"] == "All is well; d0 is draining, and 1 more."
    view = seen(without=("c1",), d0=told(**cordons))
    assert snapshot(view)["verdict"].endswith("does not answer; d0 is drained.")
    assert snapshot(seen(status="unavailable", d0=told(**cordons)))["verdict"].endswith("it is unavailable; d0 is drained.")


@pytest.mark.parametrize(
    ("name", "gauges", "reason"),
    [
        ("c0", {"disk_degraded[what=writes]": 1.0, "disk_degraded[what=reads]": 0.0}, "disk_not_written"),
        ("c0", {"disk_degraded[what=writes]": 1.0, "disk_degraded[what=reads]": 1.0}, "disk_not_read"),
        ("p0", {"keys_not_followed": 1.0}, "keys_not_followed"),
        ("c1", {"store_ssd_writable": 0.0}, "disk_not_written"),
    ],
)
def test_a_disk_that_is_full_or_fails(name, gauges, reason):
    assert reasons(seen(**{name: told(gauges=gauges)})) == [(reason, name)]


def test_a_vllm_that_does_not_answer():
    listed = (*LISTED, Listed("v0", "vllm", "h0"))
    assert reasons(seen(listed=listed, v0=told(gauges={"capacity_engines": 0.0}))) == [("engine_gone", "v0")]
    assert reasons(seen(listed=listed, v0=told(gauges={"capacity_engines": 1.0}))) == []


def test_a_model_that_differs_is_told_by_whoever_refuses_it():
    refused = "model differs: p0 has a, g0 has b"
    view = seen(without=("p0",), refusals={"p0": refused}, d0=told(refused=(("p0", "tokenizer differs"),)))
    assert reasons(view) == [("model_differs", "p0"), ("other_differs", "d0")]
    assert next(node for node in snapshot(view)["nodes"] if node["name"] == "p0")["state"] == "refused"


def test_one_that_was_stopped_in_order_is_told_from_one_that_does_not_answer():
    texts = [each.text for each in degraded(seen(without=("p0", "d0"), departed=("d0",)))]
    assert [text.partition(") ")[2] for text in texts] == ["does not answer", "was stopped and is not back"]


def test_an_old_report_and_one_of_who_is_gone_say_nothing():
    full = {"disk_degraded[what=reads]": 1.0}
    assert reasons(seen(c0=told(at=NOW - STALE_S - 0.1, gauges=full))) == []
    assert reasons(seen(without=("c0",), c0=told(gauges=full))) == [("cache_node_down", "c0")]


def test_reasons_are_known_to_metrics():
    view = seen(
        without=("k0", "p0", "d0", "c1"),
        refusals={"k1": "layout differs"},
        c0=told(gauges={"disk_degraded[what=reads]": 1.0}),
    )
    assert {each.reason for each in degraded(view)} <= set(REASONS)
    gauges = by_reason(degraded(view))
    for kind in ("degraded[", "degraded_nodes["):
        assert sum(value for name, value in gauges.items() if name.startswith(kind)) == len(degraded(view))


def test_numbers_of_the_whole_cluster_are_sums_of_reports():
    view = seen(
        p0=told(
            counts={"prompt_tokens_cached[source=own]": 32.0, "prompt_tokens_computed": 10.0, "prefix_blocks_unreached": 2.0},
            gauges={"cached_blocks": 3.0, "capacity_blocks": 8.0},
            moved=(
                Moved(kind="load", peer="c0", bytes=10),
                Moved(kind="put", peer="c0", bytes=20),
                Moved(kind="reuse", peer="p0", bytes=5),
            ),
        ),
        c0=told(counts={"lookup_misses[reason=evicted]": 4.0}, gauges={"cached_blocks": 1.0, "capacity_blocks": 4.0}),
        c1=told(counts={"lookup_misses[reason=evicted]": 1.0}, gauges={"cached_blocks": 2.0, "capacity_blocks": 4.0}),
        g0=told(
            counts={
                "requests_rejected[reason=ttft_slo]": 3.0,
                "predictions[of=ttft]": 2.0,
                "actual_microseconds[of=ttft]": 2e6,
                "predicted_microseconds[of=ttft]": 3e6,
                "prediction_error_microseconds[of=ttft]": 1e6,
            }
        ),
    )
    whole = snapshot(view)
    assert whole["tiers"]["dram"] == {"used_blocks": 3, "blocks": 8}
    assert whole["tiers"]["slab"] == {"used_blocks": 3, "blocks": 8}
    assert whole["flows"] == [
        {"from": "c0", "to": "p0", "kind": "load", "bytes": 10},
        {"from": "p0", "to": "c0", "kind": "put", "bytes": 20},
    ]
    assert whole["hits"]["tokens"] == {"own": 32, "local": 0, "remote": 0, "computed": 10}
    assert (whole["misses"]["evicted"], whole["misses"]["not_read"]) == (5, 2)
    assert whole["requests"]["rejected"] == {"ttft_slo": 3}
    assert whole["predictions"]["ttft"] == {"count": 2, "actual_s": 1.0, "predicted_s": 1.5, "absolute_error_s": 0.5}
    json.dumps(whole)


def test_calls_refused_at_the_door_are_among_the_rejected():
    counts = {
        "requests_rejected[reason=ttft_slo]": 3.0,
        "requests_failed[code=ttft_slo]": 3.0,
        "requests_failed[code=no_decode]": 2.0,
        "edge_rejected[reason=full]": 5.0,
        "edge_rejected[reason=bodies]": 1.0,
    }
    limited = {"tenant_limited[tenant=alice]": 4.0, "tenant_limited[tenant=bob]": 3.0}
    requests = snapshot(seen(g0=told(counts=counts)))["requests"]
    assert requests["rejected"] == {"ttft_slo": 3, "bodies": 1, "full": 5}
    assert requests["failed"] == {"no_decode": 2}
    assert snapshot(seen(g0=told(counts=limited)))["requests"]["rejected"] == {"limited": 7}


def test_more_degradations_than_are_told_are_cut():
    many = [Degraded("prefill_down", f"p{n}", "") for n in range(3)]
    assert verdict("ok", many).endswith(", and 2 more.")
    listed = tuple(Listed(f"p{n}", "prefill", "h") for n in range(1000))
    assert len(degraded(seen(listed=listed, without=tuple(node.name for node in listed)))) == 256
