"""Prints one line for each suite (a folder of tests) at the end of a run: how many tests it has, how long they take, and how
much CPU they and the processes that they waited for use."""

import os
from collections import Counter, defaultdict
from collections.abc import Generator

import pytest

CPU = "cpu_s"
BEGUN_S = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[BEGUN_S] = _cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: "pytest.CallInfo[None]"
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append((CPU, _cpu_s() - item.stash[BEGUN_S]))
    return report


def _cpu_s() -> float:
    """Return the CPU time of this process and of all ended ones that it has waited for."""
    return sum(os.times()[:4])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tests: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    cpu_s: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                suite = _suite(report.nodeid)
                seconds[suite] += report.duration
                cpu_s[suite] += sum(value for name, value in report.user_properties if name == CPU)
                tests[suite] += report.when == "call"
    if len(tests) < 2:
        return
    terminalreporter.section("suites")
    for suite in sorted(tests, key=seconds.__getitem__, reverse=True):
        terminalreporter.write_line(f"{suite:<16}{tests[suite]:6,} tests{seconds[suite]:8.0f} s{cpu_s[suite]:8.0f} s of CPU")
    sums = f"{sum(seconds.values()):8.0f} s{sum(cpu_s.values()):8.0f} s of CPU"
    terminalreporter.write_line(f"{'together':<16}{tests.total():6,} tests{sums}")


def _suite(nodeid: str) -> str:
    """`tests/kv/test_slots.py::test_x` -> `kv`; a module directly in `tests` belongs to `tests`."""
    folders = nodeid.partition("::")[0].split("/")[1:-1]
    return folders[0] if folders else "tests"
