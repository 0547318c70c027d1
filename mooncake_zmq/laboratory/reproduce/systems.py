"""`reproduce systems`: the systems of Mooncake's neighbourhood, what each promises, what ours measures by which command, and
whether that keeps the bounds that were set. Figures come from the commands' own reports, run here or before."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from mooncake_zmq.laboratory import tables
from mooncake_zmq.laboratory.errors import StudyError

Found = Mapping[str, Any]
"""The report of a command, as it prints it with `--json`."""
Read = Callable[[Found], float]
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
    """A figure of a report and the bounds that it is to keep, if any."""

    what: str
    read: Read
    least: float | None = None
    most: float | None = None

    def kept(self, value: float) -> bool:
        """Whether a value keeps the bounds."""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def sentence(self, value: float) -> str:
        """Return the value with its bounds."""
        bounds = (
            f"{word} {bound:g}" for word, bound in (("at least", self.least), ("at most", self.most)) if bound is not None
        )
        where = f" ({', '.join(bounds)})" if (self.least, self.most) != (None, None) else ""
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
    """Return a function that reads a field of the last entry of a report's list whose other fields match these patterns."""

    def read(found: Found) -> float:
        entries = [each for each in found[within] if all(fnmatchcase(str(each[key]), str(like)) for key, like in where.items())]
        return float(entries[-1][field])

    return read


def row(name: str, field: str = "value") -> Read:
    """Return a function that reads a row of a bench; the field `share` is the value in units of the reference."""
    if field == "share":
        return over(row(name), row(name, "reference"))
    return of("rows", field, name=name)


def over(one: Read, other: Read) -> Read:
    """Return a function that reads one figure in units of another."""

    def read(found: Found) -> float:
        under = other(found)
        return one(found) / under if under else math.inf

    return read


def capacity(policy: str) -> Read:
    """Return a function that reads the highest speed of a sweep at which enough requests are within their bounds."""

    def read(found: Found) -> float:
        runs = [each for each in found["runs"] if each["swept"]["policy"] == policy]
        return max((float(r["swept"]["speed"]) for r in runs if r["summary"]["within_slo"] >= CAPACITY_AT), default=0.0)

    return read


_TINY = "--model dummy:tiny --tokens 48 --following 8"
CODECS = Measurement("bench codecs --only quality", 5, _TINY)
EVICTION = Measurement("bench codecs --eviction", 15, f"{_TINY} --minutes 0.02")
BLEND = Measurement("bench blend --cpu-time", 10, f"{_TINY} --documents 3 --edited-tokens 96 --orders 1 --backend numpy")
SELECT = Measurement(
    "bench select --cpu-time", 5, "--model dummy:tiny --tokens 512 --following 3 --speed-tokens 512 --steps 1 --rounds 1"
)
ANSWERS = Measurement("bench answers", 2, "--seeds 1 --requests 2000 --keys 200 --entries 160 --read 500 --sizes 20")
CAKE = Measurement("reproduce cake", 1, "--quick 500")
SARATHI = Measurement(
    "sim --generate conversation:requests=400,rate=1 --prefill 2 --decode 2 --sweep policy=vllm,vllm-chunked"
    " --sweep speed=0.2,0.3,0.4,0.5,1,1.25,1.5,1.75,2",
    1,
    "--limit 20",
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
            Bounded("KL of int4 with values in 3 bits", of("qualities", "kl", name="int4, values in 3 bits")),
        ),
        differs=f"A mask for each prompt is better, but cannot be of blocks that prompts share. {SMALL_MODEL}",
    ),
    System(
        name="MiniCache",
        promise="KV up to 5.02 times smaller, with 4 bits, near-lossless (arXiv 2405.14366)",
        by=CODECS,
        figures=(
            Bounded("bits", of("qualities", "bits", name="MiniCache")),
            Bounded("KL over int4's", over(*(of("qualities", "kl", name=name) for name in ("MiniCache", "int4"))), most=1),
        ),
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
        name="KCache",
        promise="40 % more throughput, accuracy kept (arXiv 2404.18057)",
        by=SELECT,
        figures=(
            Bounded("KL at 1/8", of("outcomes", "kl", name="KCache", share=8), most=0.01),
            Bounded("near, of all KV", of("outcomes", "near", name="KCache", share=8), most=0.55),
            Bounded("tokens/s over those of all tokens", row("decode at * tokens, KCache, 1/* / all tokens", "ratio"), 1),
            Bounded("KL by values too", of("outcomes", "kl", name="KCache, by values too", share=8)),
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
            Bounded("KL of Quest, with more near", of("outcomes", "kl", name="Quest", share=8)),
        ),
        differs=SMALL_MODEL,
    ),
    System(
        name="PyramidInfer",
        promise="2.2 times Accelerate's throughput, over 54 % less KV memory (arXiv 2405.12532)",
        by=EVICTION,
        figures=(
            Bounded("multiply-adds of a whole prefill's", row("multiply-adds*in int4's bytes / *", "share")),
            Bounded("KL", row("KL, PyramidInfer, in int4's *")),
            Bounded("KL over that of sinks and recent", row("KL, PyramidInfer, in int4's *", "share"), most=1),
            Bounded("the same in int8's bytes", row("KL, PyramidInfer, in int8's *", "share"), most=1),
            Bounded("KL of int4 itself", row("KL, int4 / *")),
        ),
        differs=SMALL_MODEL,
    ),
    System(
        name="Elastic Cache",
        promise="78 % faster for vision-language models, and merging better than pruning (arXiv 2407.18121)",
        by=EVICTION,
        figures=(
            Bounded("KL", row("KL, Elastic Cache, in int4's *")),
            Bounded("KL over that of evicting alone", row("KL, Elastic Cache, in int4's *", "share"), most=1),
            Bounded("of values folded", row("KL, Elastic Cache, values folded, in int4's *", "share")),
            Bounded(
                "of evicting, over sinks and recent", row("KL, Elastic Cache, evicting alone, in int4's *", "share"), most=1
            ),
        ),
        differs="The mean of keys rotated for different positions is a key of none. Its models see pictures.",
    ),
    System(
        name="LESS",
        promise="41 % of an evicting cache's loss in Rouge recovered by a state of 4 tokens' bytes (arXiv 2402.09398)",
        by=EVICTION,
        figures=(
            Bounded("share of the eviction's KL closed", row("LESS: share of KL closed / target"), 0.25),
            Bounded("KL", row("KL, LESS, in int4's *")),
        ),
        differs="Trained for minutes, with pages of a manual; the unit of its kernel is another. A page's words are asked.",
    ),
    System(
        name="InstCache",
        promise="51.34 % of LMSys's prompts hit with 4.5 GB (arXiv 2411.13820)",
        by=ANSWERS,
        figures=(
            Bounded("% hit", row("hits, * predicted by a model of words / *")),
            Bounded("hits over those of a history as large", row("hits, * predicted by a model of words / *", "ratio"), 1),
        ),
        differs="Prompts of a synthetic grammar: we have no users' prompts.",
    ),
    System(
        name="Approximate-key caching",
        promise="fewer inferences at a controlled error, better than similarity caching (arXiv 2112.06671)",
        by=ANSWERS,
        figures=(
            Bounded("inferences of 100, worst seed", row("inferences, worst seed / target"), most=35),
            Bounded("wrong of 1,000 given, worst seed", row("wrong, worst seed / max_error"), most=10),
            Bounded("wrong over those of similarity caching", row("wrong / similar", "share"), most=1),
        ),
        differs="Keys by Zipf's law; the paper's are classes of traffic.",
    ),
    System(
        name="Sarathi-Serve",
        promise="2.6 times vLLM's capacity within bounds of tail latency, for Mistral-7B on an A100 (arXiv 2403.02310)",
        by=SARATHI,
        figures=(
            Bounded("capacity over that of vllm", over(capacity("vllm-chunked"), capacity("vllm")), 1),
            Bounded("speed at which 90 % are in time", capacity("vllm-chunked")),
        ),
        differs="In virtual time: the laboratory's coupled instance with chunked prefill (policy vllm-chunked), 4 nodes.",
    ),
)
"""Infinite-LLM and Lamina would stand behind CacheBlend, with one measurement by `bench attend`."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A system with its figures, and when and on what these were measured."""

    system: System
    values: tuple[float, ...]
    date: str
    machine: str

    @property
    def verdict(self) -> str:
        """Say that all bounds are kept, or which are not."""
        pairs = zip(self.system.figures, self.values, strict=True)
        missed = [each.what for each, value in pairs if not each.kept(value)]
        return f"does NOT: {'; '.join(missed)}" if missed else "works"


def measured(command: str, timeout_s: float = TIMEOUT_S) -> Found:
    """Run a command of ours that prints a JSON object. Raises ClickException."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mooncake_zmq", *command.split(), "--json"],
            stdout=subprocess.PIPE,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise click.ClickException(f"not done after {timeout_s:g} s") from None
    if done.returncode:
        raise click.ClickException(f"exit status {done.returncode}")
    report: Found = json.loads(done.stdout)
    return report


def reproduce_systems(names: Sequence[str], results: Path | None, *, small: bool, run: Callable[[str], Found]) -> list[Judged]:
    """Return the systems of these names, or all. Reports that `results` has are taken from there, and others are added to it as
    soon as they are run. Raises StudyError."""
    chosen = [each for each in SYSTEMS if not names or each.name in names]
    if unknown := set(names) - {each.name for each in SYSTEMS}:
        raise StudyError(f"no system {', '.join(sorted(unknown))}: choose of {', '.join(each.name for each in SYSTEMS)}")
    known = _earlier(results)
    commands = dict.fromkeys(each.by for each in chosen)
    missing = [each for each in commands if _words(each, small) not in known]
    for number, each in enumerate(missing):
        left = sum(other.minutes for other in missing[number:])
        click.echo(f"{_words(each, small)}: about {each.minutes:g} min of {left:g}", err=True)
        words = _words(each, small)
        try:
            report = run(words)
        except click.ClickException as error:
            raise StudyError(f"{words}: {error.message}") from None
        known[words] = {"date": time.strftime("%Y-%m-%d"), "report": report}
        if results:
            results.write_text(json.dumps(known))
    return [_judged(each, known[_words(each.by, small)]) for each in chosen]


def as_json(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return `{"name": "systems", "rows": [..]}`."""
    rows = []
    for each in judged:
        figures = [
            {"what": figure.what, "ours": value, "least": figure.least, "most": figure.most, "kept": figure.kept(value)}
            for figure, value in zip(each.system.figures, each.values, strict=True)
        ]
        said = {"system": each.system.name, "promise": each.system.promise, "command": each.system.by.command}
        measured = {"date": each.date, "machine": each.machine, "figures": figures, "verdict": each.verdict}
        rows.append(said | measured | {"differs": each.system.differs})
    return {"name": "systems", "rows": rows}


def show(judged: Sequence[Judged], *, small: bool) -> None:
    """Print the table."""
    table = Table(title="systems of the neighbourhood", title_justify="left", show_lines=True)
    for column in ("system", "promises", "ours", "measured by", "verdict"):
        table.add_column(column)
    for each in judged:
        figures = zip(each.system.figures, each.values, strict=True)
        ours = "\n".join(figure.sentence(value) for figure, value in figures)
        by = f"{each.system.by.command}\n{each.date}, {each.machine}"
        verdict = "toy size: none" if small else f"{each.verdict}\n{each.system.differs}"
        table.add_row(each.system.name, each.system.promise, ours, by, verdict)
    tables.show([table])


def _words(each: Measurement, small: bool) -> str:
    return f"{each.command} {each.small}" if small else each.command


def _earlier(results: Path | None) -> dict[str, Any]:
    if results is None or not results.exists():
        return {}
    try:
        known = json.loads(results.read_text())
        assert all({"date", "report"} <= each.keys() for each in known.values())
    except (ValueError, AttributeError, AssertionError):
        raise StudyError(f"{results} has no results of `reproduce systems`") from None
    found: dict[str, Any] = known
    return found


def _judged(system: System, known: Mapping[str, Any]) -> Judged:
    report = known["report"]
    values = []
    for figure in system.figures:
        try:
            values.append(figure.read(report))
        except (KeyError, IndexError, TypeError):
            raise StudyError(f"{system.by.command} has not measured: {system.name}, {figure.what}") from None
    return Judged(system, tuple(values), known["date"], report.get("machine", "in virtual time"))
