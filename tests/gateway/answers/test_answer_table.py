"""The table of kept answers: who is given what, which entries make room, and how often a given answer is wrong."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from scripted_actor import finished

from mooncake_zmq.gateway.answers.table import CLASSES, Answer, AnswerTable, Asked, Question, Stored, wilson_upper
from mooncake_zmq.gateway.settings import AnswersSettings
from mooncake_zmq.kv.block_hash import pack_tokens

TRUSTED = {"max_error": 1.0, "max_interval": 1e9}
"""Settings with which every class is open."""


def asked(key: str = "q", tenant: str = "a", group: int = 0, **more) -> Asked:
    return Asked(tenant, "m", key.encode(), group, **more)


def answer(text: str, reason: str = "stop", **end) -> Answer:
    return Answer(pack_tokens([*text.encode()]), reason, finished(**end))


def of(text: str, *versions: str | None) -> Answer:
    """An answer that weights of these versions made, one token each."""
    return answer(text, versions=tuple((name, at, at + 1) for at, name in enumerate(versions)))


def table(draw: Callable[[], float] = lambda: 0.99, **settings) -> AnswerTable:
    return AnswerTable(AnswersSettings(**settings), draw)


def ask(answers: AnswerTable, question: Asked, fresh: str, now: float = 0.0) -> str:
    """Return what the client is given: by the table, or by an engine that says `fresh`."""
    found = answers.look_up(question)
    answers.check()
    if isinstance(found, Stored):
        return bytes(output.token for output in [*found.outputs()][:-1]).decode()
    answers.settle(found, answer(fresh), now)
    answers.check()
    return fresh


def test_an_answer_is_given_again_with_the_time_of_its_verification():
    answers = table(**TRUSTED)
    assert ask(answers, asked(), "yes", now=7.0) == "yes"
    found = answers.look_up(asked())
    assert isinstance(found, Stored)
    assert found.verified_at == 7.0
    assert [*found.outputs()][-1] == finished()
    assert answers.counts == {"misses": 1, "hits": 1}


def test_an_answer_that_is_longer_than_permitted_is_not_given():
    answers = table(**TRUSTED)
    ask(answers, asked(), "four")
    assert isinstance(answers.look_up(asked(room=4)), Stored)
    assert isinstance(answers.look_up(asked(room=3)), Question)


def test_an_answer_that_ended_for_want_of_room_is_given_where_there_is_as_much():
    answers = table(**TRUSTED)
    answers.settle(answers.look_up(asked(room=4)), answer("four", "length"), 0.0)
    assert [isinstance(answers.look_up(asked(room=room)), Stored) for room in (3, 4, 5)] == [False, True, False]


def test_intervals_grow_while_an_engine_agrees_and_begin_again_when_it_does_not():
    answers = table(lambda: 0.0, max_error=1.0, max_interval=6.0)
    weights = []
    for number in range(8):
        question = answers.look_up(asked())
        weights.append(question.weight)
        answers.settle(question, answer("old" if number < 5 else "new"), 0.0)
    assert weights == [0, 1, 2, 4, 6, 6, 1, 2]
    assert answers.counts == {"misses": 1, "verifications": 7, "wrong": 1}


def test_an_answer_that_was_verified_as_wrong_is_not_given_again():
    draws = iter((0.0, 0.99))
    answers = table(lambda: next(draws), **TRUSTED)
    ask(answers, asked(), "old")
    assert ask(answers, asked(), "new") == "new"
    assert ask(answers, asked(), "newer") == "new", "the fresh answer is the one that is kept"


def until_given(answers: AnswerTable, keys: int, most: int = 3000) -> bool:
    """Ask for so many prompts by turns; return whether a stored answer was given."""
    for number in range(most):
        found = answers.look_up(asked(f"q{number % keys}"))
        if isinstance(found, Stored):
            return True
        answers.settle(found, answer("same"), 0.0)
    return False


def test_a_class_without_evidence_is_closed_and_enough_of_it_opens_it():
    answers = table(random.Random(1).random, max_error=0.01)
    assert until_given(answers, 25)
    assert answers.counts["withheld"] >= 380
    assert answers.gauges()["closed_classes"] == 0
    assert isinstance(answers.look_up(asked("q1", group=1)), Question), "another class has evidence of its own"


def test_few_prompts_that_are_asked_often_do_not_open_their_class():
    assert not until_given(table(random.Random(1).random, max_error=0.01), 5)


def test_one_prompt_does_not_make_up_for_the_wrong_answers_to_others():
    chance = random.Random(1)
    answers = table(chance.random, max_error=0.05)
    for number in range(40_000):
        often = number % 20 > 0
        ask(answers, asked("often" if often else f"q{chance.randrange(40)}"), "same" if often else str(chance.random() < 0.2))
    assert answers.gauges()["estimated_error"] < 0.05
    assert answers.gauges()["closed_classes"] == 1


def test_a_closed_class_that_opens_gives_no_answer_that_was_seen_to_be_wrong():
    answers = table(**TRUSTED)
    ask(answers, asked(), "old")
    group = answers._tenants["a"].classes[0]
    group.is_open = False
    answers.settle(answers.look_up(asked()), answer("new"), 0.0)
    group.is_open = True
    assert ask(answers, asked(), "new") == "new"
    assert ask(answers, asked(), "x") == "new"


def test_comparisons_in_flight_count_for_what_was_given_when_they_began():
    answers = table(lambda: 0.0, max_error=0.999)
    ask(answers, asked(), "old")
    group = answers._tenants["a"].classes[0]
    group.is_open = True
    question = answers.look_up(asked())
    group.is_open = False
    answers.settle(question, answer("new"), 0.0)
    assert answers.gauges()["estimated_error"] == 1.0


def test_a_slow_answer_does_not_replace_one_that_was_stored_meanwhile():
    answers = table(**TRUSTED)
    slow, quick = answers.look_up(asked()), answers.look_up(asked())
    assert answers.settle(quick, answer("newer"), 2.0)
    answers.settle(slow, answer("older"), 3.0)
    assert ask(answers, asked(), "x") == "newer"


def test_an_answer_has_one_verification_at_a_time_which_stands_for_the_hits_meanwhile():
    answers = table(lambda: 0.0, max_error=1.0)
    ask(answers, asked(), "old")
    for _ in range(3):
        question = answers.look_up(asked())
        assert isinstance(question, Question)
        assert isinstance(answers.look_up(asked()), Stored)
        answers.settle(question, None, 0.0)
    question = answers.look_up(asked())
    answers.settle(question, answer("old"), 0.0)
    assert answers._tenants["a"].classes[0]._weight == 1 + 3


def test_a_class_closes_when_its_answers_change_and_opens_when_they_stay():
    """What is asked while it is closed is answered by an engine, and compared."""
    chance, was_open = random.Random(2), []
    answers = table(chance.random, max_error=0.02)
    for epoch, count in enumerate((6000, 6000, 40_000)):
        for number in range(count):
            key = f"q{number % 40}"
            ask(answers, asked(key), f"{number if epoch == 1 else 'same'}")
        was_open.append(answers.gauges()["closed_classes"] == 0)
    assert was_open == [True, False, True]


@pytest.mark.parametrize("seed", range(10))
def test_the_share_of_wrong_answers_stays_within_the_bound(seed):
    """Prompts with one key have different answers, or answers change; a closed class serves none."""
    chance = random.Random(seed)
    max_error, given, wrong = 0.05, 0, 0
    answers = table(chance.random, max_error=max_error)
    odd = (0.0, 0.01, 0.03, 0.2)[seed % 4]
    truth = ["0"] * 200
    for number in range(20_000):
        key = min(int(chance.paretovariate(0.7)), 200) - 1
        if number % 500 == 0:
            truth[chance.randrange(200)] = str(number)
        right = "odd" if chance.random() < odd else truth[key]
        found = answers.look_up(asked(str(key)))
        if isinstance(found, Stored):
            given += 1
            wrong += found.answer != answer(right)
        else:
            answers.settle(found, answer(right), 0.0)
    assert wrong <= max_error * given
    assert given > 10_000 or odd > 0.01


@pytest.mark.parametrize("seed", range(5))
def test_the_estimate_is_of_the_answers_that_were_given(seed):
    chance = random.Random(seed)
    answers = table(chance.random, max_error=1.0)
    given = wrong = 0
    for _ in range(20_000):
        key = chance.randrange(40)
        right = str(chance.random() < key / 400)
        found = answers.look_up(asked(str(key)))
        if isinstance(found, Stored):
            given += 1
            wrong += found.answer != answer(right)
        else:
            answers.settle(found, answer(right), 0.0)
    assert answers.gauges()["estimated_error"] == pytest.approx(wrong / given, abs=0.02)


def given(answers: AnswerTable, key: str) -> bool:
    return isinstance(answers.look_up(asked(key)), Stored)


def test_an_answer_of_other_weights_is_not_given():
    answers = table(**TRUSTED)
    ask(answers, asked("q1"), "one")
    answers.settle(answers.look_up(asked("q2")), of("two", "v2"), 0.0)
    assert [given(answers, key) for key in ("q1", "q2")] == [False, True]


def test_weights_that_an_answer_names_which_is_not_kept_end_the_others():
    answers = table(**TRUSTED)
    answers.settle(answers.look_up(asked("q1")), of("a", "v1"), 0.0)
    assert given(answers, "q1")
    assert answers.renew("m", answers.version("m"), of("ab", "v1", "v2").end)
    assert not given(answers, "q1")


def test_a_late_answer_of_older_weights_is_not_stored_and_ends_no_newer_one():
    answers = table(**TRUSTED)
    late = answers.look_up(asked("q1"))
    answers.settle(answers.look_up(asked("q2")), of("b", "v2"), 0.0)
    assert not answers.settle(late, of("a", "v1"), 0.0)
    assert [given(answers, key) for key in ("q1", "q2")] == [False, True]
    assert not answers.renew("m", "v1", of("a", "v1").end)
    assert given(answers, "q2")


@pytest.mark.parametrize("versions", [("v1", "v2"), ("v1", None), (None,)])
def test_an_answer_of_several_or_unknown_weights_is_not_stored(versions):
    answers = table(**TRUSTED)
    answers.settle(answers.look_up(asked("q1")), of("a", "v2"), 0.0)
    assert not answers.settle(answers.look_up(asked("q2")), of("ab", *versions), 0.0)
    assert [given(answers, key) for key in ("q1", "q2")] == [True, False]


def test_the_least_recently_used_make_room_within_a_tenants_half():
    answers = table(max_entries=6, **TRUSTED)
    for key in "1234":
        ask(answers, asked(key), key)
    assert isinstance(answers.look_up(asked("2")), Stored)
    ask(answers, asked("5"), "5")
    kept = {key for key in "12345" if isinstance(answers.look_up(asked(key)), Stored)}
    assert kept == {"2", "4", "5"}


def test_over_the_whole_the_tenant_with_the_most_bytes_makes_room():
    answers = table(max_entries=8, **TRUSTED)
    for tenant, count in (("a", 4), ("b", 3), ("c", 2)):
        for key in range(count):
            ask(answers, asked(str(key), tenant), "x")
    held = [sum(isinstance(answers.look_up(asked(str(key), tenant)), Stored) for key in range(4)) for tenant in "abc"]
    assert held == [3, 3, 2]


def test_over_the_entries_of_the_whole_the_tenant_with_the_most_entries_makes_room():
    answers = table(max_entries=6, **TRUSTED)
    for number, tenant in enumerate(("large", *"aaabbb")):
        ask(answers, asked(str(number), tenant), "x" * (1000 if tenant == "large" else 1))
    assert {name: len(each.entries) for name, each in answers._tenants.items()} == {"large": 1, "a": 2, "b": 3}


def test_an_answer_larger_than_a_tenants_share_is_not_stored_and_takes_no_room():
    answers = table(max_bytes=8 << 10, **TRUSTED)
    assert ask(answers, asked("q1"), "x") == "x"
    assert not answers.settle(answers.look_up(asked("q2")), answer("x" * 800), 0.0)
    assert given(answers, "q1")


def test_a_tenant_without_entries_takes_no_memory():
    answers = table(max_entries=2, **TRUSTED)
    for number in range(9):
        ask(answers, asked("q", f"t{number}"), "x")
        answers.look_up(asked("q", f"never {number}"))
    assert [*answers._tenants] == ["t7", "t8"]


def test_answers_of_any_size_stay_within_the_bytes():
    answers = table(max_bytes=16 << 10, **TRUSTED)
    for number in range(200):
        ask(answers, asked(str(number), "ab"[number % 2]), "x" * (number * 37 % 3000))
    assert answers.gauges()["bytes"] <= 16 << 10


class Crossing(AnswerTable):
    """Planted: the tenant is no part of the key."""

    def look_up(self, asked: Asked):
        return super().look_up(replace(asked, tenant=""))


def crossed(kind: type[AnswerTable], seed: int) -> int:
    """Return how often a tenant was given what was answered to another one. Every answer names its tenant."""
    chance = random.Random(seed)
    answers = kind(AnswersSettings(max_error=1.0, max_entries=50), chance.random)
    count = 0
    for _ in range(2000):
        tenant, key, group = chance.choice("abc"), str(chance.randrange(20)), chance.randrange(CLASSES)
        count += not ask(answers, asked(key, tenant, group), f"{tenant} {key}").startswith(tenant)
    return count


@pytest.mark.parametrize("seed", range(3))
def test_no_answer_crosses_tenants_and_a_table_that_forgets_them_is_caught(seed):
    assert crossed(AnswerTable, seed) == 0
    assert crossed(Crossing, seed) > 0


def test_wilsons_bound():
    assert wilson_upper(0.0, 380) == pytest.approx(0.01, rel=0.01)
    assert wilson_upper(0.5, 100) == pytest.approx(0.596, abs=0.001)
    assert all(0.999 < wilson_upper(1.0, samples / 7) <= 1 for samples in range(1, 1000))
