"""Reports of our commands: run, stamped with the machine and the checkout, kept in a file whatever fails."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mooncake_zmq.laboratory.new_file import replacing
from mooncake_zmq.refused import Refused

Found = Mapping[str, Any]
"""The report of a command, as it prints it with `--json`; or a file of these."""


def run_all(commands: Sequence[str], turns: int, run: Callable[[str], Found], keep: Callable[[Found], None]) -> Found:
    """Run each command `turns` times, all of them by turns, and return everything. `run` returns a command's report, or raises
    ClickException, which stands in its place; `keep` gets all that is known before the first and after each."""
    stamp = {"commit": commit(), "machine": machine(), "date": time.strftime("%Y-%m-%d")}
    results: list[dict[str, Any]] = [{"command": command, "reports": [], "errors": []} | stamp for command in commands]
    whole = stamp | {"benches": results}
    keep(whole)
    for _ in range(turns):
        for command, result in zip(commands, results, strict=True):
            try:
                result["reports"].append(run(command))
            except click.ClickException as error:
                result["errors"].append(error.message)
            keep(whole)
    return whole


def write(path: Path, found: Found, option: str) -> None:
    """Replace the file that `option` names by these results. Raises Refused."""
    try:
        with replacing(path) as new:
            new.write_text(json.dumps(found, indent=1))
    except OSError as error:
        raise Refused(f"{option} {path}: {error.strerror}") from None


def measured(command: str, timeout_s: float) -> Found:
    """Run a command of ours that prints a JSON object. Raises ClickException."""
    words = [sys.executable, "-m", "mooncake_zmq", *command.split(), "--json"]
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise click.ClickException(f"not done after {timeout_s:g} s") from None
    if done.returncode:
        raise click.ClickException(f"exit status {done.returncode}")
    report: Found = json.loads(done.stdout)
    return report


def commit() -> str:
    """Return the short hash of the checkout this package runs from, with + if it was changed; "unknown" outside one."""
    here = Path(__file__).parent
    try:
        run = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return run.stdout.strip() or "unknown"


def machine() -> str:
    """Return processor and core count."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
        cores = len(os.sched_getaffinity(0))
    except OSError:
        return model
    return f"{model}, {cores} cores"
