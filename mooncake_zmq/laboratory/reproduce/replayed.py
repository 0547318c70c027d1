"""Run of a plan: every arm under every variant, once each, and the judgement of its conclusions."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from mooncake_zmq.laboratory.jobs import Job, Source
from mooncake_zmq.laboratory.metrics import failures
from mooncake_zmq.laboratory.profiles import sources
from mooncake_zmq.laboratory.reproduce.figure import (
    HARDWARE,
    PAPER,
    Arms,
    Assumption,
    Conclusion,
    Figure,
    Measured,
    Plan,
    Row,
    Setting,
)
from mooncake_zmq.laboratory.runs import check
from mooncake_zmq.laboratory.settings import assigned
from mooncake_zmq.laboratory.study import NodeProfile, RunResult, Setup

Run = Callable[[Sequence[Job]], list[Measured]]
"""A function that runs jobs and measures each result."""
FAILED = "failed"
"""The measure that every plan has besides its own: requests that failed."""
Variant = tuple[NodeProfile, Assumption | None]


def variants(plan: Plan) -> list[Variant]:
    """Return the base and every assumption's other value, on each hardware; the paper's base first."""
    return [(hardware, each) for hardware in HARDWARE for each in (None, *plan.assumptions)]


def name_of(variant: Variant) -> str:
    """Return the name of a variant in conclusions."""
    hardware, changed = variant
    return hardware.name if changed is None else f"{changed.key} is {changed.other} on {hardware.name}"


def setup_of(plan: Plan, arm: str, variant: Variant) -> Setup:
    """Return the setup of one run of the plan."""
    hardware, changed = variant
    nodes = plan.base.prefill + plan.base.decode
    setup = replace(plan.base, hardware=hardware)
    for key, value in plan.arms[arm]:
        setup = assigned(setup, key, value)
    for each in plan.assumptions:
        value = each.other if each is changed else each.value
        if value and (not each.arms or arm in each.arms):
            setup = assigned(setup, each.key, value)
            if each.key == "prefill":
                setup = assigned(setup, "decode", str(nodes - setup.prefill))
    check(setup)
    return setup


def measure(plan: Plan, result: RunResult) -> Measured:
    """Return the measures of a run."""
    return plan.measure(result) | {FAILED: float(len(failures(result)))}


def reproduce(plan: Plan, source: Source, run: Run) -> Figure:
    """Return the figure, from the runs of all variants. Variants that do not concern an arm are not run again for it."""
    source = msgspec.structs.replace(source, output_tokens=plan.output_tokens)
    tried = variants(plan)
    jobs = {(at, arm): Job(source, setup_of(plan, arm, variant)) for at, variant in enumerate(tried) for arm in plan.arms}
    encoded = {key: msgspec.json.encode(job) for key, job in jobs.items()}
    distinct = {text: jobs[key] for key, text in encoded.items()}
    measured = dict(zip(distinct, run(list(distinct.values())), strict=True))
    found: list[Arms] = [{arm: measured[encoded[at, arm]] for arm in plan.arms} for at in range(len(tried))]
    return Figure(
        name=plan.name,
        title=plan.title,
        settings=settings_of(plan),
        rows=_rows(plan, found[0]),
        conclusions=[judge(text, holds, tried, found) for text, holds in plan.claims],
        notes=[
            *plan.notes,
            *_failures(tried, found),
            f"{len(distinct)} runs: {len(tried)} variants of {len(plan.arms)} arms, each run once.",
        ],
        curves=_curves(plan, tried, found),
        axes=(plan.x, next(iter(plan.units.items()))[0]) if plan.x else ("", ""),
    )


def judge(text: str, holds: Callable[[Arms], bool], tried: Sequence[Variant], found: Sequence[Arms]) -> Conclusion:
    """Return the conclusion, and where it does not hold: in variants with failed requests too, as other times say nothing."""
    pairs = zip(tried, found, strict=True)
    breaks = tuple(name_of(variant) for variant, arms in pairs if any(m[FAILED] for m in arms.values()) or not holds(arms))
    return Conclusion(text, len(tried), breaks)


def _failures(tried: Sequence[Variant], found: Sequence[Arms]) -> list[str]:
    return [
        f"{arm}, {name_of(variant)}: {values[FAILED]:g} requests failed."
        for variant, arms in zip(tried, found, strict=True)
        for arm, values in arms.items()
        if values[FAILED]
    ]


def settings_of(plan: Plan) -> list[Setting]:
    """Return the settings of the plan, of its assumptions, of the hardware."""
    assumed = [
        Setting(each.key, f"{each.value or 'the default'}, then {each.other}", "assumed", each.why) for each in plan.assumptions
    ]
    hardware = [Setting(what, PAPER.name, whence, why) for what, whence, why in sources(PAPER)]
    other = [Setting("second hardware", each.name, "assumed", "by ratios of what the chips can do") for each in HARDWARE[1:]]
    return [*plan.settings, *assumed, *hardware, *other]


def _rows(plan: Plan, arms: Arms) -> list[Row]:
    return [_row(plan, arm, measure, values[measure]) for arm, values in arms.items() for measure in plan.units]


def _row(plan: Plan, arm: str, measure: str, value: float) -> Row:
    return Row(f"{arm}, {measure}", plan.units[measure], value, plan.paper.get((arm, measure)))


def _curves(plan: Plan, tried: Sequence[Variant], found: Sequence[Arms]) -> dict[str, list[tuple[float, float]]]:
    if not plan.x:
        return {}
    measure = next(iter(plan.units))
    return {
        name_of(variant): [(float(arm), values[measure]) for arm, values in arms.items()]
        for variant, arms in zip(tried, found, strict=True)
    }
