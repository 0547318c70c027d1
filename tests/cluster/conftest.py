"""Fixtures: a directory for a cluster, and one cluster for all tests of a file that leave it as they found it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_cluster import ToyCluster, until_none


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short: ipc paths may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="mz-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[ToyCluster]:
    """A cluster that a file's tests share. To start one takes the CPU of a minute's idling, which it would do to the end of the
    session."""
    with tempfile.TemporaryDirectory(prefix="mz-") as path:
        cluster = ToyCluster(Path(path))
        with cluster.unbroken():
            yield cluster


@pytest.fixture
def cluster(shared_cluster: ToyCluster) -> ToyCluster:
    """The shared cluster, whole and idle. What a test did to it is undone by its supervisor."""
    until_none(shared_cluster.missing, 30)
    until_none(shared_cluster.busy_gauges, 30)
    return shared_cluster
