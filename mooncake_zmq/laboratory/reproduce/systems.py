"""`reproduce systems`: the systems of Mooncake's neighbourhood, what each promises, what ours measures by which command, and
whether that keeps the bounds that were asked. Figures come from the commands' own reports, run here or before."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from mooncake_zmq.laboratory import tables
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.reports import Found, commit, run_all, write

Read = Callable[[Found], float]
"""Reads a figure of the report that a command prints with `--json`."""
TIMEOUT_S = 3600.0
CAPACITY_AT = 0.9
"""The share of requests within their bounds at the highest load that still counts as served."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A command and the minutes that it takes on two idle cores. `small`: options that show that it runs."""

    command: str
    minutes: float
    small: str


@dataclass(frozen=True, slots=True)
class Bounded:
    """A figure of a report and the bounds that were asked of it, by this project's own plan, if any."""

    what: str
    read: Read
    least: float | None = None
    most: float | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether any bound was asked."""
        return (self.least, self.most) != (None, None)

    def kept(self, value: float) -> bool:
        """Whether a value keeps the bounds."""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def sentence(self, value: float) -> str:
        """Return the value with its bounds."""
        bounds = (
            f"{word} {bound:g}" for word, bound in (("at least", self.least), ("at most", self.most)) if bound is not None
        )
        where = f" (asked: {', '.join(bounds)})" if self.is_bounded else ""
        return f"{self.what} {value:.4g}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system of a paper. `differs`: what ours is, or why its figure is not the paper's."""

    name: str
    promise: str
    by: Measurement
    figures: tuple[Bounded, ...]
    differs: str


def of(within: str, field: str, **where: str | int) -> Read:
    """Return a function that reads a field of the one entry of a report's list whose other fields match these patterns."""

    def read(found: Found) -> float:
        (entry,) = (
            each for each in found[within] if all(fnmatchcase(str(each[key]), str(like)) for key, like in where.items())
        )
        return float(entry[field])

    return read


def row(name: str, field: str = "value") -> Read:
    """Return a function that reads a row of a bench; the field `share` is the value in units of the reference."""
    if field == "share":
        return over(row(name), row(name, "reference"))
    return of("rows", field, name=name)


def over(one: Read, other: Read) -> Read:
    """Return a function that reads one figure in units of another."""
    return lambda found: one(found) / other(found)


def capacity(policy: str) -> Read:
    """Return a function that reads the highest speed of a sweep up to which enough requests are always within their bounds."""

    def read(found: Found) -> float:
        runs = [each for each in found["runs"] if each["swept"]["policy"] == policy]
        shares = sorted((float(each["swept"]["speed"]), each["summary"]["within_slo"]) for each in runs)
        missed = [at for at, (_, share) in enumerate(shares) if share < CAPACITY_AT]
        if not missed or not missed[0]:
            raise ValueError(f"the sweep does not have the capacity of {policy}")
        return shares[missed[0] - 1][0]

    return read


_TINY = "--model dummy:tiny --tokens 48 --following 8"
CODECS = Measurement("bench codecs --only quality", 5, _TINY)
EVICTION = Measurement("bench codecs --eviction", 12, _TINY)
BLEND = Measurement("bench blend --cpu-time", 10, f"{_TINY} --documents 3 --edited-tokens 96 --orders 1 --backend numpy")
SELECT = Measurement(
    "bench select --cpu-time", 5, "--model dummy:tiny --tokens 512 --following 3 --speed-tokens 512 --steps 1 --rounds 1"
)
ATTEND = Measurement(
    "bench attend", 3, '--model dummy:{"layers":2} --tokens 200 --lent 96 --batch 3 --steps 3 --rounds 1 --backend numpy'
)
ANSWERS = Measurement("bench answers", 2, "--seeds 1 --requests 2000 --keys 200 --entries 160 --read 500 --sizes 4000")
CAKE = Measurement("reproduce cake", 1, "--quick 500")
SARATHI = Measurement(
    "sim --generate conversation:requests=400,rate=1 --prefill 2 --decode 2 --sweep policy=vllm,vllm-chunked"
    f" --sweep speed={','.join(f'{each / 20:g}' for each in range(2, 41))}",
    1,
    "--limit 150",
)
SMALL_MODEL = "Papers measure scores of tasks with models of 7B and more on GPUs; ours is the distribution of a model of 135M."

SYSTEMS = (
    System(
        name="Cake",
        promise="TTFT 68.1 % below computing alone, 94.6 % below fetching alone, at most (arXiv 2410.03065)",
        by=CAKE,
        figures=(
            Bounded("% below computing, at most", row("largest reduction against computing", "ours")),
            Bounded("% below fetching, at most", row("largest reduction against fetching", "ours")),
            Bounded("1.05 of the better way at any rate is kept:", of("conclusions", "kept", text="no more than 1.05*"), 1),
            Bounded(".62 of it where both are equal is kept:", of("conclusions", "kept", text="no more than 0.62*"), 1),
        ),
        differs="In virtual time; `bench meet` measures live nodes. How large a maximum is, is a matter of the rates tried.",
    ),
    System(
        name="ThinK",
        promise="over 20 % less KV memory, 2.8 times less at the peak with KIVI, at nearly the same quality (arXiv 2407.21018)",
        by=CODECS,
        figures=(
            Bounded("KL with 4 bits", of("qualities", "kl", name="ThinK, fixed mask, with 4 bits"), most=0.025),
            Bounded(
                "KL over that by keys alone",
                over(*(of("qualities", "kl", name=f"ThinK, fixed mask{by}") for by in ("", " by keys alone"))),
                most=0.6,
            ),
        ),
        differs=f"A mask for each prompt is better, but cannot be of blocks that prompts share. {SMALL_MODEL}",
    ),
    System(
        name="MiniCache",
        promise="KV up to 5.02 times smaller, with 4 bits, near-lossless (arXiv 2405.14366)",
        by=CODECS,
        figures=(Bounded("KL over int4's", over(*(of("qualities", "kl", name=name) for name in ("MiniCache", "int4")))),),
        differs="It merges layers whose keys point the same way; those of this model do not.",
    ),
    System(
        name="SemShareKV",
        promise="up to 6.25 times as fast with 5k tokens (arXiv 2509.24832)",
        by=BLEND,
        figures=tuple(
            Bounded(what, of("outcomes", field, name="SemShareKV: neighbours' KV for them, 15 % by layer 1"), most=most)
            for what, field, most in (("TTFT of a full prefill's", "ttft_ratio", 0.5), ("KL", "kl", 0.08))
        ),
        differs=f"Edits are random tokens, which are harder than a person's. {SMALL_MODEL}",
    ),
    System(
        name="CacheBlend's practice",
        promise="TTFT 2.2 to 3.3 times below full recomputation, quality kept (arXiv 2405.16444)",
        by=BLEND,
        figures=(
            Bounded("TTFT of prefix caching's", of("outcomes", "ttft_ratio", name="CacheBlend, 15 % by layer 1"), most=0.35),
            Bounded("KL", of("outcomes", "kl", name="CacheBlend, 15 % by layer 1"), most=0.03),
            Bounded("top-1", of("outcomes", "top1", name="CacheBlend, 15 % by layer 1"), 0.92),
        ),
        differs=f"Eight documents of 512 tokens; three of 256 lose less. {SMALL_MODEL}",
    ),
    System(
        name="Infinite-LLM",
        promise="1.03 to 2.4 times the throughput, contexts 2 to 19 times as long, with 32 A100 (arXiv 2401.02669)",
        by=ATTEND,
        figures=(
            Bounded("TBT with half of the KV lent, over all here", row("TBT, batch *, [0-9]* of * lent*", "share"), most=1.15),
        ),
        differs="Exact: the command fails on any other token. A CPU shows no gain in throughput.",
    ),
    System(
        name="Lamina",
        promise="1.48 to 12.1 times the throughput per dollar, estimated (arXiv 2405.01814)",
        by=ATTEND,
        figures=(Bounded("TBT with all KV lent, over all here", row("TBT, batch *, all of *", "share")),),
        differs="Exact, and not served. The paper's gain is a larger batch on cheaper memory, and two half batches in turn.",
    ),
    System(
        name="KCache",
        promise="40 % more throughput, accuracy kept (arXiv 2404.18057)",
        by=SELECT,
        figures=(
            Bounded("KL at 1/8", of("outcomes", "kl", name="KCache", share=8), most=0.01),
            Bounded("near, of all KV", of("outcomes", "near", name="KCache", share=8), most=0.55),
            Bounded("tokens/s over those of all tokens", row("decode at * tokens, KCache, 1/* / all tokens", "ratio"), 1),
        ),
        differs=f"Its gain is a larger batch, where far memory is slow. {SMALL_MODEL}",
    ),
    System(
        name="PQCache",
        promise="a score 4.6 % above other selective methods on InfiniteBench (arXiv 2407.12820)",
        by=SELECT,
        figures=(
            Bounded("KL at 1/8", of("outcomes", "kl", name="PQCache", share=8), most=0.03),
            Bounded("near, of all KV", of("outcomes", "near", name="PQCache", share=8), most=0.25),
            Bounded("tokens/s over those of all tokens", row("decode at * tokens, PQCache, 1/* / all tokens", "ratio"), 1),
        ),
        differs=SMALL_MODEL,
    ),
    System(
        name="PyramidInfer",
        promise="2.2 times Accelerate's throughput, over 54 % less KV memory (arXiv 2405.12532)",
        by=EVICTION,
        figures=(
            Bounded("multiply-adds of a whole prefill's", row("multiply-adds of prefills*", "share")),
            Bounded("KL over that of sinks and recent", row("KL, PyramidInfer*", "share"), most=1),
        ),
        differs=f"Measured only: a layer's KV is as long as any other's where it is served. {SMALL_MODEL}",
    ),
    System(
        name="Elastic Cache",
        promise="78 % faster for vision-language models, and merging better than pruning (arXiv 2407.18121)",
        by=EVICTION,
        figures=(
            Bounded("KL of merging over evicting", row("KL, Elastic Cache, merging / *", "share")),
            Bounded("of folding values", row("KL, Elastic Cache, folding values / *", "share")),
            Bounded("of evicting, over sinks and recent", row("KL, Elastic Cache, evicting alone / *", "share"), most=1),
        ),
        differs=(
            "Its eviction alone is served (a request's kv_budget): the mean of keys rotated for different positions is a key "
            "of none. Its models see pictures."
        ),
    ),
    System(
        name="LESS, our kernel",
        promise="41 % of an evicting cache's loss in Rouge recovered by a state of 4 tokens' bytes (arXiv 2402.09398)",
        by=EVICTION,
        figures=(Bounded("share of the eviction's KL closed", row("LESS, our kernel: share of KL closed / *"), 0.25),),
        differs="Our kernel, not the paper's: no third matrix, no scalings, a smaller hidden layer, another unit.",
    ),
    System(
        name="InstCache",
        promise="51.34 % of LMSys's prompts hit with 4.5 GB (arXiv 2411.13820)",
        by=ANSWERS,
        figures=(Bounded("% hit", row("hits, 4,000 predicted by a model of words / *")),),
        differs="Prompts of a synthetic grammar: we have no users' prompts.",
    ),
    System(
        name="Approximate-key caching",
        promise="fewer inferences at a controlled error, better than similarity caching (arXiv 2112.06671)",
        by=ANSWERS,
        figures=(
            Bounded("inferences of 100, worst seed", row("inferences, worst seed / target"), most=35),
            Bounded("wrong of 1,000 given, worst seed", row("wrong, worst seed / max_error"), most=10),
        ),
        differs="Keys by Zipf's law; the paper's are classes of traffic.",
    ),
    System(
        name="Sarathi-Serve",
        promise="2.6 times vLLM's capacity within bounds of tail latency, for Mistral-7B on an A100 (arXiv 2403.02310)",
        by=SARATHI,
        figures=(Bounded("capacity over that of vllm", over(capacity("vllm-chunked"), capacity("vllm"))),),
        differs="In virtual time: the laboratory's coupled instance with chunked prefill (policy vllm-chunked), 4 nodes.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A system with its figures, or why there are none, and by which words, when and on what these were measured. `small`: at
    toy size, of which no bound was asked."""

    system: System
    words: str
    small: bool
    stamp: str
    values: tuple[float, ...] = ()
    error: str = ""

    @property
    def verdict(self) -> str | None:
        """Say that all bounds are kept, or which are not; None: there is nothing to judge, or no bound was asked."""
        if self.small or self.error or not any(each.is_bounded for each in self.system.figures):
            return None
        pairs = zip(self.system.figures, self.values, strict=True)
        missed = [each.what for each, value in pairs if not each.kept(value)]
        return f"does NOT: {'; '.join(missed)}" if missed else "works"


def reproduce_systems(names: Sequence[str], results: Path | None, *, small: bool, run: Callable[[str], Found]) -> list[Judged]:
    """Return the systems of these names, or all. Reports that `results` has are taken from there, and others are added to it as
    soon as they are run. Raises StudyError, or Refused if it cannot be written."""
    chosen = [each for each in SYSTEMS if not names or each.name in names]
    if unknown := set(names) - {each.name for each in SYSTEMS}:
        raise StudyError(f"no system {', '.join(sorted(unknown))}: choose of {', '.join(each.name for each in SYSTEMS)}")
    known = _earlier(results)
    minutes = {_words(each.by, small): each.by.minutes for each in chosen}
    missing = [each for each in minutes if each not in known]

    def keep(whole: Found) -> None:
        known.update((each["command"], each) for each in whole["benches"])
        if results:
            write(results, {**whole, "benches": list(known.values())}, "--results")

    def announced(words: str) -> Found:
        left = sum(minutes[each] for each in missing[missing.index(words) :])
        click.echo(f"{words}: about {minutes[words]:g} min of {left:g}", err=True)
        return run(words)

    if missing:
        run_all(missing, 1, announced, keep)
    return [_judged(each, known[_words(each.by, small)], small) for each in chosen]


def as_json(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return `{"name": "systems", "rows": [..]}`."""
    rows = []
    for each in judged:
        figures = [
            {"what": figure.what, "ours": value, "least": figure.least, "most": figure.most}
            for figure, value in zip(each.system.figures, each.values, strict=not each.error)
        ]
        said: dict[str, Any] = {
            "system": each.system.name,
            "promise": each.system.promise,
            "command": each.words,
            "measured": each.stamp,
        }
        rows.append(said | {"figures": figures, "error": each.error, "verdict": each.verdict, "differs": each.system.differs})
    return {"name": "systems", "rows": rows}


def show(judged: Sequence[Judged]) -> None:
    """Print the table."""
    table = Table(title="systems of the neighbourhood", title_justify="left", show_lines=True)
    for column in ("system", "promises", "ours", "measured by", "verdict"):
        table.add_column(column)
    for each in judged:
        figures = zip(each.system.figures, each.values, strict=not each.error)
        ours = "\n".join(figure.sentence(value) for figure, value in figures) or f"not measured: {each.error}"
        verdict = "toy size: none" if each.small else f"{each.verdict or 'none'}\n{each.system.differs}"
        table.add_row(each.system.name, each.system.promise, ours, f"{each.words}\n{each.stamp}", verdict)
    tables.show([table])


def _words(each: Measurement, small: bool) -> str:
    return f"{each.command} {each.small}" if small else each.command


def _earlier(results: Path | None) -> dict[str, Any]:
    """Return what a file has of commands that did not fail, by command."""
    if results is None or not results.exists():
        return {}
    try:
        benches = json.loads(results.read_text())["benches"]
        return {each["command"]: each for each in benches if each["reports"] and each["date"] and each["commit"]}
    except (ValueError, KeyError, TypeError):
        raise StudyError(f"{results} has no results of `reproduce systems`") from None


def _judged(system: System, known: Mapping[str, Any], small: bool) -> Judged:
    other = "" if known["commit"] == commit() else ", which is not this checkout's"
    stamp = f"{known['date']}, {known['machine']}, commit {known['commit']}{other}"
    values, error = [], "; ".join(known["errors"])
    for figure in () if error else system.figures:
        try:
            values.append(figure.read(known["reports"][-1]))
            if not math.isfinite(values[-1]):
                raise ValueError("no finite number")
        except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as failed:
            error = f"{figure.what}: {failed}"
            break
    found = () if error else tuple(values)
    return Judged(system=system, words=_words(system.by, small), small=small, stamp=stamp, values=found, error=error)
