"""Every family, from every kind of file, against Hugging Face transformers (golden/make_families.py)."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from model_files import save_gguf, save_model_directory

from mooncake_zmq.engine import prepared_files, weights
from mooncake_zmq.engine.prepare import prepare

GOLDEN = Path(__file__).parent.parent / "golden"
sys.path.insert(0, str(GOLDEN))

import families  # noqa: E402

TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def recorded():
    with np.load(GOLDEN / "families.npz", allow_pickle=False) as archive:
        return dict(archive)


def as_gguf(name, path):
    """Llama 3's scaling is carried as divisors of the frequencies, computed by whoever writes the file."""
    config, tensors, fields = families.config(name), families.weights(name), []
    scaling = config.get("rope_scaling") or {}
    if scaling.get("type") == "linear":
        kinds = gguf.GGUFValueType
        prefix = f"{config['model_type']}.rope.scaling"
        fields = [(f"{prefix}.type", "linear", kinds.STRING), (f"{prefix}.factor", scaling["factor"], kinds.FLOAT32)]
    elif scaling:
        turns = scaling["original_max_position_embeddings"] / (2 * np.pi)
        turns = turns * config["rope_theta"] ** (-np.arange(0, config["head_dim"], 2) / config["head_dim"])
        low, high, factor = (scaling[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
        kept = np.clip((turns - low) / (high - low), 0, 1)
        tensors |= {"rope_freqs.weight": (1 / (kept + (1 - kept) / factor)).astype(np.float32)}
    return save_gguf(path, config, tensors, fields=fields)


def write(name, form, directory, recorded):
    if form == "gguf":
        return as_gguf(name, directory / "model.gguf")
    config = families.config(name) if form == "old config" else str(recorded[f"{name}/config"])
    kind, _ = families.MODELS[name]
    shards = 1 if form == "old config" else 3
    return save_model_directory(directory / "model", config, families.weights(name), kind=kind, shards=shards)


@pytest.fixture(
    scope="module", params=[(name, form) for name in families.MODELS for form in ("old config", "shards", "gguf")], ids="/".join
)
def case(request, recorded, tmp_path_factory):
    """(engine, what was recorded of it)"""
    name, form = request.param
    directory = tmp_path_factory.mktemp("family")
    found = {key.removeprefix(f"{name}/"): value for key, value in recorded.items() if key.startswith(f"{name}/")}
    assert families.digest(name) == str(found["digest"]), "families.npz belongs to other weights: run make_families.py"
    path = prepare(str(write(name, form, directory, recorded)), directory)
    engine = weights.open_model(path)
    found["prompt"] = families.tokens(name)
    return engine, found


def near(logits, expected):
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


def test_prefill_in_one_step(case):
    engine, found = case
    sequence = engine.new_sequence(families.PROMPT_TOKENS)
    near(engine.prefill(sequence, found["prompt"], logits_at=found["positions"].tolist()), found["logits"])


@pytest.mark.parametrize("chunk", [1, 33, 64])
def test_prefill_in_chunks_over_what_is_cached(case, chunk):
    engine, found = case
    sequence = engine.new_sequence(families.PROMPT_TOKENS)
    positions = found["positions"].tolist()
    for start in range(0, families.PROMPT_TOKENS, chunk):
        here = [position for position in positions if start <= position < start + chunk]
        logits = engine.prefill(sequence, found["prompt"][start : start + chunk], logits_at=[at - start for at in here] or None)
        if here:
            near(logits, found["logits"][[positions.index(position) for position in here]])


def test_kv_moved_as_blocks_serves_another_sequence(case):
    """What prefill hands to decode: KV read as parts and written into an empty sequence."""
    engine, found = case
    first, second = engine.new_sequence(families.PROMPT_TOKENS), engine.new_sequence(families.PROMPT_TOKENS)
    engine.prefill(first, found["prompt"][:-33])
    spec, length = engine.spec, first.length
    part = np.empty((2, length, spec.kv_heads, spec.head_dim), dtype=np.float32)
    for layer in range(spec.layers):
        first.read_part(layer, 0, length, part)
        second.write_part(layer, 0, part)
    second.set_length(length)
    near(engine.prefill(second, found["prompt"][length:])[0], found["greedy_logits"][0])


def test_decode_one_by_one_chooses_the_same_tokens(case):
    engine, found = case
    sequence, other = (engine.new_sequence(families.PROMPT_TOKENS + families.GREEDY_TOKENS) for _ in range(2))
    engine.prefill(other, found["prompt"][:50])
    logits = engine.prefill(sequence, found["prompt"])[0]
    for token, expected in zip(found["greedy"], found["greedy_logits"], strict=True):
        near(logits, expected)
        assert logits.argmax() == token
        logits = engine.decode([other, sequence], np.array([7, token]))[1]


def test_a_sliding_window_caps_the_context(tmp_path):
    """Within its window such a model sees everything, so it is served up to there and no further."""
    fields = families.config("mistral") | {"sliding_window": 100}
    path = save_model_directory(tmp_path / "m", fields, families.weights("mistral"))
    spec = prepared_files.read_spec(prepare(str(path), tmp_path))
    assert (spec.max_positions, spec.sliding_window) == (100, 100)
    switched_off = save_model_directory(tmp_path / "q", families.config("qwen2"), families.weights("qwen2"))
    spec = prepared_files.read_spec(prepare(str(switched_off), tmp_path))
    assert (spec.max_positions, spec.sliding_window) == (256, None)


def test_the_goldens_are_of_every_family(recorded):
    kinds = {json.loads(str(recorded[f"{name}/config"]))["model_type"] for name in families.MODELS}
    assert kinds == {"llama", "mistral", "qwen2", "qwen3"}
