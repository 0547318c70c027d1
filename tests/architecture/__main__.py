"""Prints how many exceptions to the gates are left, or brings their list up to date, downward only."""

import argparse
import sys

import allowed
from allowed import PATH, Allowed
from gates import GATES, Found
from sources import package


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/architecture", description=__doc__)
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--shrink", action="store_true", help="lower the list to what is there now; raises and adds nothing")
    change.add_argument(
        "--moved", nargs="+", metavar="PLACE", help="share exceptions out anew among modules or folders that code moved between"
    )
    asked = parser.parse_args()
    found = {gate.name: gate.find(package()) for gate in GATES}
    if asked.shrink:
        return shrink(found)
    if asked.moved:
        return move(found, tuple(asked.moved))
    for gate in GATES:
        breaches = found[gate.name].values()
        print(f"{gate.name:22}{len(breaches):5} exceptions, {sum(each.number for each in breaches):6} together: {gate.rule}")
    return 0


def shrink(found: dict[str, Found]) -> int:
    """Lower the list; where there is none yet, begin it with everything that is found."""
    if PATH.exists():
        listed = allowed.read(PATH.read_text(encoding="utf-8"))
    else:
        listed = {gate: {name: each.number for name, each in breaches.items()} for gate, breaches in found.items()}
    save(allowed.shrunk(found, listed))
    return report(found)


def move(found: dict[str, Found], places: tuple[str, ...]) -> int:
    after = allowed.moved(found, allowed.read(PATH.read_text(encoding="utf-8")), places)
    if isinstance(after, str):
        print(after, file=sys.stderr)
        return 1
    save(after)
    return report(found)


def save(listed: Allowed) -> None:
    PATH.write_text(allowed.written(listed), encoding="utf-8")


def report(found: dict[str, Found]) -> int:
    """Print what the list does not allow and no command will add to it."""
    listed = allowed.read(PATH.read_text(encoding="utf-8"))
    left = [each for gate in GATES for each in allowed.problems(found[gate.name], listed.get(gate.name, {}), gate.rule)]
    for problem in left:
        print(problem, file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
