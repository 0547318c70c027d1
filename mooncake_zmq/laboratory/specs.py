"""Parsing of the argument of `--generate`, `KIND:key=number,...`. PURE."""

import math

from mooncake_zmq.laboratory.errors import StudyError


def split_spec(text: str) -> tuple[str, dict[str, float]]:
    """Return the kind, and a number for each key. Raises StudyError."""
    kind, _, rest = text.partition(":")
    values: dict[str, float] = {}
    for assignment in filter(None, (each.strip() for each in rest.split(","))):
        key, _, value = assignment.partition("=")
        try:
            values[key.strip()] = float(value)
        except ValueError:
            values[key.strip()] = math.nan
        if not math.isfinite(values[key.strip()]):
            raise StudyError(f"--generate {text}: {assignment!r} is not key=number")
    return kind, values
