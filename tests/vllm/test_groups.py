"""A prefix of a model with several KV cache groups is as long as every group has what it needs, and no longer."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_ledger import B, FakePool

from mooncake_zmq.vllm.groups import ATTENTION, STATE, Group, fitting, longest
from mooncake_zmq.vllm.ledger import Ledger, Progress
from mooncake_zmq.vllm.names import chain_root, group_prefix, object_names, token_keys

WINDOW = Group(window=2 * B + 1)
"""The next token attends to the last two whole blocks."""
TOKENS = list(range(100, 100 + 10 * B + 1))


@pytest.mark.parametrize(
    ("group", "first"),
    [
        (ATTENTION, [0, 0, 0, 0, 0]),
        (STATE, [0, 0, 1, 2, 3]),
        (Group(window=2), [0, 0, 1, 2, 3]),
        (Group(window=5), [0, 0, 1, 2, 3]),
        (Group(window=6), [0, 0, 0, 1, 2]),
        (Group(window=100), [0, 0, 0, 0, 0]),
        (Group(chunk=8), [0, 0, 2, 2, 4]),
    ],
)
def test_a_prefix_needs_what_its_next_token_attends_to(group: Group, first: list[int]) -> None:
    assert [group.first(stop, 4) for stop in range(5)] == first


def needed(group: Group, stop: int) -> set[int]:
    """The blocks that the token after `stop` blocks attends to, token by token."""
    here = stop * B
    if group.chunk:
        return {token // B for token in range(here // group.chunk * group.chunk, here)}
    return {token // B for token in range(max(0, here - group.window + 1) if group.window else 0, here)}


GROUPS = st.one_of(
    st.just(ATTENTION),
    st.just(STATE),
    st.integers(2, 40).map(lambda w: Group(window=w)),
    st.integers(2, 9).map(lambda c: Group(chunk=c * B)),
)


@given(st.lists(GROUPS, min_size=1, max_size=3), st.integers(0, 4), st.integers(0, 8), st.data())
def test_the_longest_prefix_is_the_one_found_by_trying_all(
    groups: list[Group], first: int, count: int, data: st.DataObject
) -> None:
    there = [data.draw(st.lists(st.booleans(), min_size=count, max_size=count)) for _ in groups]

    def can_be(stop: int) -> bool:
        return all(
            index < first or row[index - first]
            for group, row in zip(groups, there, strict=True)
            for index in needed(group, stop)
        )

    assert longest(groups, there, first, B) == max(stop for stop in range(first, first + count + 1) if can_be(stop))


@example([ATTENTION, *[Group(chunk=8 * B)] * 5], 4, 38, 38)  # a prefix of 42 needs fewer blocks than one of 23
@given(st.lists(GROUPS, min_size=1, max_size=4), st.integers(0, 5), st.integers(0, 30), st.integers(0, 100))
def test_what_has_room_is_what_the_longest_prefix_that_fits_needs(
    groups: list[Group], first: int, count: int, room: int
) -> None:
    saved = fitting(groups, first, first + count, room, B)
    if len(groups) * count <= room:
        assert saved == [range(first, first + count)] * len(groups)
        return
    wanted = [[needed(group, stop) - set(range(first)) for group in groups] for stop in range(first, first + count + 1)]
    stop = max(first + number for number, blocks in enumerate(wanted) if sum(map(len, blocks)) <= room)
    assert [set(indexes) for indexes in saved] == wanted[stop - first]
    assert {indexes.stop for indexes in saved} == {stop}
    assert longest(groups, [[index in indexes for index in range(first, stop)] for indexes in saved], first, B) == stop


class Hybrid:
    """A ledger with groups over a pool of names; block 100 * group + index has a request's block of a group."""

    def __init__(self, *groups: Group, ranks: int = 1, most_saving: int = 1000) -> None:
        self.pool = FakePool()
        self.groups = groups
        prefixes = tuple(f"vllm/{rank}/" for rank in range(ranks))
        self.ledger = Ledger(B, self.pool, True, True, most_saving, prefixes=prefixes, groups=groups)
        self.keys = token_keys(chain_root(), TOKENS, B).upto(10)
        self.ledger.add("r", token_keys(chain_root(), TOKENS, B))

    def name(self, group: int, index: int, rank: int = 0) -> str:
        return object_names([group_prefix(f"vllm/{rank}/", group)], [self.keys[index]])[0]

    def fill(self, group: int, indexes: Sequence[int], rank: int = 0) -> None:
        self.pool.there |= {self.name(group, index, rank) for index in indexes}

    def blocks(self, _request_id: str = "r") -> list[list[int]]:
        return [[100 * (group + 1) + index for index in range(11)] for group in range(len(self.groups))]

    def saves(self, computed: int, states: Sequence[tuple[int, int, int]] = ()) -> list[list[int]]:
        """Indexes of the blocks by group that a step up to a token saves; they are in the pool and no longer held after it."""
        indexes: list[list[int]] = [[] for _ in self.groups]
        for save in self.ledger.step(0.0, [Progress("r", computed, len(TOKENS), states)], self.blocks).saves:
            for group, part in enumerate(save.groups):
                indexes[group] += [block % 100 for block in part.blocks]
                self.fill(group, indexes[group])
            assert len(set(self.ledger.kept())) == self.ledger.saving <= self.ledger.most_saving
            self.ledger.saved([save.number], 1)
        return indexes

    def matched(self, own: int = 0) -> int:
        found = self.ledger.matched(0.0, "r", own * B, len(TOKENS))
        assert found is not None
        assert found % B == 0
        return own + found // B

    def loads(self, own: int, stop: int) -> list[tuple[int, ...]]:
        self.ledger.allocated("r", (stop - own) * B, self.blocks())
        (load,) = self.ledger.step(0.0, [], self.blocks).loads
        assert load.prefix_blocks == stop - own, "by which its time is predicted"
        assert [[key.hex() for key in part.keys] for part in load.groups] == [
            [self.keys[block % 100].hex() for block in part.blocks] for part in load.groups
        ]
        return [part.blocks for part in load.groups]


def test_a_window_is_loaded_where_it_ends_and_the_attention_whole() -> None:
    world = Hybrid(ATTENTION, WINDOW)
    world.fill(0, range(8))
    world.fill(1, [0, 1, 4, 5, 7])
    assert world.matched() == 6
    assert world.loads(0, 6) == [(100, 101, 102, 103, 104, 105), (204, 205)]


def test_beyond_the_engines_own_blocks_a_window_is_half_its_own() -> None:
    world = Hybrid(WINDOW, ATTENTION)
    world.fill(1, range(8))
    world.fill(0, [5])
    assert world.matched(own=5) == 6
    assert world.loads(5, 6) == [(105,), (205,)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_is_the_one_of_the_last_block_and_of_every_rank(ranks: int) -> None:
    world = Hybrid(ATTENTION, STATE, ranks=ranks)
    for rank in range(ranks):
        world.fill(0, range(10), rank)
        world.fill(1, [2, 6] if rank else [2, 6, 8], rank)
    assert world.matched() == (9 if ranks == 1 else 7)


def test_without_a_state_nothing_is_there() -> None:
    world = Hybrid(ATTENTION, STATE)
    world.fill(0, range(10))
    assert world.matched() == 0
    assert Hybrid(STATE, WINDOW).matched() == 0


def test_windows_are_saved_as_they_are_computed_and_states_where_the_engine_says() -> None:
    world = Hybrid(ATTENTION, WINDOW, STATE)
    freed = world.blocks()
    freed[1][:3] = [0, 0, 0]
    progress = Progress("r", 6 * B + 1, len(TOKENS), states=[(2, 305, 6 * B), (2, 303, 4 * B)])
    (save,) = world.ledger.step(0.0, [progress], lambda _: freed).saves
    assert [part.blocks for part in save.groups] == [(100, 101, 102, 103, 104, 105), (203, 204, 205), (303, 305)]
    assert [key.hex() for key in save.groups[2].keys] == [world.keys[3].hex(), world.keys[5].hex()]
    assert sorted(world.ledger.kept()) == sorted(save.blocks)
    assert world.ledger.saved([save.number], 1) == list(save.blocks)


def test_a_state_that_is_still_being_written_is_not_saved() -> None:
    world = Hybrid(ATTENTION, STATE)
    progress = Progress("r", 2 * B + 1, len(TOKENS), states=[])
    (save,) = world.ledger.step(0.0, [progress], world.blocks).saves
    assert [part.blocks for part in save.groups] == [(100, 101), ()]


@pytest.mark.parametrize(("most_saving", "stop"), [(20, 10), (19, 9), (11, 1)])
def test_of_more_than_may_be_held_the_longest_prefix_is_saved_with_the_windows_that_it_ends_in(
    most_saving: int, stop: int
) -> None:
    world = Hybrid(ATTENTION, *[WINDOW] * 5, most_saving=most_saving)
    saved = world.saves(10 * B + 1)
    assert saved == [list(range(stop)), *[list(range(max(0, stop - 2), stop))] * 5]
    assert world.matched() == stop


def test_a_state_is_saved_before_the_attention_that_can_wait() -> None:
    world = Hybrid(ATTENTION, STATE, most_saving=6)
    assert world.saves(10 * B + 1, states=[(1, 209, 10 * B)]) == [[0, 1, 2, 3, 4], [9]]
    assert world.saves(10 * B + 2) == [[5, 6, 7, 8, 9], []]
    assert world.matched() == 10


def test_no_more_states_are_held_than_have_room() -> None:
    world = Hybrid(ATTENTION, STATE, most_saving=6)
    assert world.saves(10 * B + 1, states=[(1, 205, 6 * B), (1, 209, 10 * B)])[1] == [9]


def test_blocks_for_which_there_was_no_room_until_their_request_ended_are_counted() -> None:
    world = Hybrid(ATTENTION, WINDOW, most_saving=6)
    assert world.saves(10 * B + 1) == [[0, 1, 2, 3], [2, 3]]
    world.ledger.finished("r")
    assert world.ledger.counts["unoffered_blocks"] == 6


def test_a_load_that_failed_is_not_tried_again_and_its_request_is_computed_whole() -> None:
    world = Hybrid(ATTENTION, WINDOW)
    world.fill(0, range(8))
    world.fill(1, range(8))
    assert world.matched() == 8
    world.loads(0, 8)
    world.ledger.loaded(["r"], set(), ["r"])
    assert world.matched() == 0
    assert not world.pool.held
    (save,) = world.ledger.step(0.0, [Progress("r", 8 * B, len(TOKENS))], world.blocks).saves
    assert len(save.blocks) == 16, "what did not come is offered again"
    assert world.ledger.counts["failed_loads"] == 1
