"""The real actors under seeded faults, the bugs planted to prove the checkers, and the promise that a seed repeats itself."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest
from click.testing import CliRunner

from mooncake_zmq.pool.node.store_events import Reply
from mooncake_zmq.simulation.faults import MIN_FAULTS, MIN_KINDS, FaultKind
from mooncake_zmq.simulation.planted import PLANTED
from mooncake_zmq.simulation.report import LENDING, possible, simtest, totals
from mooncake_zmq.simulation.run import SeedResult, as_line, run_seed, run_seeds
from mooncake_zmq.simulation.stores import StoreIncarnation, Stores
from mooncake_zmq.store.protocol import KeysListed
from mooncake_zmq.telemetry import progress

SEEDS = 24
PLANTED_SEEDS = 20
DRAINED_SEEDS = 12
FOUND_BY = {
    1: (
        "answer_forgotten",
        "constraint_restarts",
        "disk_unverified",
        "evicted_kv_put",
        "evicted_unreported",
        "keys_not_compared",
        "lent_freed",
        "loan_twice",
        "resume_without_adapter",
        "stale_hidden",
        "store_given_up",
        "tail_misplaced",
        "ttl_from_receipt",
    ),
    2: (
        "selected_kv_put",
        "selected_unreported",
        "store_disk_quota_ignored",
    ),
    3: (
        "kept_unverified",
        "late_taken",
        "passed_on_short",
        "store_commit_unverified",
        "versions_from_zero",
    ),
    4: (
        "cordon_ends_drain",
        "drain_waits",
        "evict_leased",
        "kept_closed",
        "place_forgone",
        "store_removed_while_read",
        "uncordoned",
    ),
    5: (
        "blend_committed",
        "blend_decoded",
        "blend_kept",
        "blend_unreported",
        "exact_ignored",
        "resume_without_images",
        "uncordoned_conductor",
    ),
    6: (
        "deaf_time_counts",
        "lateness_unreported",
    ),
    7: (
        "newer_assumed",
        "store_all_means_all",
    ),
    11: ("newer_sent",),
    12: ("store_promoted_anyway",),
}
"""Planted bugs by the seed that found them last, which is tried first: which seed finds a bug changes with every decision."""


def worker_line(seed: int, hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "mooncake_zmq.simulation", str(seed)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_seeds_hold_and_cover() -> None:
    results = run_seeds(0, SEEDS, os.cpu_count() or 1, lambda _: None)
    assert [(result.seed, result.failure) for result in results if result.failure] == []
    assert sorted(result.seed for result in results) == list(range(SEEDS))
    total = totals(results)
    never = {kind: names - total[kind].keys() for kind, names in possible().items()}
    assert not never["faults"]
    assert not never["works"]
    assert not never["store works"]
    assert not never["messages"]
    assert len(never["transitions"]) <= 3, never["transitions"]
    assert total["outcomes"]["finished after resume"] > SEEDS
    counts = total["counts"]
    assert counts["prefix_blocks_corrupt"] > 0
    assert counts["prefix_blocks_unreached"] > 0
    assert counts["jobs_begun_ahead"] > SEEDS
    assert counts["prompt_tokens_blended"] > 4 * SEEDS
    assert counts["handoff_blocks_failed"] > counts["handoff_blocks_corrupt"] > 0
    assert counts["handoff_blocks_kept"] > SEEDS
    assert counts["fetch_failures[source=node]"] > counts["fetched_blocks_corrupt"] > 0
    assert counts["fetched_blocks[source=disk]"] > SEEDS
    assert counts["evicted_blocks[tier=disk]"] > 0
    assert counts["demotion_failures"] > 0
    assert counts["disk_faults[operation=write]"] > 0
    assert counts["disk_retries"] > 0
    stores = total["stores"]
    assert (
        min(stores[name] for name in ("put", "sent on a stream", "read in shared memory", "promoted", "demoted")) > 10 * SEEDS
    )
    assert min(stores[name] for name in ("quarantined", "leases_expired", "clients_died", "corrupt", "corrupt_writes")) > 0
    assert min(stores[name] for name in ("ssd_moved", "ssd_may_come_back", "ForgetValues failed", "WriteValues failed")) > 0
    for source in ("own", "local", "remote"):
        assert total["outcomes"][f"finished with {source} blocks"] > SEEDS


def test_what_runs_when_a_drain_is_out_of_time_goes_on_elsewhere() -> None:
    """Which seed drains a node amid its work changes with every decision: the first few must show both."""
    left = {"jobs_handed_over", "requests_handed_over"}
    for seed in range(DRAINED_SEEDS):
        result = run_seed(seed, stress=[FaultKind.DRAIN] * 3)
        assert result.failure is None
        left -= result.coverage["counts"].keys()
        if not left:
            return
    pytest.fail(f"nothing was counted as {left}")


def test_a_seed_draws_enough_faults() -> None:
    result = run_seed(11)
    kinds = {fault.split("@")[0] for fault in result.faults}
    assert len(result.faults) >= MIN_FAULTS
    assert len(kinds) >= MIN_KINDS
    assert kinds <= {kind.value for kind in FaultKind}


def test_a_seed_repeats_itself_whatever_the_hash_seed() -> None:
    lines = [json.loads(worker_line(7, hash_seed)) for hash_seed in ("1", "2")]
    for line in lines:
        del line["cpu_s"]
    assert lines[0] == lines[1]
    assert lines[0]["digest"] != json.loads(worker_line(8, "1"))["digest"]


def test_the_digest_of_stores_is_of_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: keys are listed the other way round, which no client minds."""
    said, listed = run_seed(4, only="stores").digest, []

    def reply(self: Stores, store: StoreIncarnation, effect: Reply) -> None:
        if isinstance(effect.reply, KeysListed) and len(effect.reply.keys) > 1:
            listed.append(effect)
            effect.reply.keys.reverse()
        true_reply(self, store, effect)

    true_reply = Stores.reply
    monkeypatch.setattr(Stores, "reply", reply)
    assert run_seed(4, only="stores").digest != said
    assert listed


def test_watching_changes_nothing() -> None:
    watched = run_seed(7, trace=True)
    assert watched.digest == run_seed(7).digest
    assert any("fault" in line for line in watched.log)
    assert SeedResult(**json.loads(as_line(watched))).digest == watched.digest


@cache
def failure_without_a_bug(seed: int, stress: tuple[FaultKind, ...], only: str) -> str | None:
    """Return what is wrong with a seed in whose faults a bug was found: once for all bugs that it finds, and never for whole
    seeds without further faults, which `test_seeds_hold_and_cover` runs."""
    if seed < SEEDS and not stress and not only:
        return None
    return run_seed(seed, stress=stress, only=only).failure


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_planted_bug_is_caught(name: str) -> None:
    """Some seed fails the checker that is meant to notice; the same seed and faults pass without the bug."""
    planted = PLANTED[name]
    failures = []
    found_by = [seed for seed, names in FOUND_BY.items() if name in names]
    for seed in dict.fromkeys([*found_by, *range(PLANTED_SEEDS)]):
        result = run_seed(seed, planted=name)
        if result.failure is not None:
            failures.append(result.failure)
            if result.invariant in planted.invariants:
                assert failure_without_a_bug(seed, planted.stress, planted.only) is None
                return
    pytest.fail(f"{planted.what}: no checker of {planted.invariants} failed, but {failures}")


def test_a_failing_seed_says_how_to_see_it_again() -> None:
    outcome = CliRunner().invoke(simtest, ["--seed", "1", "--planted", "commit_unverified"])
    assert outcome.exit_code == 1
    assert "seed=1 commit=" in outcome.output
    assert "simtest --seed 1 --planted commit_unverified" in outcome.output
    assert "I1" in outcome.output


def test_many_seeds_say_how_far_they_are_and_what_failed_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EACH_S", 0.0)
    outcome = CliRunner().invoke(simtest, ["--seeds", "2", "--jobs", "1", "--first", "1", "--planted", "commit_unverified"])
    assert "1 of 2 seeds, " in outcome.stderr
    assert "2 of 2 seeds, " in outcome.stderr
    assert "seed=1 commit=" in outcome.stderr


def test_stores_alone_hold_in_other_seeds() -> None:
    results = run_seeds(5000, SEEDS, os.cpu_count() or 1, lambda _: None, only="stores")
    assert [(result.seed, result.failure) for result in results if result.failure] == []
    assert totals(results)["stores"]["ForgetValues failed"] > 0


def test_models_alone_hold_in_other_seeds_where_a_wrong_key_would_hit() -> None:
    results = run_seeds(5000, SEEDS, os.cpu_count() or 1, lambda _: None, only="models")
    assert [(result.seed, result.failure) for result in results if result.failure] == []
    loads = totals(results)["loads"]
    assert min(loads[f"looks past another {what}'s"] for what in ("model", "adapter")) > SEEDS
    assert loads["blocks"] > 10 * SEEDS


def test_decodes_that_lend_hold_and_every_loan_ends() -> None:
    results = run_seeds(5000, SEEDS, os.cpu_count() or 1, lambda _: None, only="lending")
    assert [(result.seed, result.failure) for result in results if result.failure] == []
    total = totals(results)
    assert not {kind.__name__ for kind in LENDING} - total["messages"].keys() - total["works"].keys()
    assert total["counts"]["requests_borrowing"] > 2 * SEEDS
    assert total["counts"]["lenders_late"] > SEEDS // 4


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ((), "the nodes are not compiled"),
        (("--planted", "late_writer"), "--planted replaces parts of actors, which machine code does not allow"),
        (("--seed", "1", "--trace", "/dev/null"), "--trace writes down a run of the sources"),
    ],
)
def test_who_asks_for_machine_code_is_not_given_python(more: tuple[str, ...], error: str) -> None:
    outcome = CliRunner().invoke(simtest, ["--seeds", "1", "--compiled", *more])
    assert outcome.exit_code != 0
    assert error in outcome.output


def test_a_worker_without_machine_code_says_so_and_runs_no_seed() -> None:
    command = [sys.executable, "-m", "mooncake_zmq.simulation", "1", "--compiled"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the nodes are not compiled" in done.stderr


def test_passing_seeds_print_coverage() -> None:
    outcome = CliRunner().invoke(simtest, ["--seeds", "2", "--jobs", "2"])
    assert outcome.exit_code == 0, outcome.output
    assert "2 seeds, 0 failed" in outcome.output
    assert "transitions" in outcome.output
