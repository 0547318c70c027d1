"""One run of the laboratory, whatever the policy: the only entry from the commands to the engines of the replay."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mooncake_zmq.laboratory.clairvoyant import foresee
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.study import COUPLED_SECTION, TRACE_BLOCK_TOKENS, Arrival, RunResult, Setup

COUPLED = ("vllm", "vllm-prefix", "vllm-chunked", "vllm-both")
DISAGGREGATED = ("coming", "global", "local", "match", "load", "round-robin", "random")
POLICIES = (*DISAGGREGATED, *COUPLED)
ADMISSIONS = ("none", "baseline", "early", "prediction")
ORDERS = ("fcfs", "shortest")

Progress = Callable[[float], None]
"""Called now and then with the share of the requests that have ended."""


def run_one(setup: Setup, arrivals: Sequence[Arrival], progress: Progress, page: Path | None = None) -> RunResult:
    """Replay `arrivals` as `setup` says, and write it into the file `page`, if any. Raises StudyError."""
    check(setup)
    began_s = time.perf_counter()
    if setup.policy in COUPLED:
        if page is not None:
            raise StudyError(f"--page shows nodes of ours, and policy {setup.policy} has none")
        from mooncake_zmq.laboratory import coupled

        result: RunResult = coupled.run(setup, arrivals, progress)
    else:
        result = _replayed(setup, arrivals, progress, page)
    if TRACE_BLOCK_TOKENS % setup.block_tokens == 0:
        foresee(arrivals, result.requests, setup.block_tokens)
    if not result.wall_s:
        result.wall_s = time.perf_counter() - began_s
    return result


def _replayed(setup: Setup, arrivals: Sequence[Arrival], progress: Progress, page: Path | None) -> RunResult:
    """Replay through our own actors, which know nothing of the coupled model's settings."""
    from mooncake_zmq.laboratory import cluster, replay

    own = {name: value for name, value in setup.overrides.items() if not name.startswith(COUPLED_SECTION)}
    asked = replace(setup, overrides=own)
    try:
        cluster.cluster_of(asked, arrivals)
    except ValueError as error:
        raise StudyError(str(error)) from None
    write = None if page is None else partial(_write_page, page, setup)
    result: RunResult = replay.run(asked, arrivals, progress, write)
    result.setup = setup
    return result


def _write_page(page: Path, setup: Setup, tape: bytes) -> None:
    from mooncake_zmq.gateway.http.web import replay_page

    title = f"replay, {setup.speed:g}x"
    try:
        page.write_text(replay_page(title, tape), encoding="utf-8")
    except OSError as error:
        raise StudyError(f"--page {page}: {error.strerror}") from None


def check(setup: Setup) -> None:
    """Raise StudyError for a setup that no engine can run."""
    for what, value, known in (
        ("policy", setup.policy, POLICIES),
        ("admission", setup.admission, ADMISSIONS),
        ("order", setup.order, ORDERS),
    ):
        if value not in known:
            raise StudyError(f"{what} {value!r} is none of {', '.join(known)}")
    if setup.policy in COUPLED and setup.admission != "none":
        raise StudyError(f"policy {setup.policy} has no admission: vLLM refuses nothing")
    if setup.policy in COUPLED and setup.order != "fcfs":
        raise StudyError(f"policy {setup.policy} has one order, fcfs")
    if setup.prefill < 1 or setup.decode < (0 if setup.policy in COUPLED else 1):
        raise StudyError("a cluster needs a prefill and a decode at least")
    for name in ("ttft_slo_s", "tbt_slo_s", "speed"):
        if not getattr(setup, name) > 0:
            raise StudyError(f"{name} must be positive, not {getattr(setup, name)}")
    if setup.block_tokens < 1:
        raise StudyError(f"block_tokens must be 1 or more, not {setup.block_tokens}")
