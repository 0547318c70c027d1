"""`bench codecs --eviction` at toy size, and what its ways keep: evicting what matters shows, keeping everything is exact."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mooncake_zmq.bench import eviction, eviction_ways, low_rank
from mooncake_zmq.bench.codecs import PAGES, CodecBench, Study
from mooncake_zmq.bench.command import bench
from mooncake_zmq.bench.eviction import (
    EVICTION,
    FOLDED,
    LESS,
    MERGED,
    PUBLISHED,
    PYRAMID,
    PYRAMID_WINDOW,
    TRAINING_PAGES,
    WINDOW,
    _Evictions,
)
from mooncake_zmq.bench.eviction_ways import (
    KeptTokens,
    _recent_weights,
    attended_most,
    folded,
    merged,
    pyramid,
    pyramid_lengths,
    taken,
)
from mooncake_zmq.bench.low_rank import LowRank, Sample, begun, error_of, joined, sample, state_tokens, trained
from mooncake_zmq.bench.quality import Computed, computed, divergence, log_probabilities, logs_of, prepared_model
from mooncake_zmq.engine.blend import read_kv
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.eviction import sinks_and_recent
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.engine.weights import open_model

MODEL = 'dummy:{"layers": 6}'
TOKENS, FOLLOWING = 48, 8
TEXT = np.random.default_rng(2).integers(3, 250, TOKENS + FOLLOWING).astype(np.int32)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    return open_model(prepared_model(MODEL, str(tmp_path_factory.mktemp("model")), kernels=False))


def layers(engine: Llama, text: np.ndarray) -> list[Computed]:
    scratch, entering, found = engine.new_sequence(len(text)), text, []
    for index in range(engine.spec.layers):
        found.append(computed(engine, scratch, index, entering, np.arange(len(text))))
        entering = found[-1].hidden
    return found


def error(engine: Llama, kv: list[np.ndarray], **options: Any) -> float:
    """The KL of what follows from what was kept of the context."""
    sequence = engine.new_sequence(len(TEXT))
    engine.prefill(sequence, TEXT[:TOKENS])
    exact = log_probabilities(engine, sequence, TEXT[TOKENS:])
    kept = KeptTokens(kv, TOKENS, FOLLOWING, **options)
    steps = [engine.decode_over([kept], TEXT[at : at + 1]) for at in range(TOKENS, len(TEXT))]
    return divergence(exact, logs_of(np.concatenate(steps)))


def run(*options: str) -> Any:
    sizes = ["--model", MODEL, "--tokens", str(TOKENS), "--following", str(FOLLOWING)]
    return CliRunner().invoke(bench, ["codecs", "--eviction", *sizes, *options])


def test_each_way_has_its_row_and_the_bytes_of_its_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "less.npz"
    result = run("--less", str(file), "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    found = {each["name"]: each for each in report["qualities"]}
    assert found.keys() == {"int4", WINDOW, EVICTION, MERGED, FOLDED, PUBLISHED, PYRAMID, PYRAMID_WINDOW, LESS}
    for name, each in found.items():
        own = "int4" if name not in (PYRAMID, PYRAMID_WINDOW) else PYRAMID
        assert each["bits"] == pytest.approx(found[own]["bits"], abs=16 / TOKENS), name
    rows = {row["name"]: row for row in report["rows"]}
    assert rows[f"{LESS}: share of KL closed / asked"]["reference"] == 0.25
    assert rows[f"multiply-adds of prefills, {PYRAMID} / all tokens"]["ratio"] > 1
    assert "400 steps at least" in report["notes"][1]
    assert "int4's 15 cannot be had" in report["notes"][2]
    other = run("--less", str(file), "--tokens", "64")
    assert other.exit_code == 2
    assert "another model or context" in other.output
    monkeypatch.setattr(eviction, "merged", taken)
    again = run("--less", str(file), "--json")
    unmerged = {each["name"]: each["kl"] for each in json.loads(again.stdout.splitlines()[-1])["qualities"]}
    assert unmerged[MERGED] == unmerged[EVICTION] != found[MERGED]["kl"]
    assert unmerged[PUBLISHED] != found[PUBLISHED]["kl"], "it is merged as published"


def test_training_that_was_cut_short_closes_nothing_that_counts(tmp_path: Path) -> None:
    result = run("--minutes", "0", "--less", str(tmp_path / "less.npz"))
    assert result.exit_code == 0, result.output
    assert "every eviction in as many bytes" in result.stdout.splitlines()[0]
    assert "0 steps at least" in result.stdout
    assert "no verdict" in result.stdout
    assert "closed / asked" not in result.stdout


def test_what_makes_no_sense_is_refused_before_the_work(tmp_path: Path) -> None:
    assert run("--only", "quality").exit_code == 2
    for options in (("--minutes", "1"), ("--less", "x.npz")):
        assert CliRunner().invoke(bench, ["codecs", *options]).exit_code == 2
    result = run("--less", str(tmp_path / "no" / "less.npz"))
    assert result.exit_code == 2
    assert "No such file" in result.output
    assert "layer 0" not in result.output


def test_texts_that_train_are_none_of_those_that_measure() -> None:
    assert not set(TRAINING_PAGES) & set(PAGES)


def test_the_state_of_less_is_that_of_the_tokens_that_are_not_kept(engine: Llama, tmp_path: Path) -> None:
    asked = CodecBench(model=MODEL, tokens=TOKENS, following=FOLLOWING)
    study = Study(asked, lambda said: None, prepared_model(MODEL, str(tmp_path), kernels=False))
    ways = _Evictions(study, asked, lambda said: None)
    ways.train(None, 0.0)
    assert ways._less is not None
    recent = ways._less.recent
    kept = ways._with_state(0)[LESS]
    for index, layer in enumerate(layers(study.engine, study.texts[0])):
        taught = sample(layer, TOKENS, recent)
        state = ways._less.state(index, np.stack((taught.keys, taught.values)))
        assert taught.keys.shape[1] == TOKENS - recent - 4
        assert np.allclose(kept._state[index].mixed, state.mixed, atol=1e-4)  # type: ignore[index]
        assert np.allclose(kept._state[index].mass, state.mass, atol=1e-4)  # type: ignore[index]


def test_keeping_everything_is_exact_and_what_matters_is_missed(engine: Llama) -> None:
    found = layers(engine, TEXT[:TOKENS])
    kv = [layer.kv for layer in found]
    everything = np.arange(TOKENS)
    whole = error(engine, [taken(each, everything) for each in kv])
    assert whole < 1e-9
    assert error(engine, [merged(each, everything) for each in kv]) < 1e-9
    assert error(engine, [folded(each, everything) for each in kv]) < 1e-9
    assert error(engine, pyramid(engine, TEXT[:TOKENS], 1.0)[0]) < 1e-9
    most = [attended_most(layer, 24) for layer in found]
    least = [np.setdiff1d(everything, each) for each in most]
    best, worst = (error(engine, [taken(*each) for each in zip(kv, which, strict=True)]) for which in (most, least))
    assert 1e-6 < best < worst
    fixed = error(engine, [taken(*each) for each in zip(kv, most, strict=True)], share=0.5)
    assert fixed != best


def test_a_layer_by_itself_computes_what_a_prefill_does(engine: Llama) -> None:
    sequence = engine.new_sequence(TOKENS)
    engine.prefill(sequence, TEXT[:TOKENS])
    exact = read_kv(engine, sequence, 0, TOKENS)
    assert np.allclose(np.stack([layer.kv for layer in layers(engine, TEXT[:TOKENS])]), exact, atol=1e-5)


def test_tokens_that_were_dropped_are_not_computed_and_keep_their_positions(engine: Llama) -> None:
    (made, work), kept = pyramid(engine, TEXT[:TOKENS], 0.2), pyramid_lengths(TOKENS, engine.spec.layers, 0.2)
    assert [each.shape[2] for each in made] == kept
    assert kept[0] == kept[1] == TOKENS > kept[-1]
    assert kept == sorted(kept, reverse=True)
    assert 0.4 * sum(layer.multiply_adds for layer in layers(engine, TEXT[:TOKENS])) < work
    exact = [layer.kv.transpose(0, 2, 1, 3) for layer in layers(engine, TEXT[:TOKENS])]
    assert np.allclose(made[1], exact[1], atol=1e-5), "all tokens reach the second layer"
    assert np.allclose(made[2][:, :, -1], exact[2][:, :, -1], atol=1e-5), "the last token's key is rotated for its position"
    assert not np.allclose(made[3][:, :, -1], exact[3][:, :, -1], atol=1e-5)


def test_tokens_with_gaps_between_them_attend_to_each_other_alone(engine: Llama) -> None:
    scratch, entering = engine.new_sequence(TOKENS), layers(engine, TEXT[:TOKENS])[0].hidden
    computed(engine, scratch, 1, entering, np.arange(TOKENS))
    here, there = (computed(engine, scratch, 1, entering[:9], first + np.arange(9)).hidden for first in (0, 30))
    assert np.allclose(here, there, atol=1e-5), "only distances count"


def test_a_prefill_counts_the_products_of_all_its_weights_and_of_all_pairs(engine: Llama) -> None:
    spec, pairs = engine.spec, TOKENS * (TOKENS + 1) // 2
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    projected = spec.hidden * query + 2 * spec.hidden * key
    finished = query * spec.hidden + spec.hidden * spec.ffn * 2 + spec.ffn * spec.hidden
    whole = spec.layers * TOKENS * projected + (spec.layers - 1) * (TOKENS * finished + 2 * pairs * query)
    assert sum(layer.multiply_adds for layer in layers(engine, TEXT[:TOKENS])) == whole
    assert pyramid(engine, TEXT[:TOKENS], 1.0)[1] == whole
    assert pyramid(engine, TEXT[:TOKENS])[1] < whole


def test_the_published_schedule() -> None:
    lengths = pyramid_lengths(1024, 30)
    assert lengths[:3] == [1024, 1024, 1023]
    assert 750 < np.mean(lengths) < 850
    assert pyramid_lengths(1024, 30, 1.0) == [1024] * 30


def test_recent_tokens_choose_what_they_attend_to_most() -> None:
    keys, queries = np.zeros((2, 40, 1, 4), np.float32), np.ones((1, 40, 2, 4), np.float32)
    keys[0, [7, 11]] = 5
    weights = _recent_weights(Computed(queries, keys, keys, 0), 30)
    assert sorted(np.argsort(-weights)[:6].tolist()) == [0, 1, 2, 3, 7, 11]


def test_what_recent_tokens_attend_to_least_goes_first(engine: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    best = error(engine, pyramid(engine, TEXT[:TOKENS], 0.0)[0])
    monkeypatch.setattr(eviction_ways, "_recent_weights", lambda *given: -_recent_weights(*given))
    assert best < error(engine, pyramid(engine, TEXT[:TOKENS], 0.0)[0])


def test_a_share_of_all_tokens_is_kept_and_those_at_the_fixed_point_go_first() -> None:
    kv = np.arange(60, dtype=np.float32).reshape(1, 1, 60, 1).repeat(2, axis=0)
    kept, counts = KeptTokens([kv], 120, 8, share=0.5), []
    for step in range(8):
        kept.attend(0, np.ones((1, 1, 1), np.float32), *np.full((2, 1, 1), 100 + step, np.float32))
        kept.length += 1
        counts.append(kept.numbers // 2)
    assert counts == [61, 61, 62, 62, 63, 63, 64, 64]
    held = kept._kv[0][0, 0, :64, 0].tolist()
    assert held == [*range(35), *range(39, 60), *range(100, 108)]


def test_what_all_attend_to_is_kept_with_the_first_and_the_last() -> None:
    keys, queries = np.zeros((2, 20, 1, 4), np.float32), np.ones((1, 20, 2, 4), np.float32)
    keys[0, [7, 11]] = 5
    assert attended_most(Computed(queries, keys, keys, 0), 7).tolist() == [0, 1, 2, 3, 7, 11, 19]


def test_dropped_tokens_are_merged_into_the_nearest_or_folded_into_the_most_similar() -> None:
    kv = np.zeros((2, 12, 1, 1), np.float32)
    kv[:, 4:8] = 8
    assert merged(kv, np.array([0, 1, 2, 3, 9, 11]))[0, 0, :, 0].tolist() == pytest.approx([0, 0, 0, 0, 32 / 7, 0])
    assert merged(kv, np.array([0, 1, 2, 3, 4, 9, 11]))[1, 0, :, 0].tolist() == [0, 0, 0, 0, 8, 8 / 4, 0]
    kv = np.array([[[1, 0], [0, 1], [0, 2]], [[1, 1], [2, 2], [2, 2]]], np.float32)[:, :, None]
    keys, values = folded(kv, np.array([0, 1]))
    assert keys[0].tolist() == [[1, 0], [0, 1]]
    assert values[0].tolist() == [[1, 1], [2, 2]]
    kv[1, 2] = 6
    assert np.allclose(folded(kv, np.array([0, 1]))[1, 0], [[1, 1], [(2 + 0.75 * 6) / 1.75] * 2])


def test_bytes_are_those_of_what_is_held() -> None:
    kv = np.ones((2, 3, 10, 64), np.float32)
    state = low_rank.State(np.ones((3, 8), np.float32), np.ones((3, 8, 64), np.float32), {})
    assert KeptTokens([kv, kv[:, :, :4]], 20, 5).numbers == 14 * 2 * 3 * 64
    assert KeptTokens([kv], 20, 5, state=[state]).numbers == kv.size + 3 * 8 * 65
    assert state_tokens(64) == 5
    assert sinks_and_recent(20, 6).tolist() == [0, 1, 2, 3, 18, 19]


def test_gradients_are_those_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "DROPPED", 30.0)
    rng = np.random.default_rng(1)
    weights: Any = {name: each.astype(float) for name, each in begun((2, 3, 8), rng, hidden=6, rank=4).items()}

    def some(*shape: int) -> Any:
        return rng.standard_normal(shape)

    taught = Sample(some(2, 3, 5, 8), rng.random((2, 3, 5, 1)), *some(2, 2, 3, 5, 8), *(2 * some(2, 2, 30, 8)))
    _, gradients = error_of(weights, taught, 0.7)
    for name, each in weights.items():
        for at in (tuple(rng.integers(size) for size in each.shape) for _ in range(5)):
            around = []
            for step in (1e-5, -1e-5):
                moved = each.copy()
                moved[at] += step
                around.append(error_of(weights | {name: moved}, taught, 0.7)[0])
            assert gradients[name][at] == pytest.approx((around[0] - around[1]) / 2e-5, rel=1e-4, abs=1e-9)


def test_training_closes_a_part_of_the_error_on_its_texts_and_decode_computes_the_same(engine: Llama, tmp_path: Path) -> None:
    said: list[str] = []
    texts = [np.random.default_rng(seed).integers(3, 250, len(TEXT)).astype(np.int32) for seed in range(3)]
    less = trained(engine, texts, TOKENS, 12, minutes=1, steps=80, progress=said.append)
    left = [float(each.split(": ")[1].split()[0]) for each in said]
    assert len(left) == engine.spec.layers
    assert max(left) < 0.9
    less.save(tmp_path / "less.npz")
    read = low_rank.opened(tmp_path / "less.npz", engine.spec.fingerprint, engine.spec.layers, TOKENS, 12)
    assert all((read.layers[2][name] == each).all() for name, each in less.layers[2].items())
    layer = layers(engine, texts[0])[2]
    taught = sample(layer, TOKENS, 12)
    state = read.state(2, np.stack((taught.keys, taught.values)))
    each = [joined(state, taught.queries[:, :, at], taught.unit[:, :, at], taught.kept[:, :, at]) for at in range(FOLLOWING)]
    off = float(np.square(np.stack(each, axis=2) - taught.exact).mean())
    assert off == pytest.approx(error_of(read.layers[2], taught, 1.0)[0], rel=1e-3)


def test_a_file_without_weights_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "less.npz"
    LowRank("x", 1, 1, 400, 0.5, [begun((1, 1, 2), np.random.default_rng(0))]).save(file)
    assert low_rank.opened(file, "x", 1, 1, 1).error == 0.5
    with pytest.raises(ModelError, match="another model"):
        low_rank.opened(file, "x", 1, 2, 1)
    with pytest.raises(ModelError, match="other layers"):
        low_rank.opened(file, "x", 2, 1, 1)
    whole = file.read_bytes()
    for cut in (2, 100, len(whole) - 30):
        file.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match="has no weights"):
            low_rank.opened(file, "x", 1, 1, 1)
    one = {name: np.zeros((1, 1)) for name in ("phi1", "phi2", "psi1", "psi2")}
    for training in (3.0, [np.nan, 0.0], [np.inf, 0.0]):
        np.savez(file, of=np.array(["x", "1", "1"]), training=np.array(training), **one)
        with pytest.raises(ModelError, match="has no weights"):
            low_rank.opened(file, "x", 1, 1, 1)
    np.save(tmp_path / "less.npy", np.zeros(3))
    with pytest.raises(ModelError, match="has no weights"):
        low_rank.opened(tmp_path / "less.npy", "x", 1, 1, 1)


def test_weights_that_cannot_be_written_leave_the_former_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any, **_: object) -> None:
        file.write(b"half")
        raise OSError("no space")

    monkeypatch.setattr(np, "savez", full)
    (tmp_path / "less.npz").write_bytes(b"former")
    with pytest.raises(OSError, match="no space"):
        LowRank("x", 1, 1, 400, 0.5, [begun((1, 1, 2), np.random.default_rng(0))]).save(tmp_path / "less.npz")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"less.npz": b"former"}
