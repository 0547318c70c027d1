"""`mooncake-zmq usage`: sums up the use of API keys, of which gateways keep files."""

import sys
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from mooncake_zmq.refused import Refused
from mooncake_zmq.telemetry.usage import PREFIX, SUFFIX, Used

HEADS = ("day", "key", "calls", "prompt", "own", "local", "remote", "computed", "answers")


def read(directory: Path) -> Iterator[Used]:
    """Yield the records of all files of a directory. A last line that was cut off by a crash is left out. Raises OSError, and
    ValueError with the place of another line that is no record."""
    for path in sorted(directory.glob(f"{PREFIX}*{SUFFIX}")):
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], 1):
            try:
                yield msgspec.json.decode(line, type=Used)
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path}:{number}: {error}") from None


def summed(records: Iterator[Used], *, key: str | None, since: str, until: str, by: Sequence[str]) -> list[Used]:
    """Return sums in order. `by`: "day" and "key" make a sum for each day and each key; without them that field is
    empty. `since` and `until` are days that are included, as YYYY-MM-DD. `key` None: all keys."""
    sums: dict[tuple[str, str], Used] = {}
    for used in records:
        if (key is None or used.key == key) and since <= used.day <= until:
            place = (used.day if "day" in by else "", used.key if "key" in by else "")
            sums.setdefault(place, Used(day=place[0], key=place[1])).add(used)
    return [sums[place] for place in sorted(sums)]


def _day(context: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        return value and date.fromisoformat(value).isoformat()
    except ValueError:
        raise click.BadParameter(f"{value!r} is no day: write YYYY-MM-DD") from None


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--key", metavar="NAME", help="Only this API key; '' for calls without one.")
@click.option("--since", metavar="DAY", default="", callback=_day, help="From this day on (UTC).")
@click.option("--until", metavar="DAY", default="", callback=_day, help="To this day, included.")
@click.option("--by", type=click.Choice(["day", "key"]), multiple=True, default=("day", "key"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def usage(directory: Path, key: str | None, since: str, until: str, by: tuple[str, ...], as_json: bool) -> None:
    """Sum up the tokens that API keys used, from the files in a gateway's `gateway.usage_directory`.

    The directories of several gateways may be copied into one. Prompt tokens are those of calls; own, local and remote are the
    ones among them whose KV was loaded from the prefill's memory, its host's pool and other hosts; the rest was computed.

    \b
    Examples:
      mooncake-zmq usage /var/lib/mooncake-zmq/usage
      mooncake-zmq usage usage --since 2026-11-01 --until 2026-11-30 --by key
      mooncake-zmq usage usage --key alice --json
    """
    try:
        sums = summed(read(directory), key=key, since=since, until=until or "9999-12-31", by=by)
    except (OSError, ValueError) as error:
        raise Refused(str(error)) from None
    if as_json:
        for each in sums:
            click.echo(msgspec.json.encode(each))
        return
    if not sums:
        click.echo(f"mooncake-zmq usage: nothing was used; gateways with usage_directory write {PREFIX}*{SUFFIX}", err=True)
        sys.exit(1)
    table = Table(box=None)
    for head in HEADS:
        table.add_column(head, justify="left" if head in ("day", "key") else "right")
    for each in sums:
        cached = each.cached_own, each.cached_local, each.cached_remote
        numbers = (each.calls, each.prompt_tokens, *cached, each.prompt_tokens - sum(cached), each.completion_tokens)
        table.add_row(each.day, each.key, *(f"{number:,}" for number in numbers))
    Console().print(table)
