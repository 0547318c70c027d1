"""A cluster of which one host's data link is as slow as wanted, for benches of what is fetched over it; see `throttled`."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from mooncake_zmq.bench.cluster import Answer, BenchCluster, connected, stop, variables_of
from mooncake_zmq.bench.others.store_driver import free_port
from mooncake_zmq.config.records import Config
from mooncake_zmq.native import mypyc_code
from mooncake_zmq.refused import Refused

UNLIMITED = 1e12
TAIL_TOKENS = 16
WAITS = {
    "prefill.pool.fetch_s": "60",
    "prefill.pool.lease_ttl_s": "120",
    "cache_node.max_lease_s": "240",
    "cache_node.fetch_lease_s": "240",
    "cache_node.report_s": "100000",
    "costs.transfer_bytes_per_s": "1e12",
}
"""Settings with which a cluster fetches at any rate, and waits for all blocks: the conductor learns of no rate."""


class SlowLink:
    """A running cluster, whose first host sends blocks to the others at `set_rate`."""

    def __init__(self, cluster: BenchCluster, config: Config, here: str, rate: Path, *, fetches_all: bool) -> None:
        self.cluster = cluster
        self._engines = [(node.name, node.host) for node in config.nodes if node.role in ("prefill", "decode")]
        self._here = here
        self._rate = rate
        self._fetches_all = fetches_all

    def set_rate(self, bytes_per_s: float) -> None:
        """Change the rate of the link."""
        _write_rate(self._rate, bytes_per_s, fetches_all=self._fetches_all)

    def ask(self, prompt: list[int]) -> Answer:
        """Complete a prompt once the cluster is idle."""
        self.cluster.settle()
        # The last tokens are made from the others, so that a prompt is the same wherever it is sent.
        return self.cluster.complete(prompt + prompt[:TAIL_TOKENS], max_tokens=2)

    def fetch(self, prompt: list[int]) -> Answer:
        """Complete a prompt whose blocks the first host has. Raises Refused if they did not come over the link."""
        answer = self.ask(prompt)
        if (fetched := int(answer.served["cached_remote"])) != len(prompt):
            raise Refused(f"{fetched} of {len(prompt)} tokens were fetched: has the first host's pool room for all?")
        return answer

    @contextmanager
    def only(self, *, first: bool) -> Iterator[None]:
        """Pause the engines of the first host, or of all others: which prefill computes is not measured here."""
        with self.cluster.paused(*(name for name, host in self._engines if (host == self._here) != first)):
            yield


@contextmanager
def slow_link(path: Path, config: Config, overrides: dict[str, str], *, fetches_all: bool) -> Iterator[SlowLink]:
    """Start the nodes of `config`, read from `path`; the cache-node of its first host sends as slowly as a file says.
    `fetches_all`: also from sources that are slower than computing."""
    hosts = list(dict.fromkeys(node.host for node in config.nodes if node.role == "prefill"))
    if len(hosts) < 2:
        raise Refused("a slow link needs prefills on two hosts, as configs/local.toml has")
    with tempfile.TemporaryDirectory(prefix="mczmq-") as name, ExitStack() as stack:
        directory, port = Path(name), free_port()
        variables = variables_of(directory, port, {"prefill.own_reuse": "false", "conductor.ttft_slo_s": "0", **overrides})
        variables[mypyc_code.SWITCH] = "0"  # the throttle replaces functions
        rate, unlimited, log = directory / "rate", directory / "unlimited", directory / "nodes.log"
        for file in (rate, unlimited):
            _write_rate(file, UNLIMITED, fetches_all=fetches_all)
        output = stack.enter_context(log.open("ab"))
        processes = []
        for node in config.nodes:
            throttled = ("mooncake_zmq.bench.throttled", str(rate if node.host == hosts[0] else unlimited))
            module = throttled if node.role == "cache-node" else ("mooncake_zmq",)
            command = [sys.executable, "-m", *module, node.role, "--config", str(path), "--node", node.name]
            processes.append(subprocess.Popen(command, env=os.environ | variables, stdout=output, stderr=output))
        stack.callback(stop, processes)
        yield SlowLink(connected(port, processes[-1], log, config), config, hosts[0], rate, fetches_all=fetches_all)


def random_prompt(random: np.random.Generator, tokens: int) -> list[int]:
    """Return tokens that any model has."""
    return [int(token) for token in random.integers(3, 90, tokens)]


def _write_rate(file: Path, bytes_per_s: float, *, fetches_all: bool) -> None:
    """Have the cache-node that reads this file send at a rate; see `throttled`."""
    part = file.with_suffix(".part")
    part.write_text(f"{bytes_per_s}{' all' if fetches_all else ''}")
    part.replace(file)
