"""Prints one line for each suite (a folder of tests) at the end of a run: how many tests it has and how long they take."""

from collections import Counter, defaultdict

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tests: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                suite = _suite(report.nodeid)
                seconds[suite] += report.duration
                tests[suite] += report.when == "call"
    if len(tests) < 2:
        return
    terminalreporter.section("suites")
    for suite in sorted(tests, key=seconds.__getitem__, reverse=True):
        terminalreporter.write_line(f"{suite:<16}{tests[suite]:6,} tests{seconds[suite]:8.0f} s")
    terminalreporter.write_line(f"{'together':<16}{tests.total():6,} tests{sum(seconds.values()):8.0f} s")


def _suite(nodeid: str) -> str:
    """`tests/kv/test_slots.py::test_x` -> `kv`; a module directly in `tests` belongs to `tests`."""
    folders = nodeid.partition("::")[0].split("/")[1:-1]
    return folders[0] if folders else "tests"
