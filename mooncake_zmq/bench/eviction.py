"""`bench codecs --eviction`: keeping fewer tokens of a context beside rounding the numbers of all, at equal bytes.

As in `bench codecs`, pages of our own manual are contexts, and what follows is predicted from what a way keeps; KL is against
exact KV. Kept tokens count as bfloat16. The bytes of each way are those that it really holds when the context ends; all keep
the tokens that follow it, but for Elastic Cache with its fixed point.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.bench.codec_baselines import SINKS, kept_tokens
from mooncake_zmq.bench.codecs import BFLOAT16, PAGES, CodecBench, CodecReport, Error, Progress, Quality, Study, mean_quality
from mooncake_zmq.bench.eviction_ways import (
    FIXED_DISTANCE,
    KeptTokens,
    Pyramid,
    attended_most,
    folded,
    merged,
    pyramid,
    sinks_and_recent,
    taken,
)
from mooncake_zmq.bench.low_rank import LowRank, opened, state_tokens, trained
from mooncake_zmq.bench.quality import Floats, Logs, computed, logs_of, studied
from mooncake_zmq.bench.report import Row
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.kv.codec import CODECS, Codec

AS_LARGE_AS = ("int8", "int4")
"""The codecs whose bytes are the budgets; LESS is trained for the last one's."""
TRAINING_PAGES = ("operating", "configuring", "testing", "api", "laboratory", "changelog", "figures")
TRAINING_TEXTS = 24
STEPS = 400
"""The most steps by which each layer of LESS is trained."""
GAP_CLOSED = 0.25
"""The share of its eviction's KL that LESS was to close."""
WINDOW, PYRAMID, LESS = "sinks and recent", "PyramidInfer", "LESS"
PUBLISHED, MENDED = "Elastic Cache", "Elastic Cache, values folded"
EVICTION, FIXED_POINT = "Elastic Cache, evicting alone", "Elastic Cache, evicting alone, with its fixed point"
PAIRS = (
    (PYRAMID, WINDOW),
    (EVICTION, WINDOW),
    (PUBLISHED, FIXED_POINT),
    (MENDED, EVICTION),
    (FIXED_POINT, EVICTION),
    (LESS, WINDOW),
)
"""Ways, and those beside which they stand."""


def bench_eviction(bench: CodecBench, less: Path | None, minutes: float, progress: Progress) -> CodecReport:
    """Run all of it. `less`: the file of LESS's weights, trained into it unless it exists, for `minutes` at most. Raises
    Refused on a bad model or file."""
    return studied(partial(_run, bench, less, minutes, progress), bench.model, bench.cache_dir, progress, kernels=False)


def _run(bench: CodecBench, less: Path | None, minutes: float, progress: Progress, path: Path) -> CodecReport:
    study = Study(bench, progress, path)
    codecs = [CODECS[name] for name in AS_LARGE_AS if not CODECS[name].refusal(study.engine.spec.head_dim)]
    if not codecs:
        raise ModelError("no codec can hold the KV of this model")
    report = CodecReport("eviction")
    report.qualities = [study.of_codec(codec) for codec in codecs]
    evictions = _Evictions(study, bench, codecs, progress)
    evictions.train(less, minutes)
    report.qualities = _ranked([*report.qualities, *evictions.qualities()], codecs)
    by_name = {each.name: each for each in report.qualities}
    for codec in codecs:
        report.rows += _rows(by_name, codec)
    report.rows += evictions.works()
    report.title = _headline(by_name, codecs)
    spec = study.engine.spec
    report.notes += [
        f"{spec.name}, {len(PAGES)} pages, {bench.tokens} tokens, the next {bench.following}",
        f"LESS: a state of {state_tokens(spec.head_dim)} tokens' bytes a layer; {evictions.training}",
    ]
    return report


def _named(way: str, codec: Codec) -> str:
    return f"{way}, in {codec.name}'s bytes"


def _ranked(found: Sequence[Quality], codecs: Sequence[Codec]) -> list[Quality]:
    """Return the qualities by budget, the best first."""

    def order(each: Quality) -> tuple[int, float]:
        return min(n for n, codec in enumerate(codecs) if codec.name in each.name), each.kl

    return sorted(found, key=order)


def _headline(by_name: dict[str, Quality], codecs: Sequence[Codec]) -> str:
    """Return what the best eviction is beside each codec, in a sentence."""
    said = []
    for codec in codecs:
        best = min((each for name, each in by_name.items() if name.endswith(_named("", codec))), key=lambda each: each.kl)
        own = by_name[codec.name].kl
        word = "beats" if own < best.kl else "does NOT beat"
        said.append(f"{codec.name} (KL {own:.4f}) {word} every eviction in as many bytes (the best {best.kl:.4f})")
    return "; ".join(said)


def _rows(by_name: dict[str, Quality], codec: Codec) -> Iterator[Row]:
    """Yield KL beside that of the codec, or of another way, and what LESS closes."""
    pairs = [(_named(one, codec), _named(other, codec)) for one, other in PAIRS if _named(one, codec) in by_name]
    for one, other in ((codec.name, _named(WINDOW, codec)), *pairs):
        name, value, reference = f"KL, {one} / {other}", by_name[one].kl, by_name[other].kl
        yield Row(name=name, unit="nats", value=value, reference=reference, higher_is_better=False)
    less, window = (by_name.get(_named(way, codec)) for way in (LESS, WINDOW))
    if less and window:
        closed = 1 - less.kl / window.kl
        yield Row(name="LESS: share of KL closed / target", unit="", value=closed, reference=GAP_CLOSED, higher_is_better=True)


class _Evictions:
    """The ways, and what they make of the study's texts."""

    def __init__(self, study: Study, bench: CodecBench, codecs: Sequence[Codec], progress: Progress) -> None:
        self._study, self._bench, self._codecs, self._progress = study, bench, codecs, progress
        spec = study.engine.spec
        self._kept = {codec: kept_tokens(bench.tokens, codec.bits_a_value(spec.head_dim)) for codec in codecs}
        self._recent = self._kept[codecs[-1]] - SINKS - state_tokens(spec.head_dim)
        """The recent tokens beside the state of LESS."""
        self._less: LowRank | None = None
        self.training = ""
        self._works: dict[Codec, int] = {}
        self._whole_work = 0

    def train(self, path: Path | None, minutes: float) -> None:
        """Read or make the weights of LESS. Raises ModelError."""
        study, bench = self._study, self._bench
        fingerprint = study.engine.spec.fingerprint
        if self._recent < 1 or bench.tokens - self._recent - SINKS < 1:
            self.training = "a context too short for it"
            return
        if path and path.exists():
            self._less = opened(path, fingerprint, bench.tokens, self._recent)
            self.training = f"weights of {path}"
            return
        texts = self._training_texts()
        self._less = trained(
            study.engine, texts, bench.tokens, self._recent, minutes=minutes, steps=STEPS, progress=self._progress
        )
        self.training = f"trained with {len(texts)} other texts"
        if path:
            try:
                self._less.save(path)
            except OSError as error:
                raise ModelError(f"--less {path}: {error.strerror}") from None

    def _training_texts(self) -> list[NDArray[np.int32]]:
        """Return pieces of the manual's other pages, spread over them."""
        size = self._bench.tokens + self._bench.following
        pages = self._study.whole(TRAINING_PAGES)
        pieces = [page[at : at + size] for page in pages for at in range(0, len(page) - size + 1, size)]
        return [pieces[at] for at in np.linspace(0, len(pieces) - 1, min(TRAINING_TEXTS, len(pieces))).astype(int)]

    def qualities(self) -> Iterator[Quality]:
        """Yield those of all ways, means over the texts."""
        errors: dict[str, list[Error]] = {}
        bits: dict[str, float] = {}
        for number, text in enumerate(self._study.texts):
            self._progress(f"evictions, {PAGES[number]}")
            ways = self._ways(number)
            whole = self._study.contexts[number][0].size * 2
            bits |= {name: BFLOAT16 * way.numbers / whole for name, way in ways.items()}
            for name, logs in zip(ways, self._decoded(list(ways.values()), text[self._bench.tokens :]), strict=True):
                errors.setdefault(name, []).append(self._study.error(number, logs))
        return (mean_quality(name, bits[name], each) for name, each in errors.items())

    def works(self) -> Iterator[Row]:
        """Yield the multiply-adds of PyramidInfer's prefill of the last text beside that of all tokens."""
        for codec, work in self._works.items():
            name = f"multiply-adds of a prefill, {_named(PYRAMID, codec)} / all tokens"
            value, reference = work / 1e9, self._whole_work / 1e9
            yield Row(name=name, unit="G", value=value, reference=reference, higher_is_better=False)

    def _ways(self, number: int) -> dict[str, KeptTokens]:
        """Return what each way keeps of a context."""
        bench, engine, study = self._bench, self._study.engine, self._study
        found: dict[str, list[Floats]] = {}
        scratch, at = engine.new_sequence(bench.tokens), np.arange(bench.tokens)
        entering: NDArray[Any] = study.texts[number][: bench.tokens]
        self._whole_work = 0
        for index in range(engine.spec.layers):
            layer = computed(engine, scratch, index, entering, at)
            self._whole_work += layer.multiply_adds
            entering = layer.hidden
            for codec, kept in self._kept.items():
                chosen = attended_most(layer, kept)
                elastic = taken(layer.kv, chosen)
                own = {
                    WINDOW: taken(layer.kv, sinks_and_recent(bench.tokens, kept)),
                    EVICTION: elastic,
                    FIXED_POINT: elastic,
                    PUBLISHED: merged(layer.kv, chosen),
                    MENDED: folded(layer.kv, chosen),
                }
                for way, kv in own.items():
                    found.setdefault(_named(way, codec), []).append(kv)
        scratch.close()
        for codec, kept in self._kept.items():
            made: Pyramid = pyramid(engine, study.texts[number][: bench.tokens], kept)
            found[_named(PYRAMID, codec)], self._works[codec] = made.kv, made.multiply_adds
        fixed = {
            _named(way, codec): kept - min(FIXED_DISTANCE, kept // 2)
            for codec, kept in self._kept.items()
            for way in (FIXED_POINT, PUBLISHED)
        }
        ways = {name: KeptTokens(kv, bench.tokens, bench.following, evict_at=fixed.get(name)) for name, kv in found.items()}
        return ways | self._with_state(number)

    def _with_state(self, number: int) -> dict[str, KeptTokens]:
        """Return what LESS keeps of a context, if it was trained."""
        if self._less is None:
            return {}
        bench, both = self._bench, np.stack(self._study.contexts[number], axis=1)
        which = sinks_and_recent(bench.tokens, SINKS + self._recent)
        dropped = both[:, :, SINKS : bench.tokens - self._recent].transpose(0, 1, 3, 2, 4)
        state = [self._less.state(index, kv) for index, kv in enumerate(dropped)]
        kept = [taken(kv, which) for kv in both]
        name = _named(LESS, self._codecs[-1])
        return {name: KeptTokens(kept, bench.tokens, bench.following, state=state)}

    def _decoded(self, ways: Sequence[KeptTokens], following: NDArray[np.int32]) -> Iterator[Logs]:
        """Yield the log probabilities after each following token, a way after the other."""
        engine = self._study.engine
        steps = [engine.decode_over(list(ways), np.full(len(ways), token, np.int32)) for token in following]
        for row in range(len(ways)):
            yield logs_of(np.stack([step[row] for step in steps]))
