"""Puts this directory on the import path, for the harnesses that several test modules share. Tests take classes apart, which
machine code does not allow: they run the sources.

Where several processes share the tests (`-n`), one of them runs all that start processes of their own or want the machine for
themselves, one after the other; the others share the rest by files.
"""

import os
from pathlib import Path

import pytest

os.environ["MOONCAKE_ZMQ_MYPYC"] = "0"
ALONE = ("chaos", "cluster", "engine", "gpu")
"""Directories of tests that run one at a time."""


def pytest_itemcollected(item):
    path = item.path.relative_to(Path(__file__).parent)
    item.add_marker(pytest.mark.xdist_group("alone" if path.parts[0] in ALONE else path.as_posix()))
