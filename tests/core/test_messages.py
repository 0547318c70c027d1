"""The wire: every message survives the trip unchanged, and any bytes decode or raise ProtocolError and nothing else."""

import random
import tracemalloc
import typing

import msgpack
import msgspec
import pytest
from actor_harness import leased
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from mooncake_zmq.core.messages import (
    MAX_BLOCKS,
    MAX_CONSTRAINT_BYTES,
    MAX_FETCHED_BLOCKS,
    MAX_MESSAGE_BYTES,
    MAX_RESERVE_BYTES,
    MAX_TEXT,
    MAX_TOKENS,
    AttemptFailed,
    BlocksAnnounced,
    BlocksArrived,
    BlocksLeased,
    Envelope,
    FirstToken,
    HandoffBlocks,
    HandoffDone,
    LeaseBlocks,
    LeaseRenewed,
    Message,
    ProtocolError,
    RejectReason,
    RenewLease,
    ReportCorrupt,
    ReserveDecode,
    Sampling,
    Sibling,
    SlotRef,
    StartPrefill,
    StartStage,
    StopRule,
    clip,
    decode,
    decode_envelope,
    encode,
)
from mooncake_zmq.core.messages.sampling import MAX_CHOICES

TYPES = typing.get_args(Message)


def values(kind):
    """Values of a field's type, within the limits it declares."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is typing.Annotated:
        return bounded(arguments[0], arguments[1])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs(kind)
    if isinstance(kind, type) and issubclass(kind, RejectReason):
        return st.sampled_from(kind)
    if origin is tuple:
        return st.tuples(*[values(a) for a in arguments])
    if type(None) in arguments:
        return st.one_of(*[st.none() if a is type(None) else values(a) for a in arguments])
    return {int: st.integers(-(1 << 31), 1 << 31), bool: st.booleans(), str: st.text(max_size=20)}[kind]


def bounded(kind, meta):
    low, high = meta.min_length or 0, meta.max_length
    if kind is str:
        return st.text(st.characters(codec="utf-8"), min_size=low, max_size=min(high, 40))
    if kind is bytes:
        return st.binary(min_size=low, max_size=min(high, 64))
    if kind is int:
        return st.integers(meta.ge or 0, meta.le if meta.le is not None else (1 << 64) - 1)
    if kind is float:
        least = meta.ge if meta.ge is not None else meta.gt
        return st.floats(least, meta.le, exclude_min=meta.gt is not None)
    assert typing.get_origin(kind) is tuple, kind
    inner = typing.get_args(kind)[0]
    return st.lists(values(inner), max_size=4).map(tuple)


def structs(kind):
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {name: values(hints[name]) for name in kind.__struct_fields__}
    if kind is BlocksLeased:  # its columns agree
        refs = st.lists(structs(SlotRef), max_size=4)
        plain = refs.flatmap(
            lambda refs: st.builds(
                leased, fields["lease_id"], st.just(refs), remote=st.integers(0, len(refs)), node=fields["node"]
            )
        )
        told = st.tuples(*[st.lists(values(typing.get_args(hints[name])[0].__args__[0])) for name in ("parents", "tokens")])
        return st.builds(told_of, plain, told)
    if kind is BlocksArrived:
        refs = st.lists(structs(SlotRef), max_size=4)
        others = [fields[name] for name in ("lease_id", "node", "incarnation", "last")]
        return st.tuples(refs, fields["blocks"], *others).map(arrived_of)
    return st.builds(kind, **fields)


def arrived_of(drawn):
    refs, blocks, lease_id, node, incarnation, last = drawn
    refs = refs[: len(blocks)]
    return BlocksArrived(
        lease_id=lease_id,
        node=node,
        incarnation=incarnation,
        blocks=blocks[: len(refs)],
        slots=tuple(ref.slot for ref in refs),
        generations=tuple(ref.generation for ref in refs),
        checksums=tuple(ref.checksum for ref in refs),
        remote=len(refs) // 2,
        last=last,
    )


def told_of(leased, told):
    """The lease with as much of these columns as there are blocks."""
    parents, tokens = (tuple(column[: len(leased.slots)]) for column in told)
    full = len(parents) == len(tokens) == len(leased.slots)
    return msgspec.structs.replace(leased, parents=parents, tokens=tokens) if full else leased


messages = st.sampled_from(TYPES).flatmap(structs)
REF = SlotRef(node="n" * 64, incarnation=1 << 48, slot=1 << 48, generation=1 << 48, checksum=(1 << 64) - 1)
GRINS = "\N{GRINNING FACE}" * 64
MANY_KEYS = (b"k" * 16,) * MAX_BLOCKS
LONGEST_SAMPLING = Sampling(logit_bias=(((1 << 31) - 1, 1.5),) * 1024, constraint=bytes(MAX_CONSTRAINT_BYTES))
LONGEST_STOP = StopRule(max_tokens=1 << 48, eos_ids=((1 << 31) - 1,) * 64)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire(kind):
    @settings(max_examples=40)
    @given(structs(kind))
    def check(message):
        assert decode(encode(message)) == message

    check()


@settings(max_examples=100)
@given(structs(Envelope))
def test_an_envelope_survives_the_wire(envelope):
    assert decode_envelope(encode(envelope)) == envelope


def decodes_or_protocol_error(raw):
    for take in (decode, decode_envelope):
        try:
            message = take(raw)
        except ProtocolError:
            continue
        assert isinstance(message, (*TYPES, Envelope))


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_protocol_error(raw):
    decodes_or_protocol_error(raw)


@settings(max_examples=500)
@given(messages, st.integers(0, 1 << 32))
def test_mutated_messages_decode_or_raise_protocol_error(message, seed):
    rng = random.Random(seed)
    raw = bytearray(encode(message))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(raw))
        match rng.randrange(3):
            case 0:
                raw[at] = rng.randrange(256)
            case 1:
                del raw[at:]
                raw += b"\xc0"
            case 2:
                raw[at:at] = bytes([rng.choice((0x91, 0xDD, 0xDB, 0xC7, 0xD4, 0xDF, 0xCB, 0xCF, 0xFF))])
    decodes_or_protocol_error(bytes(raw))


JSONLIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=300)
@given(st.sampled_from(TYPES), st.lists(JSONLIKE, max_size=12))
def test_a_known_tag_with_any_fields_decodes_or_raises_protocol_error(kind, fields):
    decodes_or_protocol_error(msgpack.packb([kind.__name__, *fields]))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x91" * 100_000,
        b"\x91" * 500 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x80",
        b"\xc7\x00\x05",
        b"\xc7\x00\xff",
        b"\xa2\xff\xfe",
        encode(RenewLease(lease_id=1, ttl_s=1.0)) + b"\x00",
        msgpack.packb([["Hello"]]),
        msgpack.packb(["NoSuchMessage", 1]),
        msgpack.packb([b"RenewLease", 1, 1.0]),
        b"\x92" + msgpack.packb("ReportCorrupt") + b"\xdd\xff\xff\xff\xff",
        b"\x92" + msgpack.packb("ReportCorrupt") + b"\xdc\x40\x00",
        b"\x93" + msgpack.packb("RenewLease") + b"\x01" + b"\x91" * 100_000,
        b"\x93" + msgpack.packb("\udcff", unicode_errors="surrogateescape") + b"\x01\x01",
    ],
    ids=range(20),
)
def test_hostile_bytes_raise_protocol_error(raw):
    with pytest.raises(ProtocolError):
        decode(raw)
    with pytest.raises(ProtocolError):
        decode_envelope(raw)


def test_everything_on_the_wire_is_bounded():
    """A length or a number that a field does not limit could make the receiver allocate what a header claims."""

    def walk(found):
        match found:
            case inspect.StructType(fields=fields):
                for field in fields:
                    walk(field.type)
            case inspect.UnionType(types=types):
                for part in types:
                    walk(part)
            case inspect.VarTupleType(item_type=item, max_length=most):
                assert most is not None
                walk(item)
            case inspect.TupleType(item_types=items):
                for item in items:
                    walk(item)
            case inspect.StrType(max_length=most) | inspect.BytesType(max_length=most):
                assert most is not None
            case inspect.IntType(ge=least) | inspect.FloatType(ge=least, gt=None) | inspect.FloatType(gt=least):
                assert least is not None
            case _:
                few = inspect.BoolType | inspect.NoneType | inspect.EnumType | inspect.LiteralType
                assert isinstance(found, few), found

    walk(inspect.type_info(Message))
    walk(inspect.type_info(Envelope))


def test_a_claimed_length_allocates_next_to_nothing():
    raw = b"\x92" + msgpack.packb("ReportCorrupt") + b"\xdd\x10\x00\x00\x00"
    tracemalloc.start()
    try:
        decodes_or_protocol_error(raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def ask(keys=(), sources=()):
    return LeaseBlocks(lease_id=1, keys=keys, sources=sources, fetch_s=0.0, ttl_s=1.0)


@pytest.mark.parametrize(
    "message",
    [
        RenewLease(lease_id=-1, ttl_s=1.0),
        RenewLease(lease_id=(1 << 48) + 1, ttl_s=1.0),
        RenewLease(lease_id=1, ttl_s=float("nan")),
        RenewLease(lease_id=1, ttl_s=float("inf")),
        RenewLease(lease_id=1, ttl_s=-0.5),
        ask(keys=(b"short",)),
        ask(keys=(b"k" * 16,) * (MAX_BLOCKS + 1)),
        ask(sources=("s",) * 17),
        AttemptFailed(request_id="", attempt=1, reason="r"),
        AttemptFailed(request_id="r" * 129, attempt=1, reason="r"),
        AttemptFailed(request_id="r", attempt=1, reason="r" * (MAX_TEXT + 1)),
        FirstToken(request_id="r", attempt=1, index=0, token=1 << 31, own=0, local=0, remote=0, queue_s=0.0, prefill_s=0.0),
        FirstToken(request_id="r", attempt=1, index=0, token=-1, own=0, local=0, remote=0, queue_s=0.0, prefill_s=0.0),
    ],
    ids=range(13),
)
def test_a_value_out_of_bounds_is_refused_on_arrival(message):
    with pytest.raises(ProtocolError):
        decode(encode(message))


@pytest.mark.parametrize(
    "columns", [[(1, 2), (2,), (3, 3), 0], [(1,), (2, 2), (3,), 0], [(1,), (2,), (), 0], [(1,), (2,), (3,), 2]], ids=range(4)
)
def test_columns_that_do_not_agree_are_refused_on_arrival(columns):
    refs = [SlotRef(node="c", incarnation=7, slot=slot, generation=2, checksum=slot + 4) for slot in (1, 2)]
    assert decode(msgpack.packb(["BlocksLeased", 1, "c", 7, (1, 2), (2, 2), (5, 6), 1])) == leased(1, refs, remote=1)
    assert leased(1, refs).sources == tuple(refs)
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(["BlocksLeased", 1, "c", 7, *columns]))


@pytest.mark.parametrize(
    ("parents", "tokens"),
    [
        ((None,), (b"",)),
        ((None, b"k" * 16), ()),
        ((), (b"", b"")),
        ((None, b"k" * 15), (b"", b"1234")),
        ((None, None), (bytes(4 * MAX_TOKENS), b"1")),
    ],
    ids=range(5),
)
def test_contents_that_do_not_agree_or_are_too_many_are_refused_on_arrival(parents, tokens):
    columns = ((1, 2), (2, 2), (5, 6), 0)
    most = (bytes(4 * MAX_TOKENS - 4), b"1234")
    fine = decode(msgpack.packb(["BlocksLeased", 1, "c", 7, *columns, (None, b"k" * 16), most]))
    assert fine.parents == (None, b"k" * 16)
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(["BlocksLeased", 1, "c", 7, *columns, parents, tokens]))


@pytest.mark.parametrize(
    "message",
    [
        BlocksAnnounced(stored=MANY_KEYS, removed=(b"r" * 16,) * MAX_BLOCKS),
        ReportCorrupt(slots=(REF,) * MAX_BLOCKS),
        msgspec.structs.replace(
            leased(1, [REF] * MAX_BLOCKS, remote=MAX_BLOCKS),
            parents=(b"p" * 16,) * MAX_BLOCKS,
            tokens=(bytes(4 * MAX_TOKENS // MAX_BLOCKS),) * MAX_BLOCKS,
        ),
        msgspec.structs.replace(
            leased(1 << 48, [REF] * MAX_FETCHED_BLOCKS, remote=MAX_FETCHED_BLOCKS),
            parents=(b"p" * 16,) * MAX_FETCHED_BLOCKS,
            tokens=(b"", bytes(4 * MAX_TOKENS), *(b"",) * (MAX_FETCHED_BLOCKS - 2)),
            tenants=(GRINS,) * MAX_FETCHED_BLOCKS,
        ),
        HandoffBlocks(request_id="r" * 128, attempt=1, first_block=0, sources=(REF,) * MAX_BLOCKS, ready=True),
        StartPrefill(
            request_id="r" * 128,
            attempt=1,
            tokens=bytes(4 * MAX_TOKENS),
            root=b"k" * 16,
            keys=MANY_KEYS,
            first_index=0,
            sampling=Sampling(),
            stop=StopRule(max_tokens=1),
            decode="d" * 64,
            reuse_blocks=0,
            sources=("s" * 64,) * 16,
            deadline_s=1.0,
        ),
        ReserveDecode(
            request_id="r" * 128,
            attempt=1,
            gateway="g" * 64,
            tokens=MAX_TOKENS,
            reuse_keys=(),
            last_key=b"k" * 16,
            tail=bytes(4 * 4095),
            first_index=0,
            sampling=LONGEST_SAMPLING,
            stop=LONGEST_STOP,
            deadline_s=1.0,
            past=bytes(4 * MAX_TOKENS),
            tenant=GRINS,
            siblings=(Sibling(request_id=GRINS * 2, attempt=1, seed=(1 << 63) - 1),) * (MAX_CHOICES - 1),
            sources=(GRINS,) * 16,
            new_keys=MANY_KEYS,
            block_tokens=bytes(MAX_RESERVE_BYTES - 4 * MAX_TOKENS),
            lenders=(GRINS,) * 16,
        ),
        StartStage(
            request_id="r" * 128,
            attempt=1,
            tokens=MAX_TOKENS,
            chunk_tokens=512,
            first_layer=1,
            stop_layer=2,
            keys=MANY_KEYS,
            reuse_blocks=0,
            sources=(GRINS,) * 16,
            sampling=LONGEST_SAMPLING,
            deadline_s=1.0,
            past=bytes(4 * MAX_TOKENS),
            seeds=((1 << 63) - 1,) * MAX_CHOICES,
            tenant=GRINS,
        ),
        HandoffDone(
            request_id="r" * 128,
            attempt=1,
            layers=1,
            blocks=MAX_BLOCKS,
            checksum=(1 << 64) - 1,
            token=1,
            index=1,
            keys=MANY_KEYS,
            parent=b"k" * 16,
            block_tokens=bytes(4 * MAX_TOKENS),
            siblings=((GRINS * 2, (1 << 31) - 1),) * MAX_CHOICES,
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_the_longest_message_of_its_type_fits_an_envelope(message):
    body = encode(message)
    envelope = Envelope(
        version=1 << 48,
        sender="s" * 64,
        incarnation=1 << 48,
        epoch=1 << 48,
        to_incarnation=1 << 48,
        floor=1 << 48,
        sequence=1 << 48,
        ack_epoch=1 << 48,
        ack=1 << 48,
        bodies=(body,),
    )
    assert decode(decode_envelope(encode(envelope)).bodies[0]) == message


def test_a_message_over_the_limit_is_our_bug_and_not_sent():
    with pytest.raises(ValueError, match="split it"):
        encode(
            Envelope(**dict.fromkeys(Envelope.__struct_fields__, 1) | {"sender": "s", "bodies": (bytes(MAX_MESSAGE_BYTES),)})
        )


def test_a_clipped_reason_always_arrives():
    failed = AttemptFailed(request_id="r", attempt=1, reason=clip("é" * 10_000))
    assert decode(encode(failed)) == failed


def test_messages_carry_no_names_of_fields():
    assert msgpack.unpackb(encode(LeaseRenewed(lease_id=7))) == ["LeaseRenewed", 7]


def test_an_unknown_field_is_refused():
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(["LeaseRenewed", 7, 8]))


def test_stop_rule_ends_at_eos_or_length():
    rule = StopRule(max_tokens=3, min_tokens=1, eos_ids=(9,))
    assert rule.reason(9, 1) is None, "min_tokens come before an end"
    assert rule.reason(9, 2) == "stop"
    assert rule.reason(5, 2) is None
    assert rule.reason(5, 3) == "length"
    assert rule.reason(9, 3) == "stop"
