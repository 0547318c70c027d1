"""`bench attend`: decode whose KV another process attends to, a part or all of it, beside decode with all KV at hand.

All requests have one context, of pages of our manual, and begin with tokens of their own. Every way takes the same steps, in
turn within each round, with the likeliest tokens; logits and tokens are compared with those of all KV at hand. What a lender
computes, it computes on cores beside those of the requests' process, and one thread for each borrower.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mooncake_zmq.bench.others.peers import Peer, driver_process
from mooncake_zmq.bench.quality import Floats, Tokens, check_positions, manual_tokens, prefilled, studied
from mooncake_zmq.bench.report import Progress, Report
from mooncake_zmq.engine.cpu import Backend
from mooncake_zmq.engine.elsewhere import FarKV
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.engine.tokenizer import open_tokenizer
from mooncake_zmq.engine.weights import load_engine
from mooncake_zmq.refused import Refused
from mooncake_zmq.transfer.partials import Borrowed, BorrowedKV, Lender
from mooncake_zmq.transfer.stream import StreamError
from mooncake_zmq.transfer.tickets import Ticket

PAGES = ("operating", "architecture", "api", "pool", "vllm", "laboratory")
DRIVER = Path(__file__).with_name("attend_driver.py")
ENDPOINT = "tcp://127.0.0.1:0"
ANSWER_TIMEOUT_S = 600.0
LENDER_TIMEOUT_S = 5.0
LOCAL, PART, ALL, SHORT = "all KV here", "part", "all", "no context"
MEMORY_PRICE = 0.25
"""Price of a node for memory, as assumed, in prices of one that computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendBench:
    """The parameters of a run. `lent`: the tokens of each request that each of the `lenders` has a copy of."""

    model: str = "default"
    cache_dir: str = ""
    backend: Backend = "auto"
    threads: int = 1
    tokens: int = 4096
    lent: int = 2048
    lenders: int = 1
    batch: int = 8
    steps: int = 16
    rounds: int = 5
    clear: bool = False


@dataclass(slots=True)
class Way:
    """Result of a way: seconds of each step, logits and tokens of the last round, payload of all steps."""

    seconds: list[float] = field(default_factory=list)
    logits: list[Floats] = field(default_factory=list)
    tokens: list[Tokens] = field(default_factory=list)
    moved_bytes: int = 0

    @property
    def step_s(self) -> float:
        return median(self.seconds)

    @property
    def step_bytes(self) -> float:
        return self.moved_bytes / len(self.seconds)


def bench_attend(bench: AttendBench, progress: Progress) -> Report:
    """Run all of it. Raises click.ClickException on a bad model, when the other process fails, or on other tokens."""
    study = studied(partial(_Study, bench), bench.model, bench.cache_dir, progress, backend=bench.backend)
    report = Report("attend")
    ways = study.run(progress)
    local = ways[LOCAL]
    title = {
        PART: f"{bench.lent * bench.lenders:,} of {bench.tokens:,} tokens lent",
        ALL: f"all of {bench.tokens:,} tokens lent",
    }
    for name, what in title.items():
        way = ways[name]
        report.row(f"TBT, batch {bench.batch}, {what} / {LOCAL}", "ms", 1e3 * way.step_s, 1e3 * local.step_s)
        equal = all(map(np.array_equal, way.tokens, local.tokens))
        error = float(np.max([np.abs(ours - its).max() for ours, its in zip(way.logits, local.logits, strict=True)]))
        if not (equal and np.isfinite(error)):
            raise Refused(f"{what}: other greedy tokens than those of {LOCAL}; greatest error of a logit {error:.2g}")
        report.notes.append(
            f"{what}: {way.step_s / local.step_s:.3f} of the TBT of {LOCAL}; greatest error of a logit {error:.2g}; greedy"
            f" tokens equal; {way.step_bytes / bench.batch / 1e3:.3f} kB of payload a token"
        )
    report.notes += [
        threads_note(bench, len(os.sched_getaffinity(0))),
        *lamina_notes(bench, ways),
        f"{study.engine.spec.name}, {type(study.engine).__name__}, {bench.threads} threads here, stream over loopback"
        f" {'in clear' if bench.clear else 'encrypted'}; medians of {bench.rounds} x {bench.steps} steps",
    ]
    return report


def threads_note(bench: AttendBench, cores: int) -> str:
    """Return what computes in each way, and whether this machine has a core for each of them."""
    note = f"threads: {bench.threads} for {LOCAL}; with lent KV one of each lender ({bench.lenders}) beside them"
    if cores >= bench.threads + bench.lenders:
        return f"{note}, so more cores"
    return f"{note}, on {cores} cores, for which they wait: lenders with cores of their own would be faster"


def lamina_notes(bench: AttendBench, ways: Mapping[str, Way]) -> Iterator[str]:
    """Yield what follows by arithmetic for decode without any KV of its own."""
    local, far = ways[LOCAL], ways[ALL]
    attention_s = local.step_s - ways[SHORT].step_s
    if attention_s > 0:
        yield (
            f"Lamina, by arithmetic: attention to {bench.tokens:,} tokens is {1e3 * attention_s:.1f} ms of a step here, in"
            f" which {far.step_bytes / attention_s / 1e6:.0f} MB/s move a step's {far.step_bytes / 1e6:.2f} MB: break-even"
        )
    estimate = local.step_s / far.step_s / (1 + MEMORY_PRICE)
    yield (
        f"throughput per dollar, an ESTIMATE: {estimate:.2f} of {LOCAL} at the same batch, if a node for memory costs"
        f" {MEMORY_PRICE} of one that computes; the paper's gain is that of a larger batch, which a CPU cannot show"
    )


def encoded_manual(path: Path, tokens: int) -> Tokens:
    """Return the tokens of our manual's pages. Raises ModelError if they are fewer than these."""
    encoded = manual_tokens(open_tokenizer(path), *PAGES)
    if len(encoded) < tokens:
        raise ModelError("the manual's pages are too short: take fewer tokens")
    return encoded


def cut(engine: Llama, source: SequenceKV, start: int, stop: int, following: int) -> SequenceKV:
    """Return a copy of some tokens, with room for more behind them; the earlier ones count as elsewhere."""
    spec = engine.spec
    copy = engine.new_sequence(stop - start + following)
    part = np.empty((2, stop - start, spec.kv_heads, spec.head_dim), np.float32)
    for layer in range(spec.layers):
        source.read_part(layer, start, stop, part)
        copy.write_part(layer, 0, part)
    copy.set_length(stop - start)
    copy.before = start
    return copy


class _Study:
    """The engine, and the context."""

    def __init__(self, bench: AttendBench, path: Path) -> None:
        engine = load_engine(path, threads=bench.threads, backend=bench.backend)
        assert isinstance(engine, Llama)
        self.engine, self._bench, self._path = engine, bench, path
        if bench.lent * bench.lenders >= bench.tokens:
            raise ModelError("a request keeps some tokens of its own: lend fewer")
        check_positions(engine, bench.tokens + bench.steps)
        manual = encoded_manual(path, bench.tokens)
        self._context, self._first = manual[: bench.tokens], manual[-bench.batch :]

    def run(self, progress: Progress) -> dict[str, Way]:
        """Measure all ways, in turn."""
        bench = self._bench
        with ExitStack() as stack:
            peers = [self._peer(stack, number, progress) for number in range(bench.lenders)]
            progress(f"computing {bench.tokens:,} tokens here")
            whole = prefilled(self.engine, self._context)
            batches = self._batches(whole)
            whole.close()
            lenders = [self._lender(stack, peer.ready) for peer in peers]
            loans = {
                name: [(each, peer.ready[name]) for each, peer in zip(lenders, peers, strict=True)] for name in (PART, ALL)
            }
            del loans[ALL][1:]
            ways = {name: Way() for name in batches}
            for number in range(bench.rounds + 1):
                progress(f"round {number} of {bench.rounds}")
                for name, sequences in batches.items():
                    way = ways[name] if number else Way()
                    way.logits, way.tokens = [], []
                    self._steps(way, sequences, loans.get(name, ()))
        return ways

    def _peer(self, stack: ExitStack, number: int, progress: Progress) -> Peer:
        """Start a lender of one range of the context; the first one has all of it too."""
        bench = self._bench
        progress(f"computing {bench.tokens:,} tokens in lender {number + 1} of {bench.lenders}")
        order = {name: getattr(bench, name) for name in ("threads", "backend", "batch", "steps")}
        order |= {"path": str(self._path), "tokens": bench.tokens, "endpoint": ENDPOINT, "sealed": not bench.clear}
        order |= {PART: [bench.lent * number, bench.lent * (number + 1)], ALL: [0, bench.tokens if number == 0 else 0]}
        started = driver_process(DRIVER, order, python=sys.executable, what="the lender", timeout_s=ANSWER_TIMEOUT_S)
        return stack.enter_context(started)

    def _batches(self, whole: SequenceKV) -> "dict[str, Sequence[SequenceKV | FarKV]]":
        """Return each way's sequences, of which only their lengths change between rounds."""
        bench, rows = self._bench, range(self._bench.batch)
        kept = partial(cut, self.engine, whole, stop=bench.tokens, following=bench.steps)
        return {
            LOCAL: [kept(0) for _ in rows],
            PART: [kept(bench.lent * bench.lenders) for _ in rows],
            ALL: [FarKV(bench.tokens, bench.tokens + bench.steps) for _ in rows],
            SHORT: [cut(self.engine, whole, 0, 1, bench.steps) for _ in rows],
        }

    def _lender(self, stack: ExitStack, ready: dict[str, Any]) -> Lender:
        ticket = Ticket(bytes.fromhex(ready["token"]), bytes.fromhex(ready["secret"]), not self._bench.clear)
        try:
            lender = Lender(self.engine.spec, ready["where"], ENDPOINT, ticket, timeout_s=LENDER_TIMEOUT_S)
        except StreamError as error:
            raise Refused(f"the lender failed: {error}") from None
        stack.callback(lender.lose, "no longer needed")
        return lender

    def _steps(
        self, way: Way, sequences: "Sequence[SequenceKV | FarKV]", loans: "Sequence[tuple[Lender, Sequence[int]]]"
    ) -> None:
        """Take a round's steps, and restore the sequences' lengths."""
        bench, engine, tokens = self._bench, self.engine, self._first
        before = sum(lender.moved_bytes for lender, _ in loans)
        lengths = [sequence.length for sequence in sequences]
        for _ in range(bench.steps):
            began = time.perf_counter()
            if not loans:
                logits = engine.decode([each for each in sequences if isinstance(each, SequenceKV)], tokens)
            else:
                elsewhere = BorrowedKV(engine.spec, list(self._borrowed(sequences, loans)), wait_s=LENDER_TIMEOUT_S)
                logits = engine.decode_elsewhere(sequences, tokens, elsewhere)
                if lost := elsewhere.failed | elsewhere.late:
                    raise Refused(f"the lender failed: {[each.lost or 'no answer in time' for each in lost.values()]}")
            way.seconds.append(time.perf_counter() - began)
            tokens = logits.argmax(axis=1).astype(np.int32)
            way.logits.append(logits)
            way.tokens.append(tokens)
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.length = length
        way.moved_bytes += sum(lender.moved_bytes for lender, _ in loans) - before

    def _borrowed(
        self, sequences: "Sequence[SequenceKV | FarKV]", loans: "Sequence[tuple[Lender, Sequence[int]]]"
    ) -> Iterator[Borrowed]:
        for lender, numbers in loans:
            for row, (sequence, loan) in enumerate(zip(sequences, numbers, strict=True)):
                far = isinstance(sequence, FarKV)
                yield Borrowed(row, lender, loan, sequence.length if far else self._bench.lent, far)
