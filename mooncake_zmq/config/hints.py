"""Finds what a mistaken name or word in the configuration was meant to be, and reads sizes such as `1GiB`."""

import re
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin, get_type_hints

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)B", re.IGNORECASE)
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return `; did you mean NAME?` for the known name that is nearest to `name`, or "" if none is near."""
    near = get_close_matches(name, known, 1) if name not in known else []
    return f"; did you mean {near[0]}?" if near else ""


def words(kind: Any) -> tuple[str, ...]:
    """Return the words that a setting of this type accepts; () if it accepts other values too."""
    if get_origin(kind) is Literal:
        return tuple(each for each in get_args(kind) if isinstance(each, str))
    return tuple(word for part in get_args(kind) for word in words(part))


def wanted(name: str, kind: Any) -> str:
    """Return what a setting of this name and type accepts, in words."""
    kinds = {kind, *get_args(kind)}
    if int in kinds and name.endswith("bytes"):
        return "an integer of bytes or a size like 512MiB"
    for accepted, what in ((bool, "true or false"), (float, "a number"), (int, "an integer")):
        if accepted in kinds:
            return what
    return "a value of TOML, such as [1, 2]"


def record_of(kind: Any) -> type[Any] | None:
    """Return the record class of a table, or of the tables in a list, that a setting of this type is; None if it is neither."""
    return next((part for part in (kind, *get_args(kind)) if is_dataclass(part) and isinstance(part, type)), None)


def kind_at(kind: Any, path: str) -> Any:
    """Return the type of the setting at a path like `nodes[2].role`, or None if there is none."""
    for name in re.findall(r"[a-z_]\w*", path):
        record = record_of(kind)
        kind = get_type_hints(record).get(name) if record is not None else None
    return kind


def size(value: str) -> int | None:
    """Return the bytes of a size such as `512MiB`, `1.5GiB` or `2GB`; None for anything else."""
    found = SIZE.fullmatch(value.strip())
    return int(float(found[1]) * UNITS[found[2].lower()]) if found else None


def with_sizes(raw: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Return `raw` with every size that stands for an integer of bytes replaced by that integer."""
    hints = get_type_hints(kind)
    return {key: _sized(value, hints.get(key)) for key, value in raw.items()}


def _sized(value: Any, kind: Any) -> Any:
    record = record_of(kind)
    if isinstance(value, str) and (kind is int or int in get_args(kind)):
        found = size(value)
        return value if found is None else found
    if record is not None and isinstance(value, Mapping):
        return with_sizes(value, record)
    if record is not None and isinstance(value, list):
        return [with_sizes(each, record) if isinstance(each, Mapping) else each for each in value]
    return value
