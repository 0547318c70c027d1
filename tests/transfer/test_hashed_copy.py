"""Copies with a checksum on the way: the bytes are their source's, and the checksum is xxhash's, whichever way made both."""

import ctypes
import mmap
import os
import signal
import sys
import threading
from random import Random

import pytest
import xxhash

from mooncake_zmq.store.memory import gather, scatter
from mooncake_zmq.transfer import hashed_copy
from mooncake_zmq.transfer.hashed_copy import PIECE_BYTES, ROUTINE_FROM_BYTES, Routine, copy_hashed, copy_in_pieces, copy_spans

ROOM = 3 * PIECE_BYTES
PAST_FROM_BYTES = 1 << 20
EDGES = [1, 240, 241, 255, 256, 257, 1023, 1024, 1025, 1087, 1088, 1089, 2049, ROUTINE_FROM_BYTES, 100_001]
PIECES = [PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 63]


@pytest.fixture(scope="module")
def source():
    return bytearray(Random(1).randbytes(ROOM))


@pytest.fixture(scope="module")
def routine():
    pytest.importorskip("llvmlite.binding")
    return Routine()


def address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def in_one(copy):
    """What copies spans, for one."""
    return lambda target, source, size: copy(target, ((source, size),), size, outward=False)


def check(copy, source: bytearray, at: int, to: int, size: int) -> None:
    target = bytearray(ROOM)
    checksum = copy(address(target) + to, address(source) + at, size)
    wanted = source[at : at + size]
    assert checksum == xxhash.xxh3_64_intdigest(wanted)
    assert target == bytes(to) + wanted + bytes(ROOM - to - size)


@pytest.mark.parametrize("size", [*EDGES, *PIECES])
def test_pieces_make_the_checksum_of_the_whole(source, size):
    check(in_one(copy_in_pieces), source, 5, 11, size)


@pytest.mark.parametrize("size", [size for size in [*EDGES, *PIECES] if size > 240])
def test_the_routine_makes_the_same_checksum(source, routine, size):
    check(in_one(routine), source, 5, 11, size)


def test_the_routine_is_right_for_any_size_and_place(source, routine):
    random = Random(2)
    for _ in range(200):
        size = random.randint(241, 20_000)
        check(in_one(routine), source, random.randrange(ROOM - size), random.randrange(ROOM - size), size)


@pytest.mark.parametrize("to", [0, 1, 32, 64])
@pytest.mark.parametrize("more", [0, 1, 63, 64, 65, 1024])
def test_what_is_stored_past_the_cache_is_all_there(source, routine, to, more):
    size = PAST_FROM_BYTES + more
    much = mmap.mmap(-1, size)
    much[:] = (source * 2)[:size]
    with mmap.mmap(-1, 2 * PAST_FROM_BYTES) as target:  # which begins where a line of the cache does
        place, origin = (ctypes.c_char.from_buffer(each) for each in (target, much))
        checksum = in_one(routine)(ctypes.addressof(place) + to, ctypes.addressof(origin), size)
        assert checksum == xxhash.xxh3_64_intdigest(much)
        assert target[:] == bytes(to) + much[:] + bytes(2 * PAST_FROM_BYTES - to - size)
        del place, origin


@pytest.mark.parametrize("is_refused", [True, False])
def test_without_the_compiler_or_leave_to_run_code_copies_go_in_pieces(source, monkeypatch, is_refused):
    def refuse(*_args, **options):
        if options.get("prot", 0) & mmap.PROT_EXEC:
            raise PermissionError(13, "Permission denied")

    if is_refused:
        monkeypatch.setattr(hashed_copy.mmap, "mmap", refuse)
    else:
        monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    monkeypatch.setattr(hashed_copy, "_routine", hashed_copy._Once())
    check(copy_hashed, source, 0, 0, ROOM)
    assert hashed_copy._routine.get() is None


def test_threads_that_copy_first_share_one_routine(source, monkeypatch):
    pytest.importorskip("llvmlite.binding")
    made, start = [], threading.Barrier(4)

    class Counted(Routine):
        def __init__(self):
            made.append(self)
            super().__init__()

    def first_copy():
        start.wait()
        check(copy_hashed, source, 0, 0, ROUTINE_FROM_BYTES)

    monkeypatch.setattr(hashed_copy, "Routine", Counted)
    monkeypatch.setattr(hashed_copy, "_routine", hashed_copy._Once())
    threads = [threading.Thread(target=first_copy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


@pytest.mark.parametrize(
    "cuts", [(), (1,), (PIECE_BYTES,), (PIECE_BYTES - 1, PIECE_BYTES + 1, 2 * PIECE_BYTES), (7, 8, 9, 400_000)]
)
@pytest.mark.parametrize("hashed", [True, False])
def test_a_value_in_several_places_has_the_checksum_of_the_whole(source, cuts, hashed):
    size = ROOM - 13
    edges = [0, *cuts, size]
    spans = [(address(source) + start, stop - start) for start, stop in zip(edges, edges[1:], strict=False)]
    cell, back = bytearray(size), bytearray(ROOM)
    expected = xxhash.xxh3_64_intdigest(source[:size]) if hashed else 0
    assert gather(spans, address(cell), size, hashed=hashed) == expected
    assert cell == source[:size]
    places = [(address(back) + start, stop - start) for start, stop in zip(edges, edges[1:], strict=False)]
    assert scatter(address(cell), size, places, hashed=hashed) == expected
    assert back == source[:size] + bytes(13)


@pytest.mark.parametrize("outward", [True, False])
@pytest.mark.parametrize("way", ["routine", "pieces"])
def test_spans_of_whole_stripes_are_copied_in_one_call_either_way(source, routine, way, outward):
    random = Random(3)
    copy = routine if way == "routine" else copy_in_pieces
    for _ in range(300):
        lengths = [64 * random.randint(1, 40) for _ in range(random.randint(0, 12))] + [random.randint(241, 3000)]
        size = sum(lengths)
        whole, places = bytearray(size), [bytearray(length) for length in lengths]
        cuts = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
        wanted = source[:size]
        if outward:
            whole[:] = wanted
        else:
            for place, start, stop in zip(places, cuts, cuts[1:], strict=False):
                place[:] = wanted[start:stop]
        spans = [(address(place), len(place)) for place in places]
        assert copy(address(whole), spans, size, outward=outward) == xxhash.xxh3_64_intdigest(wanted)
        assert whole == wanted == b"".join(places)


@pytest.mark.parametrize("lengths", [(64, 64, 64, 64), (64, 128, 64, 1), (192, 64, 64), (256, 64), (64, 192, 63), (241,)])
def test_the_last_stripe_may_be_all_of_the_last_span_or_of_none(source, routine, lengths):
    size = sum(lengths)
    places = [bytearray(length) for length in lengths]
    spans = [(address(place), len(place)) for place in places]
    assert routine(address(source), spans, size, outward=True) == xxhash.xxh3_64_intdigest(source[:size])
    assert b"".join(places) == source[:size]


def test_many_spans_are_one_call_of_the_routine(source, monkeypatch):
    calls = []

    class Counted:
        def __call__(self, whole, spans, size, *, outward):
            calls.append(len(spans))
            return copy_in_pieces(whole, spans, size, outward=outward)

    monkeypatch.setattr(hashed_copy, "Routine", Counted)
    monkeypatch.setattr(hashed_copy, "_routine", hashed_copy._Once())
    cell = bytearray(64 * 1024)
    spans = [(address(source) + 1024 * number, 1024) for number in range(64)]
    copy_spans(address(cell), spans, len(cell), outward=False)
    assert calls == [2, 2, 64]  # the first two: whether it is right
    assert cell == source[: len(cell)]


class TooOld:
    def __init__(self):
        raise RuntimeError("LLVM IR parsing error")


class Wrong:
    def __call__(self, whole, spans, size, *, outward):
        copy_in_pieces(whole, spans, size, outward=outward)
        return 7


@pytest.mark.parametrize("kind", [TooOld, Wrong])
def test_a_routine_that_cannot_be_made_or_errs_is_asked_for_once_and_never_used(source, monkeypatch, kind):
    made = []
    monkeypatch.setattr(hashed_copy, "Routine", lambda: (made.append(kind), kind())[1])
    monkeypatch.setattr(hashed_copy, "_routine", hashed_copy._Once())
    for _ in range(3):
        check(copy_hashed, source, 0, 0, ROUTINE_FROM_BYTES)
    assert made == [kind]


def test_a_child_of_a_fork_while_the_routine_is_made_copies_too(source):
    with hashed_copy._routine._making:
        child = os.fork()
        if not child:
            signal.alarm(20)
            hashed_copy._routine._is_made = False
            check(copy_hashed, source, 0, 0, ROUTINE_FROM_BYTES)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
