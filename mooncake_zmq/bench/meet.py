"""`bench meet`: the TTFT of a prompt whose blocks another host has, at six rates of the link between the hosts.

Three ways beside each other: computing everything, fetching everything before computing starts, and computing the head while
the tail is fetched. At rate 1 the first two take equally long, by a first measurement of computing. Two clusters of the same
file are up in one run, one that meets and one that waits, and the three ways alternate round by round; a request before them,
which is not measured, shows both clusters each new rate.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import click
import httpx
import numpy as np

from mooncake_zmq.bench.cluster import START_TIMEOUT_S, Answer, BenchCluster, answers, last_lines, stop, variables_of
from mooncake_zmq.bench.others.store_driver import free_port
from mooncake_zmq.bench.report import Report, Row
from mooncake_zmq.config.load import load
from mooncake_zmq.config.records import Config
from mooncake_zmq.native import mypyc_code
from mooncake_zmq.refused import Refused
from mooncake_zmq.runtime.model import prepared

RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)
"""Rates of the link, in those at which fetching takes as long as computing."""
TAIL_TOKENS = 16
UNLIMITED = 1e12
MEETS = {"prefill.meet": "true"}
WAITS = {
    "prefill.pool.fetch_s": "60",
    "prefill.pool.lease_ttl_s": "120",
    "cache_node.max_lease_s": "240",
    "cache_node.fetch_lease_s": "240",
    "cache_node.report_s": "100000",
    "costs.transfer_bytes_per_s": "1e12",
}
"""Settings with which a cluster fetches at any rate, and waits for all blocks: the conductor learns of no rate."""

Progress = Callable[[str], None]


def bench_meet(config: Path, *, tokens: int, rounds: int, progress: Progress) -> Report:
    """Run all of it. Raises click.ClickException when a cluster cannot be started or answers an error."""
    settings = load(config).config
    hosts = list(dict.fromkeys(node.host for node in settings.nodes if node.role == "prefill"))
    if len(hosts) < 2:
        raise Refused("meet needs prefills on two hosts, as configs/local.toml has")
    size = settings.model.block_tokens
    cached = max(size, tokens // size * size)
    kv_bytes = cached * prepared(settings).kv_bytes_per_token
    with ExitStack() as stack:
        meets = stack.enter_context(_throttled(config, settings, hosts[0], MEETS, fetches_all=False))
        waits = stack.enter_context(_throttled(config, settings, hosts[0], WAITS, fetches_all=True))
        run = _Run(settings, hosts, meets, waits, cached, rounds, progress)
        return run.report(kv_bytes)


class _Hosts:
    """A cluster whose first host has a throttled link."""

    def __init__(self, cluster: BenchCluster, rate: Path, *, fetches_all: bool) -> None:
        self.cluster = cluster
        self._rate = rate
        self._fetches_all = fetches_all

    def set_rate(self, bytes_per_s: float) -> None:
        """Change the rate of the link."""
        _write_rate(self._rate, bytes_per_s, fetches_all=self._fetches_all)


class _Run:
    def __init__(
        self,
        settings: Config,
        hosts: Sequence[str],
        meets: _Hosts,
        waits: _Hosts,
        cached: int,
        rounds: int,
        progress: Progress,
    ) -> None:
        self._engines = [(node.name, node.host) for node in settings.nodes if node.role in ("prefill", "decode")]
        self._here = hosts[0]
        self._meets, self._waits = meets, waits
        self._cached = cached
        self._rounds = rounds
        self._progress = progress
        self._random = np.random.default_rng(time.time_ns())
        self._unmet = 0

    def report(self, kv_bytes: int) -> Report:
        report = Report("meet")
        with self._only(first=True):
            self._ask(self._meets, self._prompt(self._cached))
            alone_s = median([self._ask(self._meets, self._prompt(self._cached)).ttft_s for _ in range(3)])
        even = kv_bytes / alone_s
        for rate in RATES:
            prompts = [self._prompt(self._cached) for _ in range(self._rounds + 1)]
            expected = self._computed(prompts)
            with self._only(first=False):
                report.rows += self._at(rate, rate * even, prompts, expected)
        report.notes.append(
            f"{self._cached:,} cached tokens of {kv_bytes / 1e6:,.0f} MB and {TAIL_TOKENS} more; at rate 1, "
            f"{even / 1e6:,.1f} MB/s, fetching takes as long as computing"
        )
        report.notes.append("the same tokens as where nothing was fetched" if not self._unmet else f"{self._unmet} differ")
        return report

    def _computed(self, prompts: Sequence[list[int]]) -> list[list[list[int]]]:
        """Compute prompts on the first host of both clusters, and return their answers. A pool need not hold those of all
        rates."""
        self._progress(f"computing {len(prompts)} prompts on the first host")
        with self._only(first=True):
            answers = [[self._ask(hosts, prompt).tokens for prompt in prompts] for hosts in (self._meets, self._waits)]
            for hosts in (self._meets, self._waits):
                hosts.cluster.settle()
        return answers

    def _at(
        self, rate: float, bytes_per_s: float, prompts: Sequence[list[int]], expected: Sequence[Sequence[list[int]]]
    ) -> list[Row]:
        """Return the rows of one rate: the meeting against the better of both others, and against each."""
        took: dict[str, list[float]] = {"computing": [], "fetching": [], "meeting": []}
        computed = 0
        for hosts in (self._meets, self._waits):
            hosts.set_rate(bytes_per_s)
        for number, prompt in enumerate(prompts):
            self._progress(f"link {bytes_per_s / 1e6:,.1f} MB/s, round {number} of {self._rounds}")
            computing = self._ask(self._waits, self._prompt(self._cached))
            fetching = self._ask(self._waits, prompt)
            meeting = self._ask(self._meets, prompt)
            for answer, tokens in ((fetching, expected[1][number]), (meeting, expected[0][number])):
                self._unmet += answer.tokens != tokens
            if (fetched := int(fetching.served["cached_remote"])) != self._cached:
                raise click.ClickException(
                    f"{fetched} of {self._cached} tokens were fetched: has the first host's pool room for all?"
                )
            if number:
                for name, answer in (("computing", computing), ("fetching", fetching), ("meeting", meeting)):
                    took[name].append(answer.ttft_s)
                computed += int(meeting.served.get("computed_of_cached", 0))
        seconds = {name: median(each) for name, each in took.items()}
        share = computed / (self._rounds * self._cached)
        self._progress(f"  {', '.join(f'{name} {1e3 * each:.0f} ms' for name, each in seconds.items())}; {share:.0%} computed")
        better = min(seconds["computing"], seconds["fetching"])
        return [
            _row(f"rate {rate:g}, {share:.0%} computed: meeting / better of both", seconds["meeting"], better),
            _row(f"rate {rate:g}: meeting / computing", seconds["meeting"], seconds["computing"]),
            _row(f"rate {rate:g}: meeting / fetching", seconds["meeting"], seconds["fetching"]),
        ]

    def _ask(self, hosts: _Hosts, prompt: list[int]) -> Answer:
        hosts.cluster.settle()
        # The last tokens are made from the others, so that a prompt is the same wherever it is sent.
        return hosts.cluster.complete(prompt + prompt[:TAIL_TOKENS], max_tokens=2)

    def _prompt(self, tokens: int) -> list[int]:
        return [int(token) for token in self._random.integers(3, 90, tokens)]

    @contextmanager
    def _only(self, *, first: bool) -> Iterator[None]:
        """Pause the engines of the other hosts: which prefill computes is not measured here."""
        with ExitStack() as paused:
            for name, host in self._engines:
                if (host == self._here) != first:
                    for hosts in (self._meets, self._waits):
                        paused.enter_context(hosts.cluster.paused(name))
            yield


def _row(name: str, value_s: float, reference_s: float) -> Row:
    return Row(name=name, unit="ms", value=1e3 * value_s, reference=1e3 * reference_s, higher_is_better=False)


def _write_rate(file: Path, bytes_per_s: float, *, fetches_all: bool) -> None:
    """Have the cache-node that reads this file send at a rate; see `throttled`."""
    part = file.with_suffix(".part")
    part.write_text(f"{bytes_per_s}{' all' if fetches_all else ''}")
    part.replace(file)


@contextmanager
def _throttled(path: Path, config: Config, slow: str, overrides: dict[str, str], *, fetches_all: bool) -> Iterator[_Hosts]:
    """Start the nodes of `config`, read from `path`; the cache-node of the host `slow` sends as slowly as a file says.
    `fetches_all`: also from sources that are slower than computing."""
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
            throttled = ("mooncake_zmq.bench.throttled", str(rate if node.host == slow else unlimited))
            module = throttled if node.role == "cache-node" else ("mooncake_zmq",)
            command = [sys.executable, "-m", *module, node.role, "--config", str(path), "--node", node.name]
            processes.append(subprocess.Popen(command, env=os.environ | variables, stdout=output, stderr=output))
        stack.callback(stop, processes)
        url = f"http://127.0.0.1:{port}"
        healthy = partial(httpx.get, f"{url}/health", timeout=5, verify=False)
        if not answers(healthy, processes[-1], START_TIMEOUT_S):
            raise click.ClickException(f"the cluster did not start:\n{last_lines(log)}")
        yield _Hosts(BenchCluster(url, directory, [node.name for node in config.nodes]), rate, fetches_all=fetches_all)
