"""`bench codecs --eviction`: keeping fewer tokens of a context beside rounding the numbers of all, at equal bytes.

As in `bench codecs`, pages of our own manual are contexts, and what follows is predicted from what a way keeps; KL is against
exact KV. Kept tokens count as bfloat16. The bytes of each way are those that it really holds when the context ends: those of
int4, or PyramidInfer's own. All keep the tokens that follow, but for Elastic Cache as published, which keeps a share of them.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.bench.codec_baselines import SINKS, kept_tokens
from mooncake_zmq.bench.codecs import BFLOAT16, PAGES, CodecBench, CodecReport, Error, Quality, Study, mean_quality
from mooncake_zmq.bench.eviction_ways import (
    DECAY,
    KeptTokens,
    attended_most,
    folded,
    merged,
    pyramid,
    pyramid_lengths,
    taken,
)
from mooncake_zmq.bench.low_rank import LowRank, opened, state_tokens, trained
from mooncake_zmq.bench.quality import Floats, Logs, computed, logs_of, studied
from mooncake_zmq.bench.report import Progress, Row
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.eviction import sinks_and_recent
from mooncake_zmq.kv.codec import CODECS
from mooncake_zmq.laboratory.new_file import new_of

CODEC = CODECS["int4"]
"""The codec whose bytes are the budget."""
TRAINING_PAGES = ("operating", "configuring", "testing", "api", "laboratory", "changelog", "figures")
TRAINING_TEXTS = 24
STEPS = 400
"""The steps by which each layer of LESS is trained, unless its time ends before."""
GAP_CLOSED = 0.25
"""The share of its eviction's KL that LESS was to close."""
WINDOW, PYRAMID, PYRAMID_WINDOW = "sinks and recent", f"PyramidInfer, d = {DECAY}", "sinks and recent, in PyramidInfer's bytes"
EVICTION, LESS = "Elastic Cache, evicting alone", "LESS, our kernel"
MERGED, FOLDED = "Elastic Cache, merging", "Elastic Cache, folding values"
PUBLISHED = "Elastic Cache, merging, with its fixed point"
PAIRS = (
    (CODEC.name, WINDOW),
    (EVICTION, WINDOW),
    (MERGED, EVICTION),
    (FOLDED, EVICTION),
    (PUBLISHED, MERGED),
    (PYRAMID, PYRAMID_WINDOW),
    (LESS, WINDOW),
)
"""Ways, and those beside which they stand."""


def bench_eviction(bench: CodecBench, less: Path | None, minutes: float, progress: Progress) -> CodecReport:
    """Run all of it. `less`: the file of LESS's weights, trained into it unless it exists, for `minutes` at most. Raises
    Refused on a bad model or file."""
    return studied(partial(_run, bench, less, minutes, progress), bench.model, bench.cache_dir, progress, kernels=False)


def _run(bench: CodecBench, less: Path | None, minutes: float, progress: Progress, path: Path) -> CodecReport:
    study = Study(bench, progress, path)
    spec = study.engine.spec
    if refusal := CODEC.refusal(spec.head_dim):
        raise ModelError(f"{CODEC.name} cannot hold the KV of this model: {refusal}")
    report = CodecReport("eviction")
    evictions = _Evictions(study, bench, progress)
    evictions.train(less, minutes)
    report.qualities = sorted([study.of_codec(CODEC), *evictions.qualities()], key=lambda each: each.kl)
    errors = {each.name: each.kl for each in report.qualities}
    own, best = errors[CODEC.name], min(kl for name, kl in errors.items() if name not in (CODEC.name, PYRAMID, PYRAMID_WINDOW))
    word = "beats" if own < best else "does NOT beat"
    report.title = f"{CODEC.name} (KL {own:.4f}) {word} every eviction in as many bytes (the best {best:.4f})"
    for one, other in ((one, other) for one, other in PAIRS if one in errors):
        name, value, reference = f"KL, {one} / {other}", errors[one], errors[other]
        report.row(name, "nats", value, reference)
    if evictions.is_trained:
        name, closed = f"{LESS}: share of KL closed / asked", 1 - errors[LESS] / errors[WINDOW]
        report.row(name, "", closed, GAP_CLOSED, higher=True)
    report.rows.append(evictions.multiply_adds())
    report.notes += [
        f"{spec.name}, {len(PAGES)} pages, {bench.tokens} tokens, the next {bench.following}",
        f"LESS: a state of {state_tokens(spec.head_dim)} tokens' bytes a layer; {evictions.training}",
        evictions.schedule(),
    ]
    return report


class _Evictions:
    """The ways, and what they make of the study's texts."""

    def __init__(self, study: Study, bench: CodecBench, progress: Progress) -> None:
        self._study, self._bench, self._progress = study, bench, progress
        spec = study.engine.spec
        self._kept = kept_tokens(bench.tokens, CODEC.bits_a_value(spec.head_dim))
        self._lengths = pyramid_lengths(bench.tokens, spec.layers)
        self._recent = self._kept - SINKS - state_tokens(spec.head_dim)
        """The recent tokens beside the state of LESS."""
        self._less: LowRank | None = None
        self.training = "a context too short for it"
        self._work, self._whole_work = 0, 0

    @property
    def is_trained(self) -> bool:
        """Whether LESS had all its steps."""
        return self._less is not None and self._less.steps >= STEPS

    def train(self, path: Path | None, minutes: float) -> None:
        """Read or make the weights of LESS. Raises ModelError."""
        study, bench, spec = self._study, self._bench, self._study.engine.spec
        if self._recent < 1 or bench.tokens - self._recent - SINKS < 1:
            return
        if path and path.exists():
            less = opened(path, spec.fingerprint, spec.layers, bench.tokens, self._recent)
        else:
            try:
                if path:
                    new_of(path).touch()  # before minutes of training
                    new_of(path).unlink()
                texts = self._training_texts()
                less = trained(
                    study.engine, texts, bench.tokens, self._recent, minutes=minutes, steps=STEPS, progress=self._progress
                )
                if path:
                    less.save(path)
            except OSError as error:
                raise ModelError(f"--less {path}: {error.strerror}") from None
        self._less = less
        self.training = (
            f"trained with other texts, {less.steps} steps at least, {less.error:.2f} of the squared error left there"
        )
        if not self.is_trained:
            self.training += f"; it was cut short of {STEPS} steps, so that what it closes is no verdict"

    def _training_texts(self) -> list[NDArray[np.int32]]:
        """Return pieces of the manual's other pages, spread over them."""
        size = self._bench.tokens + self._bench.following
        pages = self._study.whole(TRAINING_PAGES)
        pieces = [page[at : at + size] for page in pages for at in range(0, len(page) - size + 1, size)]
        return [pieces[at] for at in np.linspace(0, len(pieces) - 1, min(TRAINING_TEXTS, len(pieces))).astype(int)]

    def qualities(self) -> Iterator[Quality]:
        """Return those of all ways, means over the texts."""
        errors: dict[str, list[Error]] = {}
        bits: dict[str, float] = {}
        for number, text in enumerate(self._study.texts):
            self._progress(f"evictions, {PAGES[number]}")
            ways = self.ways(number)
            whole = self._study.contexts[number][0].size * 2
            bits |= {name: BFLOAT16 * way.numbers / whole for name, way in ways.items()}
            for name, logs in zip(ways, self._decoded(list(ways.values()), text[self._bench.tokens :]), strict=True):
                errors.setdefault(name, []).append(self._study.error(number, logs))
        return (mean_quality(name, bits[name], each) for name, each in errors.items())

    def multiply_adds(self) -> Row:
        """Return those of PyramidInfer's prefills beside those of all tokens."""
        name, value, reference = f"multiply-adds of prefills, {PYRAMID} / all tokens", self._work / 1e9, self._whole_work / 1e9
        return Row(name, "G", value, reference)

    def schedule(self) -> str:
        """Say what PyramidInfer keeps, and whether its schedule could keep as few tokens as all others."""
        found, mean = self._lengths, np.mean(self._lengths)
        fewest = np.mean(pyramid_lengths(self._bench.tokens, len(found), 0.0))
        can = f"; {CODEC.name}'s {self._kept} cannot be had: d = 0 keeps {fewest:.0f}" if fewest > self._kept else ""
        return f"{PYRAMID}: keeps {mean:.0f} tokens in the mean, by layer {', '.join(map(str, found))}{can}"

    def ways(self, number: int) -> dict[str, KeptTokens]:
        """Return what each way keeps of a context."""
        bench, engine, study = self._bench, self._study.engine, self._study
        found: dict[str, list[Floats]] = {}
        scratch, at = engine.new_sequence(bench.tokens), np.arange(bench.tokens)
        entering: NDArray[Any] = study.texts[number][: bench.tokens]
        for index in range(engine.spec.layers):
            layer = computed(engine, scratch, index, entering, at)
            self._whole_work += layer.multiply_adds
            entering, chosen = layer.hidden, attended_most(layer, self._kept)
            own = {
                WINDOW: taken(layer.kv, sinks_and_recent(bench.tokens, self._kept)),
                PYRAMID_WINDOW: taken(layer.kv, sinks_and_recent(bench.tokens, round(np.mean(self._lengths)))),
                EVICTION: taken(layer.kv, chosen),
                MERGED: merged(layer.kv, chosen),
                FOLDED: folded(layer.kv, chosen),
            }
            for way, kv in own.items():
                found.setdefault(way, []).append(kv)
        scratch.close()
        found[PYRAMID], work = pyramid(engine, study.texts[number][: bench.tokens])
        self._work += work
        ways = {name: KeptTokens(kv, bench.tokens, bench.following) for name, kv in found.items()}
        share = self._kept / bench.tokens
        return (
            ways | {PUBLISHED: KeptTokens(found[MERGED], bench.tokens, bench.following, share=share)} | self._with_state(number)
        )

    def _with_state(self, number: int) -> dict[str, KeptTokens]:
        """Return what LESS keeps of a context, if it was trained."""
        if self._less is None:
            return {}
        bench, both = self._bench, np.stack(self._study.contexts[number], axis=1)
        which = sinks_and_recent(bench.tokens, SINKS + self._recent)
        dropped = both[:, :, SINKS : bench.tokens - self._recent].transpose(0, 1, 3, 2, 4)
        state = [self._less.state(index, kv) for index, kv in enumerate(dropped)]
        kept = [taken(kv, which) for kv in both]
        return {LESS: KeptTokens(kept, bench.tokens, bench.following, state=state)}

    def _decoded(self, ways: Sequence[KeptTokens], following: NDArray[np.int32]) -> Iterator[Logs]:
        """Yield the log probabilities after each following token, a way after the other."""
        engine = self._study.engine
        steps = [engine.decode_over(list(ways), np.full(len(ways), token, np.int32)) for token in following]
        for row in range(len(ways)):
            yield logs_of(np.stack([step[row] for step in steps]))
