"""`bench meet`: the TTFT of a prompt whose blocks another host has, at six rates of the link between the hosts.

Three ways beside each other: computing everything, fetching everything before computing starts, and computing the head while
the tail is fetched. At rate 1 the first two take equally long, by a first measurement of computing. Two clusters of the same
file are up in one run, one that meets and one that waits, and the three ways alternate round by round; a request before them,
which is not measured, shows both clusters each new rate.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from mooncake_zmq.bench.report import Progress, Report, Row
from mooncake_zmq.bench.slow_link import TAIL_TOKENS, WAITS, SlowLink, random_prompt, slow_link
from mooncake_zmq.config.load import load
from mooncake_zmq.runtime.model import prepared

RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)
"""Rates of the link, in those at which fetching takes as long as computing."""
MEETS = {"prefill.meet": "true"}
POOL_PART = 2
"""Divisor of a host's pool for the prompts that wait in it for their turn."""


def bench_meet(config: Path, *, tokens: int, rounds: int, progress: Progress) -> Report:
    """Run all of it. Raises click.ClickException when a cluster cannot be started or answers an error."""
    settings = load(config).config
    size = settings.model.block_tokens
    cached = max(size, tokens // size * size)
    kv_bytes = cached * prepared(settings).kv_bytes_per_token
    with ExitStack() as stack:
        meets = stack.enter_context(slow_link(config, settings, MEETS, fetches_all=False))
        waits = stack.enter_context(slow_link(config, settings, WAITS, fetches_all=True))
        held = settings.cache_node.pool_bytes // POOL_PART // (kv_bytes * (rounds + 1))
        return _Run(meets, waits, cached, rounds, progress).report(kv_bytes, max(1, held))


class _Run:
    def __init__(self, meets: SlowLink, waits: SlowLink, cached: int, rounds: int, progress: Progress) -> None:
        self._meets, self._waits = meets, waits
        self._cached = cached
        self._rounds = rounds
        self._progress = progress
        self._random = np.random.default_rng(time.time_ns())
        self._compared = self._unmet = 0

    def report(self, kv_bytes: int, held: int) -> Report:
        """Measure all rates. `held`: of so many of them a pool holds the prompts at a time."""
        report = Report("meet")
        with self._meets.only(first=True), self._waits.only(first=True):
            self._meets.ask(self._prompt(self._cached))
            alone_s = median([self._meets.ask(self._prompt(self._cached)).ttft_s for _ in range(3)])
        even = kv_bytes / alone_s
        for begin in range(0, len(RATES), held):
            some = RATES[begin : begin + held]
            prompts = [[self._prompt(self._cached) for _ in range(self._rounds + 1)] for _ in some]
            expected = self._computed(prompts)
            with self._meets.only(first=False), self._waits.only(first=False):
                for rate, own, answers in zip(some, prompts, expected, strict=True):
                    report.rows += self._at(rate, rate * even, own, answers)
        report.notes.append(
            f"{self._cached:,} cached tokens of {kv_bytes / 1e6:,.0f} MB and {TAIL_TOKENS} more; at rate 1, "
            f"{even / 1e6:,.1f} MB/s, fetching takes as long as computing"
        )
        report.notes.append(
            f"{self._unmet} of {self._compared} answers behind fetched blocks have other tokens than where nothing was fetched"
        )
        return report

    def _computed(self, prompts: Sequence[Sequence[list[int]]]) -> list[list[list[list[int]]]]:
        """Compute prompts on the first host, and return the answers of both clusters to each group of them."""
        self._progress(f"computing {sum(map(len, prompts))} prompts on the first host of each cluster")
        both = self._meets, self._waits
        with self._meets.only(first=True), self._waits.only(first=True):
            answers = [[[hosts.ask(prompt).tokens for prompt in group] for hosts in both] for group in prompts]
            for hosts in both:
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
            computing = self._waits.ask(self._prompt(self._cached))
            fetching = self._waits.fetch(prompt)
            meeting = self._meets.ask(prompt)
            for answer, tokens in ((fetching, expected[1][number]), (meeting, expected[0][number])):
                self._compared += 1
                self._unmet += answer.tokens != tokens
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

    def _prompt(self, tokens: int) -> list[int]:
        return random_prompt(self._random, tokens)


def _row(name: str, value_s: float, reference_s: float) -> Row:
    return Row(name, "ms", 1e3 * value_s, 1e3 * reference_s)
