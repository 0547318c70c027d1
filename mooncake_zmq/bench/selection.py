"""`bench select`: what decode over few of many tokens costs in quality, keeps near, moves from far memory, and saves in time.

Quality: of pages of our own manual, which are in no training set that ended before them, the first `tokens` are a context that
is computed exactly, and the following ones are decoded one by one from few of its tokens. KL is that of the next token's
distribution against attention over all. Speed: decode behind several pages, all ways in turn, in one run.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from mooncake_zmq.bench.quality import (
    Logs,
    Tokens,
    agreement,
    check_positions,
    divergence,
    log_probabilities,
    logs_of,
    manual_tokens,
    prefilled,
    studied,
)
from mooncake_zmq.bench.report import Progress, Report, Row
from mooncake_zmq.core.selection import RECENT, SINKS
from mooncake_zmq.engine.cpu import Backend
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.engine.selection.few_of_many import FewOfMany
from mooncake_zmq.engine.selection.kinds import SELECTORS
from mooncake_zmq.engine.tokenizer import open_tokenizer
from mooncake_zmq.engine.weights import load_engine
from mooncake_zmq.laboratory import tables

PAGES = ("architecture", "pool", "vllm")
SPEED_PAGES = ("operating", "architecture", "api", "pool", "vllm", "laboratory")
SPEED_SHARE = 8
EXACT, BASELINE = "all tokens", "sinks and recent"
WAYS: Mapping[str, tuple[str, bool]] = {
    "KCache": ("kcache", False),
    "KCache, by values too": ("kcache", True),
    "PQCache": ("pqcache", False),
    "PQCache, by values too": ("pqcache", True),
    "Quest": ("quest", False),
}
"""Kinds of selection, and whether values count too, as `FewOfMany` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectBench:
    """The parameters of a run. `shares`: the parts of the context that are chosen, each in turn; `speed_tokens`: the context
    whose decode is timed, `rounds` times `steps` tokens."""

    model: str = "default"
    cache_dir: str = ""
    backend: Backend = "auto"
    threads: int = 1
    tokens: int = 1024
    following: int = 64
    shares: tuple[int, ...] = (4, 8, 16)
    speed_tokens: int = 8128
    steps: int = 8
    rounds: int = 5
    cpu_time: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A way's error and memory at a share of the context: means over all texts. `fetched_bytes`: copied from far memory for a
    token."""

    name: str
    share: int
    attended: int
    kl: float
    top1: float
    near: float
    fetched_bytes: float


@dataclass(slots=True)
class SelectReport(Report):
    """A report with the outcomes of all ways."""

    outcomes: list[Outcome] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return Report.as_json(self) | {"outcomes": [asdict(each) for each in self.outcomes]}

    def _tables(self) -> Iterator[Table]:
        columns = ("way", "of the context", "tokens", "KL", "top-1", "near, of all KV", "MB fetched a token")
        table = tables.empty("quality", columns, text=columns[:1])
        for each in self.outcomes:
            figures = (f"{each.kl:.4f}", f"{each.top1:.3f}", f"{each.near:.3f}", f"{each.fetched_bytes / 1e6:.2f}")
            table.add_row(each.name, f"1/{each.share}", str(each.attended), *figures)
        yield table
        yield from Report._tables(self)


def bench_select(bench: SelectBench, progress: Progress) -> SelectReport:
    """Run all of it. Raises click.ClickException on a bad model."""
    report = SelectReport("select")
    study = studied(partial(_Study, bench), bench.model, bench.cache_dir, progress, backend=bench.backend)
    report.outcomes = study.qualities(progress)
    baselines = {each.share: each.kl for each in report.outcomes if each.name == BASELINE}
    report.rows += [
        Row(f"KL, {each.name} / {BASELINE}, 1/{each.share}", "nats", each.kl, baselines[each.share])
        for each in report.outcomes
        if each.name != BASELINE
    ]
    rows, notes = study.speeds(progress)
    report.rows += rows
    engine, seconds = study.engine, "seconds of CPU" if bench.cpu_time else "seconds"
    report.notes += [
        f"{engine.spec.name}, {type(engine).__name__}, {bench.threads} threads, {seconds}; {len(PAGES)} pages, {bench.tokens}"
        f" tokens, the next {bench.following}; {SINKS} sinks and {RECENT} recent tokens are attended to beside each share",
        "near: bytes of float32, as our engine keeps KV; with 16 bits a number, codes of PQCache would be twice this part",
        *notes,
    ]
    return report


class _Study:
    """The engine and its texts."""

    def __init__(self, bench: SelectBench, path: Path) -> None:
        engine = load_engine(path, threads=bench.threads, backend=bench.backend)
        assert isinstance(engine, Llama)
        self._bench, self.engine = bench, engine
        self._clock = time.process_time if bench.cpu_time else time.perf_counter
        self._timed = bench.steps * bench.rounds
        tokenizer = open_tokenizer(path)

        needed, timed = bench.tokens + bench.following, bench.speed_tokens + self._timed
        check_positions(engine, max(needed, timed))
        if bench.tokens // min(bench.shares) + SINKS + RECENT > bench.tokens or bench.tokens < max(bench.shares):
            raise ModelError(f"{SINKS + RECENT} tokens are always attended to: take more tokens or other shares")
        self._texts = [manual_tokens(tokenizer, page)[:needed] for page in PAGES]
        self._long = manual_tokens(tokenizer, *SPEED_PAGES)[:timed]
        if any(len(text) < needed for text in self._texts) or len(self._long) < timed:
            raise ModelError("the manual's pages are too short: take fewer tokens")

    def qualities(self, progress: Progress) -> list[Outcome]:
        """Return the outcome of each way at each share."""
        bench = self._bench
        found: dict[tuple[str, int], list[tuple[float, ...]]] = {}
        for page, text in zip(PAGES, self._texts, strict=True):
            context, following = text[: bench.tokens], text[bench.tokens :]
            sequence = prefilled(self.engine, context, bench.following)
            exact = log_probabilities(self.engine, sequence, following)
            sequence.set_length(len(context))
            for share in bench.shares:
                progress(f"{page}, 1/{share}")
                for name in (*WAYS, BASELINE):
                    few = self._few(name, sequence, bench.tokens // share, bench.following)
                    logs = self._decoded(few, following)
                    near, fetched = few.near_bytes() / few.whole_bytes(), few.fetched_bytes / len(following)
                    outcome = divergence(exact, logs), agreement(exact, logs), near, fetched
                    found.setdefault((name, share), []).append(outcome)
            sequence.close()
        means = {key: np.mean(each, axis=0).tolist() for key, each in found.items()}
        return [
            Outcome(
                name=name,
                share=share,
                attended=bench.tokens // share + SINKS + RECENT,
                kl=kl,
                top1=top1,
                near=near,
                fetched_bytes=fetched,
            )
            for (name, share), (kl, top1, near, fetched) in sorted(means.items(), key=lambda each: each[0][1])
        ]

    def speeds(self, progress: Progress) -> tuple[list[Row], list[str]]:
        """Return the rows of tokens per second over the long context, and what else was measured there."""
        bench, notes = self._bench, []
        context, following = self._long[: bench.speed_tokens], self._long[bench.speed_tokens :]
        progress(f"a context of {len(context)} tokens")
        sequence = prefilled(self.engine, context, self._timed)
        seconds: dict[str, list[float]] = {EXACT: []}
        ways: dict[str, FewOfMany] = {}
        for name in (*WAYS, BASELINE):
            begun = self._clock()
            ways[name] = self._few(name, sequence, len(context) // SPEED_SHARE, self._timed)
            notes.append(f"{name}: {self._clock() - begun:.2f} s to begin with {len(context)} tokens")
            seconds[name] = []
        for number in range(bench.rounds):
            progress(f"round {number + 1} of {bench.rounds}")
            some = following[number * bench.steps :][: bench.steps]
            for name in seconds:
                begun = self._clock()
                for token in some:
                    if name == EXACT:
                        self.engine.decode([sequence], np.array([token], np.int32))
                    else:
                        self.engine.decode_over([ways[name]], np.array([token], np.int32))
                seconds[name].append((self._clock() - begun) / len(some))
        for name, few in ways.items():
            near, fetched = few.near_bytes() / few.whole_bytes(), few.fetched_bytes / len(following)
            notes.append(f"{name} there: near {near:.3f} of all KV, {fetched / 1e6:.1f} MB fetched a token")
        sequence.close()
        rates = {name: 1 / median(each) for name, each in seconds.items()}
        what = f"decode at {len(context)} tokens"
        rows = [
            Row(f"{what}, {name}, 1/{SPEED_SHARE} / {EXACT}", "tokens/s", rates[name], rates[EXACT], higher=True)
            for name in ways
        ]
        return rows, notes

    def _few(self, name: str, sequence: SequenceKV, chosen: int, following: int) -> FewOfMany:
        """Return a way's own KV of a sequence. The baseline has as many recent tokens more as others choose."""
        if name == BASELINE:
            return FewOfMany(sequence, None, 0, following=following, recent=RECENT + chosen)
        spec, (kind, values) = self.engine.spec, WAYS[name]
        kept = SELECTORS[kind](spec.layers, spec.kv_heads, spec.head_dim, sequence.length + following)
        return FewOfMany(sequence, kept, chosen, following=following, values=values)

    def _decoded(self, few: FewOfMany, following: Tokens) -> Logs:
        """Return the log probabilities of the next token after each of these."""
        steps = [self.engine.decode_over([few], following[at : at + 1]) for at in range(len(following))]
        return logs_of(np.concatenate(steps))
