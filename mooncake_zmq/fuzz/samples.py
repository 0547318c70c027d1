"""Valid records of any msgspec type, drawn from its type information: the first inputs of a fuzzer."""

from random import Random
from typing import Any

import msgspec
from msgspec import inspect

TEXTS = ("decode-a", "gateway-a", "7", "")
_TRIES = 50


def samples(kind: Any, random: Random, each: int = 3) -> list[bytes]:
    """Yield MessagePack of `each` records of every record type in `kind`, which is one type or a union."""
    told = inspect.type_info(kind)
    types = told.types if isinstance(told, inspect.UnionType) else (told,)
    return [msgspec.msgpack.encode(_valid(one, random)) for one in types for _ in range(each)]


def _valid(told: Any, random: Random) -> Any:
    """Return a valid record: one that its own check refuses is drawn anew."""
    for _ in range(_TRIES):
        try:
            return _drawn(told, random)
        except ValueError:
            continue
    raise AssertionError(f"no sample of {told}")


def _drawn(told: Any, random: Random, length: int = 1) -> Any:
    """Return a value of a type. `length`: of lists, where their own limits allow it; a record's are alike, as columns are."""
    match told:
        case inspect.StructType():
            length = random.choice((0, 1, 1, 3))
            drawn = {each.name: each for each in told.fields if each.required or random.random() < 0.7}
            return told.cls(**{name: _drawn(each.type, random, length) for name, each in drawn.items()})
        case inspect.UnionType():
            return _drawn(random.choice(told.types), random, length)
        case inspect.VarTupleType() | inspect.ListType():
            limited = max(min(length, told.max_length or length), told.min_length or 0)
            return [_drawn(told.item_type, random, length) for _ in range(limited)]
        case inspect.TupleType():
            return tuple(_drawn(each, random, length) for each in told.item_types)
        case inspect.EnumType():
            return random.choice(list(told.cls))
        case inspect.LiteralType():
            return random.choice(told.values)
    return _scalar(told, random)


def _scalar(told: Any, random: Random) -> Any:
    match told:
        case inspect.BoolType():
            return random.random() < 0.5
        case inspect.NoneType():
            return None
        case inspect.IntType():
            least = 0 if told.ge is None else told.ge
            return random.choice((least, least, least + 1, told.le or 1000))
        case inspect.FloatType():
            most = 10.0 if told.le is None else min(10.0, told.le)
            return random.choice((most, most / 3))
        case inspect.StrType():
            return random.choice(TEXTS).ljust(told.min_length or 0, "x")
        case inspect.BytesType():
            return random.randbytes(max(told.min_length or 0, min(8, told.max_length or 8)))
    raise TypeError(told)
