"""What blocks hold is told as it was put, in chains, parents before children; what is not known is told as nothing."""

import random

from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.kv.block_hash import extend_keys, pack_tokens
from mooncake_zmq.kv.events import BlocksStored, Medium
from mooncake_zmq.pool.node.contents import UNKNOWN, Content, Contents, in_chains

BLOCK = 4
ROOT = b"r" * 16


def key(number):
    return number.to_bytes(16, "big")


def tokens(number):
    return pack_tokens([number] * BLOCK)


def test_a_slot_tells_of_its_latest_block_alone():
    contents = Contents(3, BLOCK)
    contents.put(1, key(7), tokens(1))
    contents.put(2, None, tokens(2))
    assert [contents.of(slot) for slot in range(3)] == [UNKNOWN, Content(key(7), tokens(1)), Content(None, tokens(2))]
    contents.put(1, key(8))
    assert contents.of(1) == Content(key(8))
    assert contents.parent(1) == key(8)
    contents.put(1, None)
    assert contents.of(1) == UNKNOWN


def test_tokens_that_are_not_a_blocks_are_not_kept():
    contents = Contents(2, BLOCK)
    contents.put(0, key(7), tokens(1) + tokens(2))
    contents.put(1, key(7), tokens(1)[:-1])
    assert contents.of(0) == contents.of(1) == Content(key(7))


def test_without_tokens_the_parents_are_kept():
    contents = Contents(2, 0)
    contents.put(1, key(7), tokens(1))
    assert contents.of(1) == Content(key(7))
    assert contents.token_bytes == 0


@st.composite
def forests(draw):
    """Blocks (key -> content) of chains that fork, by their true keys; some of them are not here, of some nothing is known."""
    parents = [None]
    blocks = {}
    for number in range(draw(st.integers(0, 20))):
        parent = draw(st.sampled_from(parents))
        (one,) = extend_keys(parent or ROOT, tokens(number), BLOCK)
        parents.append(one)
        match draw(st.integers(0, 5)):
            case 0:
                pass
            case 1:
                blocks[one] = UNKNOWN
            case 2:
                blocks[one] = Content(parent)
            case _:
                blocks[one] = Content(parent, tokens(number))
    return list(blocks.items())


@given(forests(), st.randoms(use_true_random=False))
def test_every_block_is_told_once_after_its_parent_and_hashes_to_its_key(blocks, shuffler):
    shuffler.shuffle(blocks)
    contents = dict(blocks)
    told = []
    for event in in_chains(Medium.DISK, blocks):
        assert event.medium is Medium.DISK
        assert event.keys
        known = {bool(contents[one].tokens) for one in event.keys}
        assert known == {bool(event.tokens)}, "tokens of all of an event's blocks, or of none"
        if event.tokens:
            assert extend_keys(event.parent or ROOT, event.tokens, BLOCK) == list(event.keys)
        if contents[event.keys[0]] != UNKNOWN:
            assert contents[event.keys[0]].parent == (event.parent or None)
        for one in event.keys:
            assert contents[one].parent not in contents or contents[one].parent in told
            told.append(one)
    assert sorted(told) == sorted(contents)


def test_a_chain_is_one_event_whatever_its_order():
    numbers = list(range(10))
    line = b"".join(map(tokens, numbers))
    keys = extend_keys(ROOT, line, BLOCK)
    blocks = [(keys[i], Content(keys[i - 1] if i else None, tokens(i))) for i in numbers]
    random.Random(1).shuffle(blocks)
    assert in_chains(Medium.CPU, blocks) == [BlocksStored(tuple(keys), Medium.CPU, b"", line)]
    fork = (key(99), Content(keys[3], tokens(99)))
    assert len(in_chains(Medium.CPU, [*blocks, fork])) == 2


def test_a_chain_of_which_only_the_order_is_known_is_one_event_too():
    blocks = [(key(1), UNKNOWN), (key(2), Content(key(1))), (key(9), UNKNOWN), (key(8), UNKNOWN)]
    assert in_chains(Medium.CPU, blocks) == [
        BlocksStored((key(1), key(2)), Medium.CPU),
        BlocksStored((key(9), key(8)), Medium.CPU),
    ]


def test_blocks_said_to_follow_each_other_in_a_circle_are_told_without_what_was_said():
    lies = [(key(n), Content(key((n + 1) % 3), tokens(n))) for n in range(3)]
    true = (key(7), Content(None, tokens(7)))
    one, *others = in_chains(Medium.CPU, [*lies, true])
    assert one == BlocksStored((key(7),), Medium.CPU, b"", tokens(7))
    assert [(set(event.keys), event.parent, event.tokens) for event in others] == [({key(0), key(1), key(2)}, b"", b"")]
