"""Rows of requests as a CSV file or as arrays of NumPy: what `sim`, `reproduce` and `bench client` write with `--rows`.

No value has a comma, a quotation mark or a line break in it, so that the simplest reader can read the file.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.new_file import new_of, replacing

if TYPE_CHECKING:  # the command line imports this module, and nothing that nodes run as machine code
    from numpy.typing import NDArray

    from mooncake_zmq.laboratory.study import RunResult, Setup

Found = TypeVar("Found")
RENAMED = {"prefill": "prefill_nodes", "decode": "decode_nodes"}
"""Settings of a run whose names are those of columns of its requests."""
UNSAFE = str.maketrans({",": ";", '"': "'", "\n": " ", "\r": " "})

rows_option = click.option(
    "--rows",
    "--csv",
    "rows_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a row for each request there: a CSV, or an array of NumPy for each column if FILE ends in .npz.",
)


def request_columns() -> tuple[str, ...]:
    """Return the columns of a replayed request: the fields of its record."""
    from mooncake_zmq.laboratory.study import RequestRecord

    return tuple(field.name for field in fields(RequestRecord))


def rows_of(requests: Iterable[object], columns: Sequence[str]) -> list[str]:
    """Return a line for each request, with the attributes that the columns name."""
    return [",".join(_text(getattr(each, name)) for name in columns) for each in requests]


def kept(measure: Callable[["RunResult"], Found], rows_file: Path | None) -> Callable[["RunResult"], tuple[Found, list[str]]]:
    """Return a function that measures a run and keeps the rows of its requests, if they are written."""
    return lambda result: (measure(result), [] if rows_file is None else rows_of(result.requests, request_columns()))


def write_runs(rows_file: Path | None, runs: Sequence[tuple["Setup", list[str]]]) -> None:
    """Write the rows of all runs, each with the number of its run and the settings in which the runs differ. Raises
    StudyError."""
    if rows_file is None:
        return
    settings = [_settings(setup) for setup, _ in runs]
    names = list(dict.fromkeys(name for each in settings for name in each))
    differing = [name for name in names if len({each.get(name, "") for each in settings}) > 1]
    lines = (
        ",".join([str(number), *(each.get(name, "") for name in differing), row])
        for number, (each, (_, rows)) in enumerate(zip(settings, runs, strict=True))
        for row in rows
    )
    write(rows_file, ["run", *differing, *request_columns()], lines)


def write(rows_file: Path, columns: Sequence[str], lines: Iterable[str]) -> None:
    """Write a header and lines, or a file of arrays, in place of a former file once all is written. Raises StudyError."""
    try:
        with replacing(rows_file) as new:
            if rows_file.suffix == ".npz":
                _write_arrays(new, columns, lines)
            else:
                with new.open("w", encoding="utf-8") as file:
                    file.writelines(f"{line}\n" for line in (",".join(columns), *lines))
    except OSError as error:
        raise StudyError(f"--rows {rows_file}: {error.strerror}") from None


def _write_arrays(rows_file: Path, columns: Sequence[str], lines: Iterable[str]) -> None:
    import numpy as np

    rows = [line.split(",") for line in lines]
    arrays: dict[str, Any] = {name: _array([row[at] for row in rows]) for at, name in enumerate(columns)}
    with rows_file.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _array(texts: Sequence[str]) -> "NDArray[Any]":
    """Return whole numbers, numbers or truth values if all of a column are such, and text otherwise."""
    import numpy as np

    if texts and set(texts) <= {"True", "False"}:
        return np.array([text == "True" for text in texts])
    for kind in (int, float):
        with suppress(ValueError):
            return np.array([kind(text) for text in texts])
    return np.array(texts)


def check_writable(file: Path | None, option: str, *inputs: Path | None) -> None:
    """Raise StudyError, before hours of runs, if a file cannot be written or is one of those that are read. What is in it
    stays until then."""
    if file is None:
        return
    if file.exists() and any(each is not None and each.exists() and file.samefile(each) for each in inputs):
        raise StudyError(f"{option} {file}: that is the trace")
    try:
        new = new_of(file)
        new.open("wb").close()
        new.unlink()
        if file.exists():
            file.open("ab").close()
    except OSError as error:
        raise StudyError(f"{option} {file}: {error.strerror}") from None


def _settings(setup: "Setup") -> Mapping[str, str]:
    own = {RENAMED.get(field.name, field.name): getattr(setup, field.name) for field in fields(setup)}
    overrides = own.pop("overrides")
    return {name: _text(value) for name, value in {**own, "hardware": setup.hardware.name, **overrides}.items()}


def _text(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value).translate(UNSAFE)
