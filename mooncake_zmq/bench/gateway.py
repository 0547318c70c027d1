"""`bench gateway`: the cost of the path through the gateway, beside its goals. Engines do not count: the toy's time is
negligible, the modelled ones sleep, and CPU time is that of the gateway's process alone."""

import asyncio
import time
from collections.abc import Callable, Sequence
from statistics import median

import click
import msgspec
import numpy as np

from mooncake_zmq.bench.chats import chats
from mooncake_zmq.bench.client import Client, Replayed, replay
from mooncake_zmq.bench.client_prompts import PromptForm
from mooncake_zmq.bench.client_report import Bounds, Result, figures, result_of
from mooncake_zmq.bench.client_stream import Seen, ask
from mooncake_zmq.bench.cluster import BenchCluster, written_cluster
from mooncake_zmq.bench.memory import footprint, threads_cpu_s
from mooncake_zmq.bench.relay_floor import floor_s
from mooncake_zmq.bench.report import Progress, Report
from mooncake_zmq.core.messages import Sampling
from mooncake_zmq.engine.sampling import sample
from mooncake_zmq.engine.toy import ToyEngine
from mooncake_zmq.laboratory.study import TRACE_BLOCK_TOKENS, Arrival
from mooncake_zmq.runtime.http_connections import Connections, Target

PROMPT_TOKENS = 16
IDLE_REQUESTS = 200
"""Requests, one after the other, that measure the time to a first token at idle."""
STREAMS = (64, 1)
STREAM_TOKENS = {64: 160, 1: 320}
"""Number of concurrent streams -> tokens of each."""
OPEN_STREAMS, OPEN_TOKENS = 1000, 96
OPEN_SHARE = 0.95
"""Share of the streams that must be open at once for the row to count."""
RATE_PER_S, RATE_S, RATE_TOKENS = 200, 10, 8
ADDED_MS, BATCHED_US, ALONE_US = 2.0, 25.0, 100.0
"""Goals."""
ALONE_PER_S = 60.0
"""Tokens a second of one stream here."""
IDLE_S = 4.0
LOOK_S = 0.005
NODES = """
[conductor]
admission = "none"

[cache_node]
pool_bytes = 16_777_216

[prefill]
max_queued = 2048

[decode]
capacity_tokens = 131_072
max_requests = 2048
max_batch = 1024

[gateway.requests]
max_open = 2048

[gateway.connections]
max_connections = 4096
max_per_address = 4096

[[nodes]]
name = "conductor-0"
role = "conductor"

[[nodes]]
name = "cache-a"
role = "cache-node"
host = "host-a"

[[nodes]]
name = "prefill-a"
role = "prefill"
host = "host-a"
{backend}
[[nodes]]
name = "decode-a"
role = "decode"
host = "host-a"
{backend}
[[nodes]]
name = "gateway-0"
role = "gateway"
"""
TOY = '[model]\npath = "toy"\nmax_model_len = 4096\n'
MODELLED = """[model]
path = 'dummy:{"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 16, "max_positions": 4096}'
max_model_len = 4096
"""
BACKEND = 'backend = "modelled:h800-llama3-70b"\n'


def bench_gateway(rounds: int, parts: Sequence[str], progress: Progress) -> Report:
    """Start clusters, send them requests, stop them. Raises click.ClickException."""
    report = Report("gateway")
    if {"ttft", "rate"} & {*parts}:
        progress("starting 5 processes")
        with written_cluster(TOY + NODES.format(backend="")) as cluster:
            run = _Run(cluster, report, progress)
            if "ttft" in parts:
                run.ttft(rounds)
            if "rate" in parts:
                run.rate()
    if {"relay", "open"} & {*parts}:
        progress("starting 5 processes")
        with written_cluster(MODELLED + NODES.format(backend=BACKEND)) as cluster:
            run = _Run(cluster, report, progress)
            if "relay" in parts:
                run.relay(rounds)
            if "open" in parts:
                run.open()
    if "chat" in parts:
        chats(report, rounds, progress)
    return report


class _Run:
    def __init__(self, cluster: BenchCluster, report: Report, progress: Progress) -> None:
        self._cluster = cluster
        self._report = report
        self._progress = progress
        self._pid = cluster.pid("gateway-0")
        self._random = np.random.default_rng(time.time_ns())  # The pool must not hold a prompt of an earlier run.
        self._client = Client(
            url=cluster.url,
            model=cluster.model,
            max_open=4096,
            form=PromptForm(block_tokens=PROMPT_TOKENS),
        )

    # --- the time to a first token

    def ttft(self, rounds: int) -> None:
        """Measure the time through the cluster, and by the engine alone in this process: prefill and the choice of a token."""
        ours, bare = [], []
        for number in range(rounds):
            self._progress(f"TTFT at idle, round {number + 1} of {rounds}")
            cpu_s = threads_cpu_s(self._pid)
            ours.append(1e3 * asyncio.run(self._ttft_s()))
            cpu_ms = 1e3 * (threads_cpu_s(self._pid) - cpu_s) / IDLE_REQUESTS
            bare.append(1e3 * self._engine_s())
            self._progress(f"  {ours[-1]:.2f} ms, engine {bare[-1]:.2f} ms, gateway's CPU {cpu_ms:.2f} ms a request")
        self._report.row("TTFT added at idle, 16 ids / wanted", "ms", median(ours) - median(bare), ADDED_MS)

    async def _ttft_s(self) -> float:
        connections, found = Connections(Target.of(self._cluster.url)), []
        for _ in range(IDLE_REQUESTS):
            seen = await self._ask(connections, tokens=2)
            _expect(seen)
            found.append(seen.ttft_s)
        await connections.close()
        return median(found)

    def _engine_s(self) -> float:
        engine, found = ToyEngine(), []
        for _ in range(IDLE_REQUESTS):
            prompt = self._prompt()
            began = time.perf_counter()
            sequence = engine.new_sequence(len(prompt) + 2)
            logits = engine.prefill(sequence, np.array(prompt, np.int32))
            assert logits is not None
            sample(logits[0], Sampling(), len(prompt))
            found.append(time.perf_counter() - began)
            sequence.close()
        return median(found)

    # --- CPU time of a token

    def relay(self, rounds: int) -> None:
        """Measure the CPU time while all streams run, less the gateway's at idle; and that of the bare system calls."""
        idle = asyncio.run(self._idle_share())
        self._progress(f"idle: {100 * idle:.2f} % of a core")
        found: dict[int, list[float]] = {streams: [] for streams in STREAMS}
        floor: list[float] = []
        for number in range(rounds):
            for streams in STREAMS:
                self._progress(f"{streams} streams, round {number + 1} of {rounds}")
                found[streams].append(1e6 * asyncio.run(self._token_s(streams, idle)))
            floor.append(1e6 * floor_s(STREAM_TOKENS[1], 1 / ALONE_PER_S))
        for streams, wanted in zip(STREAMS, (BATCHED_US, ALONE_US), strict=True):
            name = "one stream" if streams == 1 else f"{streams} streams"
            self._progress(f"  {name}: {[round(each, 1) for each in found[streams]]} us")
            self._report.row(f"CPU of a relayed token, {name} / wanted", "us", median(found[streams]), wanted)
        self._progress(f"  bare loop: {[round(each, 1) for each in floor]} us")
        self._report.row(
            "CPU of a relayed token, one stream / bare loop of its system calls", "us", median(found[1]), median(floor)
        )

    async def _idle_share(self) -> float:
        began, cpu_s = time.perf_counter(), threads_cpu_s(self._pid)
        await asyncio.sleep(IDLE_S)
        return (threads_cpu_s(self._pid) - cpu_s) / (time.perf_counter() - began)

    async def _token_s(self, streams: int, idle: float) -> float:
        tokens = STREAM_TOKENS[streams]
        connections = Connections(Target.of(self._cluster.url))
        seen = [Seen(output_tokens=tokens) for _ in range(streams)]
        asking = [asyncio.create_task(self._ask(connections, tokens, each)) for each in seen]
        await _until(lambda: all(len(each.token_s) > 2 for each in seen), asking)
        began, cpu_s, before = time.perf_counter(), threads_cpu_s(self._pid), sum(len(each.token_s) for each in seen)
        await _until(lambda: any(len(each.token_s) > tokens - 4 for each in seen), asking)
        took_s, used_s = time.perf_counter() - began, threads_cpu_s(self._pid) - cpu_s
        relayed = sum(len(each.token_s) for each in seen) - before
        for each in await asyncio.gather(*asking):
            _expect(each)
        await connections.close()
        return (used_s - idle * took_s) / relayed

    async def _ask(self, connections: Connections, tokens: int, seen: Seen | None = None) -> Seen:
        body = {
            "model": self._client.model,
            "prompt": self._prompt(),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "ttft_slo": 0,
            "tbt_slo": 0,
        }
        seen = seen or Seen(output_tokens=tokens)
        return await ask(connections, self._client.path, self._client.headers, msgspec.json.encode(body), seen, 300.0)

    # --- many streams

    def open(self) -> None:
        """Open all streams at once, each answered to its end."""
        self._progress(f"{OPEN_STREAMS} streams at once")
        result, cpu_s = self._replayed([0.0] * OPEN_STREAMS, OPEN_TOKENS)
        _expect_open(result)
        self._report.row(f"{OPEN_STREAMS:,} open streams, answered", "share", result.finished / OPEN_STREAMS, 1.0, higher=True)
        each_us = 1e6 * cpu_s / max(1, result.output_tokens)
        self._report.row(f"{OPEN_STREAMS:,} open streams, CPU of a token, calls included / wanted", "us", each_us, BATCHED_US)
        self._report.memory.append(footprint("gateway gateway-0", self._pid))
        self._note(f"{OPEN_STREAMS:,} streams", result, cpu_s)

    def rate(self) -> None:
        """Measure the rate of new requests, each with few tokens."""
        count = RATE_PER_S * RATE_S
        self._progress(f"{RATE_PER_S} requests/s for {RATE_S} s")
        result, cpu_s = self._replayed([number / RATE_PER_S for number in range(count)], RATE_TOKENS)
        self._report.row(f"{RATE_PER_S} requests/s, answered", "share", result.finished / count, 1.0, higher=True)
        self._report.row(f"{RATE_PER_S} requests/s, rate of answers", "1/s", result.requests_per_s, RATE_PER_S, higher=True)
        self._note(f"{RATE_PER_S} requests/s", result, cpu_s)

    def _replayed(self, at_s: Sequence[float], tokens: int) -> tuple[Result, float]:
        drawn = self._random.integers(0, 1 << 60, len(at_s)).tolist()
        arrivals = [Arrival(at, TRACE_BLOCK_TOKENS, tokens, (each,)) for at, each in zip(at_s, drawn, strict=True)]
        cpu_s = threads_cpu_s(self._pid)
        replayed: Replayed = asyncio.run(replay(self._client, arrivals, self._progress))
        return result_of(replayed, self._cluster.url, Bounds()), threads_cpu_s(self._pid) - cpu_s

    def _note(self, name: str, result: Result, cpu_s: float) -> None:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in result.errors.items()) or "none"
        self._report.notes += [
            f"{name}: TTFT mean, p50, p90, p99 {figures(result.ttft_s, 1000)} ms; "
            f"{result.output_tokens_per_s:,.0f} tokens/s; gateway's CPU {1e3 * cpu_s / max(1, result.requests):.2f} ms for one "
            f"of {result.output_tokens / max(1, result.finished):.0f} tokens, {100 * cpu_s / result.span_s:.0f} % of a core",
            f"{name}: errors: {kinds}; {result.most_open:,} open at most; sent late by {figures(result.late_s, 1000)} ms",
        ]

    def _prompt(self) -> list[int]:
        return [int(token) for token in self._random.integers(0, 256, PROMPT_TOKENS)]


def _expect(seen: Seen) -> None:
    if seen.outcome != "finished" or len(seen.token_s) != seen.output_tokens:
        raise click.ClickException(f"a request did not end as it should: {seen.error or 'too few tokens'} {seen.said}")


def _expect_open(result: Result) -> None:
    if (most := min(result.most_open, result.finished)) < OPEN_SHARE * OPEN_STREAMS:  # a call that is refused is open too
        raise click.ClickException(f"no more than {most:,} of {OPEN_STREAMS:,} streams were open at once and finished")


async def _until(condition: Callable[[], bool], asking: Sequence["asyncio.Task[Seen]"]) -> None:
    while not condition() and not all(task.done() for task in asking):
        await asyncio.sleep(LOOK_S)
