"""The schema of the protocol as data, so that that of the former protocol can be kept as a file and compared.

Before the protocol's number is raised: `python tests/helpers/protocol_schema.py > tests/core/protocol_schema.json`.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from msgspec import inspect

from mooncake_zmq.core import messages
from mooncake_zmq.core.routes import SAYS


def schema() -> dict[str, Any]:
    """Return the records of the protocol, with their fields in order, and which role may send what to which."""
    types = {kind.__name__: kind for kind in (messages.Envelope, *get_args(messages.Message))}
    records: dict[str, Any] = {}
    while types:
        name, kind = types.popitem()
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        assert info.array_like
        records[name] = {
            "tag": info.tag,
            "fields": {field.name: [_text(field.type), field.required] for field in info.fields},
        }
        types |= {each.__name__: each for field in info.fields for each in _structs(field.type) if each.__name__ not in records}
    says = {f"{sender} to {receiver}": sorted(kind.__name__ for kind in kinds) for (sender, receiver), kinds in SAYS.items()}
    return {"protocol": messages.PROTOCOL_VERSION, "records": dict(sorted(records.items())), "says": dict(sorted(says.items()))}


def changes(old: Mapping[str, Any], new: Mapping[str, Any], since: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for each difference that is not an addition, or that `since` does not name."""
    number, former, present = new["protocol"], old["records"], new["records"]
    for name in sorted(former.keys() - present.keys()):
        yield f"{name} is gone: a peer of protocol {old['protocol']} may send it"
    for name in sorted(former.keys() & present.keys()):
        yield from _changes_of(name, former[name], present[name], number, since)
    messages_added = {name for name in present.keys() - former.keys() if present[name]["tag"] is not None}
    for name in sorted(messages_added):
        if since.get(name) != number:
            yield f"{name} is new: SINCE must say that it exists since protocol {number}"
    for pair, kinds in new["says"].items():
        for name in sorted({*kinds} - {*old["says"].get(pair, ())} - messages_added):
            yield f"{name} may now be sent from {pair}: a peer of protocol {old['protocol']} drops it"


def _changes_of(
    name: str, old: Mapping[str, Any], new: Mapping[str, Any], number: int, since: Mapping[str, int]
) -> Iterator[str]:
    before, after = list(old["fields"].items()), list(new["fields"].items())
    if old["tag"] != new["tag"]:
        yield f"{name} has another tag"
    for (was, (was_type, _)), (field, (kind, _)) in zip(before, after, strict=False):
        if was != field:
            yield f"{name}.{was} has become {field}: fields are added at the end and stay in their order"
            return
        if was_type != kind:
            yield f"{name}.{field} was {was_type} and is {kind}: a field keeps its type and limits"
    for field, _ in before[len(after) :]:
        yield f"{name}.{field} is gone: a peer of the former protocol sends it"
    for field, (_, required) in after[len(before) :]:
        if required:
            yield f"{name}.{field} is new and has no default: a peer of the former protocol does not send it"
        if since.get(f"{name}.{field}") != number:
            yield f"{name}.{field} is new: SINCE must say that it exists since protocol {number}"


def _structs(kind: inspect.Type) -> Iterator[type]:
    if isinstance(kind, inspect.StructType):
        yield kind.cls
    for part in _parts(kind):
        yield from _structs(part)


def _parts(kind: inspect.Type) -> list[inspect.Type]:
    found = [getattr(kind, name, ()) for name in ("item_types", "types")]
    parts = [part for each in found for part in each]
    return parts + [part for name in ("item_type", "key_type", "value_type") if (part := getattr(kind, name, None)) is not None]


def _text(kind: inspect.Type) -> str:
    """Return a type and its limits as text, in which other records are their names."""
    if isinstance(kind, inspect.StructType):
        return kind.cls.__name__
    if isinstance(kind, inspect.EnumType):
        return f"one of {', '.join(str(each.value) for each in kind.cls)}"
    if isinstance(kind, inspect.UnionType):
        return " | ".join(map(_text, kind.types))
    limits = [f"{name}={getattr(kind, name)!r}" for name in kind.__struct_fields__ if _is_limit(getattr(kind, name))]
    return f"{type(kind).__name__.removesuffix('Type').lower()}({', '.join([*map(_text, _parts(kind)), *limits])})"


def _is_limit(value: Any) -> bool:
    return value is not None and not isinstance(value, inspect.Type) and not _is_types(value)


def _is_types(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(each, inspect.Type) for each in value)


if __name__ == "__main__":
    json.dump(schema(), sys.stdout, indent=1)
    sys.stdout.write("\n")
