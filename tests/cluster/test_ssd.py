"""The SSD tier through real processes: what a killed cache-node had written is served again, a changed byte is a miss, and a
disk that was full is written once there is room."""

import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_cluster import ToyCluster, eventually, expected_tokens, until_none

pytestmark = pytest.mark.timeout(120)

PROMPT = [(7 * position) % 250 for position in range(400)]
REUSABLE = (len(PROMPT) - 1) // 32 * 32


@pytest.fixture
def cluster() -> Iterator[ToyCluster]:
    with tempfile.TemporaryDirectory(prefix="mz-") as path, tempfile.TemporaryDirectory(prefix="mz-ssd-") as ssd:
        settings = (f"cache_node.ssd.directory={ssd}", "cache_node.ssd.ahead=1.0", "prefill.own_reuse=false")
        cluster = ToyCluster(Path(path), settings=settings)
        cluster.ssd = Path(ssd)
        try:
            cluster.start()
            until_none(cluster.missing, 30)
            yield cluster
            cluster.stop()
            assert cluster.leftovers() == []
        finally:
            cluster.kill()


def ask(cluster: ToyCluster) -> dict[str, Any]:
    with cluster.stream(prompt=PROMPT, max_tokens=8) as answer:
        assert answer.read() == expected_tokens(PROMPT, 8)
        return answer.served


def cold_and_written(cluster: ToyCluster) -> str:
    """Ask once; the cache-node whose disk alone then holds all of it."""
    node = "cache-a"
    with cluster.only("a"):
        ask(cluster)
    eventually(lambda: cluster.dumps()[node]["gauges"]["cached_disk_blocks"] >= REUSABLE // 32, 20, "all is on disk")
    until_none(cluster.missing, 60)
    until_none(cluster.busy_gauges, 20)
    return node


def kill(cluster: ToyCluster, node: str) -> None:
    killed = cluster.pid(node)
    cluster.signal(node, signal.SIGKILL)
    eventually(lambda: cluster.pid(node) != killed, 30, f"{node} is restarted")
    until_none(cluster.missing, 60)


def indexed(cluster: ToyCluster, node: str) -> int:
    return cluster.dumps()["conductor-0"]["actor"]["index"]["by_node"].get(node, 0)


def test_a_killed_cache_node_serves_its_ssd_again(cluster: ToyCluster) -> None:
    node = cold_and_written(cluster)
    kill(cluster, node)
    eventually(lambda: indexed(cluster, node) == REUSABLE // 32, 20, "the conductor knows what the disk holds")
    warm = ask(cluster)
    assert warm["cached_local"] + warm["cached_remote"] == REUSABLE
    assert cluster.dumps()[node]["counts"]["fetched_blocks[source=disk]"] == REUSABLE // 32


def test_a_changed_byte_on_disk_is_a_miss_and_the_answer_is_right(cluster: ToyCluster) -> None:
    node = cold_and_written(cluster)
    cluster.signal(node, signal.SIGSTOP)  # nothing of it is in flight while its files change
    for segment in (cluster.ssd / node).glob("segment*"):
        content = bytearray(segment.read_bytes())
        for at in range(4096 + 100, len(content), 512):
            content[at] ^= 1
        segment.write_bytes(content)
    cluster.signal(node, signal.SIGKILL)  # a stopped process dies of it too
    until_none(cluster.missing, 60)
    eventually(lambda: indexed(cluster, node) == REUSABLE // 32, 20, "the conductor knows what the disk should hold")
    again = ask(cluster)
    assert again["cached_own"] + again["cached_local"] + again["cached_remote"] == 0
    assert cluster.dumps()[node]["counts"]["corrupt_blocks[tier=disk]"] >= 1


def let_files_grow_to(cluster: ToyCluster, size: int | None) -> None:
    """What a cache-node sees of a full disk; None: of one with room."""
    for node in ("cache-a", "cache-b"):
        pid = cluster.pid(node)
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


@pytest.mark.parametrize("logs_have_room", [True, False])
def test_a_disk_that_was_full_is_written_again_without_a_restart(cluster: ToyCluster, *, logs_have_room: bool) -> None:
    pids = [cluster.pid(node) for node in ("cache-a", "cache-b")]
    logs = [] if logs_have_room else [cluster.runtime_dir / "logs" / f"{node}.log" for node in ("cache-a", "cache-b")]
    for log in logs:
        with log.open("ab") as file:
            file.write(b"\n" * (1 << 20))
    let_files_grow_to(cluster, 1 << 20)  # the index has room, segments have not
    node = ask(cluster)["prefill"].replace("prefill", "cache")
    eventually(lambda: cluster.dumps()[node]["counts"].get("disk_faults[operation=write]", 0) >= 2, 20, "it was tried again")
    assert cluster.dumps()[node]["gauges"]["cached_disk_blocks"] == 0
    ask(cluster)
    let_files_grow_to(cluster, None)
    eventually(lambda: cluster.dumps()[node]["gauges"]["cached_disk_blocks"] >= REUSABLE // 32, 30, "all is on disk")
    until_none(cluster.busy_gauges, 20)
    assert [cluster.pid(node) for node in ("cache-a", "cache-b")] == pids
    assert logs_have_room or any("lost_lines" in log.read_text() for log in logs)
