"""Records of a stream: what was sealed comes out whatever the sizes on either side, and anything else ends it."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.transfer import sealing
from mooncake_zmq.transfer.sealing import GATHERED_BELOW_BYTES, RECORD_BYTES, TAG_BYTES, Broken, Opener, Sealer

KEY = bytes(range(32))


def sealed(*values, key=KEY):
    """Each record of one stream, on the wire."""
    sealer = Sealer(key)
    return [bytes(record) for value in values for record in sealer.records([memoryview(view) for view in value])]


def fed(opener, raw, steps):
    """Give an opener bytes as a socket would, and take what it opens in places of any size."""
    opened = bytearray()
    step = iter(steps)
    while True:
        place = memoryview(bytearray(next(step)))
        if taken := opener.take(place):
            opened += place[:taken]
            continue
        if not raw:
            return bytes(opened)
        room = opener.wanted()
        count = min(len(room), len(raw), next(step))
        room[:count] = raw[:count]
        opener.came(count)
        raw = raw[count:]


lengths = st.one_of(
    st.integers(1, 300), st.integers(GATHERED_BELOW_BYTES - 2, GATHERED_BELOW_BYTES + 2), st.integers(1, 2 * RECORD_BYTES + 3)
)
steps = st.lists(st.integers(1, 70_000), max_size=6)


@settings(max_examples=40)
@given(views=st.lists(st.lists(lengths, min_size=1, max_size=4), min_size=1, max_size=3), steps=steps)
def test_what_was_sealed_comes_out_whatever_the_sizes_on_either_side(views, steps):
    values = [[bytes([17 * i % 256]) * length for i, length in enumerate(lengths, n)] for n, lengths in enumerate(views)]
    records = sealed(*values)
    assert max(map(len, records)) <= RECORD_BYTES + TAG_BYTES + 4
    sizes = itertools.cycle([*steps, RECORD_BYTES])
    assert fed(Opener(KEY), memoryview(b"".join(records)), sizes) == b"".join(b"".join(value) for value in values)


def opened(raw):
    """All of it, or Broken."""
    return fed(Opener(KEY), memoryview(raw), itertools.repeat(RECORD_BYTES))


VALUES = ([b"one" * 30], [b"two" * 40], [b"three" * 50])


@settings(max_examples=80)
@given(data=st.data())
def test_one_changed_bit_anywhere_opens_nothing_behind_it(data):
    raw = bytearray(b"".join(sealed(*VALUES)))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Broken):  # where its length grew, more has to come before anybody can tell
        opened(bytes(raw) + bytes(2 * RECORD_BYTES))


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2), (0, 0, 1, 2), (1, 2), (0, 1, 1)], ids=str)
def test_a_record_that_is_moved_left_out_or_repeated_does_not_open(order):
    records = sealed(*VALUES)
    with pytest.raises(Broken):
        opened(b"".join(records[number] for number in order))


def test_a_record_that_is_cut_gives_nothing():
    (record,) = sealed(VALUES[0])
    for length in range(len(record)):
        assert opened(record[:length]) == b""


@pytest.mark.parametrize("length", [0, RECORD_BYTES + 1, 0xFFFFFFFF])
def test_a_length_that_no_record_has_is_refused_before_its_bytes_come(length):
    with pytest.raises(Broken, match=f"a record of {length} bytes"):
        opened(length.to_bytes(4, "little"))


def test_another_streams_records_do_not_open():
    with pytest.raises(Broken):
        opened(b"".join(sealed(*VALUES, key=bytes(32))))


def test_a_key_is_for_so_many_records_and_no_more(monkeypatch):
    monkeypatch.setattr(sealing, "MAX_RECORDS", 2)
    with pytest.raises(Broken):
        sealed(*VALUES)
    monkeypatch.undo()
    raw = b"".join(sealed(*VALUES))
    monkeypatch.setattr(sealing, "MAX_RECORDS", 2)
    with pytest.raises(Broken):
        opened(raw)


def test_equal_bytes_are_sealed_differently_each_time():
    records = sealed([b"same" * 20], [b"same" * 20])
    assert records[0] != records[1]
    assert b"same" not in b"".join(records)


def test_nothing_at_all_takes_no_record():
    long = bytes(GATHERED_BELOW_BYTES)
    records = sealed([b"", long, b""])
    assert len(records) == 1
    assert opened(b"".join(records)) == long
