"""Messages that are valid by their types and otherwise as odd as can be: the ends of every range, ids that clash."""

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from mooncake_zmq.core import messages
from mooncake_zmq.core.routes import SAYS

NAMES = ("g", "k", "p", "d", "c", "p0", "p1", "d0", "d1", "c0", "c1", "me", "nobody")
KEYS = tuple(bytes([i]) * 16 for i in range(6))
LIMIT = 1 << 48
WORDS = (bytes(4), (1_000_000).to_bytes(4, "little"), b"\xff" * 4)
"""As token ids: 0, one that small models do not have, and a negative one."""
VOCABULARY = 600


def numbers(kind, small, *, odd=()):
    """Of the range of `kind`: its ends, what is next to them, and those in `small` that it allows."""
    low = kind.ge if kind.ge is not None else kind.gt
    high = kind.le if kind.le is not None else LIMIT
    found = [n for n in (low, high, *small, *odd) if n is not None and (kind.ge is None or n >= kind.ge)]
    found = [n for n in found if (kind.gt is None or n > kind.gt) and n <= high]
    return st.sampled_from(list(dict.fromkeys(found)))


def values(kind, field=""):
    """Any value of a type, as `msgspec.inspect` describes it."""
    match kind:
        case inspect.IntType():
            return numbers(kind, (0, 1, 2, 3, 4, 5, 7, 12))
        case inspect.FloatType():
            return numbers(kind, (0.0, 0.25, 1.0, 60.0), odd=(5e-324, 1e-9, -1.0))
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case inspect.LiteralType(values=told):
            return st.sampled_from(told)
        case inspect.StrType():
            pool = ("r", "s", "t") if field == "request_id" else NAMES
            return st.sampled_from(pool if kind.min_length else ("", *pool))
        case inspect.BytesType():
            if kind.min_length == 16:
                return st.sampled_from(KEYS)
            longest = min(kind.max_length or 64, 64)
            return st.tuples(st.integers(0, longest), st.sampled_from(WORDS)).map(lambda told: (told[1] * 16)[: told[0]])
        case inspect.UnionType(types=types):
            return st.one_of([values(each, field) for each in types])
        case inspect.VarTupleType():
            return st.lists(values(kind.item_type, field), max_size=min(kind.max_length or 6, 6)).map(tuple)
        case inspect.TupleType(item_types=types):
            return st.tuples(*[values(each) for each in types])
        case inspect.StructType(cls=cls, fields=fields):
            made = st.fixed_dictionaries({f.name: values(f.type, f.name) for f in fields})
            return made.map(lambda told: built(cls, told)).filter(lambda message: message is not None)
    raise TypeError(kind)


def built(cls, told):
    """The message, if there can be one: what a decoder would refuse never arrives."""
    try:
        return cls(**told)
    except ValueError:
        return None


def of(*kinds):
    """Messages of these types."""
    return st.one_of([values(inspect.type_info(kind)) for kind in kinds])


anything = of(*[kind for kind in msgspec.inspect.type_info(messages.Message).types for kind in [kind.cls]])


def said(to, speakers):
    """(speaker, message) of all that the named speakers may say to the role `to`; `speakers`: their roles by name."""
    allowed = {name: SAYS.get((role, to)) for name, role in speakers.items()}
    return st.one_of([st.tuples(st.just(name), of(*sorted(kinds, key=str))) for name, kinds in allowed.items() if kinds])


senders = st.sampled_from(NAMES)
pauses = st.sampled_from((0.0, 0.001, 0.3, 5.0, 100.0))
