"""Adds to the report of a failed test the last lines of its cluster's logs, which are gone with the test's directory."""

from collections.abc import Generator
from pathlib import Path

import pytest

LINES, COLUMNS = 12, 500
CALLS = ('"event": "http"', '"event": "request"')
"""Lines of single calls, which would push out what happened to the node."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            runtime_dir = getattr(value, "runtime_dir", value)
            if isinstance(runtime_dir, Path) and (runtime_dir / "logs").is_dir():
                report.sections.append((f"logs in {runtime_dir}", _tails(runtime_dir / "logs")))
    return report


def _tails(logs: Path) -> str:
    return "\n".join(f"--- {log.stem}\n{_tail(log)}" for log in sorted(logs.glob("*.log")))


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if not any(event in line for event in CALLS)]
    return "\n".join(line[:COLUMNS] for line in lines[-LINES:])
