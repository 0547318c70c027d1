"""Readers of traces of requests: Mooncake's JSON lines, the Azure LLM inference CSV, the BurstGPT CSV, each also as .gz.

The CSVs name no blocks, so each of their prompts is taken to be like no other: nothing is reused. An invalid row is an error
that names its line; of BurstGPT, requests without an answer failed where they were recorded and are left out.
"""

import csv
import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from itertools import count, islice
from pathlib import Path
from typing import Annotated, TextIO, cast

import msgspec

from mooncake_zmq.kv.layout import div_ceil
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.study import TRACE_BLOCK_TOKENS, Arrival

PUBLIC = "'mooncake-zmq trace-data' says where the public trace is"
MAX_REQUESTS = 2_000_000
MAX_BLOCKS = 50_000_000
"""The longest trace that is read, in requests and in blocks: about 2 GiB."""
MAX_TOKENS = 10_000_000
"""Tokens of one request at most: more is taken for a damaged row."""

Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
Row = Mapping[str, str]


class _Line(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    input_length: Count
    output_length: Count
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)], ...] = ()


class _BadRow(Exception):
    """The error of a row."""


def read_trace(path: Path, first: int | None = None) -> list[Arrival]:
    """Return the arrivals of `path`, or the first ones, in the order of their times, the earliest at 0. Raises StudyError."""
    try:
        with _open(path) as lines:
            arrivals = list(islice(_read(path, lines), first))
    except FileNotFoundError:
        raise StudyError(f"there is no {path}: {PUBLIC}") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise StudyError(f"cannot read {path}: {error}") from None
    if not arrivals:
        raise StudyError(f"{path} has no request")
    arrivals.sort(key=lambda each: each.at_s)
    began_s = arrivals[0].at_s
    return [replace(each, at_s=each.at_s - began_s) for each in arrivals] if began_s else arrivals


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, "rt", encoding="utf-8-sig", newline=""))
    return path.open(encoding="utf-8-sig", newline="")


def _read(path: Path, lines: TextIO) -> Iterator[Arrival]:
    """Yield each arrival, as the file has it. Its first line shows the format."""
    first = lines.readline()
    if first.lstrip().startswith("{"):
        rows: Iterable[tuple[int, Arrival | None]] = _mooncake(path, _chained(first, lines))
    else:
        rows = _csv(path, first, lines)
    blocks = requests = 0
    for number, arrival in rows:
        if arrival is None:
            continue
        requests, blocks = requests + 1, blocks + len(arrival.hash_ids)
        if requests > MAX_REQUESTS or blocks > MAX_BLOCKS:
            raise StudyError(f"{path}:{number}: more than {MAX_REQUESTS:,} requests or {MAX_BLOCKS:,} blocks")
        yield arrival


def _chained(first: str, rest: TextIO) -> Iterator[str]:
    yield first
    yield from rest


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Arrival]]:
    decoder = msgspec.json.Decoder(_Line)
    fresh = count(1 << 62)
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
            needed = div_ceil(line.input_length, TRACE_BLOCK_TOKENS)
            # Some writers name full blocks only: the begun one then gets an id of its own.
            if line.hash_ids and not needed - 1 <= len(line.hash_ids) <= needed:
                raise _BadRow(f"{line.input_length} tokens are {needed} blocks, and hash_ids names {len(line.hash_ids)}")
        except (msgspec.MsgspecError, _BadRow) as error:
            raise StudyError(f"{path}:{number}: {str(error).replace('`', '')}") from None
        ids = line.hash_ids + tuple(islice(fresh, needed - len(line.hash_ids)))
        yield number, Arrival(line.timestamp / 1000, line.input_length, line.output_length, ids)


def _csv(path: Path, header: str, lines: TextIO) -> Iterator[tuple[int, Arrival | None]]:
    names = [name.strip() for name in next(csv.reader([header]), [])]
    parse = next((parse for needed, parse in FORMATS.items() if set(needed) <= set(names)), None)
    if parse is None:
        if not header.strip():
            raise StudyError(f"{path}: the file is empty")
        known = "; ".join(", ".join(each) for each in FORMATS)
        raise StudyError(f"{path}:1: neither JSON lines nor a CSV with the columns {known}")
    fresh = count()
    reader = csv.reader(lines)
    for cells in reader:
        number = reader.line_num + 1
        if not cells:
            continue
        try:
            if len(cells) != len(names):
                raise _BadRow(f"{len(cells)} columns, and the header has {len(names)}")
            at_s, asked, made = parse(dict(zip(names, cells, strict=True)))
        except _BadRow as error:
            raise StudyError(f"{path}:{number}: {error}") from None
        if not made:
            yield number, None
            continue
        ids = tuple(islice(fresh, div_ceil(asked, TRACE_BLOCK_TOKENS)))
        yield number, Arrival(at_s, asked, made, ids)


def _azure(row: Row) -> tuple[float, int, int]:
    text = row["TIMESTAMP"].strip()
    try:
        # Seven digits of a second, where Python reads six.
        whole, dot, rest = text.partition(".")
        digits = "".join(each for each in rest if each.isdigit()) if "+" not in rest else rest.partition("+")[0]
        at_s = datetime.fromisoformat(f"{whole}+00:00" if "+" not in whole else whole).timestamp()
        at_s += float(f"0.{digits}") if dot and digits else 0.0
    except ValueError:
        raise _BadRow(f"TIMESTAMP {text!r} is no date and time") from None
    return at_s, _count(row, "ContextTokens", 1), _count(row, "GeneratedTokens", 1)


def _burst(row: Row) -> tuple[float, int, int]:
    try:
        at_s = float(row["Timestamp"])
    except ValueError:
        raise _BadRow(f"Timestamp {row['Timestamp']!r} is no number") from None
    if not 0 <= at_s < 1e12:
        raise _BadRow(f"Timestamp {row['Timestamp']!r} is no time")
    made = _count(row, "Response tokens", 0)
    return at_s, _count(row, "Request tokens", 1 if made else 0), made


def _count(row: Row, name: str, least: int) -> int:
    text = row[name].strip()
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= MAX_TOKENS:
        raise _BadRow(f"{name} {text!r} is no number from {least} to {MAX_TOKENS:,}")
    return int(text)


FORMATS: dict[tuple[str, ...], Callable[[Row], tuple[float, int, int]]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("Timestamp", "Request tokens", "Response tokens"): _burst,
}
"""Readers of CSV formats, by the columns of the header."""
