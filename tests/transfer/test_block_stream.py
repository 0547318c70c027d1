"""A reader's end of a stream, told anything at all: what it gives is what its owner has, or no block."""

import contextlib
import math
import socket

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.kv.checksum import block_checksum, part_checksums
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.transfer.block_messages import ReadReply, ReadStatus
from mooncake_zmq.transfer.block_stream import StreamChannel
from mooncake_zmq.transfer.channel import ChannelLost, ReadBatch, RemoteRead
from mooncake_zmq.transfer.sealing import Sealer
from mooncake_zmq.transfer.stream import Stream, framed

LAYOUT = BlockLayout(layers=3, kv_heads=1, head_dim=2, block_tokens=4)
BLOCK = np.random.default_rng(1).bytes(LAYOUT.block_bytes)
ROW = tuple(part_checksums(BLOCK, LAYOUT.part_bytes))
REF = SlotRef(node="a", incarnation=1, slot=0, generation=2, checksum=block_checksum(ROW))
KEY = bytes(range(32))
READS = 3


class Sink:
    def __init__(self, into):
        self.into, self.parts = into, []

    def buffer(self):
        return self.into

    def part(self, layer, payload, checksum):
        self.parts.append(bytes(payload))

    def end(self, failure):
        pass


def answered(raw, *, sealed, straight):
    """What a channel makes of bytes that answer three reads of the same block: (failure or None, parts) of each that ended."""
    here, there = socket.socketpair()
    stream = Stream(here, lambda _: None, slice_s=1.0, opens=KEY if sealed else None)
    channel = StreamChannel(stream, LAYOUT)
    reads = [
        RemoteRead(REF, range(3), Sink(memoryview(bytearray(LAYOUT.block_bytes)) if straight else None)) for _ in range(READS)
    ]
    batch = ReadBatch(reads, math.inf, lambda: None, READS)
    for read in reads:
        read.batch = batch
    ended = []
    with there, contextlib.closing(channel), contextlib.suppress(ChannelLost):
        channel.ask(reads)
        there.sendall(raw)
        there.shutdown(socket.SHUT_WR)
        for read, failure in channel.ended():
            ended.append((failure, read.sink.parts))
    return ended


def good(number):
    return bytes(framed(ReadReply(number, ReadStatus.OK, ROW))) + BLOCK


GOOD = b"".join(map(good, range(READS)))
WHOLE = [BLOCK[at : at + LAYOUT.part_bytes] for at in range(0, len(BLOCK), LAYOUT.part_bytes)]


def wire(raw, sealed):
    """The sealed form comes in three records."""
    third = len(raw) // 3
    sealer = Sealer(KEY)
    pieces = (raw[:third], raw[third : 2 * third], raw[2 * third :])
    return b"".join(bytes(each) for piece in pieces for each in sealer.records([memoryview(piece)])) if sealed else raw


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("straight", [True, False])
def test_what_its_owner_sends_arrives(sealed, straight):
    assert answered(wire(GOOD, sealed), sealed=sealed, straight=straight) == [(None, WHOLE)] * READS


changes = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=3)


@settings(max_examples=150)
@given(changes=changes, cut=st.one_of(st.none(), st.floats(0, 1)), sealed=st.booleans(), straight=st.booleans())
def test_what_is_changed_or_cut_under_way_is_no_block(changes, cut, sealed, straight):
    raw = bytearray(wire(GOOD, sealed))
    for place, flip in changes:
        raw[int(place * len(raw))] ^= flip
    if cut is not None:
        del raw[int(cut * len(raw)) :]
    for failure, parts in answered(bytes(raw), sealed=sealed, straight=straight):
        assert failure or parts == WHOLE
        assert parts == WHOLE[: len(parts)]


@settings(max_examples=100)
@given(raw=st.one_of(st.binary(max_size=300), st.binary(max_size=40).map(lambda head: head + GOOD)), sealed=st.booleans())
def test_any_bytes_at_all_end_reads_or_the_lane_and_nothing_else(raw, sealed):
    for failure, parts in answered(raw, sealed=sealed, straight=True):
        assert failure or parts == WHOLE


@settings(max_examples=60)
@given(row=st.lists(st.integers(0, 2**64 - 1), max_size=5).map(tuple), status=st.sampled_from(ReadStatus))
def test_a_row_of_checksums_that_its_owner_does_not_have_is_no_block(row, status):
    lie = bytes(framed(ReadReply(0, status, row))) + (BLOCK if status is ReadStatus.OK else b"")
    ended = answered(lie + good(1) + good(2), sealed=False, straight=True)
    if status is ReadStatus.OK and len(row) != LAYOUT.layers:
        assert ended == []
    else:
        failure = ReadFailure.CORRUPT if status is ReadStatus.OK else ReadFailure.UNREACHED
        assert ended == [(failure, []), (None, WHOLE), (None, WHOLE)]
