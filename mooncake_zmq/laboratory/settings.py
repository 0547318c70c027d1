"""Parsing of a Setup from text: its fields and dotted settings by name, one at a time or as a sweep's cross product. PURE but
for files that a profile names."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any, TypeVar

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.laboratory.coupled import read_settings
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.profiles import find_profile
from mooncake_zmq.laboratory.runs import check
from mooncake_zmq.laboratory.study import COUPLED_SECTION, NodeProfile, Setup
from mooncake_zmq.roles import PARTS

MAX_RUNS = 1_000
"""Runs of one sweep at most."""

Record = TypeVar("Record", Setup, NodeProfile, Costs)
Value = float | int | str | bool
SECTIONS = {name.replace("-", "_"): {each.name for each in fields(parts.settings)} for name, parts in PARTS.items()}
UNLISTED = ("laboratory.", COUPLED_SECTION)
"""Sections whose settings their own engine checks."""
NUMBERS: Mapping[str, Callable[[str], float]] = {
    "prefill": int,
    "decode": int,
    "seed": int,
    "block_tokens": int,
    "ttft_slo_s": float,
    "tbt_slo_s": float,
    "speed": float,
}
NAMES = ("policy", "admission", "order", "hardware")
SHORT = {"ttft_slo": "ttft_slo_s", "tbt_slo": "tbt_slo_s"}


def assigned(setup: Setup, key: str, text: str) -> Setup:
    """Return `setup` with one field or dotted setting changed. Raises StudyError."""
    key = key.strip().replace("-", "_")
    name = SHORT.get(key, key)
    if name == "hardware":
        return replace(setup, hardware=find_profile(text))
    if name in NAMES:
        return _with(setup, name, text)
    if name in NUMBERS:
        return _with(setup, name, _number(key, text, NUMBERS[name]))
    section, dot, setting = key.partition(".")
    if not dot:
        raise StudyError(f"no setting {key!r}: {', '.join((*NUMBERS, *NAMES))}, or SECTION.NAME")
    return _dotted(setup, key, section, setting, text)


def _dotted(setup: Setup, key: str, section: str, setting: str, text: str) -> Setup:
    try:
        if section == "hardware":
            return replace(setup, hardware=_replaced(setup.hardware, key, setting, text))
        if section == "costs":
            costs = _replaced(setup.hardware.costs, key, setting, text)
            return replace(setup, hardware=replace(setup.hardware, costs=costs))
    except ValueError as error:
        raise StudyError(str(error)) from None
    known = SECTIONS.get(section, ())
    if section + "." not in UNLISTED and setting.partition(".")[0] not in known:
        raise StudyError(f"no setting {key!r}: sections are {', '.join(SECTIONS)}, laboratory, coupled, hardware, costs")
    changed = replace(setup, overrides={**setup.overrides, key: _value(text)})
    read_settings(changed)
    return changed


def _replaced(record: Record, key: str, setting: str, text: str) -> Record:
    known = {each.name for each in fields(record) if isinstance(getattr(record, each.name), int | float)}
    if setting not in known:
        raise StudyError(f"no setting {key!r}: {', '.join(sorted(known))}")
    kind = type(getattr(record, setting))
    return _with(record, setting, _number(key, text, kind))


def _with(record: Record, name: str, value: Value) -> Record:
    changed: dict[str, Any] = {name: value}
    return replace(record, **changed)


def _number(key: str, text: str, kind: Callable[[str], float]) -> float:
    try:
        number = kind(text)
    except ValueError:
        raise StudyError(f"{key}={text}: {'a whole number' if kind is int else 'a number'} is needed") from None
    if math.isnan(number):
        raise StudyError(f"{key}={text}: a number is needed")
    return number


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def sweep(base: Setup, axes: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[dict[str, str], Setup]]:
    """Return every combination of the axes' values, the last axis fastest, and its setup. Raises StudyError for one that cannot
    run."""
    count = math.prod(len(values) for _, values in axes)
    if count > MAX_RUNS:
        raise StudyError(f"the sweep has {count:,} runs; at most {MAX_RUNS:,}")
    found = []
    for values in product(*(values for _, values in axes)):
        chosen = dict(zip((key for key, _ in axes), values, strict=True))
        setup = base
        for key, value in chosen.items():
            setup = assigned(setup, key, value)
        check(setup)
        found.append((chosen, setup))
    return found


def split_assignment(option: str, text: str) -> tuple[str, str]:
    """Split `KEY=VALUE`. Raises StudyError."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise StudyError(f"{option} {text}: write KEY=VALUE")
    return key.strip(), value.strip()


def axes_of(texts: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Parse `KEY=A,B` each, every key once. Raises StudyError."""
    axes: dict[str, list[str]] = {}
    for text in texts:
        key, values = split_assignment("--sweep", text)
        if key in axes:
            raise StudyError(f"--sweep {key} is given twice")
        axes[key] = [each.strip() for each in values.split(",") if each.strip()]
        if len(set(axes[key])) != len(axes[key]):
            raise StudyError(f"--sweep {text}: a value is given twice")
    return list(axes.items())
