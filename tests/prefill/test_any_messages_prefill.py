"""No message, from whomever and however odd, ends a prefill or spoils its state."""

from dataclasses import replace

import pytest
from actor_harness import LAYOUT as NARROW
from actor_harness import Harness
from adversary import KEYS, VOCABULARY, WORDS, anything, of, pauses, senders
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mooncake_zmq.core.actor import Received
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import (
    BlocksArrived,
    BlocksLeased,
    CancelRequest,
    DecodeDenied,
    DecodeReserved,
    HandoffFailed,
    HandoffReceived,
    ReclaimSlots,
    ReportCorrupt,
    SlotsReserved,
    StartPrefill,
)
from mooncake_zmq.core.work import (
    BlocksCopied,
    ChunkComputed,
    ComputeChunk,
    CopyBlocks,
    SampleTokens,
    TokensSampled,
    WorkFailed,
)
from mooncake_zmq.kv.block_hash import unpack_tokens
from mooncake_zmq.prefill.prefill import Prefill
from mooncake_zmq.prefill.settings import PrefillSettings

LAYOUT = replace(NARROW, vocab_size=VOCABULARY)
B = LAYOUT.block_tokens


@st.composite
def starts(draw):
    """Mostly such as a prefill takes."""
    message = draw(of(StartPrefill))
    tokens = draw(st.integers(1, 6 * B))
    packed = bytes(4 * tokens - 4) + draw(st.sampled_from((*WORDS[:1] * 7, *WORDS)))
    more = {"tokens": packed, "keys": KEYS[: tokens // B], "decode": draw(st.sampled_from(("d0", "d1")))}
    return structs.replace(message, **more, deadline_s=60.0, stages=())


def outcome(node, work, share):
    """What an engine and a copy make of a work; every so often it fails, or the reused blocks are not what they were."""
    if share > 0.9:
        return WorkFailed("odd")
    match work:
        case ComputeChunk(prefix=prefix, outputs=outputs, sampling=sampling, seeds=seeds):
            if prefix and share > 0.7:
                return ChunkComputed((), None, 0.1, failed=(0,), corrupt=(0,) if share > 0.8 else ())
            others = tuple((4, None) for _ in seeds)
            if sampling is not None and 0 < share < 0.2:
                node.late[work.sequence] = ((3, None), *others)
                return ChunkComputed(tuple(5 for _ in outputs), None, share)
            return ChunkComputed(tuple(5 for _ in outputs), None if sampling is None else 3, share, others=others)
        case SampleTokens(logits_of=sequence):
            return TokensSampled(node.late[sequence])
        case CopyBlocks(copies=copies):
            return BlocksCopied(tuple(5 for _ in copies))
    raise TypeError(work)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.just("g"), starts()),
        st.tuples(st.just("say"), st.just("g"), of(StartPrefill, CancelRequest)),
        st.tuples(st.just("say"), st.just("c"), of(BlocksLeased, BlocksArrived, SlotsReserved, ReclaimSlots, ReportCorrupt)),
        st.tuples(
            st.just("say"),
            st.sampled_from(("d0", "d1")),
            of(DecodeReserved, DecodeDenied, HandoffReceived, HandoffFailed, ReportCorrupt),
        ),
        st.tuples(st.just("say"), senders, st.one_of(starts(), anything)),
        st.tuples(st.just("begin"), st.integers(0, 3), starts()),
        st.tuples(st.just("lease"), st.integers(0, 9), st.none()),
        st.tuples(st.just("grow"), st.integers(0, 9), st.none()),
        st.tuples(st.just("grow"), st.integers(0, 9), st.none()),
        st.tuples(st.just("work"), st.floats(0, 1), st.none()),
        st.tuples(st.just("work"), st.floats(0, 0.7), st.none()),
        st.tuples(st.just("wait"), pauses, st.none()),
        st.tuples(st.just("restart"), st.sampled_from(("d0", "c", "g")), st.none()),
    ),
    min_size=15,
    max_size=40,
)


@pytest.mark.filterwarnings("error")
@settings(max_examples=60)
@given(steps)
def test_any_messages_leave_a_prefill_sound(steps):
    node = new_node()
    for what, which, message in steps:
        take_step(node, what, which, message)
        for work in node.works.values():
            assert not isinstance(work, ComputeChunk) or work.tokens, "a chunk computes something"
            assert not isinstance(work, ComputeChunk) or set(unpack_tokens(work.tokens)) <= set(range(VOCABULARY))
    for name in ("d0", "d1", "g"):
        node.down(name)
    while node.works:
        work_id, work = next(iter(node.works.items()))
        node.done(work_id, outcome(node, work, 0.0))
    node.down("c")
    node.advance(100.0)
    assert not node.busy()
    assert not node.sequences


def leased(lease_id, blocks):
    """Perhaps of more blocks than were asked for."""
    columns = {"slots": tuple(range(blocks)), "generations": (1,) * blocks, "checksums": (5,) * blocks}
    return BlocksLeased(lease_id=lease_id, node="c", incarnation=7, **columns, remote=blocks // 2)


def new_node():
    settings = PrefillSettings(slab_bytes=16 * LAYOUT.slot_bytes, chunk_tokens=2 * B, max_active=2, short_jobs=1, max_queued=4)
    node = Harness(Prefill(name="me", host="h0", incarnation=2, settings=settings, layout=LAYOUT, costs=Costs()))
    for name in ("g", "c", "k", "d0", "d1"):
        node.up(name, 7)
    node.late = {}
    return node


def take_step(node, what, which, message):
    match what:
        case "say":
            node.handle(Received(which, message))
        case "begin":
            node.handle(Received("g", message))
            job = node.actor.jobs.of(message.request_id)
            if job is not None and job.lease_id is not None:
                node.handle(Received("c", leased(job.lease_id, 2 * which)))
            reserved = DecodeReserved(request_id=message.request_id, attempt=message.attempt, held_blocks=which)
            node.handle(Received(message.decode, reserved))
        case "lease" if leases := sorted(job.lease_id for job in node.actor.jobs if job.lease_id is not None):
            node.handle(Received("c", leased(leases[which % len(leases)], which)))
        case "grow" if leases := sorted(job.lease_id for job in node.actor.jobs if job.lease_id is not None):
            lease_id, block = leases[which % len(leases)], which // 2
            node.handle(Received("c", structs.replace(leased(lease_id, which % 2), more=True)))
            columns = {"blocks": (block,), "slots": (which,), "generations": (2,), "checksums": (5,)}
            arrived = BlocksArrived(lease_id=lease_id, node="c", incarnation=7, last=which == 9, **columns)
            node.handle(Received("c", arrived))
        case "work" if node.works:
            work_id, work = sorted(node.works.items())[0]
            node.done(work_id, outcome(node, work, which))
        case "wait":
            node.advance(which)
        case "restart":
            node.down(which)
            node.up(which, int(node.now * 1000) + 8)
