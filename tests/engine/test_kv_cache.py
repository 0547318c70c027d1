"""Parts in, parts out, and memory that returns."""

import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mooncake_zmq.engine import backend
from mooncake_zmq.engine.kept_memory import KeptMemory
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.prepare import default_cache_dir

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture(params=["NumPy", "machine code"])
def sequences(request):
    """Make sequences of a kind; machine code places parts into the second."""
    if request.param == "NumPy":
        return SequenceKV
    object_code = pytest.importorskip("mooncake_zmq.engine.machine_code.object_code", reason="needs Numba")
    from mooncake_zmq.engine.machine_code.placed_parts import PlacingSequenceKV

    return partial(PlacingSequenceKV, object_code.load(default_cache_dir()))


@pytest.mark.parametrize("head_dim", [8, 12, 64])
def test_parts_come_back_as_written_at_any_offset(sequences, head_dim):
    random = np.random.default_rng(3)
    sequence = sequences(layers=2, kv_heads=3, head_dim=head_dim, capacity_tokens=500)
    plain = np.zeros((2, 2, 500, 3, head_dim), dtype=np.float32)
    for _ in range(300):
        layer, start = int(random.integers(2)), int(random.integers(500))
        stop = int(random.integers(start, 501))
        part = random.standard_normal((2, stop - start, 3, head_dim), dtype=np.float32)
        sequence.write_part(layer, start, part)
        plain[layer, :, start:stop] = part
        start = int(random.integers(500))
        stop = int(random.integers(start, 501))
        out = np.full((2, stop - start, 3, head_dim), np.nan, dtype=np.float32)
        sequence.read_part(layer, start, stop, out)
        np.testing.assert_array_equal(out, plain[layer, :, start:stop])


def test_parts_written_together_change_nothing_but_their_own_tokens(sequences):
    random = np.random.default_rng(5)
    sequence, one_by_one = (kind(layers=3, kv_heads=2, head_dim=16, capacity_tokens=200) for kind in (sequences, SequenceKV))
    for each in (sequence, one_by_one):
        each.keys[:] = each.values[:] = -1.0
    blocks = random.standard_normal((5, 3, 2, 32, 2, 16), dtype=np.float32)
    parts = [(layer, 7 + 32 * block, 32 - block, blocks[block, layer]) for block in range(5) for layer in range(3)]
    sequence.write_parts(parts)
    for layer, start, tokens, part in parts:
        one_by_one.store(layer, start, part[0, :tokens], part[1, :tokens])
    np.testing.assert_array_equal(sequence.keys, one_by_one.keys)
    np.testing.assert_array_equal(sequence.values, one_by_one.values)


def test_parts_beyond_a_sequence_are_refused_before_any_is_written(sequences):
    sequence = sequences(layers=1, kv_heads=2, head_dim=8, capacity_tokens=40)
    part = np.ones((2, 32, 2, 8), dtype=np.float32)
    for start, tokens in ((9, 32), (-1, 2)):
        with pytest.raises(ValueError, match="capacity of 40"):
            sequence.write_parts([(0, start, tokens, part)])
    with pytest.raises(IndexError):
        sequence.write_parts([(1, 0, 32, part)])


def test_parts_may_be_views_of_something_larger(sequences):
    sequence = sequences(layers=1, kv_heads=2, head_dim=4, capacity_tokens=300)
    part = np.random.default_rng(4).standard_normal((2, 300, 2, 4), dtype=np.float32)
    sequence.write_part(0, 20, part[:, ::2])
    large = np.zeros((2, 300, 2, 8), dtype=np.float32)
    sequence.read_part(0, 20, 170, large[:, ::2, :, 4:])
    np.testing.assert_array_equal(large[:, ::2, :, 4:], part[:, ::2])
    assert not large[:, 1::2].any()


def test_memory_is_committed_as_written_and_returned_by_close():
    before = resident_bytes()
    sequence = SequenceKV(layers=30, kv_heads=3, head_dim=64, capacity_tokens=100_000)  # 4.6 GB if it were committed
    assert resident_bytes() - before < 8 << 20
    part = np.ones((2, 2048, 3, 64), dtype=np.float32)
    for layer in range(30):
        sequence.write_part(layer, 0, part)
    assert resident_bytes() - before > 80 << 20
    view = sequence.values  # a view that someone still holds must not keep the memory of a sequence that is mostly empty
    sequence.close()
    sequence.close()
    assert resident_bytes() - before < 16 << 20
    assert view[0, 0, 0, 0] == 0


@pytest.fixture
def kept(monkeypatch):
    """What this process keeps, nothing at first."""
    fresh = KeptMemory(limit_bytes=8 << 20)
    monkeypatch.setattr(backend, "of_this_process", fresh)
    return fresh


def full_sequence(tokens):
    sequence = SequenceKV(layers=2, kv_heads=2, head_dim=64, capacity_tokens=tokens)
    sequence.expect(tokens)
    return sequence


def test_the_memory_of_a_full_sequence_is_used_by_the_next_also_a_longer_one(kept):
    first = full_sequence(600)
    places = {first.keys.ctypes.data, first.values.ctypes.data}
    first.keys[:] = first.values[:] = 7
    first.close()
    first.close()
    second = full_sequence(700)
    assert {second.keys.ctypes.data, second.values.ctypes.data} == places
    assert second.keys.shape == (2, 2, 11, 64, 64)
    assert 7 in second.values, "it was not cleared"
    other = full_sequence(600)
    assert not places & {other.keys.ctypes.data, other.values.ctypes.data}, "a sequence's memory is its own"
    assert not other.keys.any()


def test_no_more_is_kept_than_the_limit_and_the_oldest_goes_first(kept):
    sequences = [full_sequence(2048) for _ in range(5)]  # 2 MiB of keys and of values each
    last = sequences[-1].values.ctypes.data
    before = resident_bytes()
    for sequence in sequences:
        sequence.keys[:] = sequence.values[:] = 1
    for sequence in sequences:
        sequence.close()
    assert resident_bytes() - before < 12 << 20
    assert last in {
        getattr(full, what).ctypes.data for full in (full_sequence(2048), full_sequence(2048)) for what in ("keys", "values")
    }


def test_a_short_sequence_does_not_take_the_memory_of_a_long_one_while_a_shorter_is_kept(kept):
    long, short = full_sequence(2000), full_sequence(300)
    places = {short.keys.ctypes.data, short.values.ctypes.data}
    short.close()
    long.close()
    again = full_sequence(300)
    assert {again.keys.ctypes.data, again.values.ctypes.data} == places


def large_page_bytes(sequence):
    """Of its keys, as the kernel counts them."""
    address = sequence.keys.ctypes.data
    lines = Path("/proc/self/smaps").read_text().splitlines()
    for line in lines:
        first, _, rest = line.partition("-")
        if rest and all(digit in "0123456789abcdef" for digit in first):
            start, stop = int(first, 16), int(rest.split()[0], 16)
        elif line.startswith("AnonHugePages:") and start <= address < stop:
            return int(line.split()[1]) << 10
    raise AssertionError("not mapped")


@pytest.mark.skipif(not LARGE_PAGES.exists() or "[never]" in LARGE_PAGES.read_text(), reason="this kernel gives no large pages")
@pytest.mark.parametrize(("tokens", "is_large"), [(2048, True), (1024, True), (1000, False)])
def test_a_sequence_that_will_be_mostly_full_lies_in_large_pages(tokens, is_large):
    sequence = SequenceKV(layers=8, kv_heads=3, head_dim=64, capacity_tokens=2048)
    sequence.expect(tokens)
    sequence.write_part(0, 0, np.ones((2, 16, 3, 64), dtype=np.float32))
    assert bool(large_page_bytes(sequence)) == is_large
    sequence.close()
    sequence.expect(tokens)  # of a sequence that is dead: nothing


def test_ranges_outside_the_capacity_are_refused():
    sequence = SequenceKV(layers=1, kv_heads=1, head_dim=2, capacity_tokens=100)
    part = np.zeros((2, 10, 1, 2), dtype=np.float32)
    for start in (-1, 91, 100):
        with pytest.raises(ValueError):
            sequence.write_part(0, start, part)
        with pytest.raises(ValueError):
            sequence.read_part(0, start, start + 10, part)
    for length in (-1, 101):
        with pytest.raises(ValueError):
            sequence.set_length(length)


def test_a_copy_thread_reads_while_another_writes_later_tokens():
    sequence = SequenceKV(layers=1, kv_heads=1, head_dim=4, capacity_tokens=64 * 200)
    first = np.random.default_rng(5).standard_normal((2, 100, 1, 4), dtype=np.float32)
    sequence.write_part(0, 0, first)
    part = np.ones((2, 37, 1, 4), dtype=np.float32)
    writer = threading.Thread(target=lambda: [sequence.write_part(0, at, part) for at in range(100, 12_000, 37)])
    writer.start()
    out = np.empty_like(first)
    while writer.is_alive():
        sequence.read_part(0, 0, 100, out)
        np.testing.assert_array_equal(out, first)
    writer.join()
