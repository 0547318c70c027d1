"""Valid records of any msgspec type, drawn from its type information: the first inputs of a fuzzer."""

from random import Random
from typing import Any

import msgspec
from msgspec import inspect

TEXTS = ("decode-a", "gateway-a", "7", "")
_TRIES = 50


def samples(kind: Any, random: Random, each: int = 3) -> list[bytes]:
    """Yield MessagePack of `each` records of every record type in `kind`, which is one type or a union."""
    described = inspect.type_info(kind)
    types = described.types if isinstance(described, inspect.UnionType) else (described,)
    return [msgspec.msgpack.encode(_valid(one, random)) for one in types for _ in range(each)]


def _valid(described: Any, random: Random) -> Any:
    """Return a valid record: one that its own check refuses is drawn anew."""
    for _ in range(_TRIES):
        try:
            return _drawn(described, random)
        except ValueError:
            continue
    raise AssertionError(f"no sample of {described}")


def _drawn(described: Any, random: Random, length: int = 1) -> Any:
    """Return a value of a type. `length`: of lists, where their own limits allow it; a record's are alike, as columns are."""
    match described:
        case inspect.StructType():
            length = random.choice((0, 1, 1, 3))
            drawn = {each.name: each for each in described.fields if each.required or random.random() < 0.7}
            return described.cls(**{name: _drawn(each.type, random, length) for name, each in drawn.items()})
        case inspect.UnionType():
            return _drawn(random.choice(described.types), random, length)
        case inspect.VarTupleType() | inspect.ListType():
            limited = max(min(length, described.max_length or length), described.min_length or 0)
            return [_drawn(described.item_type, random, length) for _ in range(limited)]
        case inspect.TupleType():
            return tuple(_drawn(each, random, length) for each in described.item_types)
        case inspect.EnumType():
            return random.choice(list(described.cls))
        case inspect.LiteralType():
            return random.choice(described.values)
    return _scalar(described, random)


def _scalar(described: Any, random: Random) -> Any:
    match described:
        case inspect.BoolType():
            return random.random() < 0.5
        case inspect.NoneType():
            return None
        case inspect.IntType():
            least = 0 if described.ge is None else described.ge
            return random.choice((least, least, least + 1, described.le or 1000))
        case inspect.FloatType():
            most = 10.0 if described.le is None else min(10.0, described.le)
            return random.choice((most, most / 3))
        case inspect.StrType():
            return random.choice(TEXTS).ljust(described.min_length or 0, "x")
        case inspect.BytesType():
            return random.randbytes(max(described.min_length or 0, min(8, described.max_length or 8)))
    raise TypeError(described)
