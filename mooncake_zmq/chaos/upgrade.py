"""A rolling upgrade from the former release to this one under load, and back: each node is drained and started again."""

import asyncio
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mooncake_zmq.chaos.cluster import Cluster
from mooncake_zmq.chaos.faults import Saboteur
from mooncake_zmq.chaos.plan import Fault, Kind
from mooncake_zmq.core.messages import PROTOCOL_VERSION
from mooncake_zmq.operate.console.rolling import ORDER
from mooncake_zmq.refused import Refused

THIS = Path(__file__).parents[2]
"""The directory of this release's package."""
MIXED_S = 2.0
"""The least time for which the cluster serves after each node's replacement."""


@dataclass(slots=True)
class Upgraded:
    """The result. `spoken`: conversations of this release's nodes, half way and at the end of the upgrade, by protocol."""

    replaced: int = 0
    spoken: list[dict[int, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@contextmanager
def release(wanted: str, directory: Path) -> Iterator[Path]:
    """Provide the directory of a release that is a directory, or a commit of this repository. Raises Refused."""
    path = Path(wanted).expanduser().resolve()
    if path.is_dir():
        if not (path / "mooncake_zmq").is_dir():
            raise Refused(f"{path} has no mooncake_zmq")
        if path == THIS:
            raise Refused(f"{path} is this release")
        yield path
        return
    tree = directory / "release"
    git = ["git", "-C", str(THIS)]
    done = subprocess.run([*git, "worktree", "add", "--detach", str(tree), wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"{wanted} is neither a directory nor a commit of {THIS}: {done.stderr.strip()}")
    try:
        if not subprocess.run([*git, "diff", "--quiet", wanted, "--", "mooncake_zmq"], check=False).returncode:
            raise Refused(f"{wanted} is this release")
        yield tree
    finally:
        shutil.rmtree(tree, ignore_errors=True)
        subprocess.run([*git, "worktree", "prune"], capture_output=True, check=False)


async def upgrade(cluster: Cluster, saboteur: Saboteur, former: Path) -> Upgraded:
    """Replace every node by this release, and then by the former one again."""
    names = sorted(cluster.children, key=lambda name: ORDER.index(cluster.children[name].node.role))
    result = Upgraded()
    for to in (THIS, former):
        for number, name in enumerate(names, 1):
            cluster.releases[name] = to
            await saboteur.commit(Fault(Kind.DRAIN, 0.0, 0.0, (name,)))
            if (runs := _release_of(cluster, name)) != str(to):
                result.problems.append(f"{name} runs from {runs or 'nowhere'}, not from {to}")
            result.replaced += 1
            await asyncio.sleep(MIXED_S)
            if to == THIS and number in (len(names) // 2, len(names)):
                result.spoken.append(await _spoken(cluster))
    if set(result.spoken[-1]) != {PROTOCOL_VERSION}:
        result.problems.append(f"nodes of this release speak protocols {sorted(result.spoken[-1])} with each other")
    return result


def _release_of(cluster: Cluster, name: str) -> str:
    """Return the directory from which a node's process runs; empty: it has ended."""
    process = cluster.children[name].process
    with suppress(psutil.Error):
        return psutil.Process(process.pid).cwd() if process else ""
    return ""


async def _spoken(cluster: Cluster) -> dict[int, int]:
    sessions = [dump["session"]["peers"].values() for dump in (await cluster.dumps()).values()]
    return dict(Counter(peer["protocol"] for peers in sessions for peer in peers if peer["up"] and "protocol" in peer))
