"""The list of today's exceptions to the gates, `allowed.toml`, which may only shrink.

A list maps a gate's name to its exceptions: name of a breach -> the number that it may have. It must agree exactly with what
the gates find: a breach that grew is refused, and one that shrank must be lowered in the list, so that it cannot grow back.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from gates import Found

PATH = Path(__file__).parent / "allowed.toml"
SHRINK = "python tests/architecture --shrink"

Allowed = dict[str, dict[str, int]]

_HEAD = f"""\
# Today's exceptions to the gates of `gates.py`, each with its number. They may only shrink: lower a number or delete a line, by
# hand or by `{SHRINK}`, which never raises one.
"""
_SECTION = re.compile(r"\[(\w+)\]")
_ENTRY = re.compile(r'"([^"]+)" = (\d+)')
_LEFT_BY_A_MERGE = ("<<<<<<<", "|||||||", "=======", ">>>>>>>")


class Damaged(Exception):
    """The list cannot be read."""


def read(text: str) -> Allowed:
    """The list; of one that a merge left in conflict, the larger number of each exception, as `shrunk` lowers it.

    Raises Damaged at a line that is not of the list's own form.
    """
    allowed: Allowed = {}
    section: dict[str, int] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith(("#", *_LEFT_BY_A_MERGE)):
            continue
        head, entry = _SECTION.fullmatch(line), _ENTRY.fullmatch(line)
        if head:
            section = allowed.setdefault(head[1], {})
        elif entry and section is not None:
            section[entry[1]] = max(int(entry[2]), section.get(entry[1], 0))
        else:
            raise Damaged(f'{PATH.name}:{number}: not [gate] or "name" = number: {line!r}')
    return allowed


def written(allowed: Mapping[str, Mapping[str, int]]) -> str:
    sections = (f"\n[{gate}]\n" + "".join(f"{_line(*each)}\n" for each in sorted(allowed[gate].items())) for gate in allowed)
    return _HEAD + "".join(sections)


def problems(found: Found, allowed: Mapping[str, int], rule: str) -> Iterator[str]:
    """In what one gate's breaches differ from its exceptions, and which line to change."""
    for name, breach in found.items():
        if name not in allowed:
            yield f"{name} breaks the rule that {rule}: {breach.number}, {breach.where}"
        elif breach.number > allowed[name]:
            yield f"{name} breaks the rule that {rule}: {breach.number}, and may have {allowed[name]}, {breach.where}"
        elif breach.number < allowed[name]:
            yield f"{name} shrank: in {PATH.name} write {_line(name, breach.number)} for {allowed[name]}, or run `{SHRINK}`"
    for name in allowed.keys() - found.keys():
        yield f"{name} is no exception any more: delete {_line(name, allowed[name])} from {PATH.name}, or run `{SHRINK}`"


def shrunk(found: Mapping[str, Found], allowed: Mapping[str, Mapping[str, int]]) -> Allowed:
    """The list with every number lowered to what the gate finds, and without what it does not find. Nothing is raised."""
    return {
        gate: {
            name: min(number, found[gate][name].number) for name, number in allowed.get(gate, {}).items() if name in found[gate]
        }
        for gate in found
    }


def moved(found: Mapping[str, Found], allowed: Mapping[str, Mapping[str, int]], places: tuple[str, ...]) -> Allowed | str:
    """The list after code moved among `places`, modules or folders: their exceptions as the gates find them now.

    A gate's numbers in these places may not sum to more than before. If they do, the answer is a sentence that says so.
    """
    after: Allowed = {}
    for gate, breaches in found.items():
        before = allowed.get(gate, {})
        now = {name: breach.number for name, breach in breaches.items() if _is_in(name, places)}
        were, are = sum(number for name, number in before.items() if _is_in(name, places)), sum(now.values())
        if are > were:
            return f"{gate}: {' and '.join(places)} have {are} together, and may have {were}"
        after[gate] = {name: number for name, number in before.items() if not _is_in(name, places)} | now
    return after


def _line(name: str, number: int) -> str:
    return f'"{name}" = {number}'


def _is_in(name: str, places: tuple[str, ...]) -> bool:
    """Does the breach name one of the places? `config -> gateway/http/tls` names `config`, `runtime` and `gateway/http/tls`."""
    modules = re.split(r":| -> ", name)
    return any(f"{module}/".startswith(f"{place}/") for module in modules for place in places)
