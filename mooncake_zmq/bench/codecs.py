"""`bench codecs`: what codecs of KV cost in quality beside other ways at about as many bytes, and in time beside exact KV.

Quality: of pages of our own manual, which are in no training set that ended before them, the first `tokens` are a context whose
KV is coded, and the following ones are predicted from it. KL is that of the next token's distribution against the one with
exact KV. A codec is run as it is served; the others change the KV of the whole context, which was computed exactly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from mooncake_zmq.bench.codec_baselines import SINKS, adjacent_cosines, baselines
from mooncake_zmq.bench.codec_link import link_row
from mooncake_zmq.bench.codec_pool import pool_rows
from mooncake_zmq.bench.codec_pruning import BY_PROMPT, FIXED, KEYS_ALONE, LAST, left_out, mean_squares, prunings
from mooncake_zmq.bench.codec_rates import rate_rows
from mooncake_zmq.bench.quality import (
    Floats,
    Logs,
    agreement,
    check_positions,
    divergence,
    log_probabilities,
    manual_tokens,
    studied,
)
from mooncake_zmq.bench.report import Progress, Report, Row
from mooncake_zmq.engine.blend import read_kv, rotation, turned
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.engine.tokenizer import open_tokenizer
from mooncake_zmq.engine.weights import open_model
from mooncake_zmq.kv.codec import CODECS, Codec
from mooncake_zmq.laboratory import tables

PAGES = ("architecture", "pool", "vllm")
OTHER_PAGES = ("operating", "configuring", "testing", "api")
"""Texts by which a mask is fixed for a model."""
BFLOAT16, FLOAT32 = 16.0, 32.0
"""Bits of a number: as most engines keep KV, and as ours computes it."""
BESIDE = (
    ("int8", "KIVI, 8 bits"),
    ("int8", "fp8 e4m3, scale 1 (vLLM's fp8)"),
    ("k8v4", "KIVI, K 8 and V 4 bits"),
    ("int4", "KIVI, 4 bits"),
    ("int4", "4 bits a token and head, not rotated"),
    ("int4", f"ThinK, {FIXED}, with 4 bits"),
    ("int4", f"{SINKS} sinks and recent tokens"),
)
"""Codecs, and the ways beside which they stand: that take as many bytes or more, but for fp8, which takes a thirtieth less, and
ThinK, which takes a tenth less."""
Error = tuple[float, float, float]
"""KL, share of equal top-1 tokens, and the mean of minus the log probability of the right one, for a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecBench:
    """The parameters of a run. `rate_blocks`: that are encoded and decoded in each of `rounds`; `linked_tokens`: of a prompt
    that comes over a link."""

    model: str = "default"
    cache_dir: str = ""
    tokens: int = 1024
    following: int = 128
    rounds: int = 5
    rate_blocks: int = 64
    linked_tokens: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The error of a way to hold KV: means over all texts. `warm`: the KL of an answer whose context was loaded from blocks
    against one that computed it; None: not served."""

    name: str
    bits: float
    kl: float
    top1: float
    perplexity: float
    warm: float | None = None


@dataclass(slots=True)
class CodecReport(Report):
    """A report with the qualities of all ways."""

    qualities: list[Quality] = field(default_factory=list)
    title: str = "quality"

    def as_json(self) -> dict[str, Any]:
        return Report.as_json(self) | {"qualities": [asdict(each) for each in self.qualities]}

    def _tables(self) -> Iterator[Table]:
        columns = ("KV", "bits", "x of bf16", "KL", "top-1", "perplexity", "KL, warm / cold")
        table = tables.empty(self.title, columns, text=columns[:1])
        for each in self.qualities:
            ratio = BFLOAT16 / each.bits
            warm = "" if each.warm is None else f"{each.warm:.4f}"
            figures = (f"{each.bits:.2f}", f"{ratio:.2f}", f"{each.kl:.4f}", f"{each.top1:.3f}", f"{each.perplexity:.3f}", warm)
            table.add_row(each.name, *figures)
        if self.qualities:
            yield table
        yield from Report._tables(self)


def bench_codecs(bench: CodecBench, parts: Sequence[str], progress: Progress) -> CodecReport:
    """Run the chosen parts. Raises click.ClickException on a bad model or when a process does not start."""
    report = CodecReport("codecs")
    if "quality" in parts:
        _measure_quality(report, bench, progress)
    if "rates" in parts:
        report.rows += rate_rows(bench.rate_blocks, bench.rounds, progress)
    if "pool" in parts:
        report.rows += pool_rows(bench.rate_blocks, bench.rounds, progress)
    if "link" in parts:
        report.rows += [link_row(bench.model, bench.cache_dir, bench.linked_tokens, bench.rounds, progress)]
    return report


def _measure_quality(report: CodecReport, bench: CodecBench, progress: Progress) -> None:
    study = studied(partial(Study, bench, progress), bench.model, bench.cache_dir, progress, kernels=False)
    report.qualities = study.qualities()
    report.notes += [f"{study.engine.spec.name}, {len(study.texts)} pages, {bench.tokens} tokens, the next {bench.following}"]
    report.notes += study.cosine_notes()
    by_name = {each.name: each for each in report.qualities}
    report.rows += [Row(f"KL, {name} / {other}", "nats", by_name[name].kl, by_name[other].kl) for name, other in BESIDE]


class Study:
    """The texts, the exact engine and what it makes of them."""

    def __init__(self, bench: CodecBench, progress: Progress, path: Path) -> None:
        self._bench, self._path, self._progress = bench, path, progress
        self.engine = open_model(path)
        self._tokenizer = open_tokenizer(path)
        needed = bench.tokens + bench.following
        check_positions(self.engine, needed)
        self.texts = self._read(PAGES, needed)
        progress("exact KV")
        self.contexts = [self._context(text) for text in self.texts]
        self._exact = [self._after(keys, values, text) for (keys, values), text in zip(self.contexts, self.texts, strict=True)]

    def qualities(self) -> list[Quality]:
        """Return those of exact KV, of all codecs and of the other ways."""
        spec = self.engine.spec
        found = [self.quality("exact", FLOAT32, self._exact)]
        for codec in CODECS.values():
            if not codec.refusal(spec.head_dim):
                self._progress(f"codec {codec.name}")
                found.append(self.of_codec(codec))
        int4_bits = CODECS["int4"].bits_a_value(spec.head_dim)
        for other in baselines(spec.head_dim, spec.layers, self._bench.tokens, int4_bits):
            self._progress(other.name)
            logs = []
            for (keys, values), text in zip(self.contexts, self.texts, strict=True):
                changed = other.change(keys, values)
                moved = self._moved(changed[0]) if other.drops else changed[0]
                logs.append(self._after(moved, changed[1], text))
            found.append(self.quality(other.name, other.bits, logs))
        return [*found, *self._pruned()]

    def _pruned(self) -> Iterator[Quality]:
        """Yield those of ThinK."""
        tokens = self._bench.tokens
        self._progress("masks of channels")
        others = [mean_squares(self.engine, text, tokens) for text in self._read(OTHER_PAGES, tokens)]
        queries, keys = np.mean(others, axis=0)
        masks = {FIXED: [left_out(queries * keys)] * len(self.texts), KEYS_ALONE: [left_out(keys)] * len(self.texts)}
        own = (mean_squares(self.engine, text[:tokens], LAST) for text in self.texts)
        masks[BY_PROMPT] = [left_out(queries * keys) for queries, keys in own]
        for way in prunings(self.engine.spec.head_dim, tokens):
            self._progress(way.name)
            each = zip(self.contexts, masks[way.mask], self.texts, strict=True)
            logs = [self._after(*way.changed(*context, mask), text) for context, mask, text in each]
            yield self.quality(way.name, way.bits, logs)

    def _read(self, pages: Sequence[str], tokens: int) -> list[NDArray[np.int32]]:
        """Return the first tokens of pages of the manual. Raises ModelError if a page has less."""
        texts = [page[:tokens] for page in self.whole(pages)]
        if any(len(text) < tokens for text in texts):
            raise ModelError(f"the manual's pages have less than {tokens} tokens: take fewer")
        return texts

    def whole(self, pages: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return pages of the manual."""
        return [manual_tokens(self._tokenizer, page) for page in pages]

    def cosine_notes(self) -> Iterator[str]:
        """Yield what says why merging layers works or not."""
        for what, index in (("keys", 0), ("values", 1)):
            cosines = np.mean([adjacent_cosines(context[index]) for context in self.contexts], axis=0)
            yield (
                f"cosine of {what} in adjacent layers, which MiniCache needs near 1: "
                f"{cosines.min():.2f} to {cosines.max():.2f}, mean {cosines.mean():.2f}"
            )

    def of_codec(self, codec: Codec) -> Quality:
        """Compare what is served: a context computed here, where KV is rounded when stored, and one loaded from blocks."""
        engine = open_model(self._path, codec=codec)
        cold: list[Logs] = []
        warm: list[Logs] = []
        for text in self.texts:
            context, following = text[: self._bench.tokens], text[self._bench.tokens :]
            sequence = engine.new_sequence(len(text))
            engine.prefill(sequence, context)
            loaded = _through_blocks(codec, engine, sequence, len(context))
            for each, logs in ((sequence, cold), (loaded, warm)):
                logs.append(log_probabilities(engine, each, following))
                each.close()
        served = self.quality(codec.name, codec.bits_a_value(engine.spec.head_dim), warm)
        warm_kl = float(np.mean([divergence(*pair) for pair in zip(cold, warm, strict=True)]))
        return Quality(**(asdict(served) | {"warm": warm_kl}))

    def quality(self, name: str, bits: float, logs: Sequence[Logs]) -> Quality:
        """Return that of the log probabilities that a way has for all texts."""
        return mean_quality(name, bits, [self.error(number, each) for number, each in enumerate(logs)])

    def error(self, number: int, logs: Logs) -> Error:
        """Return that of the log probabilities for one text."""
        exact, after = self._exact[number], self.texts[number][self._bench.tokens + 1 :]
        return divergence(exact, logs), agreement(exact, logs), float(-logs[np.arange(len(logs) - 1), after].mean())

    def _context(self, text: NDArray[np.int32]) -> tuple[Floats, Floats]:
        """Return the exact keys and values of a context, [layer, token, kv_head, head_dim]."""
        tokens = self._bench.tokens
        sequence = self.engine.new_sequence(tokens)
        self.engine.prefill(sequence, text[:tokens])
        both = read_kv(self.engine, sequence, 0, tokens)
        sequence.close()
        return both[:, 0], both[:, 1]

    def _after(self, keys: Floats, values: Floats, text: NDArray[np.int32]) -> Logs:
        """Return the log probabilities after each following token, of a context that has this KV."""
        tokens = keys.shape[1]
        sequence = self.engine.new_sequence(tokens + self._bench.following)
        for layer in range(len(keys)):
            sequence.store(layer, 0, keys[layer], values[layer])
        sequence.set_length(tokens)
        logs = log_probabilities(self.engine, sequence, text[self._bench.tokens :])
        sequence.close()
        return logs

    def _moved(self, keys: Floats) -> Floats:
        """Return keys of which those after the sinks are rotated to the positions that they have now, as in StreamingLLM."""
        at = np.arange(SINKS, keys.shape[1])
        turn = rotation(self.engine.frequencies, at + self._bench.tokens - keys.shape[1], at)
        moved = keys.copy()
        moved[:, SINKS:] = turned(keys[:, SINKS:], turn)
        return moved


def mean_quality(name: str, bits: float, errors: Sequence[Error]) -> Quality:
    """Return that of a way from its error for each text."""
    kl, top1, surprise = np.mean(errors, axis=0).tolist()
    return Quality(name=name, bits=bits, kl=kl, top1=top1, perplexity=float(np.exp(surprise)))


def _through_blocks(codec: Codec, engine: Llama, source: SequenceKV, tokens: int) -> SequenceKV:
    """Return a sequence that has the tokens of another as blocks bring them."""
    spec, taken = engine.spec, engine.new_sequence(source.capacity)
    part = np.empty((tokens, codec.token_bytes(spec.kv_heads, spec.head_dim)), np.uint8)
    for layer in range(spec.layers):
        source.read_part(layer, 0, tokens, part)
        taken.write_part(layer, 0, part)
    taken.set_length(tokens)
    return taken
