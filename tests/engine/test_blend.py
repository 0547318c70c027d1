"""Blended prefills: exact where everything is computed, refused where the plan makes no sense, and otherwise what the same
rows give when each is computed by itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.engine import blend, codecs, weights
from mooncake_zmq.engine.blend import (
    CACHEBLEND,
    NOTHING,
    Again,
    Reused,
    found_run,
    moved_run,
    prefill_blended,
    rotation,
    turned,
)
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.kv_cache import KEY_TILE, SequenceKV
from mooncake_zmq.engine.machine_code.step_layout import SPAN_TILES
from mooncake_zmq.engine.prepare import default_cache_dir, prepare
from mooncake_zmq.kv.codec import CODECS
from mooncake_zmq.kv.parts import Part

LAYERS, LONGEST = 5, 1300
RNG = np.random.default_rng(11)
SYSTEM, QUESTION = (RNG.integers(0, 500, count).astype(np.int32) for count in (70, 40))
DOCUMENTS = [RNG.integers(0, 500, count).astype(np.int32) for count in (200, 64, 131)]


@pytest.fixture(scope="session")
def path():
    """In the usual directory, whose machine code need not be made again."""
    return prepare(f'dummy:{{"layers": {LAYERS}, "family": "qwen3"}}', default_cache_dir())


@pytest.fixture(scope="session", params=["numpy", "numpy, 3 threads", "compiled", "compiled, 2 threads"])
def engine(request, path):
    backend, _, threads = request.param.partition(", ")
    count = int(threads.split()[0]) if threads else 1
    if backend == "numpy":
        return weights.open_model(path, threads=count)
    try:
        return weights.open_compiled(path, threads=count, compacted=False)
    except ModelError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="session")
def one(path):
    return weights.open_model(path)


def kv_of(sequence, spec):
    out = np.empty((spec.layers, 2, sequence.length, spec.kv_heads, spec.head_dim), np.float32)
    for layer in range(spec.layers):
        SequenceKV.read_part(sequence, layer, 0, sequence.length, out[layer])
    return out


def computed(engine, tokens, at=0):
    """The KV of tokens at positions from `at` on, behind others."""
    sequence = engine.new_sequence(LONGEST)
    if at:
        engine.prefill(sequence, np.arange(at).astype(np.int32) % 500)
    engine.prefill(sequence, tokens)
    kv = kv_of(sequence, engine.spec)[:, :, at:]
    sequence.close()
    return kv


def prompt(engine):
    """(a sequence that has the system prompt, the other tokens, the documents' KV as each was computed alone)."""
    sequence = engine.new_sequence(LONGEST)
    engine.prefill(sequence, SYSTEM)
    reused, at = [], len(SYSTEM)
    for document in DOCUMENTS:
        reused.append(moved_run(computed(engine, document), at))
        at += len(document)
    return sequence, np.concatenate((*DOCUMENTS, QUESTION)), reused


def in_full(engine, tokens):
    sequence = engine.new_sequence(LONGEST)
    engine.prefill(sequence, SYSTEM)
    return engine.prefill(sequence, tokens)[0], kv_of(sequence, engine.spec)


@pytest.mark.parametrize("probed", [1, 3])
def test_to_compute_all_again_gives_the_whole_prefill_bit_for_bit(engine, probed):
    sequence, tokens, reused = prompt(engine)
    result = prefill_blended(engine, sequence, tokens, reused, Again(1.0, probed))
    logits, kv = in_full(engine, tokens)
    assert sequence.length == len(SYSTEM) + len(tokens) == len(SYSTEM) + len(result.computed)
    np.testing.assert_array_equal(result.logits, logits)
    np.testing.assert_array_equal(kv_of(sequence, engine.spec), kv)


@pytest.mark.parametrize("backend", ["numpy", "compiled"])
def test_kv_that_is_rounded_when_stored_is_so_in_rows_that_do_not_follow_one_another(path, backend):
    """As each row is by a prefill of its own."""
    codec = CODECS["int8"]
    try:
        engine = weights.load_engine(path, backend="numpy" if backend == "numpy" else "auto", codec=codec)
    except ModelError as error:
        pytest.skip(error.message)
    sequence, tokens, reused = prompt(engine)
    result = prefill_blended(engine, sequence, tokens, reused, Again(0.3))
    kv = kv_of(sequence, engine.spec)
    for layer in range(LAYERS):
        for each, back in zip(kv[layer], codecs.rounded(codec, *kv[layer]), strict=True):
            np.testing.assert_array_equal(back[result.computed], each[result.computed])


def test_nothing_reused_is_a_prefill(engine):
    sequence, tokens, _ = prompt(engine)
    np.testing.assert_array_equal(prefill_blended(engine, sequence, tokens, []).logits, in_full(engine, tokens)[0])


@pytest.mark.parametrize("chunk", [64, 145, 435])
@pytest.mark.parametrize("probed", [1, 3])
def test_the_whole_prefill_may_be_computed_in_chunks_some_of_which_end_with_the_prompt(one, monkeypatch, chunk, probed):
    sequence, tokens, reused = prompt(one)
    assert len(tokens) == 435
    monkeypatch.setattr(blend, "CHUNK_ROWS", chunk)
    result = prefill_blended(one, sequence, tokens, reused, Again(1.0, probed))
    logits, kv = in_full(one, tokens)
    np.testing.assert_allclose(result.logits, logits, atol=1e-4)
    np.testing.assert_allclose(kv_of(sequence, one.spec), kv, atol=1e-4)


@pytest.mark.parametrize("chunk", [64, 7, 119])
def test_chunks_of_rows_that_do_not_follow_one_another_give_what_all_at_once_give(engine, monkeypatch, chunk):
    results = []
    for rows in (blend.CHUNK_ROWS, chunk):
        monkeypatch.setattr(blend, "CHUNK_ROWS", rows)
        sequence, tokens, reused = prompt(engine)
        results.append((prefill_blended(engine, sequence, tokens, reused, Again(0.2)), kv_of(sequence, engine.spec)))
    (expected, expected_kv), (got, got_kv) = results
    assert len(got.computed) == 119, "of which two of the chunks are a divisor"
    np.testing.assert_array_equal(got.computed, expected.computed)
    np.testing.assert_allclose(got.logits, expected.logits, atol=1e-4)
    np.testing.assert_allclose(got_kv, expected_kv, atol=1e-4)


OTHER_ENGINES = ["numpy, 3 threads", "compiled", "compiled, 2 threads"]


@pytest.mark.parametrize("engine", OTHER_ENGINES, indirect=True)
def test_rows_in_several_spans_of_keys_are_blended_alike(engine, one):
    """In a prompt of more than two spans, which the compiled engine scores one after another."""
    rng, results = np.random.default_rng(5), []
    documents = [rng.integers(0, 500, 380).astype(np.int32) for _ in range(3)]
    tokens = np.concatenate((*documents, QUESTION))
    assert len(SYSTEM) + len(tokens) > 2 * SPAN_TILES * KEY_TILE
    for each in (engine, one):
        sequence = each.new_sequence(LONGEST)
        each.prefill(sequence, SYSTEM)
        reused = [moved_run(computed(one, own), len(SYSTEM) + 380 * number) for number, own in enumerate(documents)]
        results.append((prefill_blended(each, sequence, tokens, reused, Again(0.1)), kv_of(sequence, each.spec)))
    (got, got_kv), (expected, expected_kv) = results
    assert len(set((expected.computed // (SPAN_TILES * KEY_TILE)).tolist())) == 3
    np.testing.assert_array_equal(got.computed, expected.computed)
    np.testing.assert_allclose(got.logits, expected.logits, atol=1e-4)
    np.testing.assert_allclose(got_kv, expected_kv, atol=1e-4)


@pytest.mark.parametrize("engine", OTHER_ENGINES, indirect=True)
@pytest.mark.parametrize("again", [NOTHING, CACHEBLEND, Again(0.05), Again(0.5), Again(0.1, 3), Again(0.1, LAYERS - 1)])
def test_all_engines_blend_alike(engine, one, again):
    """And with any number of threads: the same rows, and KV that differs by rounding."""
    results = []
    for each in (engine, one):
        sequence, tokens, reused = prompt(each)
        results.append((prefill_blended(each, sequence, tokens, reused, again), kv_of(sequence, each.spec)))
    (got, got_kv), (expected, expected_kv) = results
    np.testing.assert_array_equal(got.computed, expected.computed)
    np.testing.assert_allclose(got.logits, expected.logits, atol=1e-4)
    np.testing.assert_allclose(got_kv, expected_kv, atol=1e-4)


def test_the_share_that_deviates_most_is_computed_and_all_that_is_not_reused(one):
    sequence, tokens, reused = prompt(one)
    planted = len(SYSTEM) + 33
    reused[0].kv[1, 1, 33] += 50
    result = prefill_blended(one, sequence, tokens, reused, Again(0.1))
    covered, own = sum(map(len, DOCUMENTS)), set(range(len(SYSTEM) + len(tokens) - len(QUESTION), len(SYSTEM) + len(tokens)))
    assert len(result.computed) == round(0.1 * covered) + len(QUESTION)
    assert {planted, *own} <= set(result.computed.tolist())
    assert (np.diff(result.computed) > 0).all()


def test_each_row_sees_the_reused_kv_and_the_rows_before_it_and_no_other(one):
    """Against every row computed by a prefill of its own over the same KV."""
    sequence, tokens, reused = prompt(one)
    result = prefill_blended(one, sequence, tokens, reused, Again(0.2))
    other = one.new_sequence(LONGEST)
    one.prefill(other, SYSTEM)
    for each in reused:
        for layer in range(LAYERS):
            keys, values = each.kv[layer]
            other.store(layer, int(each.at[0]), turned(keys, rotation(one.frequencies, each.computed_at, each.at)), values)
    full = one.new_sequence(LONGEST)
    one.prefill(full, np.concatenate((SYSTEM, tokens)))
    for layer in range(2):  # exact for every token
        other.keys[layer], other.values[layer] = full.keys[layer], full.values[layer]
    for position in result.computed.tolist():
        other.set_length(position)
        logits = one.prefill(other, tokens[position - len(SYSTEM) :][:1])
    np.testing.assert_allclose(result.logits, logits[0], atol=1e-4)
    np.testing.assert_allclose(kv_of(sequence, one.spec), kv_of(other, one.spec), atol=1e-4)


def test_a_part_in_its_own_place_is_reused_exactly(one):
    """As the prefix that it is: no row is computed again, and nothing changes."""
    tokens = np.concatenate((DOCUMENTS[0], QUESTION))
    sequence = one.new_sequence(LONGEST)
    result = prefill_blended(one, sequence, tokens, [moved_run(computed(one, DOCUMENTS[0]), 0)], NOTHING)
    assert result.computed.tolist() == list(range(len(DOCUMENTS[0]), len(tokens)))
    np.testing.assert_allclose(result.logits, one.prefill(one.new_sequence(LONGEST), tokens)[0], atol=1e-5)


def test_a_prompt_that_is_reused_to_its_end_computes_its_last_token(one):
    sequence = one.new_sequence(LONGEST)
    result = prefill_blended(one, sequence, DOCUMENTS[0], [moved_run(computed(one, DOCUMENTS[0]), 0)], NOTHING)
    assert result.computed.tolist() == [len(DOCUMENTS[0]) - 1]
    np.testing.assert_allclose(result.logits, one.prefill(one.new_sequence(LONGEST), DOCUMENTS[0])[0], atol=1e-5)


@settings(max_examples=60)
@given(st.integers(0, 8000), st.integers(0, 8000), st.integers(0, 8000), st.integers(1, 40))
def test_rotations_compose_and_one_by_nothing_is_exact(one, first, second, third, count):
    keys = np.random.default_rng(count).standard_normal((count, 2, one.spec.head_dim), dtype=np.float32)
    places = [start + np.arange(count) for start in (first, second, third)]

    def turn(numbers, before, after):
        return turned(numbers, rotation(one.frequencies, places[before], places[after]))

    np.testing.assert_array_equal(turn(keys, 0, 0), keys)
    np.testing.assert_allclose(turn(turn(keys, 0, 1), 1, 2), turn(keys, 0, 2), atol=2e-6)
    np.testing.assert_allclose(turn(turn(keys, 0, 1), 1, 0), keys, atol=2e-6)


@pytest.mark.parametrize(("skipped", "computed_at", "at"), [(0, 0, 70), (64, 0, 0), (64, 9, 70)])
def test_what_is_found_of_a_part_has_the_keys_of_its_places_in_the_prompt(one, skipped, computed_at, at):
    """In layer 0, where a key depends on its token alone."""
    part, start = Part(5, 5 + 128, skipped, ()), at - 5 if at else 0
    reused = found_run(part, computed(one, DOCUMENTS[0], computed_at), start, computed_at)
    there = computed(one, DOCUMENTS[0][skipped : skipped + 128], start + 5)
    assert reused.at.tolist() == list(range(start + 5, start + 5 + 128))
    turn = rotation(one.frequencies, reused.computed_at, reused.at)
    np.testing.assert_allclose(turned(reused.kv[0, 0], turn), there[0, 0], atol=3e-6)
    np.testing.assert_allclose(reused.kv[0, 1], there[0, 1], atol=3e-6)


@pytest.mark.parametrize("at", [1, 64, 700])
def test_a_key_turned_to_a_position_is_the_key_computed_there(one, at):
    """In layer 0, where a key depends on its token alone."""
    here, there = computed(one, DOCUMENTS[2]), computed(one, DOCUMENTS[2], at)
    places = np.arange(len(DOCUMENTS[2]))
    turn = rotation(one.frequencies, places, places + at)
    np.testing.assert_allclose(turned(here[0, 0], turn), there[0, 0], atol=3e-6)
    assert np.abs(here[0, 0] - there[0, 0]).max() > 0.1


def run_at(one, at, count=20):
    shape = (LAYERS, 2, count, one.spec.kv_heads, one.spec.head_dim)
    return moved_run(np.zeros(shape, np.float32), at)


def refusals(one):
    good, start = run_at(one, 100), len(SYSTEM)
    return {
        "overlap": ([good, run_at(one, 119)], "same token"),
        "twice": ([good, good], "same token"),
        "before the tokens": ([run_at(one, start - 1)], "is not of"),
        "behind the tokens": ([run_at(one, start + 281)], "is not of"),
        "backwards": ([Reused(at=good.at[::-1].copy(), computed_at=good.computed_at, kv=good.kv)], "ascending"),
        "another shape": ([Reused(at=good.at, computed_at=good.computed_at, kv=good.kv[:, :, 1:])], "tokens have"),
        "other numbers": ([Reused(at=good.at, computed_at=good.computed_at, kv=good.kv.astype(np.float16))], "tokens have"),
        "places that lack": ([Reused(at=good.at, computed_at=good.computed_at[1:], kv=good.kv)], "tokens have"),
        "nothing": ([good.only(np.zeros(20, bool))], "no tokens"),
        "below 0": ([Reused(at=good.at, computed_at=good.computed_at - 1, kv=good.kv)], "below 0"),
    }


def test_a_plan_that_makes_no_sense_is_refused_before_anything_is_written(one):
    sequence = one.new_sequence(LONGEST)
    one.prefill(sequence, SYSTEM)
    before = kv_of(sequence, one.spec)
    for plan, message in refusals(one).values():
        with pytest.raises(ValueError, match=message):
            prefill_blended(one, sequence, QUESTION.repeat(7), plan)
    for again in (Again(-0.1), Again(1.1), Again(float("nan")), Again(0.1, 0), Again(0.1, LAYERS)):
        with pytest.raises(ValueError, match="share"):
            prefill_blended(one, sequence, QUESTION, [], again)
    assert sequence.length == len(SYSTEM)
    np.testing.assert_array_equal(kv_of(sequence, one.spec), before)


def test_a_failure_leaves_the_length(one, monkeypatch):
    sequence, tokens, reused = prompt(one)

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(blend, "_deviating", fail)
    with pytest.raises(MemoryError):
        prefill_blended(one, sequence, tokens, reused)
    assert sequence.length == len(SYSTEM)
