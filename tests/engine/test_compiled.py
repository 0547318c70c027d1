"""Machine code against NumPy: every shape, form of weights, batch and number of threads."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from near_tie import near_tie

from mooncake_zmq.core.messages import Sampling
from mooncake_zmq.engine import prepare as prepare_module
from mooncake_zmq.engine import weights
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.matrices import quantized
from mooncake_zmq.engine.matrices.panels import to_panels
from mooncake_zmq.engine.prepare import default_cache_dir, prepare
from mooncake_zmq.runtime.executor.lending import why_not

compiled = pytest.importorskip("mooncake_zmq.engine.machine_code.compiled", reason="needs Numba")

SHAPES = {
    "tiny": {},
    "odd sizes": {"hidden": 72, "ffn": 100, "vocab_size": 515, "heads": 6, "kv_heads": 3, "head_dim": 10},
    "one KV head": {"heads": 7, "kv_heads": 1, "head_dim": 32},
    "no groups": {"heads": 3, "kv_heads": 3, "head_dim": 80, "family": "qwen3"},
    "groups of 5": {"heads": 10, "kv_heads": 2, "head_dim": 128, "family": "qwen2"},
    "tied": {"heads": 6, "kv_heads": 1, "head_dim": 64, "tied": True, "hidden": 96},
    "groups of 9": {"heads": 9, "kv_heads": 1, "head_dim": 4, "family": "qwen3", "norm_eps": 1e-3},
}
LENGTHS = [1, 63, 64, 65, 128, 2, 510, 30, 600]  # about tiles, and spans of eight


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """With the machine code that this user's engines have: it is made once."""
    directory, code, kept = tmp_path_factory.mktemp("models"), compiled.object_code, default_cache_dir()
    kept.mkdir(parents=True, exist_ok=True)
    prepare_module._make_kernels(kept, lambda *_: None)
    if code.is_kept(kept):
        shutil.copytree(kept / code.DIRECTORY, directory / code.DIRECTORY)
    return directory


def open_both(path, threads, panels=None):
    """(NumPy's, compiled). `panels(spec, tensors)` gives matrices' shorter forms; decode sees NaN for the float32 of these."""
    spec, tensors = weights._map_tensors(path)
    tensors = {name: np.array(tensor) for name, tensor in tensors.items()}
    panels = {} if panels is None else panels(spec, tensors)
    numpy = weights.Llama(spec, tensors)
    poisoned = {name: np.full_like(tensor, np.nan) if name in panels else tensor for name, tensor in tensors.items()}
    return numpy, compiled.CompiledLlama(spec, poisoned, panels, threads=threads, cache_dir=path.parent)


def begin(engine, lengths, steps):
    rng = np.random.default_rng(len(lengths))
    sequences = [engine.new_sequence(length + steps) for length in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        engine.prefill(sequence, rng.integers(0, 500, length).astype(np.int32))
    return sequences


def assert_same_decode(numpy, other, lengths, steps=3, tolerance=1e-4):
    left, right = begin(numpy, lengths, steps), begin(numpy, lengths, steps)
    rng = np.random.default_rng(7)
    spec = numpy.spec
    for _ in range(steps):
        tokens = rng.integers(0, 500, len(lengths)).astype(np.int32)
        expected, got = numpy.decode(left, tokens), other.decode(right, tokens)
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)
    for before, after, length in zip(left, right, lengths, strict=True):
        assert after.length == before.length == length + steps
        parts = [np.empty((2, after.length, spec.kv_heads, spec.head_dim), dtype=np.float32) for _ in range(2)]
        for layer in range(spec.layers):
            before.read_part(layer, 0, before.length, parts[0])
            after.read_part(layer, 0, after.length, parts[1])
            np.testing.assert_allclose(parts[1], parts[0], rtol=0, atol=tolerance)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shapes_prefill_in_chunks(cache_dir, shape, threads):
    numpy, other = open_both(prepare("dummy:" + json.dumps(SHAPES[shape]), cache_dir), threads, _distort)
    rng = np.random.default_rng(3)
    left, right = numpy.new_sequence(800), other.new_sequence(800)
    for length in (1, 64, 65, 130, 1, 300, 7):
        tokens = rng.integers(0, 500, length).astype(np.int32)
        expected, got = (engine.prefill(s, tokens, logits_at=range(length)) for engine, s in ((numpy, left), (other, right)))
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


def test_cells_that_are_not_written_mean_nothing(cache_dir):
    _, engine = open_both(prepare("dummy:tiny", cache_dir), 2)
    tokens = np.random.default_rng(4).integers(0, 500, 200).astype(np.int32)
    results = []
    for content in (0, np.nan):
        sequence = engine.new_sequence(512)
        sequence.keys[:] = sequence.values[:] = content
        logits = [engine.prefill(sequence, chunk) for chunk in (tokens[:130], tokens[130:170])]
        logits += [engine.decode([sequence], tokens[at : at + 1]) for at in range(170, 200)]
        results.append(np.concatenate(logits))
    np.testing.assert_array_equal(*results)


def test_scores_that_need_a_shift_get_it(cache_dir):
    def enlarge(spec, tensors):
        for layer in range(spec.layers):
            tensors[f"{layer}.qkv"] *= 40
        return {}

    numpy, other = open_both(prepare("dummy:tiny", cache_dir), 2, enlarge)
    tokens = np.arange(100, 228, dtype=np.int32)
    expected, got = (engine.prefill(engine.new_sequence(128), tokens, logits_at=range(128)) for engine in (numpy, other))
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(cache_dir, shape, threads):
    path = prepare("dummy:" + json.dumps(SHAPES[shape]), cache_dir)
    numpy, other = open_both(path, threads, _distort)
    for lengths in ([5], [64, 1], LENGTHS):
        assert_same_decode(numpy, other, lengths)


def _distort(spec, tensors):
    """Norms other than 1, in place; no panels."""
    rng = np.random.default_rng(3)
    for tensor in tensors.values():
        if np.all(tensor == 1):
            tensor += rng.standard_normal(tensor.shape, dtype=np.float32) / 4
    return {}


@pytest.mark.parametrize("batch", range(1, 10))
@pytest.mark.parametrize("form", list(quantized.Form))
def test_every_form_and_batch(cache_dir, form, batch):
    path = prepare('dummy:{"hidden": 96, "ffn": 160, "heads": 6, "head_dim": 32}', cache_dir)
    numpy, other = open_both(path, 2, lambda spec, tensors: _in_form(form, spec, tensors))
    assert_same_decode(numpy, other, LENGTHS[:batch], steps=2)


def _in_form(form, spec, tensors):
    """Panels of random matrices of one form; the float32 tensors become the same weights."""
    rng, panels = np.random.default_rng(5), {}
    for name, (rows, columns) in weights._matrix_shapes(spec).items():
        if form is quantized.Form.FLOAT32:
            continue
        if form is quantized.Form.BFLOAT16:
            drawn = rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)
            matrix = (drawn.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
            panels[name] = quantized.bfloat16_panels(matrix)
        else:
            low, high = (0, 16) if form is quantized.Form.INT4_MINIMUM else (-128, 128)
            values = rng.integers(low, high, (rows, columns)).astype(np.int8)
            group = 16 if name.endswith("down") else 32
            scales, minima = rng.standard_normal((2, rows, columns // group), dtype=np.float32) / np.float32(columns**0.5)
            drawn = quantized.Quantized(values, scales / high, None if form is quantized.Form.INT8 else minima)
            matrix, panels[name] = drawn.dequantize(), quantized.quantized_panels(drawn)
        assert panels[name].form is form
        tensors[name] = to_panels(matrix)
    return panels


def test_scores_far_apart_do_not_overflow(cache_dir):
    def loud(spec, tensors):
        for name in tensors:
            if name.endswith("qkv"):
                tensors[name] *= 30
        return {}

    numpy, other = open_both(prepare("dummy:tiny", cache_dir), 2, loud)
    assert_same_decode(numpy, other, [130, 5, 64], tolerance=2e-3)


def test_impossible_requests_are_refused(cache_dir):
    _, engine = open_both(prepare("dummy:tiny", cache_dir), 1)
    sequence = begin(engine, [10], 0)[0]
    with pytest.raises(ValueError, match="capacity"):
        engine.decode([sequence], np.array([1], dtype=np.int32))
    with pytest.raises(ValueError, match="one token"):
        engine.decode([sequence], np.array([1, 2], dtype=np.int32))
    with pytest.raises(ValueError, match="out of range"):
        engine.decode([engine.new_sequence(3)], np.array([engine.spec.vocab_size], dtype=np.int32))
    assert sequence.length == 10


WARM_START = """
import sys
from pathlib import Path
sys.modules["numba"] = None  # an import of it fails
import numpy as np
from mooncake_zmq.engine import weights
from mooncake_zmq.engine.machine_code import compiled
path = Path(sys.argv[1])
engine = compiled.CompiledLlama(*weights._map_tensors(path), {}, threads=2, cache_dir=path.parent)
sequence = engine.new_sequence(8)
engine.prefill(sequence, np.arange(5, dtype=np.int32))
print(engine.decode([sequence], np.array([7], dtype=np.int32)).tobytes().hex())
"""


def test_a_warm_start_needs_no_compiler(cache_dir):
    """Another process, that cannot import Numba, decodes the same with the code that this one made."""
    path = prepare("dummy:tiny", cache_dir)
    _, engine = open_both(path, 2)
    sequence = engine.new_sequence(8)
    engine.prefill(sequence, np.arange(5, dtype=np.int32))
    expected = engine.decode([sequence], np.array([7], dtype=np.int32))
    done = subprocess.run([sys.executable, "-c", WARM_START, str(path)], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    got = np.frombuffer(bytes.fromhex(done.stdout), dtype=np.float32).reshape(expected.shape)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_a_model_without_its_compact_form_is_refused(tmp_path):
    with pytest.raises(ModelError, match="compact"):
        weights.load_engine(prepare("dummy:tiny", tmp_path), backend="compiled")


@pytest.fixture(scope="session")
def compiled_model():
    path = prepare("default", default_cache_dir(), backend="compiled")
    return weights.load_engine(path, threads=2, backend="compiled")


def test_its_kv_can_be_lent(compiled_model):
    assert why_not(compiled_model) == ""


def test_the_default_models_logits_keep_the_golden_rule(compiled_model, golden, golden_prompts):
    """The last recorded position of each prompt, decoded: all prompts in one batch."""
    rows = [
        max(np.flatnonzero(golden["row_prompt"] == prompt), key=lambda row: golden["row_position"][row]) for prompt in range(9)
    ]
    rows = [row for row in rows if golden["row_position"][row]]
    sequences, tokens = [], []
    for row in rows:
        prompt, position = golden_prompts[golden["row_prompt"][row]], int(golden["row_position"][row])
        sequences.append(compiled_model.new_sequence(position + 1))
        compiled_model.prefill(sequences[-1], prompt[:position], logits_at=None)
        tokens.append(prompt[position])
    logits = compiled_model.decode(sequences, np.array(tokens, dtype=np.int32))
    for row, got in zip(rows, logits, strict=True):
        np.testing.assert_allclose(got[golden["top_ids"][row]], golden["top_logits"][row], rtol=0, atol=1e-3)
        np.testing.assert_allclose(got[golden["fixed_ids"]], golden["fixed_logits"][row], rtol=0, atol=1e-3)


def test_greedy_tokens_of_the_default_model(compiled_model, golden, golden_prompts):
    """Each step is given the reference's tokens and must choose the next one."""
    sequences, logits = [], []
    for tokens in golden_prompts:
        sequences.append(compiled_model.new_sequence(len(tokens) + 48))
        logits.append(compiled_model.prefill(sequences[-1], tokens)[0])
    for step in range(golden["greedy"].shape[1]):
        for prompt, row in enumerate(logits):
            if not near_tie(row, Sampling(), len(golden_prompts[prompt]) + step):
                assert row.argmax() == golden["greedy"][prompt, step], f"prompt {prompt}, token {step}"
        logits = compiled_model.decode(sequences, golden["greedy"][:, step])
