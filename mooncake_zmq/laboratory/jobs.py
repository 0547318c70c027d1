"""Runs of the laboratory in processes of their own, here or on a Dask cluster. Jobs and results are JSON.

A worker is `python -m mooncake_zmq.laboratory`: one job on its standard input; lines on its standard output, first its
progress, last the result or the error.
"""

import gc
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import msgspec

from mooncake_zmq.extras import installing
from mooncake_zmq.laboratory import zoo
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.generated import Shape, generate
from mooncake_zmq.laboratory.runs import run_one
from mooncake_zmq.laboratory.study import Arrival, RunResult, Setup
from mooncake_zmq.laboratory.traces import read_trace

KIB = 1024
FEW_COLLECTIONS = 200_000
"""Objects made, less those gone, before the collector looks for cycles: the actors make none that last, and the search took an
eighth of a replay."""
Found = TypeVar("Found")
Progress = Callable[[int, float], None]
"""Called with a job's number and the share of its requests that have ended. Any thread may call it."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The source of the arrivals: a file, which a worker elsewhere must find too, or a shape or workload to generate."""

    path: str = ""
    shape: Shape | None = None
    workload: zoo.Workload | None = None
    first: int | None = None
    """Number of requests, the first ones; None: all."""
    output_tokens: int | None = None
    """Output tokens of every request, whatever the trace says."""


class Job(msgspec.Struct, frozen=True):
    """One run."""

    source: Source
    setup: Setup
    page: str = ""
    """The file into which the replay is written for viewing; empty: none."""


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line that a worker prints."""

    share: float = 0.0
    error: str = ""
    result: RunResult | None = None


def load(source: Source) -> list[Arrival]:
    """Return the arrivals. Raises StudyError."""
    arrivals = _arrivals(source)[: source.first]
    if source.output_tokens is None:
        return arrivals
    return [replace(each, output_tokens=source.output_tokens) for each in arrivals]


def _arrivals(source: Source) -> list[Arrival]:
    if source.workload is not None:
        return zoo.arrivals_of(source.workload)
    if source.shape is not None:
        return generate(source.shape)
    return read_trace(Path(source.path), source.first)


def run_job(job: Job, progress: Callable[[float], None]) -> RunResult:
    """Load and replay, in this process. Raises StudyError."""
    result = run_one(job.setup, load(job.source), progress, Path(job.page) if job.page else None)
    if not result.peak_mib:
        result.peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB
    return result


def run_text(job: str) -> str:
    """Run a job and return its last line, both as JSON text: the function that a Dask worker calls."""
    try:
        line = Line(result=run_job(msgspec.json.decode(job, type=Job), lambda share: None))
    except StudyError as error:
        line = Line(error=str(error))
    return msgspec.json.encode(line).decode()


def work() -> None:
    """Run the worker process."""
    gc.freeze()
    gc.set_threshold(FEW_COLLECTIONS)
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    try:
        last = Line(result=run_job(job, lambda share: _say(Line(share=share))))
    except StudyError as error:
        last = Line(error=str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    _say(last)


def _say(line: Line) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def run_jobs(jobs: Sequence[Job], processes: int, keep: Callable[[RunResult], Found], progress: Progress) -> list[Found]:
    """Return the result of `keep` for each run, in the order of the jobs; at most `processes` run at a time. Raises StudyError
    of the first job that fails, and then ends the others."""
    stop = Event()
    with ThreadPoolExecutor(max(1, min(processes, len(jobs)))) as pool:
        futures = [pool.submit(_run_in_process, job, number, keep, progress, stop) for number, job in enumerate(jobs)]
        try:
            return [each.result() for each in futures]
        finally:
            stop.set()
            for each in futures:
                each.cancel()


def _run_in_process(job: Job, number: int, keep: Callable[[RunResult], Found], progress: Progress, stop: Event) -> Found:
    command = [sys.executable, "-m", "mooncake_zmq.laboratory"]
    # No array is large enough for threads: they would only wait, and spend time on it.
    environment = {"OPENBLAS_NUM_THREADS": "1"} | os.environ
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(msgspec.json.encode(job) + b"\n")
        worker.stdin.close()
        for text in worker.stdout:
            line = msgspec.json.decode(text, type=Line)
            if line.error:
                raise StudyError(line.error)
            if line.result is not None:
                return keep(line.result)
            if stop.is_set():
                worker.kill()
            progress(number, line.share)
    raise StudyError(f"the process of run {number + 1} died with status {worker.returncode}")


def run_on_dask(address: str, jobs: Sequence[Job], keep: Callable[[RunResult], Found], progress: Progress) -> list[Found]:
    """Run the jobs on the workers of a Dask cluster, which have this package, and the trace at the same path. Raises
    StudyError."""
    try:
        from distributed import Client
    except ImportError:
        raise StudyError(f"--dask needs Dask: {installing('dask')}") from None
    try:
        client: Any = Client(address, timeout="10s")
    except (OSError, ValueError, TimeoutError) as error:
        raise StudyError(f"--dask {address}: {error or 'no answer'}") from None
    found: list[Found] = []
    with client:
        futures = [client.submit(run_text, msgspec.json.encode(job).decode(), pure=False) for job in jobs]
        for number, future in enumerate(futures):
            line = msgspec.json.decode(future.result(), type=Line)
            if line.result is None:
                raise StudyError(line.error)
            found.append(keep(line.result))
            progress(number, 1.0)
    return found
