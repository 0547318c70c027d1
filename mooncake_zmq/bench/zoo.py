"""`bench zoo`: every workload of the laboratory's zoo under every policy, in virtual time, each beside the clairvoyant's
optimum."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import click

from mooncake_zmq.bench.zoo_report import ZooLine, ZooReport
from mooncake_zmq.laboratory import zoo
from mooncake_zmq.laboratory.jobs import Job, Progress, Source, run_jobs
from mooncake_zmq.laboratory.metrics import Summary, summarize
from mooncake_zmq.laboratory.runs import DISAGGREGATED, POLICIES, check
from mooncake_zmq.laboratory.study import Setup

SMALL_REQUESTS = 200
"""Requests of each workload in a quick run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooRow(ZooLine):
    """One workload under one policy. Shares from 0 to 1, times in seconds; `*_error`: mean absolute error over the mean."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        *("workload", "policy", "hits/possible", "regret", "TTFT", "least", "gap p99", "in TBT", "TTFT off", "TBT off"),
    )

    workload: str
    policy: str
    requests: int
    finished: int
    hits: float
    possible: float
    hits_of_possible: float
    regret: float
    ttft_s: float
    least_ttft_s: float
    first_gap_p99_s: float
    within_tbt: float
    ttft_error: float
    tbt_error: float

    @property
    def group(self) -> str:
        return self.workload

    def cells(self) -> Iterable[str]:
        return (
            self.workload,
            self.policy,
            f"{self.hits:.3f} / {self.possible:.3f}",
            f"{self.regret:.3f}",
            f"{self.ttft_s:.4g}",
            f"{self.least_ttft_s:.4g}",
            f"{1000 * self.first_gap_p99_s:.4g}",
            f"{100 * self.within_tbt:.1f} %",
            f"{100 * self.ttft_error:.1f} %",
            f"{100 * self.tbt_error:.1f} %",
        )


def bench_zoo(
    setup: Setup,
    *,
    kinds: Sequence[str],
    policies: Sequence[str],
    seed: int,
    small: bool,
    processes: int,
    progress: Progress,
) -> ZooReport:
    """Replay each of `kinds` under each of `policies` on the cluster of `setup`. Raises click.ClickException."""
    chosen = [(kind, policy) for kind in kinds for policy in policies]
    jobs = [Job(source_of(kind, seed, small=small), replace(setup, policy=policy)) for kind, policy in chosen]
    for job in jobs:
        check(job.setup)
    found = run_jobs(jobs, processes, summarize, progress)
    title = f"{setup.prefill}P+{setup.decode}D of {setup.hardware.name}, seed {seed}"
    lines = [row_of(kind, policy, each) for (kind, policy), each in zip(chosen, found, strict=True)]
    report = ZooReport("zoo", title=title, lines=lines)
    report.notes.append("TTFT and its least (a clairvoyant's on an idle machine): means in s; gap after the first token: ms")
    report.notes.append(f"in TBT: of all requests, {1000 * setup.tbt_slo_s:g} ms as the mean of the longest tenth of the gaps")
    return report


def source_of(kind: str, seed: int, *, small: bool) -> Source:
    """Return a workload of its usual size, or of few requests. Raises StudyError."""
    requests = f",requests={SMALL_REQUESTS}" if small else ""
    return Source(workload=zoo.parse_workload(f"{kind}:seed={seed}{requests}"))


def row_of(kind: str, policy: str, summary: Summary) -> ZooRow:
    """Return a run's figures."""
    errors = {name: error.percent / 100 for name, error in summary.errors.items()}
    return ZooRow(
        workload=kind,
        policy=policy,
        requests=summary.requests,
        finished=summary.finished,
        hits=summary.hit_ratio,
        possible=summary.possible_ratio,
        hits_of_possible=summary.hits_of_possible,
        regret=summary.regret,
        ttft_s=summary.ttft_s.mean,
        least_ttft_s=summary.least_ttft_s,
        first_gap_p99_s=summary.first_gap_s.p99,
        within_tbt=summary.within_tbt,
        ttft_error=errors.get("ttft_s", 0.0),
        tbt_error=errors.get("tbt_s", 0.0),
    )


def names(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Parse `A,B`, each one of `known` and once; all of them if there is no text. Raises click.UsageError."""
    if not text:
        return tuple(known)
    chosen = tuple(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))
    wrong = [each for each in chosen if each not in known]
    if wrong or not chosen:
        raise click.UsageError(f"{option}: {', '.join(wrong) or 'nothing'} is none of {', '.join(known)}")
    return chosen


def policies_of(text: str) -> tuple[str, ...]:
    """Return the policies that `--policy` names; without it those of our conductor. Raises click.UsageError."""
    return names("--policy", text, POLICIES) if text else DISAGGREGATED
