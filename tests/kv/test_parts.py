"""Parts of prompts: found wherever they stand, never on a hash's word, never by another tenant, within a table's bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.kv import parts as module
from mooncake_zmq.kv.block_hash import extend_keys, namespace
from mooncake_zmq.kv.parts import Part, PartTable, marked_parts, part_root, window_hashes

SIZE = 8
ALICE, BOB = (namespace(model="m", layout="l", salt=salt) for salt in ("alice", "bob"))


def run(seed, count, vocabulary=500):
    return np.random.default_rng(seed).integers(0, vocabulary, count).astype(np.int32)


def chain(root, tokens):
    return tuple(extend_keys(part_root(root), tokens.tobytes(), SIZE))


def assert_is_what_it_says(root, tokens, found, start=0):
    """Each is where it says, of a chain of its own tenant, and they do not overlap."""
    for part in found:
        assert start <= part.start < part.stop <= len(tokens)
        assert part.skipped % SIZE == (part.stop - part.start) % SIZE == 0
        start = part.stop
        if part.skipped == 0:
            own = tokens[part.start : part.stop]
            assert chain(root, own) == part.keys[: len(own) // SIZE]


def test_a_part_is_found_at_any_offset_between_other_tokens():
    table = PartTable(SIZE)
    one, two = run(1, 5 * SIZE + 3), run(2, 2 * SIZE)
    assert table.add(ALICE, one) == chain(ALICE, one)
    table.add(ALICE, two)
    for gap in range(2 * SIZE):
        tokens = np.concatenate((run(3, gap), two, run(4, 5), one, run(5, 11)))
        first, second = gap, gap + 2 * SIZE + 5
        expected = [Part(first, first + 2 * SIZE, 0, chain(ALICE, two)), Part(second, second + 5 * SIZE, 0, chain(ALICE, one))]
        assert table.find(ALICE, tokens) == expected
        assert table.find(ALICE, tokens, first + 1) == [
            Part(first + SIZE, first + 2 * SIZE, SIZE, chain(ALICE, two)),
            expected[1],
        ]


def test_what_is_left_of_a_part_is_found_by_its_blocks():
    table = PartTable(SIZE)
    whole = run(1, 6 * SIZE)
    keys = table.add(ALICE, whole)
    tokens = np.concatenate((run(2, 3), whole[SIZE : 3 * SIZE + 4], run(3, 9)))
    assert table.find(ALICE, tokens) == [Part(3, 3 + 2 * SIZE, SIZE, keys)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_what_is_found_has_the_very_tokens_of_what_was_added(data):
    """With few different tokens, so that blocks are alike, and hashes that collide."""
    vocabulary = data.draw(st.integers(1, 3))
    tokens_of = st.integers(0, 60).flatmap(lambda count: st.lists(st.integers(0, vocabulary), min_size=count, max_size=count))
    table = PartTable(4, most_blocks=data.draw(st.integers(1, 30)), most_tenants=2)
    added = {}
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            patch.setattr(module, "window_hashes", lambda tokens, size: window_hashes(tokens, size) % np.uint64(3))
        for _ in range(data.draw(st.integers(1, 6))):
            root = data.draw(st.sampled_from([ALICE, BOB]))
            tokens = np.array(data.draw(tokens_of), np.int32)
            keys = table.add(root, tokens)
            if keys:
                added[root, keys[-1]] = tokens
            table.check()
            for asked in (ALICE, BOB):
                prompt = np.array(data.draw(tokens_of), np.int32)
                start = data.draw(st.integers(0, 10))
                free = start
                for part in table.find(asked, prompt, start):
                    assert free <= part.start < part.stop <= len(prompt)
                    free = part.stop
                    own = added[asked, part.keys[-1]][part.skipped :][: part.stop - part.start]
                    assert own.tolist() == prompt[part.start : part.stop].tolist()
                    assert (
                        part.keys
                        == tuple(extend_keys(part_root(asked), added[asked, part.keys[-1]].tobytes(), 4))[: len(part.keys)]
                    )
                table.check()


def test_two_tenants_share_no_part_and_no_key():
    table = PartTable(SIZE)
    tokens = run(1, 4 * SIZE)
    alice = table.add(ALICE, tokens)
    assert table.find(BOB, tokens) == []
    bob = table.add(BOB, tokens)
    assert not set(alice) & set(bob)
    assert [part.keys for part in table.find(BOB, tokens)] == [bob]


def test_no_exact_chain_has_a_parts_key():
    """Whatever salt a client sends."""
    tokens = run(1, 4 * SIZE)
    roots = [ALICE, *(namespace(model="m", layout="l", salt=salt) for salt in ("", "part:alice", part_root(ALICE).hex()))]
    exact = {key for root in roots for key in (root, *extend_keys(root, tokens.tobytes(), SIZE))}
    assert not exact & {part_root(ALICE), *chain(ALICE, tokens)}


def test_parts_that_were_not_used_are_forgotten_first():
    table = PartTable(SIZE, most_blocks=4)
    one, two, three = (run(seed, 2 * SIZE) for seed in (1, 2, 3))
    table.add(ALICE, one)
    table.add(ALICE, two)
    table.find(ALICE, one)
    table.add(ALICE, three)
    assert [len(table.find(ALICE, each)) for each in (one, two, three)] == [1, 0, 1]
    assert len(table.add(ALICE, run(4, 9 * SIZE))) == 4, "a part of more is cut"
    assert [len(table.find(ALICE, each)) for each in (one, two, three)] == [0, 0, 0]


def test_tenants_that_were_not_seen_are_forgotten_first_and_take_no_room_of_others():
    table = PartTable(SIZE, most_blocks=2, most_tenants=2)
    roots = [namespace(model="m", layout="l", salt=str(number)) for number in range(3)]
    tokens = run(1, 2 * SIZE)
    for root in roots[:2]:
        table.add(root, tokens)
    table.find(roots[0], tokens)
    table.add(roots[2], tokens)
    assert [len(table.find(root, tokens)) for root in roots] == [1, 0, 1]


def test_two_parts_that_share_blocks_are_both_whole():
    table = PartTable(SIZE)
    shared = run(1, 2 * SIZE)
    one, two = (np.concatenate((shared, run(seed, 2 * SIZE))) for seed in (2, 3))
    table.add(ALICE, one)
    table.add(ALICE, two)
    for each in (one, two):
        found = table.find(ALICE, each)
        assert_is_what_it_says(ALICE, each, found)
        assert sum(part.stop - part.start for part in found) == len(each)


def test_marked_parts_are_their_whole_blocks_and_the_same_chains():
    one, two = run(1, 2 * SIZE + 5), run(2, SIZE)
    tokens = np.concatenate((run(3, 7), one, two, run(4, 4)))
    marks = [(7, 7 + len(one)), (7 + len(one), 7 + len(one) + SIZE), (len(tokens) - 4, len(tokens))]
    found = marked_parts(ALICE, tokens, marks, SIZE)
    assert found == [
        Part(7, 7 + 2 * SIZE, 0, chain(ALICE, one)),
        Part(marks[1][0], marks[1][1], 0, chain(ALICE, two)),
    ]
    assert PartTable(SIZE).find(ALICE, tokens) == []


@pytest.mark.parametrize("marks", [[(5, 3)], [(3, 3)], [(0, 10), (9, 12)], [(10, 12), (0, 5)], [(-1, 4)], [(90, 101)]])
def test_marks_that_make_no_sense_are_refused(marks):
    with pytest.raises(ValueError, match="follow one another"):
        marked_parts(ALICE, run(1, 100), marks, SIZE)


def test_the_exact_prefix_comes_first_and_what_lies_behind_it_keeps_its_place():
    part = Part(10, 50, 8, ())
    assert part.behind(0) == part.behind(10) == part
    assert part.behind(13) == Part(13, 50, 11, ())
    assert part.behind(50) is None


@pytest.mark.parametrize("size", [1, 3, 64])
def test_equal_windows_have_equal_hashes_wherever_they_stand(size):
    tokens = run(1, 400, vocabulary=2)
    hashes = window_hashes(tokens, size).tolist()
    assert len(hashes) == 400 - size + 1
    windows = [tuple(tokens[at : at + size].tolist()) for at in range(len(hashes))]
    by_window = {}
    for window, number in zip(windows, hashes, strict=True):
        assert by_window.setdefault(window, number) == number
    assert len(set(by_window.values())) == len(by_window)
