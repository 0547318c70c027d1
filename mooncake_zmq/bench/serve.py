"""`bench serve`: the cluster against the bare engine with the same threads, both in one run, other nodes idle.

Cold: TTFT of a prompt that no node has computed, against the engine's own prefill of as many tokens. Warm: the same prefix
again with a new tail, served by the pool (the prefill's own reuse is off), from this host or from the other, against cold.
Decode: tokens per second of one decode node, against the engine's own batched loop. Gap: between the first two tokens of a
prompt whose prefix is in a pool, against the median gap of the same answer. The two sides of a row alternate round by round.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.bench.cluster import Answer, BenchCluster, bench_cluster
from mooncake_zmq.bench.memory import footprint, shared_files
from mooncake_zmq.bench.report import Progress, Report, Row
from mooncake_zmq.config.load import load
from mooncake_zmq.config.records import Config
from mooncake_zmq.core.messages import Sampling
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.engine.sampling import sample
from mooncake_zmq.engine.spec import Engine
from mooncake_zmq.engine.weights import load_engine
from mooncake_zmq.refused import Refused

COLD_TOKENS = (64, 512, 2048, 4096)
QUICK_TOKENS = 1500
"""Short prompts get more rounds, up to this many tokens a row: milliseconds on a shared machine need a median of many."""
PREFIX_TOKENS, TAIL_TOKENS = 2048, 64
GAP_PREFIX_TOKENS, GAP_TOKENS = 4000, 32
DECODE_PROMPT, DECODE_TOKENS = 64, 96
BATCHES = (1, 8)


def bench_serve(config: Path, *, rounds: int, threads: int, parts: Sequence[str], progress: Progress) -> Report:
    """Run all of it. Raises click.ClickException when the cluster cannot be started or answers an error."""
    settings = load(config).config
    progress("opening the bare engine")
    path = prepare(settings.model.path, settings.model.cache_dir, backend=settings.backend)
    engine = load_engine(path, threads=threads, backend=settings.backend)
    report = Report("serve")
    overrides = {"prefill.own_reuse": "false", "conductor.ttft_slo_s": "0", "conductor.tbt_slo_s": "0"}
    progress("starting the cluster")
    with bench_cluster(config, overrides) as cluster:
        run = _Run(engine, cluster, rounds, progress)
        run.warm_up()
        if "cold" in parts:
            report.rows += [run.cold(tokens) for tokens in COLD_TOKENS if tokens + 2 <= cluster.max_model_len]
        if "warm" in parts:
            report.rows += run.warm([(node.name, node.host) for node in settings.nodes if node.role in ("prefill", "decode")])
        if "gap" in parts and cluster.max_model_len >= GAP_PREFIX_TOKENS + TAIL_TOKENS + GAP_TOKENS:
            report.rows.append(run.gap())
        if "decode" in parts:
            decodes = [node.name for node in settings.of_role("decode")]
            report.rows += [run.decode(batch, decodes) for batch in BATCHES]
        if (most := cluster.max_model_len) < COLD_TOKENS[-1] + 2:
            report.notes.append(f"the model takes {most:,} tokens: rows of longer prompts are left out")
        _add_memory(report, settings, cluster)
    return report


def _add_memory(report: Report, settings: Config, cluster: BenchCluster) -> None:
    """Every node's memory, and the shared segments, which are taken whole at start."""
    segments: dict[str, int] = {}
    for node in settings.nodes:
        pid = cluster.pid(node.name)
        report.memory.append(footprint(f"{node.role} {node.name}", pid))
        segments |= shared_files(pid, settings.cluster.shm_dir)
    total = sum(segments.values())
    report.notes.append(f"{len(segments)} segments in {settings.cluster.shm_dir}: {total / (1 << 20):,.0f} MiB in all")


class _Run:
    def __init__(self, engine: Engine, cluster: BenchCluster, rounds: int, progress: Progress) -> None:
        self._engine = engine
        self._cluster = cluster
        self._rounds = rounds
        self._progress = progress
        self._random = np.random.default_rng(time.time_ns())  # The pool must not hold a prompt of an earlier run.

    def warm_up(self) -> None:
        """Send a few unmeasured requests, so that every page of weights and every code path is used on every node."""
        self._progress("warming up")
        for _ in range(3):
            self._cluster.complete(self._prompt(96), max_tokens=4)
            self._prefill_s(self._prompt(96))

    def cold(self, tokens: int) -> Row:
        ours: list[float] = []
        bare: list[float] = []
        rounds = max(self._rounds, QUICK_TOKENS // tokens)
        for number in range(rounds):
            self._progress(f"cold {tokens} tokens, round {number + 1} of {rounds}")
            self._cluster.settle()
            ours.append(self._cluster.complete(self._prompt(tokens), max_tokens=2).ttft_s)
            bare.append(self._prefill_s(self._prompt(tokens)))
        self._progress(f"  TTFT {[round(1e3 * s) for s in ours]} ms, engine {[round(1e3 * s) for s in bare]} ms")
        return _milliseconds(f"cold TTFT, {tokens} tokens / engine prefill", ours, bare)

    def warm(self, engines: list[tuple[str, str]]) -> list[Row]:
        """Return the rows of prompts whose beginning a pool has; `engines`: names and hosts."""
        hosts = list(dict.fromkeys(host for _, host in engines))
        if len(hosts) < 2:
            raise Refused("warm needs engines on two hosts, as configs/local.toml has: --only cold, gap or decode")
        here, there = hosts[:2]
        cold: list[float] = []
        local: list[float] = []
        remote: list[float] = []
        for number in range(self._rounds):
            self._progress(f"warm {PREFIX_TOKENS} + {TAIL_TOKENS} tokens, round {number + 1} of {self._rounds}")
            prefix = self._prompt(PREFIX_TOKENS)
            for host, source, seconds in ((here, "", cold), (here, "cached_local", local), (there, "cached_remote", remote)):
                self._cluster.settle()
                with self._only(host, engines):
                    answer = self._cluster.complete(prefix + self._prompt(TAIL_TOKENS), max_tokens=2)
                if source:
                    _expect(answer, source)
                seconds.append(answer.ttft_s)
        return [
            _milliseconds("warm TTFT, prefix in own host's pool / cold", local, cold),
            _milliseconds("warm TTFT, prefix in other host's pool / cold", remote, cold),
        ]

    @contextmanager
    def _only(self, host: str, engines: list[tuple[str, str]]) -> Iterator[None]:
        """Pause the engines of other hosts, as the conductor's choice is not measured here, and a decode on another host would
        bring its blocks into the pool there."""
        with self._cluster.paused(*(name for name, where in engines if where != host)):
            yield

    def gap(self) -> Row:
        """Return the row of the gap after the first token, behind a prefix that a pool has."""
        first: list[float] = []
        others: list[float] = []
        for number in range(self._rounds):
            self._progress(f"gap after {GAP_PREFIX_TOKENS} cached tokens, round {number + 1} of {self._rounds}")
            prefix = self._prompt(GAP_PREFIX_TOKENS)
            self._cluster.settle()
            self._cluster.complete(prefix, max_tokens=2)
            self._cluster.settle()
            warm = self._cluster.complete(prefix + self._prompt(TAIL_TOKENS), max_tokens=GAP_TOKENS)
            cached = warm.usage["prompt_tokens_details"]["cached_tokens"]
            assert cached >= GAP_PREFIX_TOKENS - 64, f"{cached} tokens were cached, so this run measured something else"
            gaps = [later - sooner for sooner, later in pairwise(warm.token_times)]
            first.append(gaps[0])
            others.append(median(gaps[1:]))
        return _milliseconds(f"gap after the first token, {GAP_PREFIX_TOKENS} cached / median gap", first, others)

    def decode(self, batch: int, decodes: list[str]) -> Row:
        ours: list[float] = []
        bare: list[float] = []
        for number in range(self._rounds):
            self._progress(f"decode, batch {batch}, round {number + 1} of {self._rounds}")
            self._cluster.settle()
            bare.append(self._engine_tokens_per_s(batch))
            ours.append(self._cluster_tokens_per_s(batch, decodes))
        name = f"decode, batch {batch} / engine"
        return Row(name, "tokens/s", median(ours), median(bare), higher=True)

    def _prompt(self, tokens: int) -> list[int]:
        return [int(t) for t in self._random.integers(100, self._engine.spec.vocab_size - 100, tokens)]

    def _prefill_s(self, prompt: list[int]) -> float:
        sequence = self._engine.new_sequence(len(prompt))
        began = time.perf_counter()
        logits = self._engine.prefill(sequence, np.array(prompt, np.int32), logits_at=(-1,))
        assert logits is not None
        sample(logits[0], Sampling(), len(prompt))
        took = time.perf_counter() - began
        sequence.close()
        return took

    def _engine_tokens_per_s(self, batch: int) -> float:
        sequences = [self._engine.new_sequence(DECODE_PROMPT + DECODE_TOKENS) for _ in range(batch)]
        for sequence in sequences:
            self._engine.prefill(sequence, np.array(self._prompt(DECODE_PROMPT), np.int32), logits_at=None)
        tokens: NDArray[np.int32] = np.full(batch, 100, np.int32)
        began = time.perf_counter()
        for _ in range(DECODE_TOKENS - 1):
            logits = self._engine.decode(sequences, tokens)
            positions = [sequence.length for sequence in sequences]
            tokens = np.array([sample(row, Sampling(), p) for row, p in zip(logits, positions, strict=True)], np.int32)
        took = time.perf_counter() - began
        for sequence in sequences:
            sequence.close()
        return batch * (DECODE_TOKENS - 1) / took

    def _cluster_tokens_per_s(self, batch: int, decodes: list[str]) -> float:
        if batch == 1:
            answer = self._cluster.complete(self._prompt(DECODE_PROMPT), max_tokens=DECODE_TOKENS)
            return (len(answer.token_times) - 1) / (answer.token_times[-1] - answer.token_times[0])
        with self._cluster.paused(decodes[-1]):
            return self._batch_tokens_per_s(batch)

    def _batch_tokens_per_s(self, batch: int) -> float:
        """Return tokens per second while all of the batch are decoding, from arrival times at the clients."""
        tokens = DECODE_TOKENS + 48  # the first ones run while the last prompts are still being prefilled
        epoch = time.perf_counter()

        def one(prompt: list[int]) -> list[float]:
            sent = time.perf_counter() - epoch
            return [sent + at for at in self._cluster.complete(prompt, max_tokens=tokens).token_times]

        with ThreadPoolExecutor(batch) as pool:
            times = list(pool.map(one, [self._prompt(DECODE_PROMPT) for _ in range(batch)]))
        begin = max(arrivals[1] for arrivals in times)
        end = min(arrivals[-1] for arrivals in times)
        together = sum(1 for arrivals in times for at in arrivals if begin < at <= end)
        return together / (end - begin)


def _expect(answer: Answer, source: str) -> None:
    """Raise unless the prefix came from `source`: else a warm figure does not count."""
    reused = answer.served[source]
    assert reused >= PREFIX_TOKENS - 64, f"{source} is {reused}, so this run measured something else: {answer.served}"


def _milliseconds(name: str, ours: list[float], reference: list[float]) -> Row:
    return Row(name, "ms", 1e3 * median(ours), 1e3 * median(reference))
