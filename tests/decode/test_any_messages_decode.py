"""No message, from whomever and however odd, ends a decode or spoils its state."""

from dataclasses import replace

import pytest
from actor_harness import LAYOUT as NARROW
from actor_harness import Harness
from adversary import KEYS, NAMES, VOCABULARY, anything, of, pauses, senders
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mooncake_zmq.core.actor import PeerDown, Received
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import (
    BlocksLeased,
    BlocksLent,
    CancelRequest,
    FillLoan,
    HandoffBlocks,
    HandoffDone,
    HandoffFailed,
    LayersReady,
    LendBlocks,
    LoanFilled,
    LoanPlace,
    ReserveDecode,
    Sampling,
    SlotRef,
    SlotsReserved,
    StopRule,
)
from mooncake_zmq.core.routes import SAYS
from mooncake_zmq.core.work import (
    BlocksCopied,
    BlocksPulled,
    BorrowParts,
    CopyBlocks,
    DecodeStep,
    Done,
    ForkSequence,
    LendSequence,
    PullBlocks,
    SampleTokens,
    SequenceForked,
    SequenceLent,
    StepDecoded,
    TakeBack,
    TokensSampled,
    WorkFailed,
)
from mooncake_zmq.decode.decode import Decode
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.kv.checksum import block_checksum

LAYOUT = replace(NARROW, vocab_size=VOCABULARY)
B = LAYOUT.block_tokens
LAYERS = LAYOUT.layers
PLACE = LoanPlace(where="there", number=1, token=b"t", secret=b"s", sealed=True)


@st.composite
def reservations(draw):
    """Mostly such as a decode takes."""
    message = draw(of(ReserveDecode))
    tokens = draw(st.integers(1, draw(st.sampled_from((4, 4, 20))) * B))
    tail = bytes(tokens % B * 4)
    reuse = KEYS[: draw(st.integers(0, tokens // B))]
    lenders = draw(st.sampled_from(((), ("d1",), ("d1", "d0"))))
    more = {"gateway": "g", "tokens": tokens, "tail": tail, "reuse_keys": reuse, "deadline_s": 60.0, "lenders": lenders}
    if draw(st.booleans()):
        more |= {
            "stop": StopRule(max_tokens=draw(st.sampled_from((2, 5, 17, 60, 1 << 48)))),
            "first_index": 0,
            "tbt_slo_s": 0.0,
        }
    return structs.replace(message, **more)


def complete(request):
    """What a prefill says of a request whose KV is written."""
    blocks = LAYOUT.blocks_for(request.request.tokens)
    whole = block_checksum([block_checksum(list(range(LAYERS)))] * (blocks - request.held_blocks))
    name = {"request_id": request.request.request_id, "attempt": request.request.attempt}
    siblings = tuple((each.request.request_id, 2) for each in request.siblings)
    blocks -= request.held_blocks
    return HandoffDone(**name, layers=LAYERS, blocks=blocks, checksum=whole, token=1, index=0, siblings=siblings)


def outcome(work, share):
    """What an engine and a copy make of a work; every so often it fails."""
    if share > 0.9:
        return WorkFailed("odd")
    match work:
        case PullBlocks(loads=loads):
            parts = tuple((load.block, layer, layer) for load in loads for layer in range(load.first_layer, load.stop_layer))
            return BlocksPulled(parts, ())
        case DecodeStep(entries=entries, steps=steps):
            made = max(1, int(share * steps))
            late = tuple(place for place, _ in enumerate(entries) if 0 < share < 0.2 and place % 2 == 0)
            return StepDecoded(tuple(tuple(7 for _ in entries) for _ in range(made)), 0.01, sat_out=late)
        case SampleTokens():
            return TokensSampled(((7, None),))
        case ForkSequence():
            return SequenceForked()
        case LendSequence():
            return SequenceLent(PLACE)
        case TakeBack() | BorrowParts():
            return Done()
        case CopyBlocks(copies=copies):
            return BlocksCopied(tuple(5 for _ in copies))
    raise TypeError(work)


few = st.lists(st.integers(0, 25), max_size=2)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.sampled_from(("p0", "p1")), reservations()),
        st.tuples(st.just("say"), st.sampled_from(("p0", "p1")), of(HandoffBlocks, LayersReady, HandoffDone, HandoffFailed)),
        st.tuples(st.just("say"), st.just("g"), of(CancelRequest)),
        st.tuples(st.just("say"), st.just("c"), of(BlocksLeased, SlotsReserved)),
        st.tuples(st.just("say"), senders, st.one_of(reservations(), anything)),
        st.tuples(st.just("begin"), st.sampled_from(("p0", "p1")), reservations()),
        st.tuples(st.just("hand off"), st.integers(0, 3), st.none()),
        st.tuples(st.just("hand off"), st.integers(0, 3), st.none()),
        st.tuples(st.just("say"), st.sampled_from(("d0", "d1")), of(*SAYS["decode", "decode"])),
        st.tuples(st.just("lend"), st.none(), st.none()),
        st.tuples(st.just("lend"), st.none(), st.none()),
        st.tuples(st.just("borrow"), few, st.integers(1, 9)),
        st.tuples(st.just("lease"), st.integers(0, 9), st.none()),
        st.tuples(st.just("work"), st.floats(0, 1), st.none()),
        st.tuples(st.just("work"), st.floats(0, 0.9), st.none()),
        st.tuples(st.just("wait"), pauses, st.none()),
        st.tuples(st.just("restart"), st.sampled_from(("p0", "c", "g", "d1")), st.none()),
    ),
    min_size=15,
    max_size=40,
)


@pytest.mark.filterwarnings("error")
@settings(max_examples=60)
@given(steps, st.sampled_from((1, 8)))
def test_any_messages_leave_a_decode_sound(steps, max_steps):
    node = new_node(max_steps)
    for what, which, message in steps:
        take_step(node, what, which, message)
        for work in node.works.values():
            assert not isinstance(work, PullBlocks) or all(0 < load.tokens <= B for load in work.loads)
            assert not isinstance(work, DecodeStep) or all(entry.token < VOCABULARY for entry in work.entries)
        for request in node.actor.requests.live.values():
            assert len(request.wanted) <= 20 * LAYERS
    assert node.longest_sequence <= 16 * B
    for name in ("p0", "p1", "g"):
        node.down(name)
    for name in NAMES:
        node.handle(PeerDown(name, "test"))
    while node.works:
        work_id, work = next(iter(node.works.items()))
        node.done(work_id, outcome(work, 0.0))
    node.down("c")
    assert not node.busy()
    assert node.sequences == set(node.actor.kept_sequences)


def new_node(max_steps):
    settings = DecodeSettings(
        capacity_tokens=16 * B, max_batch=3, max_requests=6, max_steps=max_steps, lend_tokens=6 * B, borrow=True
    )
    node = Harness(Decode(name="me", host="h0", incarnation=2, settings=settings, layout=LAYOUT, costs=Costs()))
    for name in ("g", "c", "k", "p0", "d0", "d1"):
        node.up(name, 7)
    node.up("p1", 7, host="h1")
    return node


def open_leases(node):
    asked = [request.segment.lease_id for request in node.actor.requests if request.segment is not None]
    return sorted(asked + [lease_id for request in node.actor.requests for lease_id in request.reading])


def take_step(node, what, which, message):
    match what:
        case "say":
            node.handle(Received(which, message))
        case "begin":
            node.handle(Received(which, message))
            request = node.actor.requests.live.get(message.request_id)
            if request is not None and request.request is message:
                hand_off(node, request)
        case "hand off":
            live = list(node.actor.requests.live.values())
            if live:
                hand_off(node, live[which % len(live)])
        case "lease" if leases := open_leases(node):
            columns = {"slots": tuple(range(which)), "generations": (1,) * which, "checksums": (5,) * which}
            lease = BlocksLeased(lease_id=leases[which % len(leases)], node="c", incarnation=7, **columns)
            node.handle(Received("c", lease))
        case "lend":
            lend(node)
            for ask in node.take(FillLoan, "d1"):
                parts = [(block, layer, layer) for block, _, first, stop in ask.loads for layer in range(first, stop)]
                node.handle(Received("d1", LoanFilled(loan=ask.loan, parts=tuple(parts))))
        case "borrow":
            borrower = structs.replace(RESERVE, attempt=message, tokens=20 * B, lenders=("d1",))
            node.handle(Received("p0", borrower))
            lend(node)
            for work_id, work in list(node.works.items()):
                if isinstance(work, BorrowParts):
                    node.done(work_id, Done())
            request = node.actor.requests.live.get("r")
            if request is not None and request.request is borrower:
                hand_off(node, request)
            for ask in node.take(FillLoan, "d1") if which else ():
                node.handle(Received("d1", LoanFilled(loan=ask.loan, parts=(), failed=tuple(which[:1]), corrupt=tuple(which))))
        case "work" if node.works:
            work_id, work = sorted(node.works.items())[0]
            node.done(work_id, outcome(work, which))
        case "wait":
            node.advance(which)
        case "restart":
            node.down(which)
            node.up(which, int(node.now * 1000) + 8)


def lend(node):
    for ask in node.take(LendBlocks, "d1"):
        node.handle(Received("d1", BlocksLent(loan=ask.loan, blocks=ask.blocks, place=PLACE)))


def hand_off(node, request):
    """As a prefill does it whose KV is all there."""
    name = {"request_id": request.request.request_id, "attempt": request.request.attempt}
    first, stop = request.held_blocks, LAYOUT.blocks_for(request.request.tokens)
    refs = tuple(
        SlotRef(node=request.prefill, incarnation=7, slot=block, generation=1, checksum=0) for block in range(first, stop)
    )
    node.handle(Received(request.prefill, HandoffBlocks(**name, first_block=first, sources=refs, ready=True)))
    node.handle(Received(request.prefill, complete(request)))


RESERVE = ReserveDecode(
    request_id="r",
    attempt=1,
    gateway="g",
    tokens=2 * B,
    reuse_keys=(),
    last_key=KEYS[0],
    tail=b"",
    first_index=0,
    sampling=Sampling(),
    stop=StopRule(max_tokens=1 << 48),
    deadline_s=60.0,
)


def test_what_is_handed_off_again_ends_the_request():
    """Else a prefill could make a decode remember as much as it likes."""
    node = new_node(1)
    node.handle(Received("p0", RESERVE))
    assert node.longest_sequence == 16 * B
    refs = tuple(SlotRef(node="p0", incarnation=7, slot=slot, generation=1, checksum=0) for slot in range(2))
    again = HandoffBlocks(request_id="r", attempt=1, first_block=0, sources=refs, ready=True)
    for _ in range(2):
        assert not node.take(HandoffFailed)
        node.handle(Received("p0", again))
    assert node.one(HandoffFailed, "p0").reason == "blocks handed off twice"


@pytest.mark.parametrize("token", [VOCABULARY, (1 << 31) - 1])
def test_a_token_that_the_model_does_not_have_is_never_fed(token):
    node = new_node(1)
    node.handle(Received("p0", RESERVE))
    request = node.actor.requests.live["r"]
    node.handle(Received("p0", structs.replace(complete(request), token=token)))
    assert node.one(HandoffFailed, "p0").reason == "a token that the model does not have"
