"""Parts of prompts: found wherever they stand, by their tokens and not by a hash alone, by their own tenant, within
a table's bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.kv import parts as module
from mooncake_zmq.kv.block_hash import extend_keys, namespace
from mooncake_zmq.kv.parts import Part, PartTable, window_hashes

SIZE = 8
ALICE, BOB = (namespace(model="m", layout="l", salt=salt) for salt in ("alice", "bob"))


def run(seed, count, vocabulary=500):
    return np.random.default_rng(seed).integers(0, vocabulary, count).astype(np.int32)


def chain(root, tokens, size=SIZE):
    return tuple(extend_keys(root, tokens.tobytes(), size))


def add(table, root, tokens):
    """Adds a prompt with all of its keys, and returns these as far as the table remembers them."""
    keys = chain(root, tokens, table.block_tokens)
    table.add(root, tokens, keys)
    return keys[: table.most_blocks]


def assert_is_what_it_says(root, tokens, found):
    """Each is where it says, of a chain of its own tenant, and they do not overlap."""
    start = 0
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
    assert add(table, ALICE, one) == chain(ALICE, one)
    add(table, ALICE, two)
    for gap in range(2 * SIZE):
        tokens = np.concatenate((run(3, gap), two, run(4, 5), one, run(5, 11)))
        first, second = gap, gap + 2 * SIZE + 5
        expected = [Part(first, first + 2 * SIZE, 0, chain(ALICE, two)), Part(second, second + 5 * SIZE, 0, chain(ALICE, one))]
        assert table.find(ALICE, tokens) == expected


def test_what_is_left_of_a_part_is_found_by_its_blocks():
    table = PartTable(SIZE)
    whole = run(1, 6 * SIZE)
    keys = add(table, ALICE, whole)
    tokens = np.concatenate((run(2, 3), whole[SIZE : 3 * SIZE + 4], run(3, 9)))
    assert table.find(ALICE, tokens) == [Part(3, 3 + 2 * SIZE, SIZE, keys)]


@settings(max_examples=300)
@given(st.data())
def test_what_is_found_has_the_very_tokens_of_what_was_added(data):
    """With few different tokens, so that blocks are alike, and hashes that collide."""
    vocabulary = data.draw(st.integers(1, 3))
    tokens_of = st.integers(0, 60).flatmap(lambda count: st.lists(st.integers(0, vocabulary), min_size=count, max_size=count))
    most_tokens, most_blocks = data.draw(st.integers(4, 200)), data.draw(st.integers(1, 30))
    table = PartTable(4, most_tokens=most_tokens, most_blocks=most_blocks, most_tenants=2)
    added = {}
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            patch.setattr(module, "window_hashes", lambda tokens, size: window_hashes(tokens, size) % np.uint64(3))
        for _ in range(data.draw(st.integers(1, 6))):
            root = data.draw(st.sampled_from([ALICE, BOB]))
            tokens = np.array(data.draw(tokens_of), np.int32)
            keys = add(table, root, tokens)
            if keys:
                added[root, keys[-1]] = tokens
            table.check()
            for asked in (ALICE, BOB):
                prompt = np.array(data.draw(tokens_of), np.int32)
                free = 0
                for part in table.find(asked, prompt):
                    assert free <= part.start < part.stop <= len(prompt)
                    free = part.stop
                    own = added[asked, part.keys[-1]][part.skipped :][: part.stop - part.start]
                    assert own.tolist() == prompt[part.start : part.stop].tolist()
                    assert part.keys == chain(asked, added[asked, part.keys[-1]], 4)[: len(part.keys)]
                table.check()


def test_two_tenants_share_no_part_and_no_key():
    table = PartTable(SIZE)
    tokens = run(1, 4 * SIZE)
    alice = add(table, ALICE, tokens)
    assert table.find(BOB, tokens) == []
    bob = add(table, BOB, tokens)
    assert not set(alice) & set(bob)
    assert [part.keys for part in table.find(BOB, tokens)] == [bob]


def test_only_blocks_that_have_keys_are_found():
    table = PartTable(SIZE)
    tokens = run(1, 4 * SIZE)
    table.add(ALICE, tokens, chain(ALICE, tokens)[:2])
    assert table.find(ALICE, tokens) == [Part(0, 2 * SIZE, 0, chain(ALICE, tokens)[:2])]


def test_a_prompt_that_goes_on_from_another_takes_its_place():
    table = PartTable(SIZE, most_blocks=5)
    tokens = run(1, 4 * SIZE)
    for blocks in range(1, 5):
        add(table, ALICE, tokens[: blocks * SIZE])
        table.check()
    other = run(2, SIZE)
    add(table, ALICE, other)
    assert [len(table.find(ALICE, each)) for each in (tokens, other)] == [1, 1], "there is room for both"


def test_parts_that_were_not_used_are_forgotten_first():
    table = PartTable(SIZE, most_blocks=4)
    one, two, three = (run(seed, 2 * SIZE) for seed in (1, 2, 3))
    add(table, ALICE, one)
    add(table, ALICE, two)
    table.find(ALICE, one)
    add(table, ALICE, three)
    assert [len(table.find(ALICE, each)) for each in (one, two, three)] == [1, 0, 1]
    assert len(add(table, ALICE, run(4, 9 * SIZE))) == 4, "a part of more is cut"
    assert [len(table.find(ALICE, each)) for each in (one, two, three)] == [0, 0, 0]


def test_tenants_that_were_not_seen_are_forgotten_first_and_take_no_room_of_others():
    table = PartTable(SIZE, most_blocks=2, most_tenants=2)
    roots = [namespace(model="m", layout="l", salt=str(number)) for number in range(3)]
    tokens = run(1, 2 * SIZE)
    for root in roots[:2]:
        add(table, root, tokens)
    table.find(roots[0], tokens)
    add(table, roots[2], tokens)
    assert [len(table.find(root, tokens)) for root in roots] == [1, 0, 1]


def test_the_tokens_of_all_tenants_together_have_a_bound():
    table = PartTable(SIZE, most_tokens=4 * SIZE)
    one, two = run(1, 2 * SIZE), run(2, 3 * SIZE)
    add(table, ALICE, one)
    add(table, BOB, one)
    table.find(ALICE, one)
    add(table, ALICE, two)
    table.check()
    assert [len(table.find(root, tokens)) for root, tokens in ((ALICE, one), (ALICE, two), (BOB, one))] == [0, 1, 0]
    assert len(add(table, BOB, run(3, 9 * SIZE))) == 4
    table.check()


def test_less_than_a_block_makes_no_tenant():
    table = PartTable(SIZE, most_tenants=1)
    add(table, ALICE, run(1, SIZE))
    assert add(table, BOB, run(1, SIZE - 1)) == ()
    assert len(table.find(ALICE, run(1, SIZE))) == 1


@pytest.mark.parametrize("again", [False, True])
def test_a_part_is_found_from_its_first_block_once_another_that_began_alike_is_forgotten(again):
    """Whether it was added again meanwhile or not."""
    table = PartTable(SIZE, most_blocks=5)
    one, two, three = (np.concatenate((run(1, SIZE), run(seed, SIZE))) for seed in (2, 3, 4))
    keys = add(table, ALICE, one)
    add(table, ALICE, two)
    if again:
        add(table, ALICE, one)
    else:
        table.find(ALICE, one)
    add(table, ALICE, three)
    table.check()
    for seed in (5, 6):
        table.find(ALICE, one[SIZE:])
        add(table, ALICE, run(seed, 2 * SIZE))  # of the others, forgets the one that was not used for longest
        table.check()
    assert table.find(ALICE, one) == [Part(0, 2 * SIZE, 0, keys)]


def test_a_part_that_repeats_a_block_is_found_as_one():
    table = PartTable(SIZE)
    part = np.concatenate((np.tile(run(1, SIZE), 3), run(2, SIZE)))
    keys = add(table, ALICE, part)
    assert table.find(ALICE, part) == [Part(0, 4 * SIZE, 0, keys)]


@pytest.mark.parametrize("collide", [False, True])
def test_what_is_compared_is_in_proportion_to_the_prompt(monkeypatch, collide):
    """A prompt that repeats the first block of a long part, and one whose every hash is that of the part's first block."""
    looked, equal = [], module._equal

    class Counted(np.ndarray):
        def __ne__(self, other):
            looked.append(len(self))
            return np.asarray(self) != np.asarray(other)

    block, count = run(1, SIZE), 400
    table = PartTable(SIZE)
    if collide:
        monkeypatch.setattr(module, "window_hashes", lambda tokens, size: window_hashes(tokens, size) % np.uint64(1))
    add(table, ALICE, np.concatenate((block, run(2, count * SIZE))))
    monkeypatch.setattr(module, "_equal", lambda one, other, first: equal(one.view(Counted), other, first))
    prompt = run(3, count * SIZE) if collide else np.tile(block, count)
    table.find(ALICE, prompt)
    assert len(looked) >= count
    assert sum(looked) <= (SIZE if collide else 4) * len(prompt)


def test_two_parts_that_share_blocks_are_found_whole_though_in_pieces():
    table = PartTable(SIZE)
    shared = run(1, 2 * SIZE)
    one, two = (np.concatenate((shared, run(seed, 2 * SIZE))) for seed in (2, 3))
    add(table, ALICE, one)
    add(table, ALICE, two)
    for each in (one, two):
        found = table.find(ALICE, each)
        assert_is_what_it_says(ALICE, each, found)
        assert sum(part.stop - part.start for part in found) == len(each)


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


def test_a_part_whose_blocks_are_gone_does_not_hide_another_that_has_them():
    table = PartTable(SIZE)
    shared = run(1, 3 * SIZE)
    one, two = (np.concatenate((run(seed, SIZE), shared)) for seed in (2, 3))
    first, second = add(table, ALICE, one), add(table, ALICE, two)
    prompt = np.concatenate((run(4, 3), shared))
    assert table.find(ALICE, prompt) == [Part(3, 3 + 3 * SIZE, SIZE, second)]
    assert table.find(ALICE, prompt, set(first).__contains__) == [Part(3, 3 + 3 * SIZE, SIZE, first)]
    left = {*first, *second[:3]}
    expected = [Part(3, 3 + 2 * SIZE, SIZE, second), Part(3 + 2 * SIZE, 3 + 3 * SIZE, 3 * SIZE, first)]
    assert table.find(ALICE, prompt, left.__contains__) == expected
    assert table.find(ALICE, prompt, set().__contains__) == []


def test_a_prompt_that_a_known_one_goes_on_from_is_not_added():
    table = PartTable(SIZE, most_blocks=6)
    whole = run(1, 4 * SIZE)
    keys = add(table, ALICE, whole)
    for blocks in (1, 3):
        add(table, ALICE, whole[: blocks * SIZE])
        table.check()
    assert table.find(ALICE, whole) == [Part(0, 4 * SIZE, 0, keys)]
    add(table, ALICE, run(2, 2 * SIZE))
    assert table.find(ALICE, whole) == [Part(0, 4 * SIZE, 0, keys)], "there is room for both"
