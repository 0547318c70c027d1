"""`profile`: measure one engine over lengths, prefixes and batches, for the conductor's estimates. See `core.profile`."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import numpy as np
import psutil
from msgspec import structs

from mooncake_zmq.bench.engine_timing import decode_step_s, prefill_times_s, random_prompt
from mooncake_zmq.bench.report import Progress
from mooncake_zmq.core.profile import PrefillTime, Profile, StepTime, fit
from mooncake_zmq.engine.cpu import Backend, chosen
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.engine.spec import Engine
from mooncake_zmq.engine.weights import load_engine
from mooncake_zmq.laboratory import tables
from mooncake_zmq.laboratory.drawing import new_figure, save
from mooncake_zmq.laboratory.reports import machine
from mooncake_zmq.refused import Refused

WARM_UP_TOKENS = 64
MEMORY_SHARE = 0.7
"""Share of the available memory that a batch's KV may take; a larger batch is not begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """The measurements to make; `chunk_tokens`: the chunks in which prefill nodes compute a prompt."""

    model: str = "default"
    cache_dir: str = ""
    threads: int = 1
    backend: Backend = "auto"
    rounds: int = 3
    lengths: tuple[int, ...] = (64, 256, 512, 1024, 2048)
    prefixes: tuple[int, ...] = (0, 1024, 2048)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] = (128, 1024)
    steps: int = 16
    chunk_tokens: int = 512


def measure(plan: ProfilePlan, progress: Progress) -> Profile:
    """Return medians of `rounds`. Raises ModelError, and click.ClickException when the plan does not fit the model or the
    memory."""
    if min(len(set(plan.lengths)), len(set(plan.batches)), len(set(plan.contexts))) < 2:
        raise Refused("two or more lengths, batches and contexts are needed to fit anything")
    progress(f"preparing the model {plan.model}")
    path = prepare(plan.model, plan.cache_dir, lambda what, share: progress(f"{what}: {share:.0%}"), backend=plan.backend)
    engine = load_engine(path, threads=plan.threads, backend=plan.backend)
    _check_fits(plan, engine)
    random = np.random.default_rng(0)
    prefill_times_s(engine, random, [WARM_UP_TOKENS] * 3, prefix=0, chunk_tokens=0)
    return Profile(
        model=plan.model,
        fingerprint=engine.spec.fingerprint,
        threads=plan.threads,
        backend=chosen(plan.backend),
        machine=machine(),
        prefill=_measure_prefill(plan, engine, random, progress),
        decode=_measure_decode(plan, engine, random, progress),
    )


def _measure_prefill(
    plan: ProfilePlan, engine: Engine, random: np.random.Generator, progress: Progress
) -> tuple[PrefillTime, ...]:
    times = []
    for prefix in plan.prefixes:
        progress(f"prefill of {_listed(plan.lengths)} tokens behind {prefix:,}, {plan.rounds} rounds")
        lengths = [length for length in plan.lengths for _ in range(plan.rounds)]
        took_s = prefill_times_s(engine, random, lengths, prefix=prefix, chunk_tokens=plan.chunk_tokens)
        for at, length in enumerate(plan.lengths):
            seconds = median(took_s[at * plan.rounds : (at + 1) * plan.rounds])
            progress(f"  {length:,} tokens: {1e3 * seconds:,.1f} ms, {length / seconds:,.0f} tokens/s")
            times.append(PrefillTime(length, prefix, seconds))
    return tuple(times)


def _measure_decode(plan: ProfilePlan, engine: Engine, random: np.random.Generator, progress: Progress) -> tuple[StepTime, ...]:
    times = []
    for batch, context in itertools.product(plan.batches, plan.contexts):
        progress(f"decode, batch {batch}, context {context:,}, {plan.rounds} rounds")
        prompts = [random_prompt(random, context, engine.spec.vocab_size) for _ in range(batch)]
        seconds = median(decode_step_s(engine, prompts, steps=plan.steps) for _ in range(plan.rounds))
        progress(f"  {1e3 * seconds:,.1f} ms a step, {batch / seconds:,.1f} tokens/s")
        times.append(StepTime(batch, context, seconds))
    return tuple(times)


def _check_fits(plan: ProfilePlan, engine: Engine) -> None:
    spec = engine.spec
    longest = max(max(plan.lengths) + max(plan.prefixes), max(plan.contexts) + 2 * plan.steps)
    if longest > spec.max_positions:
        raise Refused(f"{spec.name} has {spec.max_positions} positions, and this plan needs {longest}")
    needed = spec.kv_bytes_per_token * max(max(plan.batches) * (max(plan.contexts) + 2 * plan.steps), longest)
    available = psutil.virtual_memory().available
    if needed > MEMORY_SHARE * available:
        raise Refused(f"the largest batch takes {needed >> 20} MiB of KV, and {available >> 20} MiB are available")


def show(profile: Profile, *, as_json: bool) -> None:
    """Print measured beside fitted times, and the costs, on standard output."""
    costs = fit(profile)
    if as_json:
        click.echo(json.dumps({"costs": structs.asdict(costs), "measurements": [line.as_dict() for line in lines(profile)]}))
        return
    title = f"profile of {profile.model}, {profile.threads} threads, {profile.backend} ({profile.machine})"
    table = tables.empty(title, ("measured", "ms", "fitted ms", "error"), text=("measured",))
    for line in lines(profile):
        table.add_row(line.name, f"{1e3 * line.seconds:,.1f}", f"{1e3 * line.fitted_s:,.1f}", f"{line.error:+.1%}")
    tables.show([table])
    for name, value in structs.asdict(costs).items():
        click.echo(f"{name} = {value:.4g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A measurement beside the fitted value. `x`: its abscissa in a plot."""

    name: str
    kind: str
    x: int
    seconds: float
    fitted_s: float

    @property
    def error(self) -> float:
        """The fit's error as a share of the measurement."""
        return self.fitted_s / self.seconds - 1

    def as_dict(self) -> dict[str, str | float]:
        """Return the fields for JSON."""
        return {"name": self.name, "seconds": self.seconds, "fitted_s": self.fitted_s, "error": self.error}


def lines(profile: Profile) -> list[Line]:
    """Return all measurements. Raises ProfileError when they cannot be fitted."""
    costs = fit(profile).costs
    prefills = [
        Line(
            name=f"prefill {t.tokens:,} behind {t.prefix:,}",
            kind=f"prefill behind {t.prefix:,}",
            x=t.tokens,
            seconds=t.seconds,
            fitted_s=costs.compute_s(t.prefix + t.tokens, t.prefix),
        )
        for t in profile.prefill
    ]
    steps = [
        Line(
            name=f"decode step, batch {t.batch}, context {t.context:,}",
            kind=f"decode step, context {t.context:,}",
            x=t.batch,
            seconds=t.seconds,
            fitted_s=costs.step_s(t.batch, t.batch * t.context),
        )
        for t in profile.decode
    ]
    return prefills + steps


def draw(profile: Profile, path: Path) -> None:
    """Plot measured values (dots) and fitted ones (lines). Raises click.ClickException without matplotlib."""
    figure = new_figure(10, 4)
    for position, (kind, unit) in enumerate((("prefill", "tokens"), ("decode step", "batch")), start=1):
        axes = figure.add_subplot(1, 2, position)
        shown = [line for line in lines(profile) if line.kind.startswith(kind)]
        for name in dict.fromkeys(line.kind for line in shown):
            group = sorted((line for line in shown if line.kind == name), key=lambda line: line.x)
            at = [line.x for line in group]
            (fitted,) = axes.plot(at, [1e3 * line.fitted_s for line in group], label=name)
            axes.plot(at, [1e3 * line.seconds for line in group], "o", color=fitted.get_color())
        axes.set_xlabel(unit)
        axes.set_ylabel("ms")
        axes.legend()
    engine = f"{profile.model}, {profile.threads} threads, {profile.backend}, {profile.machine}"
    figure.suptitle(f"{engine}: measured (dots) and fitted")
    save(figure, path)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)
