"""The scheduler's half without vLLM: promises, loads and saves of requests, over a pool that is a set of names."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from mooncake_zmq.vllm.choice import Choice
from mooncake_zmq.vllm.groups import ATTENTION, Group
from mooncake_zmq.vllm.hints import NO_HINTS, Hints
from mooncake_zmq.vllm.ledger import AGAIN_S, HOLD_LEFT_S, REOFFER_S, Ledger, Progress
from mooncake_zmq.vllm.names import chain_root, object_names, token_keys

B = 4
TOKENS = list(range(100, 141))
"""Ten complete blocks and a token."""


@dataclass
class FakeLookup:
    names: list[str]
    count: int | None
    until: float = 1e9
    holders: tuple[str, ...] = ("cache-b",)
    reached: bool = True
    found: Sequence[bool] = ()

    def answer(self) -> int | None:
        return self.count


@dataclass
class FakePool:
    """`slow`: answers are not known yet."""

    there: set[str] = field(default_factory=set)
    slow: bool = False
    reached: bool = True
    held: list[FakeLookup] = field(default_factory=list)
    asked: int = 0
    first: Sequence[str] = ()

    def ask(self, names: list[str], first: Sequence[str]) -> FakeLookup:
        self.asked += 1
        self.first = first
        missing = [index for index, name in enumerate(names) if name not in self.there]
        lookup = FakeLookup(names, None if self.slow else (missing[0] if missing else len(names)), reached=self.reached)
        lookup.found = [name in self.there for name in names]
        self.held.append(lookup)
        return lookup

    def release(self, lookup: FakeLookup) -> None:
        self.held.remove(lookup)


class World:
    def __init__(self, ranks: int = 1, most_saving: int = 100, may_load: bool = True, may_save: bool = True) -> None:
        self.pool = FakePool()
        self.prefixes = tuple(f"{rank}/" for rank in range(ranks))
        self.ledger = Ledger(B, self.pool, may_load, may_save, most_saving, prefixes=self.prefixes)
        self.blocks: dict[str, list[int]] = {}
        self.now = 0.0

    def add(
        self, name: str = "r", tokens: list[int] = TOKENS, blocks: list[int] | None = None, hints: Hints = NO_HINTS
    ) -> None:
        self.ledger.add(name, token_keys(chain_root(), tokens, B), hints)
        self.blocks[name] = blocks or list(range(1, 20))

    def fill(self, count: int, tokens: list[int] = TOKENS) -> None:
        """The pool has the first `count` blocks."""
        self.pool.there |= set(object_names(self.prefixes, token_keys(chain_root(), tokens, B).upto(count)))

    def matched(self, own: int = 0, name: str = "r", tokens: int = len(TOKENS)) -> int | None:
        return self.ledger.matched(self.now, name, own, tokens)

    def step(self, computed: int = 0, known: int | None = None, name: str = "r"):
        scheduled = [Progress(name, computed, computed if known is None else known)] if computed else []
        return self.ledger.step(self.now, scheduled, lambda each: [self.blocks[each]])


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_pool_has_beyond_the_engines_own_is_promised_and_held_until_loaded(ranks):
    world = World(ranks)
    world.fill(6)
    world.add()
    assert world.matched(own=2 * B) == 4 * B
    assert len(world.pool.held) == 1
    world.ledger.allocated("r", 4 * B, [world.blocks["r"]])
    orders = world.step()
    assert [(load.request_id, load.blocks, len(load.groups[0].keys)) for load in orders.loads] == [("r", (3, 4, 5, 6), 4)]
    assert orders.idle
    assert world.pool.held, "until it was read"
    world.ledger.loaded(["r"], set())
    assert not world.pool.held
    assert world.step().loads == (), "once"


def test_every_load_has_a_number_of_its_own_also_of_the_same_request():
    world = World()
    world.fill(6)
    world.add()
    numbers = []
    for _ in range(3):
        world.matched()
        world.ledger.allocated("r", 6 * B, [world.blocks["r"]])
        numbers += [load.number for load in world.step().loads]
        world.ledger.loaded(["r"], set())
    assert len(set(numbers)) == 3


def test_one_rank_without_its_part_is_a_block_less():
    world = World(ranks=2)
    world.fill(5)
    world.pool.there.discard(object_names(["1/"], token_keys(chain_root(), TOKENS, B).upto(4))[3])
    world.add()
    assert world.matched() == 3 * B


def test_the_last_token_is_always_computed():
    world = World()
    world.fill(10)
    world.add()
    assert world.matched(tokens=40) == 9 * B
    assert world.matched(tokens=41) == 10 * B
    assert world.matched(own=10 * B, tokens=41) == 0
    assert not world.pool.held


def test_a_question_without_answer_is_asked_again_and_in_the_end_a_miss():
    world = World()
    world.pool.slow = True
    world.add()
    assert world.matched() is None
    world.now += world.ledger.lookup_s / 2
    assert world.matched() is None
    assert world.pool.asked == 1
    world.pool.held[0].count = 3
    assert world.matched() == 3 * B
    world.add("other")
    assert world.matched(name="other") is None
    world.now += world.ledger.lookup_s
    assert world.matched(name="other") == 0
    assert world.ledger.counts["lookups_slow"] == 1


def test_a_promise_serves_until_it_is_over_or_does_not_fit():
    world = World()
    world.fill(8)
    world.add()
    assert world.matched() == 8 * B
    assert world.matched(own=3 * B) == 5 * B, "the engine's own cache has more by now"
    assert world.pool.asked == 1
    world.pool.held[0].until = world.now + HOLD_LEFT_S / 2
    assert world.matched() == 8 * B
    assert world.pool.asked == 2, "it would have ended before it was read"
    assert world.matched(tokens=30) == 7 * B
    assert world.pool.asked == 3
    assert len(world.pool.held) == 1


@pytest.mark.parametrize("end", ["finished", "computed", "partial"])
def test_whatever_becomes_of_a_request_its_promise_ends(end):
    world = World()
    world.fill(4)
    world.add()
    world.matched()
    if end == "finished":
        world.ledger.finished("r")
    elif end == "computed":
        world.ledger.allocated("r", 0, [world.blocks["r"]])
    else:
        assert world.matched(own=B + 1) == 0
    assert not world.pool.held


def test_blocks_that_did_not_come_are_offered_again_and_the_pool_is_not_asked_twice():
    world = World()
    world.fill(6)
    world.add()
    world.matched()
    world.ledger.allocated("r", 6 * B, [world.blocks["r"]])
    world.step()
    world.ledger.loaded(["r"], {4, 5, 6})
    assert world.ledger.counts["failed_loads"] == 1
    assert world.matched() == 0
    assert world.pool.asked == 1
    assert [save.blocks for save in world.step(computed=6 * B).saves] == [(1, 2, 3, 4, 5, 6)]


def test_loaded_blocks_are_offered_where_a_store_may_have_lost_its_copy_unless_some_were_not_loaded():
    for offers, groups, saved in ((False, (ATTENTION,), 0), (True, (ATTENTION,), 6), (True, (Group(window=2 * B),), 0)):
        world = World()
        world.ledger.offers_loaded, world.ledger.groups = offers, groups
        world.fill(6)
        world.add()
        found = world.matched()
        world.ledger.allocated("r", found, [world.blocks["r"]])
        world.ledger.loaded(["r"], set())
        assert found == 6 * B
        assert sum(len(save.blocks) for save in world.step(computed=6 * B).saves) == saved
        assert not world.step(computed=6 * B).saves, "once"


def test_blocks_that_did_not_come_to_the_quicker_of_two_ranks_are_offered_again_too():
    world = World(ranks=2)
    for name in ("r", "other"):
        world.add(name)
        world.fill(6)
        world.matched(name=name)
    world.ledger.allocated("r", 6 * B, [world.blocks["r"]])
    world.ledger.allocated("other", 6 * B, [list(range(21, 40))])
    world.step()
    world.ledger.loaded([], {4, 5, 6})
    assert world.pool.held, "the other rank still reads"
    world.ledger.loaded(["r", "other"], set())
    assert world.ledger.counts["failed_loads"] == 1
    assert world.matched() == 0
    assert world.matched(name="other") == 6 * B
    assert [save.blocks for save in world.step(computed=6 * B).saves] == [(1, 2, 3, 4, 5, 6)]


def test_blocks_are_saved_as_their_last_token_is_computed_and_certain():
    world = World()
    world.add()
    assert [save.blocks for save in world.step(computed=2 * B + 3).saves] == [(1, 2)]
    assert world.step(computed=2 * B + 3).saves == ()
    assert world.step(computed=3 * B, known=3 * B - 1).saves == (), "a draft may be refused"
    assert [save.blocks for save in world.step(computed=4 * B, known=3 * B).saves] == [(3,)]
    assert not world.step(computed=1).idle


def test_what_came_from_the_pool_is_not_offered_to_it():
    world = World()
    world.fill(6)
    world.add()
    world.matched()
    world.ledger.allocated("r", 6 * B, [world.blocks["r"]])
    world.step()
    world.ledger.loaded(["r"], set())
    assert [save.blocks for save in world.step(computed=8 * B).saves] == [(7, 8)]


def test_a_block_is_offered_once_in_a_while_whoever_has_it():
    world = World()
    world.add("a")
    world.add("b", blocks=list(range(30, 50)))
    world.step(computed=4 * B, name="a")
    assert [save.blocks for save in world.step(computed=6 * B, name="b").saves] == [(34, 35)]
    world.add("c")
    world.now += REOFFER_S
    assert [save.blocks for save in world.step(computed=2 * B, name="c").saves] == [(1, 2)]


def test_blocks_the_engine_let_go_of_are_not_offered():
    world = World()
    world.add(blocks=[0, 0, 3, 4])
    assert [save.blocks for save in world.step(computed=4 * B).saves] == [(3, 4)]


def test_blocks_are_kept_up_to_a_limit_and_until_every_rank_is_done():
    world = World(ranks=2, most_saving=3)
    world.add()
    (save,) = world.step(computed=8 * B).saves
    assert save.blocks == (1, 2, 3)
    assert world.step(computed=8 * B).saves == ()
    assert world.ledger.saved([save.number], 2) == []
    assert list(world.ledger.kept()) == [1, 2, 3]
    assert world.ledger.saved([save.number, 99], 2) == [1, 2, 3]
    assert world.ledger.saved([save.number], 2) == [], "once"
    assert world.ledger.saving == 0
    (save,) = world.step(computed=8 * B).saves
    assert save.blocks == (4, 5, 6), "the others come later"
    world.ledger.finished("r")
    assert world.ledger.saved([save.number] * 2, 2) == [4, 5, 6], "though their request is gone"


def test_a_role_that_may_not_does_not():
    world = World(may_load=False)
    world.fill(4)
    world.add()
    assert world.matched() == 0
    assert world.step(computed=2 * B).saves
    world = World(may_save=False)
    world.fill(4)
    world.add()
    assert world.matched() == 4 * B
    assert not world.step(computed=2 * B).saves


def test_before_the_ranks_have_told_their_shelves_nothing_is_asked_or_saved():
    world = World()
    world.ledger.prefixes = ()
    world.add()
    assert world.matched() == 0
    assert not world.step(computed=2 * B).saves
    assert world.pool.asked == 0


def test_requests_that_are_not_followed_are_left_alone():
    world = World()
    assert world.matched(name="who") == 0
    world.ledger.allocated("who", 8, [[1, 2]])
    world.ledger.loaded(["who"], {1})
    world.ledger.finished("who")
    assert world.step(computed=8, name="who").loads == ()


def test_the_stores_that_a_request_names_are_asked_first_and_who_has_it_is_read_first():
    world = World()
    world.fill(6)
    world.add(hints=Hints(("cache-b", "cache-c")))
    assert world.matched() == 6 * B
    assert world.pool.first == ("cache-b", "cache-c")
    world.ledger.allocated("r", 6 * B, [world.blocks["r"]])
    (load,) = world.step().loads
    assert load.holders == ("cache-b",)


def test_a_step_without_any_request_waits_longer_for_saves():
    world = World()
    assert world.step().deserted
    world.add()
    assert not world.step(computed=4).deserted
    assert not world.step().deserted, "it may be waiting for an answer of the pool"
    world.ledger.finished("r")
    assert world.step().deserted


def test_what_another_engine_is_still_saving_is_waited_for():
    world = World()
    world.fill(3)
    world.add(hints=Hints(coming_tokens=len(TOKENS)))
    assert world.matched() is None
    asked = world.pool.asked
    assert world.matched() is None
    assert world.pool.asked == asked, "not at every step"
    world.fill(10)
    world.now += AGAIN_S
    assert world.matched() is None, "it is asked"
    assert world.matched() == 10 * B
    assert len(world.pool.held) == 1
    world.ledger.finished("r")
    assert not world.pool.held


def test_what_does_not_come_in_time_is_computed():
    world = World()
    world.fill(3)
    world.add(hints=Hints(coming_tokens=len(TOKENS)))
    assert world.matched() is None
    world.now += world.ledger.coming_s
    assert world.matched() == 3 * B
    assert world.ledger.counts["late_requests"] == 1
    world.fill(10)
    world.now += AGAIN_S
    assert world.matched() == 3 * B, "once it is decided, that is that"


def test_blocks_that_are_coming_are_not_waited_for_while_no_store_answers():
    world = World()
    world.add(hints=Hints(coming_tokens=len(TOKENS)))
    assert world.matched() is None
    world.pool.reached = False
    world.now += AGAIN_S
    world.matched()
    assert world.matched() == 0
    world.add("later", hints=Hints(coming_tokens=len(TOKENS)))
    assert world.matched(name="later") == 0


def test_more_than_the_prompt_is_never_waited_for():
    world = World()
    world.fill(10)
    world.add(hints=Hints(coming_tokens=1 << 31))
    assert world.matched() == 10 * B


def choosing(*, load_s: float, compute_s: float) -> World:
    """Measured twice: a load of all blocks and a step of all tokens."""
    world = World()
    world.fill(10)
    world.ledger.choice = Choice()
    for _ in range(2):
        world.ledger.choice.load_took(10, load_s)
        step(world, len(TOKENS), compute_s)
    return world


def step(world: World, tokens: int, took_s: float) -> None:
    world.now += took_s
    world.ledger.choice.step_ended(world.now, world.ledger.choice.step_begins(world.now - took_s, tokens))


def test_blocks_that_are_sooner_computed_are_left_and_not_offered_to_the_pool_that_has_them():
    world = choosing(load_s=3.0, compute_s=1.0)
    world.add()
    assert world.matched(own=2 * B) == 0
    assert world.ledger.counts == {"left_blocks": 8}
    assert not world.pool.held
    assert world.matched(own=2 * B) == 0
    assert world.pool.asked == 1, "once is enough"
    assert world.ledger.counts == {"left_blocks": 8}
    assert world.step(computed=len(TOKENS)).saves == ()


def test_blocks_that_are_sooner_loaded_are_promised():
    world = choosing(load_s=0.5, compute_s=1.0)
    world.add()
    assert world.matched(own=2 * B) == 8 * B
    assert not world.ledger.counts


def preempted(world: World) -> None:
    """It was computed to its end, and had to go."""
    world.ledger.allocated("r", 0, [world.blocks["r"]])
    assert world.step(computed=len(TOKENS)).saves == ()


def with_a_tail_left() -> World:
    """Of a request that was preempted then."""
    world = choosing(load_s=0.5, compute_s=1.0)
    for _ in range(2):
        world.ledger.choice.load_took(1, 0.4)
    world.add()
    assert world.matched(own=9 * B) == 0
    preempted(world)
    return world


def test_a_tail_that_is_left_does_not_keep_the_whole_from_being_loaded_after_a_preemption():
    world = with_a_tail_left()
    assert world.matched() == 10 * B
    world.ledger.allocated("r", 10 * B, [world.blocks["r"]])
    world.step()
    world.ledger.loaded(["r"], set())
    assert world.step(computed=len(TOKENS)).saves == (), "all of it is in the pool"


def test_what_is_loaded_after_it_was_left_and_does_not_come_is_offered_again():
    world = with_a_tail_left()
    world.matched(own=2 * B)
    world.ledger.allocated("r", 8 * B, [world.blocks["r"]])
    world.step()
    world.ledger.loaded(["r"], {5})
    assert world.matched(own=0) == 0, "once is enough"
    assert [save.blocks for save in world.step(computed=len(TOKENS)).saves] == [tuple(range(3, 11))]


def test_a_whole_that_is_loaded_does_not_make_a_tail_worth_it_after_a_preemption():
    world = choosing(load_s=0.5, compute_s=1.0)
    for _ in range(2):
        world.ledger.choice.load_took(1, 0.4)
    world.add()
    assert world.matched() == 10 * B
    world.ledger.allocated("r", 10 * B, [world.blocks["r"]])
    world.step()
    world.ledger.loaded(["r"], set())
    preempted(world)
    assert world.matched(own=9 * B) == 0


def test_what_is_computed_beside_does_not_count_for_loading():
    """Of 41 tokens that take 1 s, 4 in the pool."""
    world = choosing(load_s=3.0, compute_s=1.0)
    world.pool.there.clear()
    world.fill(1)
    world.add()
    assert world.matched() == 0
    assert world.ledger.counts == {"left_blocks": 1}


def test_what_the_engine_has_itself_is_not_computed_either():
    """Of 5 tokens that take 1 s, 4 in the pool."""
    world = choosing(load_s=3.0, compute_s=1.0)
    for _ in range(2):
        step(world, 5, 1.0)
    world.add()
    assert world.matched(own=9 * B) == B


def test_what_another_engine_prefilled_for_a_request_is_loaded_however_long_that_takes():
    world = choosing(load_s=3.0, compute_s=1.0)
    world.add(hints=Hints(coming_tokens=len(TOKENS)))
    assert world.matched() == 10 * B
    assert not world.ledger.counts


def test_what_came_in_time_is_loaded_however_long_the_engine_then_has_no_room():
    world = choosing(load_s=3.0, compute_s=1.0)
    world.add(hints=Hints(coming_tokens=len(TOKENS)))
    assert world.matched() == 10 * B
    world.now += 2 * world.ledger.coming_s
    assert world.matched(own=B) == 9 * B
    assert not world.ledger.counts


def test_a_probe_stays_one_until_it_is_loaded():
    world = choosing(load_s=3.0, compute_s=1.0)
    found = 0
    while not found:
        world.ledger.finished("r")
        world.add()
        found = world.matched()
    assert world.ledger.counts["probed_blocks"] == 10
    assert world.matched() == 10 * B, "asked again, as where the engine has no room"
    assert world.ledger.counts["probed_blocks"] == 10
