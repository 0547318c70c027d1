"""Lists what the installed program consists of: CycloneDX JSON, with licences."""

from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OURS = "mooncake-zmq"
LICENCE_CHARS = 200
"""The longest text taken as the name of a licence: some packages have the whole licence in that field."""


def bill() -> dict[str, Any]:
    """Return the bill of the program and all installed packages that it may import, with the extras that are installed."""
    found: dict[str, Distribution] = {canonicalize_name(each.metadata["Name"]): each for each in _reached()}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": _component(found[OURS], "application")},
        "components": [_component(each, "library") for name, each in sorted(found.items()) if name != OURS],
        "dependencies": [
            {"ref": _url(each), "dependsOn": sorted(_url(found[name]) for name in _needs(each) if name in found)}
            for _, each in sorted(found.items())
        ],
    }


def _reached() -> Iterator[Distribution]:
    left, seen = [OURS], {OURS}
    while left:
        name = left.pop()
        try:
            here = distribution(name)
        except PackageNotFoundError:  # it belongs to an extra, or to another system
            continue
        yield here
        for each in _needs(here) - seen:
            seen.add(each)
            left.append(each)


def _needs(each: Distribution) -> set[str]:
    """Return the names of all packages that one requires, by any extra."""
    return {canonicalize_name(Requirement(text).name) for text in each.requires or ()}


def _component(each: Distribution, kind: str) -> dict[str, Any]:
    name = canonicalize_name(each.metadata["Name"])
    component = {"type": kind, "bom-ref": _url(each), "name": name, "version": each.version, "purl": _url(each)}
    licence = licence_of(each)
    return component | ({"licenses": [{"license": {"name": licence}}]} if licence else {})


def licence_of(each: Distribution) -> str:
    """Return the licence that a package declares; empty if it declares none."""
    metadata: Any = each.metadata
    said = metadata.get("License-Expression") or metadata.get("License") or ""
    classifiers = metadata.get_all("Classifier") or ()
    classified = [text.rpartition(" :: ")[2] for text in classifiers if text.startswith("License")]
    if said and len(said) <= LICENCE_CHARS and "\n" not in said:
        return said
    return ", ".join(classified) or said.strip().partition("\n")[0][:LICENCE_CHARS]


def _url(each: Distribution) -> str:
    return f"pkg:pypi/{canonicalize_name(each.metadata['Name'])}@{each.version}"
