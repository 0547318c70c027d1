"""References: the prompt that is most like another, of the same tenant; and where two are the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.bench.blend import edited
from mooncake_zmq.kv import similar
from mooncake_zmq.kv.block_hash import namespace
from mooncake_zmq.kv.parts import window_hashes
from mooncake_zmq.kv.similar import References, aligned, likeness, sketch

ALICE, BOB, CAROL = (namespace(model="m", layout="l", salt=salt) for salt in ("alice", "bob", "carol"))


def run(seed, count=600, vocabulary=20_000):
    return np.random.default_rng(seed).integers(0, vocabulary, count).astype(np.int32)


@pytest.mark.parametrize("seed", range(5))
def test_the_reference_is_the_prompt_that_was_edited(seed):
    table = References()
    prompts = [run(number) for number in range(64)]
    for prompt in prompts:
        table.add(ALICE, prompt)
    assert table.best(ALICE, edited(prompts[seed], 0.1, np.random.default_rng(seed))).tolist() == prompts[seed].tolist()
    assert table.best(ALICE, run(100 + seed)) is None
    assert table.best(BOB, prompts[seed]) is None


def test_old_prompts_and_tenants_are_forgotten():
    table = References(most_prompts=2, most_tenants=1)
    for seed in (1, 2, 1, 3):
        table.add(ALICE, run(seed))
    assert [table.best(ALICE, run(seed)) is not None for seed in (1, 2, 3)] == [True, False, True]
    table.add(BOB, run(1))
    assert table.best(ALICE, run(1)) is None
    assert table.best(BOB, run(1)[:3]) is None, "too short to be like anything"


def test_a_search_counts_as_use_of_the_tenant_and_of_the_prompt_that_it_found():
    table = References(most_prompts=2, most_tenants=2)
    for seed in (1, 2):
        table.add(ALICE, run(seed))
    table.add(BOB, run(1))
    table.best(ALICE, run(1))
    table.add(CAROL, run(1))
    table.add(ALICE, run(3))
    assert [table.best(root, run(1)) is not None for root in (ALICE, BOB, CAROL)] == [True, False, True]
    assert [table.best(ALICE, run(seed)) is not None for seed in (1, 2, 3)] == [True, False, True]


def test_tokens_have_a_bound_over_all_tenants():
    table = References(most_tokens=1500)
    for root, seed, count in ((ALICE, 1, 600), (BOB, 2, 600), (CAROL, 3, 7), (CAROL, 4, 1501), (BOB, 5, 700), (BOB, 6, 700)):
        table.add(root, run(seed, count))
        table.check()
    assert table.best(ALICE, run(1)) is None, "the tenant that was used last keeps its prompts"
    assert table.best(CAROL, run(4, 1501)) is None, "a prompt of more than the bound takes no room"
    assert [table.best(BOB, run(seed, 700)) is not None for seed in (2, 5, 6)] == [False, True, True]


def test_a_prompt_that_was_seen_before_counts_once():
    table = References(most_tokens=1300)
    for seed in (1, 2, 1, 2, 1):
        table.add(ALICE, run(seed))
        table.check()
    assert all(table.best(ALICE, run(seed)) is not None for seed in (1, 2))


def test_likeness_is_about_the_share_of_shingles_that_both_have():
    one = run(1, 4000)
    for same in (0, 1000, 2000, 4000):
        other = np.concatenate((one[:same], run(2, 4000 - same)))
        assert likeness(sketch(one), sketch(other)) == pytest.approx(same / (8000 - same), abs=0.13)


@settings(max_examples=400)
@given(st.lists(st.integers(0, 4), max_size=60), st.lists(st.integers(0, 4), max_size=60), st.integers(1, 30))
def test_aligned_tokens_are_equal_and_ascend(reference, tokens, hashes):
    """Also with so few hashes that they collide."""
    reference, tokens = np.array(reference, np.int32), np.array(tokens, np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(similar, "window_hashes", lambda *given: window_hashes(*given) % np.uint64(hashes))
        source = aligned(reference, tokens)
    at = np.flatnonzero(source >= 0)
    assert (reference[source[at]] == tokens[at]).all()
    assert (np.diff(source[at]) > 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_nearly_all_that_was_not_edited_is_aligned(seed):
    tokens = run(seed, 2000)
    assert aligned(tokens, tokens).tolist() == list(range(2000))
    changed = edited(tokens, 0.1, np.random.default_rng(seed))
    assert (aligned(tokens, changed) >= 0).mean() > 0.85
    assert (aligned(tokens, run(90 + seed)) < 0).mean() > 0.99


def test_a_run_that_moved_to_the_front_does_not_break_the_order():
    tokens = run(1, 400)
    source = aligned(tokens, np.concatenate((tokens[300:], tokens[:300])))
    assert source.tolist() == [-1] * 100 + list(range(300))
