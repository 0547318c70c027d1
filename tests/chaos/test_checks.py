"""Each checker of a chaos run, on what is right and on a planted fault that it must find."""

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_zmq.chaos import run as chaos_run
from mooncake_zmq.chaos import upgrade as upgrades
from mooncake_zmq.chaos.checks import (
    MAX_GROWTH_BYTES_PER_H,
    MORE_DESCRIPTORS,
    MORE_RSS_BYTES,
    WARM_S,
    Footprint,
    Growth,
    Verdict,
    bad_lines,
    busy,
    growing,
    grown,
    judge,
    strangers_in_memory,
    swollen,
    unreached,
)
from mooncake_zmq.chaos.clients import Clients, _Stream
from mooncake_zmq.chaos.faults import Saboteur, unmet
from mooncake_zmq.chaos.forged import Met
from mooncake_zmq.chaos.history import History
from mooncake_zmq.chaos.plan import Fault, Kind
from mooncake_zmq.core.messages import PROTOCOL_VERSION
from mooncake_zmq.refused import Refused

EXPECTED = [(37 * position * position + 11) % 512 for position in range(60)]


@pytest.mark.parametrize(
    ("tokens", "verdict"),
    [
        (EXPECTED, Verdict.RIGHT),
        (EXPECTED[:20], Verdict.SHORT),
        ([], Verdict.SHORT),
        ([*EXPECTED[:30], EXPECTED[30] ^ 1, *EXPECTED[31:]], Verdict.WRONG),
        ([*EXPECTED[:-1], EXPECTED[-1] ^ 1], Verdict.WRONG),
        ([*EXPECTED[:30], *EXPECTED[31:]], Verdict.LOST),
        ([*EXPECTED[:30], *EXPECTED[45:]], Verdict.LOST),
        ([*EXPECTED[:30], EXPECTED[29], *EXPECTED[30:]], Verdict.DUPLICATED),
        ([*EXPECTED[:30], *EXPECTED[10:]], Verdict.DUPLICATED),
        ([*EXPECTED, 5], Verdict.DUPLICATED),
    ],
)
def test_an_answer_is_judged_by_every_token(tokens: list[int], verdict: Verdict) -> None:
    assert judge(tokens, EXPECTED) is verdict


def test_what_a_process_leaks_is_seen() -> None:
    before = {"decode-a": Footprint(40, 100 << 20)}
    assert list(grown(before, {"decode-a": Footprint(40 + MORE_DESCRIPTORS, (100 << 20) + MORE_RSS_BYTES)})) == []
    assert len(list(grown(before, {"decode-a": Footprint(41 + MORE_DESCRIPTORS, (101 << 20) + MORE_RSS_BYTES)}))) == 2


def dump(*, up: bool = True, **gauges: float) -> dict[str, object]:
    return {"session": {"peers": {"cache-a": {"up": up}}}, "gauges": gauges}


def test_a_node_that_is_gone_or_deaf_is_named() -> None:
    assert unreached({"decode-a": dump()}, ["decode-a"]) == []
    assert unreached({"decode-a": dump(up=False)}, ["decode-a", "decode-b"]) == [
        "decode-b does not answer",
        "decode-a is not connected to cache-a",
    ]


def test_a_lease_that_was_never_returned_is_named() -> None:
    assert busy({"cache-a": dump(leases=0, cached_blocks=7, capacity_blocks=9)}) == []
    assert busy({"cache-a": dump(leases=1)}) == ["cache-a has leases 1"]


def test_a_process_that_inputs_made_swell_is_named() -> None:
    before = {"decode-a": Footprint(40, 70 << 20)}
    assert list(swollen(before, {"decode-a": Footprint(40, 134 << 20), "decode-b": Footprint(1, 1 << 40)})) == []
    assert len(list(swollen(before, {"decode-a": Footprint(40, 135 << 20)}))) == 1


def test_a_dead_life_s_segment_is_named() -> None:
    incarnations = {"cache-a": 17}
    assert strangers_in_memory(["mooncake=chaos=cache-a=17", "mooncake=chaos=cache-a.objects=17"], incarnations) == []
    assert len(strangers_in_memory(["mooncake=chaos=cache-a=16", "mooncake=chaos=cache-b=17"], incarnations)) == 2


def test_errors_and_tracebacks_in_logs_are_found_and_a_disk_s_fault_only_where_none_was_made() -> None:
    good, fault, crash = (
        json.dumps({"event": event, "level": level})
        for event, level in (("ready", "info"), ("disk_fault", "error"), ("crashed", "critical"))
    )
    lines = [good, "", "Traceback (most recent call last):", fault, crash]
    assert bad_lines(lines, [Kind.KILL, Kind.DISK_FULL]) == ["Traceback (most recent call last):", crash]
    assert bad_lines(lines, [Kind.KILL, Kind.FLIP_MEMORY]) == ["Traceback (most recent call last):", fault, crash]


def grown_by(bytes_per_h: float, incarnations: int = 8, ttl_s: int = 400) -> Growth:
    """Lives that begin anywhere, warm up by a lot, and then grow."""
    growth = Growth()
    for incarnation in range(1, incarnations + 1):
        level = (60 + 13 * incarnation % 7) << 20
        for age_s in range(ttl_s):
            warming = int((30 << 20) * min(age_s, WARM_S) / WARM_S)
            growth.saw(incarnation, float(age_s), level + warming + int(bytes_per_h * age_s / 3600))
    return growth


def test_memory_that_grows_in_every_life_is_seen_and_what_a_life_begins_with_is_not() -> None:
    assert abs(grown_by(0).bytes_per_h) < 1
    assert grown_by(40 << 20).bytes_per_h == pytest.approx(40 << 20, rel=1e-3)
    assert list(growing({"decode-a": grown_by(MAX_GROWTH_BYTES_PER_H * 0.9)})) == []
    assert list(growing({"decode-a": grown_by(MAX_GROWTH_BYTES_PER_H * 2, incarnations=2)})) == []  # not seen for long enough
    (said,) = growing({"decode-a": grown_by(MAX_GROWTH_BYTES_PER_H * 2)})
    assert said.startswith("decode-a grew by 64 MiB an hour over 45 minutes")


def test_strangers_whom_a_node_does_not_answer_are_told_of() -> None:
    refused, silent = Met(refused=2), Met()
    assert list(unmet("cache-a", [refused, refused], 4, was_up=True)) == []
    assert list(unmet("cache-a", [refused, silent], 1, was_up=False)) == ["cache-a refused strangers 2 times and counted 1"]
    assert list(unmet("cache-a", [silent, silent], 0, was_up=True)) == ["cache-a neither let in nor refused 2 of 2 strangers"]
    assert list(unmet("cache-a", [silent, silent], 0, was_up=False)) == []


def test_a_run_in_which_nothing_was_broken_is_not_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_run.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    cluster: Any = SimpleNamespace(unexpected=[], leftovers=list, lines=list)
    asked: Any = {"loaded": None, "seed": 1, "duration_s": 1.0}
    history = History()
    for count, problems in enumerate((["nothing was broken"], [])):
        run = chaos_run.Run(chaos_run.Wanted(**asked), print)
        run.outcome.done = history.done
        run._look_back(cluster)
        assert (len(history.done), run.outcome.problems) == (count, problems)
        history.begin(Fault(Kind.DELAY, 0.0, 1.0, ("cache-a",)), (), 0.0)


def test_bits_that_were_not_there_to_flip_are_no_fault(tmp_path: Path) -> None:
    history = History()
    saboteur = Saboteur(SimpleNamespace(host=str, ssd_dir=lambda host: tmp_path), history, 1)  # type: ignore[arg-type]
    fault = Fault(Kind.FLIP_DISK, 0.0, 0.0, ("cache-a",), amount=5)
    asyncio.run(saboteur.commit(fault))
    assert history.done == []
    (tmp_path / "cache-a").mkdir()
    (tmp_path / "cache-a" / "segment-1").write_bytes(bytes(100))
    asyncio.run(saboteur.commit(fault))
    assert [entry.what for entry in history.done] == ["5 bytes flipped"]


@pytest.mark.parametrize(("finished", "verdicts"), [(True, {"lost": 1}), (False, {})])
def test_an_answer_that_ends_without_its_last_tokens_has_lost_them_whatever_was_done_to_its_gateway(
    finished: bool, verdicts: dict[str, int]
) -> None:
    history = History()
    history.begin(Fault(Kind.DRAIN, 0.0, 0.0, ("gateway-a",)), ("gateway-a",), 0.0)
    clients = Clients(None, {"gateway-a": ""}, history, seed=1, count=1)  # type: ignore[arg-type]
    clients._end(_Stream("gateway-a", 0.0, tokens=EXPECTED[:20], finished=finished), EXPECTED, "ended early")
    assert (clients.score.verdicts, clients.score.cut) == (verdicts, int(not finished))


@pytest.mark.parametrize("starts_it", [True, False])
def test_an_upgrade_is_one_only_if_every_node_runs_the_other_release(
    starts_it: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a node is started from the same directory again."""
    monkeypatch.setattr(upgrades, "MIXED_S", 0.0)
    monkeypatch.chdir(upgrades.THIS)
    child = SimpleNamespace(node=SimpleNamespace(role="gateway"), process=SimpleNamespace(pid=os.getpid()))
    spoken = {"session": {"peers": {"b": {"up": True, "protocol": PROTOCOL_VERSION}}}}

    async def dumps() -> dict[str, Any]:
        return {"a": spoken}

    cluster: Any = SimpleNamespace(children={"a": child, "b": child}, releases={}, dumps=dumps)

    async def commit(fault: Fault) -> None:
        if starts_it:
            os.chdir(cluster.releases[fault.targets[0]])

    saboteur: Any = SimpleNamespace(commit=commit)
    found = asyncio.run(upgrades.upgrade(cluster, saboteur, tmp_path))
    wrong = [f"{name} runs from {upgrades.THIS}, not from {tmp_path}" for name in "ab"]
    assert found.problems == ([] if starts_it else wrong)


def test_this_release_is_not_one_to_upgrade_from(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is this release"), upgrades.release(str(upgrades.THIS), tmp_path):
        pass
