"""Spreads the files that start clusters over a run. A cluster waits most of its time, in which other files compute; several at
once wait for each other's cores, and are late."""

from itertools import groupby

import pytest

WAITING = ("bench", "chaos", "cluster")
"""Folders of such files."""
UNTIL = 0.8
"""The part of a run in which they begin: what is short comes last, so that no process waits long for another's end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files = [list(file) for _, file in groupby(items, key=lambda item: item.path)]
    waiting, computing = [], []
    for file in files:
        (waiting if file[0].path.parent.name in WAITING else computing).append(file)
    placed = [(UNTIL * number / len(waiting), file) for number, file in enumerate(waiting)]
    placed += [(number / len(computing), file) for number, file in enumerate(computing)]
    items[:] = [item for _, file in sorted(placed, key=lambda each: each[0]) for item in file]
