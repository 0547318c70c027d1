"""`bench answers` at small size: its caches, its grammar, and the enumeration of likely prompts."""

import json
import math
from collections import Counter
from itertools import islice
from random import Random

import pytest
from click.testing import CliRunner

from mooncake_zmq.bench.answers import AnswersBench, Trace, aged, ideal, lifetime_for, verified
from mooncake_zmq.bench.answers_grammar import Grammar, WordModel
from mooncake_zmq.bench.command import bench
from mooncake_zmq.gateway.answers.likely import likely

SMALL = AnswersBench(requests=20_000, keys=500, entries=400, changing=0.4)


def test_its_rows(tmp_path) -> None:
    options = "--seeds 1 --requests 3000 --keys 200 --entries 160 --read 500 --sizes 20,50 --json"
    result = CliRunner().invoke(bench, ["answers", *options.split()])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    assert len(rows) == 17
    assert rows["inferences / ideal"]["ratio"] < 1


@pytest.mark.parametrize("seed", range(3))
def test_what_each_cache_does(seed) -> None:
    """The ideal one is always right and asks least among those that are; one that never asks again is wrong the most."""
    trace = Trace(SMALL, seed)
    ours, never, best = verified(trace, SMALL, 0.05), aged(trace, SMALL, SMALL.requests), ideal(trace, SMALL)
    assert best.wrong == 0 < ours.wrong <= 0.05 < never.wrong
    assert best.inferences < ours.inferences < 0.5
    always = aged(trace, SMALL, 1)
    assert (always.inferences, always.wrong) == (1.0, 0.0)


def test_an_answer_to_a_similar_prompt_is_wrong() -> None:
    trace = Trace(SMALL, 0)
    confused = aged(trace, SMALL, SMALL.requests, [[(key + 1) % SMALL.keys] for key in range(SMALL.keys)])
    plain = aged(trace, SMALL, SMALL.requests)
    assert confused.wrong > plain.wrong


def test_a_lifetime_is_found_that_needs_as_many_inferences() -> None:
    trace = Trace(SMALL, 1)
    found = aged(trace, SMALL, lifetime_for(0.3, lambda lifetime: aged(trace, SMALL, lifetime), SMALL.requests))
    assert 0.3 <= found.inferences < 0.33


def test_a_guard_that_always_serves_is_seen_in_the_traces_of_keys_that_change_often() -> None:
    often = Trace(SMALL, 0, changes=40)
    assert verified(often, SMALL, 1.0).wrong > 0.02
    guarded = verified(often, SMALL, 0.01)
    assert guarded.inferences > 0.9


def test_the_likeliest_come_first_and_are_those_that_the_grammar_draws() -> None:
    grammar, chance = Grammar(), Random(3)
    found = list(islice(likely(grammar.expand, max_nll=30.0), 200))
    assert [nll for _, nll in found] == sorted(nll for _, nll in found)
    assert len({text for text, _ in found}) == 200
    drawn = Counter(grammar.draw(chance) for _ in range(20_000))
    for text, nll in found[:5]:
        assert drawn[text] / 20_000 == pytest.approx(math.exp(-nll), rel=0.2)


@pytest.mark.parametrize("at_once", [1, 7])
def test_the_order_does_not_depend_on_how_many_are_expanded_at_once(at_once) -> None:
    found = [nll for _, nll in islice(likely(Grammar().expand, max_nll=30.0, at_once=at_once), 100)]
    assert found == pytest.approx([nll for _, nll in islice(likely(Grammar().expand, max_nll=30.0), 100)])


def test_no_text_is_less_likely_than_the_bound_and_they_end() -> None:
    bound = -math.log(1e-3)
    found = list(likely(Grammar().expand, max_nll=bound))
    assert 0 < len(found) <= 1000
    assert all(nll <= bound for _, nll in found)
    assert sum(math.exp(-nll) for _, nll in found) < 1


def test_few_beginnings_that_wait_are_enough_for_the_likeliest() -> None:
    few = [text for text, _ in islice(likely(Grammar().expand, max_nll=30.0, most_waiting=200), 20)]
    assert few == [text for text, _ in islice(likely(Grammar().expand, max_nll=30.0), 20)]


def test_a_model_that_has_read_prompts_gives_probabilities_and_predicts_unseen_ones() -> None:
    grammar, chance = Grammar(), Random(4)
    read = [grammar.draw(chance) for _ in range(500)]
    model = WordModel(read)
    for text in ("", *read[:20]):
        assert sum(math.exp(-nll) for _, nll in model.expand([text])[0]) == pytest.approx(1.0)
    predicted = {text for text, _ in islice(likely(model.expand, max_nll=30.0), 500)}
    assert predicted - set(read)
