"""A replay written down: the same results, the facts that a gateway tells, and no more of them than fit."""

import base64
import gzip
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lab_bench import NODE, small_setup, small_trace

from mooncake_zmq.cli import main
from mooncake_zmq.gateway.requests.cluster_snapshot import Listed, Seen, snapshot
from mooncake_zmq.laboratory import tape as taping
from mooncake_zmq.laboratory.replay import run
from mooncake_zmq.laboratory.study import RunResult, Setup

REFUSING = replace(small_setup(), admission="prediction", ttft_slo_s=1.0, speed=20.0)


def taped(setup: Setup) -> tuple[RunResult, dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """The result; the head, the pictures and the requests that were written."""
    written: list[bytes] = []
    result = run(setup, small_trace(), write=written.append)
    head, *lines = [json.loads(line) for line in gzip.decompress(written[0]).split(b"\n")]
    count = len(head["at_s"])
    return result, head, lines[:count], lines[count:]


def facts(result: RunResult) -> dict[str, Any]:
    return {name: value for name, value in asdict(result).items() if name not in ("wall_s", "cpu_s", "peak_mib")}


@pytest.mark.parametrize(
    "setup",
    [
        small_setup(),
        replace(small_setup(), hardware=replace(NODE, dram_tokens=8192, disk_tokens=200_000)),
        replace(small_setup(), overrides={"conductor.pipeline_stages": 2, "conductor.pipeline_min_tokens": 1024}),
        REFUSING,
    ],
    ids=["plain", "disk", "pipelines", "refusing"],
)
def test_to_write_it_down_changes_nothing(setup: Setup) -> None:
    assert facts(run(setup, small_trace())) == facts(taped(setup)[0])


def test_the_last_picture_tells_what_the_run_came_to() -> None:
    result, head, pictures, _ = taped(small_setup())
    last = pictures[-1]
    prompts = sum(record.input_tokens for record in result.requests)
    assert sum(last["hits"]["tokens"].values()) == prompts
    assert last["requests"]["finished"] == {"length": len(result.requests)}
    assert last["predictions"]["ttft"]["count"] == len(result.requests)
    assert last["predictions"]["ttft"]["actual_s"] == pytest.approx(
        sum(r.ttft_s for r in result.requests) / len(result.requests)
    )
    assert {node["state"] for node in last["nodes"]} == {"ready"}
    handed_over = sum(flow["bytes"] for flow in last["flows"] if flow["kind"] == "handoff")
    assert handed_over == pytest.approx(prompts * NODE.costs.kv_bytes_per_token, rel=0.5)
    assert head["at_s"] == sorted(head["at_s"])
    assert max(head["open"]) > 0
    assert head["open"][-1] == 0


def test_it_has_the_shape_of_a_live_picture() -> None:
    _, _, pictures, requests = taped(small_setup())
    listed = (Listed("g", "gateway", "h"),)
    live = snapshot(Seen(now=1.0, gateway="g", status="ok", model="m", listed=listed, peers={}))
    assert pictures[0].keys() == live.keys() | {"about", "replication"}
    loads = {role: {name for name in node["gauges"]} for node in pictures[-1]["nodes"] for role in [node["role"]]}
    assert {"requests_prefilling", "requests_decoding", "requests_waiting"} <= loads["gateway"]
    assert all(each["spans"] and each["attempts"] for each in requests)


def test_its_requests_are_those_of_the_run() -> None:
    result, head, _, requests = taped(small_setup())
    records = {f"r{number}": record for number, record in enumerate(result.requests)}
    assert head["ended"][-1] == len(requests)
    for told in requests:
        record = records[told["request_id"]]
        assert told["first_s"] == pytest.approx(record.ttft_s)
        assert told["prompt_tokens"] == record.input_tokens
        assert (told["attempts"][-1]["prefill"], told["attempts"][-1]["decode"]) == (record.prefill, record.decode)
        assert told["duration_s"] >= record.end_s - 1e-6
        assert told["cached_local"] + told["cached_remote"] == record.hit_dram + record.hit_disk + record.hit_remote


def test_prefixes_and_their_copies_are_those_that_the_conductor_knows_at_the_time() -> None:
    _, _, pictures, _ = taped(small_setup())
    pools = {node["name"] for node in pictures[-1]["nodes"] if node["role"] == "cache-node"}
    told = [snapshot["replication"]["recent"] for snapshot in pictures]
    assert told[0] == []
    assert max(map(len, told)) > 1
    chains = [chain for snapshot in told for chain in snapshot]
    assert {holder for chain in chains for holder in chain["holders"]} == pools
    assert len({(chain["key"], len(chain["holders"])) for chain in chains}) > len({chain["key"] for chain in chains})
    assert max(map(len, told)) <= taping.KEPT_CHAINS


def test_refusals_are_told_with_what_was_predicted() -> None:
    result, head, pictures, requests = taped(REFUSING)
    refused = [record for record in result.requests if record.outcome == "rejected"]
    assert refused
    assert sum(head["refused"]) == len(refused)
    assert sum(pictures[-1]["requests"]["rejected"].values()) == len(refused)
    told = [each for each in requests if each["outcome"] == "ttft_slo"]
    assert told
    assert all(each["attempts"][-1]["predicted_ttft_s"] > 1.0 for each in told)


def test_of_too_many_pictures_every_second_one_goes_and_nothing_that_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole, _, every = taped(REFUSING)
    monkeypatch.setattr(taping, "MIN_EVERY_S", 0.01)
    monkeypatch.setattr(taping, "WANTED_SNAPSHOTS", 10_000)
    monkeypatch.setattr(taping, "MAX_SNAPSHOTS", 7)
    _, head, pictures, requests = taped(REFUSING)
    assert 3 < len(pictures) <= 7
    steps = [b - a for a, b in zip(head["at_s"], head["at_s"][1:-1], strict=False)]
    assert max(steps) <= 2.01 * min(steps)
    assert sum(head["refused"]) == sum(whole["refused"])
    assert len(requests) <= taping.KEPT * len(pictures)
    assert {each["request_id"] for each in requests if each["outcome"] == "ttft_slo"}
    assert len(every) >= len(requests)


def test_it_is_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taping, "MIN_EVERY_S", 0.01)
    monkeypatch.setattr(taping, "WANTED_SNAPSHOTS", 10_000)
    monkeypatch.setattr(taping, "MAX_BYTES", 100_000)
    _, _, pictures, _ = taped(small_setup())
    assert len(json.dumps(pictures)) < 150_000


def sim(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["sim", "--generate", "conversation:requests=20,seed=2", *arguments])


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "replay.html"
    result = sim("--prefill", "2", "--decode", "1", "--page", str(page))
    assert result.exit_code == 0, result.output
    assert f"wrote {page}" in result.stderr
    (written,) = re.findall(r'id="tape">([^<]*)<', page.read_text())
    head = json.loads(gzip.decompress(base64.b64decode(written)).split(b"\n")[0])
    assert len(head["at_s"]) > 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--policy", "vllm"), "policy vllm has none"),
        (("--sweep", "speed=1,2"), "for one run"),
        (("--dask", "tcp://localhost:1"), "for one run, on this machine"),
    ],
)
def test_what_is_no_run_of_ours_has_no_page(arguments: tuple[str, ...], why: str, tmp_path: Path) -> None:
    result = sim(*arguments, "--page", str(tmp_path / "x.html"))
    assert result.exit_code == 2
    assert why in result.stderr
    assert sim("--page", str(tmp_path / "no" / "x.html")).exit_code == 2
