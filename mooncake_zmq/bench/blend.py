"""`bench blend`: what reuse beyond the prefix saves and costs: documents in another order, and prompts that were edited.

Texts are pages of our own manual, which are in no training set that ended before them. KL is that of the next token's
distribution over following tokens, against a prompt that was computed in whole; time to the first token is that of the engine,
with the search for what is reused and every copy of its KV, and without its way from a pool. Both sides are measured in turn,
in one run.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from mooncake_zmq.bench.quality import (
    Floats,
    Logs,
    Tokens,
    agreement,
    check_positions,
    divergence,
    log_probabilities,
    manual_tokens,
    prefilled,
    studied,
)
from mooncake_zmq.bench.report import Progress, Report, Row
from mooncake_zmq.engine.blend import CHUNK_ROWS, NOTHING, Again, Reused, found_run, prefill_blended, read_kv
from mooncake_zmq.engine.cpu import Backend
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.engine.neighbours import Neighbours
from mooncake_zmq.engine.tokenizer import open_tokenizer
from mooncake_zmq.engine.weights import load_engine
from mooncake_zmq.kv.block_hash import Key, extend_keys, namespace
from mooncake_zmq.kv.parts import PartTable
from mooncake_zmq.kv.similar import References, aligned
from mooncake_zmq.laboratory import tables

PAGES = ("architecture", "pool", "vllm", "operating", "api", "laboratory", "configuring", "testing")
EDITED_PAGES = ("operating", "vllm", "laboratory")
SYSTEM = """You answer questions about a piece of software from the pages of its manual that follow. Read them with care, answer
shortly, and say so where they do not have the answer.\n\n"""
QUESTION = "\n\nGo on with one of the pages:\n\n"
ASKED = 4
"""Documents whose continuation is predicted behind each prompt."""
BLOCK_TOKENS = 16
EDITED = 0.1
"""The share of tokens edited: four fifths replaced, a tenth left out, a tenth put in."""
PREFIX, WHOLE = "prefix caching", "full prefill"
Plan = tuple[list[Reused], Again]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendBench:
    """The parameters of a run. `orders`: of the documents; `edited_tokens`: of a prompt that is edited."""

    model: str = "default"
    cache_dir: str = ""
    backend: Backend = "auto"
    threads: int = 1
    documents: int = 8
    tokens: int = 512
    following: int = 64
    orders: int = 3
    edited_tokens: int = 2048
    cpu_time: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A way's mean error and time over all prompts. `computed`: the share of tokens times layers. `ttft_ratio`: the median of
    its seconds over those of the reference for the same prompt."""

    of: str
    name: str
    computed: float
    kl: float
    top1: float
    ttft_s: float
    ttft_ratio: float


@dataclass(slots=True)
class BlendReport(Report):
    """A report with the outcomes of all ways."""

    outcomes: list[Outcome] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return Report.as_json(self) | {"outcomes": [asdict(each) for each in self.outcomes]}

    def _tables(self) -> Iterator[Table]:
        columns = ("way", "computed", "KL", "top-1", "TTFT, ms", "of the reference's")
        for of in dict.fromkeys(each.of for each in self.outcomes):
            table = tables.empty(of, columns, text=columns[:1])
            for each in self.outcomes:
                if each.of == of:
                    figures = (f"{each.computed:.3f}", f"{each.kl:.4f}", f"{each.top1:.3f}", f"{1e3 * each.ttft_s:,.0f}")
                    table.add_row(each.name, *figures, f"{each.ttft_ratio:.3f}")
            yield table
        yield from Report._tables(self)


def bench_blend(bench: BlendBench, progress: Progress) -> BlendReport:
    """Run all of it. Raises click.ClickException on a bad model."""
    report = BlendReport("blend")
    study = studied(partial(_Study, bench), bench.model, bench.cache_dir, progress, backend=bench.backend)
    spec = study.engine.spec
    report.outcomes = [*study.shuffled(progress), *study.edited(progress)]
    seconds = "seconds of CPU" if bench.cpu_time else "seconds"
    engine = f"{spec.name}, {type(study.engine).__name__}, {bench.threads} threads, {seconds}"
    report.notes += [
        f"{engine}; {bench.orders} prompts of each kind; the reference computes {CHUNK_ROWS} tokens at a time",
        "computed: tokens times layers. The way of KV from a pool is not in these times. The search for what is reused, and the"
        " gathering, turning and storing of its KV, are in those of every way",
    ]
    for of in dict.fromkeys(each.of for each in report.outcomes):
        reference, *others = (each for each in report.outcomes if each.of == of)
        report.rows += [
            Row(f"TTFT, {each.name} / {reference.name}", "ms", 1e3 * each.ttft_s, 1e3 * reference.ttft_s) for each in others
        ]
    return report


@dataclass(slots=True)
class _Tally:
    """The results of a way so far: (share computed, KL, top-1, seconds, ratio) of each prompt."""

    found: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)

    def outcomes(self, of: str) -> list[Outcome]:
        return [
            Outcome(
                of=of,
                name=name,
                computed=float(np.mean([each[0] for each in found])),
                kl=float(np.mean([each[1] for each in found])),
                top1=float(np.mean([each[2] for each in found])),
                ttft_s=median(each[3] for each in found),
                ttft_ratio=median(each[4] for each in found),
            )
            for name, found in self.found.items()
        ]


class _Study:
    """The texts, the engine, and the prompts that are made of these."""

    def __init__(self, bench: BlendBench, path: Path) -> None:
        engine = load_engine(path, threads=bench.threads, backend=bench.backend)
        assert isinstance(engine, Llama)
        self._bench, self.engine = bench, engine
        self._clock = time.process_time if bench.cpu_time else time.perf_counter
        self._deep = max(1, engine.spec.layers // 4)
        self._root = namespace(model=engine.spec.fingerprint, layout="bench")
        tokenizer = open_tokenizer(path)

        def encoded(text: str) -> Tokens:
            return np.asarray(tokenizer.encode(text), np.int32)

        self._system, self._question = encoded(SYSTEM), encoded(QUESTION)
        self._pages = {page: manual_tokens(tokenizer, page) for page in {*PAGES, *EDITED_PAGES}}
        prompt = len(self._system) + bench.documents * bench.tokens + len(self._question)
        self._capacity = max(prompt, 2 * bench.edited_tokens) + bench.following
        check_positions(engine, self._capacity)
        if bench.documents > len(PAGES):
            raise ModelError(f"there are {len(PAGES)} documents")
        if min(map(len, self._pages.values())) < max(bench.tokens, bench.edited_tokens) + bench.following:
            raise ModelError("the manual's pages are too short: take fewer tokens")

    # ------------------------------------------------------------------------------------------- documents, shuffled

    def shuffled(self, progress: Progress) -> list[Outcome]:
        """Return the outcomes of documents in other orders than those in which they were computed."""
        bench, rng, tally = self._bench, np.random.default_rng(3), _Tally()
        texts = [self._pages[page] for page in PAGES[: bench.documents]]
        parts = PartTable(BLOCK_TOKENS)
        progress(f"{bench.documents} documents by themselves")
        kept = dict[Key, Floats]()
        for text in texts:
            own = text[: bench.tokens]
            keys = extend_keys(self._root, own.astype("<i4").tobytes(), BLOCK_TOKENS)
            parts.add(self._root, own, keys)
            kept[keys[-1]] = self._kv(own, 0)
        behind = {key: self._kv(text[: bench.tokens], len(self._system)) for key, text in zip(kept, texts, strict=True)}
        for number in range(bench.orders):
            order = rng.permutation(len(texts)).tolist()
            tokens = np.concatenate((*(texts[index][: bench.tokens] for index in order), self._question))
            asked = [texts[index][bench.tokens :][: bench.following] for index in rng.permutation(len(texts))[:ASKED]]
            ways = self._ways_with_parts(partial(self._found, parts, tokens), kept, behind, rng)
            progress(f"documents, order {number + 1} of {bench.orders}")
            self._measure(tally, PREFIX, self._system, tokens, asked, ways)
        return tally.outcomes(f"{bench.documents} documents of {bench.tokens} tokens, shuffled")

    def _found(self, parts: PartTable, tokens: Tokens, kept: dict[Key, Floats], computed_at: int) -> list[Reused]:
        """Return the known parts of a prompt behind the system prompt, with their KV."""
        start, found = len(self._system), parts.find(self._root, tokens)
        return [found_run(part, kept[part.keys[-1]], start, computed_at) for part in found]

    def _ways_with_parts(
        self,
        found: Callable[[dict[Key, Floats], int], list[Reused]],
        kept: dict[Key, Floats],
        behind: dict[Key, Floats],
        rng: np.random.Generator,
    ) -> Mapping[str, Callable[[], Plan]]:
        def alone() -> list[Reused]:
            return found(kept, 0)

        def some(kept: Callable[[int], NDArray[np.bool_]]) -> list[Reused]:
            pieces = [each.only(kept(len(each.at))) for each in alone()]
            return [each for each in pieces if len(each.at)]

        def again(share: float, probed: int = 1) -> Callable[[], Plan]:
            return lambda: (alone(), Again(share, probed))

        def first(count: int) -> Callable[[], Plan]:
            return lambda: (some(lambda length: np.arange(length) >= count), NOTHING)

        def unturned(reused: list[Reused]) -> list[Reused]:
            return [Reused(at=each.at, computed_at=each.at, kv=each.kv) for each in reused]

        few = 8 if self._bench.tokens > 32 else 1
        return {
            "reused, keys not turned": lambda: (unturned(alone()), NOTHING),
            "reused, keys turned": lambda: (alone(), NOTHING),
            "the same, computed behind the system prompt": lambda: (found(behind, len(self._system)), NOTHING),
            "CacheBlend, 5 % by layer 1": again(0.05),
            "CacheBlend, 15 % by layer 1": again(0.15),
            "CacheBlend, 30 % by layer 1": again(0.3),
            f"10 % by layer {self._deep}": again(0.1, self._deep),
            f"15 % by layer {self._deep}": again(0.15, self._deep),
            "15 % at random": lambda: (some(lambda length: rng.random(length) >= 0.15), NOTHING),
            f"EPIC, first {few} of each": first(few),
            f"EPIC, first {4 * few} of each": first(4 * few),
        }

    # ------------------------------------------------------------------------------------------- prompts, edited

    def edited(self, progress: Progress) -> list[Outcome]:
        """Return the outcomes of prompts of which a tenth of the tokens was edited."""
        bench, rng, tally = self._bench, np.random.default_rng(4), _Tally()
        neighbours, references, kept = Neighbours(self.engine), References(), {}
        originals = [self._pages[page] for page in EDITED_PAGES]
        for text in originals:
            own = text[: bench.edited_tokens]
            references.add(self._root, own)
            kept[own.tobytes()] = self._kv(own, 0)
        for number in range(bench.orders):
            text = originals[number % len(originals)]
            tokens = edited(text[: bench.edited_tokens], EDITED, rng)
            following = text[bench.edited_tokens :][: bench.following]
            progress(f"edited prompts, {number + 1} of {bench.orders}")
            ways = self._ways_with_reference(tokens, references, kept, neighbours)
            self._measure(tally, WHOLE, tokens[:0], tokens, [following], ways)
        return tally.outcomes(f"prompts of {bench.edited_tokens} tokens, {EDITED:.0%} edited")

    def _ways_with_reference(
        self, tokens: Tokens, references: References, kept: dict[bytes, Floats], neighbours: Neighbours
    ) -> Mapping[str, Callable[[], Plan]]:
        def plan(again: Again, *, accepts: bool) -> Plan:
            reference = references.best(self._root, tokens)
            if reference is None:
                return [], again
            source = aligned(reference, tokens)
            if accepts:
                source = neighbours.paired(reference, tokens, source)
            at = np.flatnonzero(source >= 0)
            return [Reused(at=at, computed_at=source[at], kv=kept[reference.tobytes()][:, :, source[at]])], again

        ways = {"": NOTHING, ", 15 % by layer 1": Again(), ", 30 % by layer 1": Again(0.3)}
        ways[f", 10 % by layer {self._deep}"] = Again(0.1, self._deep)
        equal = {f"replaced tokens computed{name}": partial(plan, again, accepts=False) for name, again in ways.items()}
        taken = {
            f"SemShareKV: neighbours' KV for them{name}": partial(plan, ways[name], accepts=True) for name in list(ways)[:2]
        }
        return equal | taken

    # ------------------------------------------------------------------------------------------- both

    def _measure(
        self,
        tally: _Tally,
        reference: str,
        prefix: Tokens,
        tokens: Tokens,
        asked: Sequence[Tokens],
        ways: Mapping[str, Callable[[], Plan]],
    ) -> None:
        """Compute a prompt in whole, and in each way, with the continuations asked of it. The time of the whole one is the mean
        of that before all ways and that behind them."""
        layers = self.engine.spec.layers

        def whole(sequence: SequenceKV) -> float:
            for begin in range(0, len(tokens), CHUNK_ROWS):
                asked = (-1,) if begin + CHUNK_ROWS >= len(tokens) else None
                self.engine.prefill(sequence, tokens[begin : begin + CHUNK_ROWS], logits_at=asked)
            return 1.0

        def blended(plan: Callable[[], Plan], sequence: SequenceKV) -> float:
            reused, again = plan()
            computed = len(prefill_blended(self.engine, sequence, tokens, reused, again).computed) / len(tokens)
            return (again.probed + computed * (layers - again.probed)) / layers if again.share else computed

        exact, _, before = self._run(prefix, asked, whole)
        results = {name: self._run(prefix, asked, partial(blended, plan)) for name, plan in ways.items()}
        whole_s = (before + self._run(prefix, (), whole)[2]) / 2
        for name, (logs, computed, seconds) in ({reference: (exact, 1.0, whole_s)} | results).items():
            error = divergence(exact, logs), agreement(exact, logs)
            tally.found.setdefault(name, []).append((computed, *error, seconds, seconds / whole_s))

    def _run(
        self, prefix: Tokens, asked: Sequence[Tokens], compute: Callable[[SequenceKV], float]
    ) -> tuple[Logs, float, float]:
        """Return the log probabilities after each of the tokens asked, what `compute` returned, and its time."""
        sequence = self.engine.new_sequence(self._capacity)
        if len(prefix):
            self.engine.prefill(sequence, prefix, logits_at=None)
        begun = self._clock()
        computed = compute(sequence)
        seconds = self._clock() - begun
        logs = [self._logs(sequence, following) for following in asked]
        sequence.close()
        return np.concatenate(logs) if logs else np.empty(0), computed, seconds

    def _logs(self, sequence: SequenceKV, following: Tokens) -> Logs:
        """Return the log probabilities of the next token after each of these; the sequence stays as long as it is."""
        length = sequence.length
        logs = log_probabilities(self.engine, sequence, following)
        sequence.set_length(length)
        return logs

    def _kv(self, tokens: Tokens, at: int) -> Floats:
        """Return the KV of tokens computed at a position: behind nothing, or as much of the system prompt."""
        sequence = prefilled(self.engine, np.concatenate((self._system[:at], tokens)))
        kv = read_kv(self.engine, sequence, at, at + len(tokens))
        sequence.close()
        return kv


def edited(tokens: Tokens, share: float, rng: np.random.Generator) -> Tokens:
    """Return tokens of which a share was edited: most replaced by others of the same text, a tenth of these each left out or
    preceded by another one."""
    kinds, others = rng.random(len(tokens)) / share, rng.choice(tokens, len(tokens))
    pairs = np.stack((others, tokens), axis=1)
    kept = np.stack(((kinds >= 0.1) & (kinds < 1), (kinds >= 1) | ((kinds >= 0.1) & (kinds < 0.2))), axis=1)
    return pairs[kept]
