"""`model inspect`: right about what it reads, silent about nothing, and never a traceback whatever the bytes."""

import contextlib
import json
import shutil
from dataclasses import replace

import gguf
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_files import save_gguf, save_model_directory, stored

from mooncake_zmq.cli import main
from mooncake_zmq.engine import weights
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.inspect import WORKING_TOKENS, Host, inspect, measure_host
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.engine.sources.dummy import DummySource

ROOMY = Host(memory_available_bytes=1 << 40, disk_free_bytes=1 << 40)
TINY = stored(DummySource("tiny"))
FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def directory(tmp_path):
    return save_model_directory(tmp_path / "model", *TINY)


def run(*arguments):
    return CliRunner().invoke(main, ["model", "inspect", *map(str, arguments)])


def listing(path):
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def test_a_hugging_face_directory(tmp_path):
    config, tensors = stored(DummySource('{"family": "qwen3", "tied": true}'))
    path = save_model_directory(tmp_path / "model", config, tensors, kind="BF16", shards=2)
    before = listing(tmp_path)
    found = inspect(str(path), tmp_path / "cache", ROOMY)
    assert listing(tmp_path) == before, "it writes nothing"
    assert found.runs
    assert (found.spec.family, found.spec.tied, found.tokenizer, found.chat_template) == ("qwen3", True, "tokenizer.json", True)
    assert found.parameters == sum(tensor.size for tensor in tensors.values())
    assert found.formats == {"BF16": 2 * found.parameters}
    assert found.prepared is None
    prepared = prepare(str(path), tmp_path / "cache")
    assert found.prepared_bytes == (prepared / "weights.bin").stat().st_size
    for model in (path, prepared):
        again = inspect(str(model), tmp_path / "cache", ROOMY)
        assert (again.prepared, again.prepared_bytes) == (prepared, found.prepared_bytes)
        assert replace(again.spec, fingerprint="") == found.spec
    engine = weights.open_model(prepared)
    sequence = engine.new_sequence(64)
    assert (sequence.keys.nbytes + sequence.values.nbytes) == 64 * found.spec.kv_bytes_per_token


def test_a_gguf_file_of_mixed_formats(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    path = save_gguf(tmp_path / "model.gguf", *TINY, quantization=kind)
    found = inspect(str(path), tmp_path, ROOMY)
    matrices = sum(tensor.size for tensor in TINY[1].values() if tensor.ndim == 2)
    norms = found.parameters - matrices
    assert found.formats == {"Q8_0": matrices // 32 * 34, "F32": 4 * norms}
    assert found.tokenizer == "GGUF, byte-level BPE (gpt-2)"
    assert any("no chat template" in note for note in found.notes)


def test_a_sliding_window_and_scaled_rope_are_said(tmp_path):
    changes = {"model_type": "mistral", "sliding_window": 100, "rope_scaling": {"type": "linear", "factor": 2.0}}
    path = save_model_directory(tmp_path / "model", TINY[0] | changes, TINY[1])
    found = inspect(str(path), tmp_path, ROOMY)
    assert (found.spec.max_positions, found.spec.sliding_window, found.spec.rope_scaling) == (100, 100, "linear")
    assert "sliding window of 100" in found.notes[0]


def test_the_default_model_before_it_is_downloaded(tmp_path):
    found = inspect("default", tmp_path, ROOMY)
    assert found.runs
    assert found.parameters == 134_515_008
    assert found.spec.kv_bytes_per_token == 46_080
    assert "not downloaded yet" in found.notes[-1]
    assert not listing(tmp_path)


def test_the_default_model_is_as_published(default_path):
    found = inspect("default", "", ROOMY)
    published = inspect("default", "/nonexistent", ROOMY)
    assert found.prepared == default_path
    assert replace(found.spec, fingerprint="", eos_ids=(), bos_id=None, norm_eps=1.0) == replace(
        published.spec, fingerprint="", eos_ids=(), bos_id=None, norm_eps=1.0
    )


@pytest.mark.parametrize("model", ["toy", "dummy:tiny", "dummy:135m"])
def test_models_without_files(tmp_path, model):
    assert inspect(model, tmp_path, ROOMY).runs


def test_a_host_without_room(tmp_path):
    whole = inspect("dummy:135m", tmp_path, ROOMY)
    working = whole.prepared_bytes + WORKING_TOKENS * whole.spec.kv_bytes_per_token

    def host(memory=1 << 40, disk=1 << 40):
        return inspect("dummy:135m", tmp_path, Host(memory_available_bytes=memory, disk_free_bytes=disk))

    assert host(memory=working).runs
    assert "of memory" in host(memory=working - 1).problems[0]
    assert host(disk=whole.prepared_bytes).runs
    assert "of disk" in host(disk=whole.prepared_bytes - 1).problems[0]
    assert host(memory=working).context_that_fits == WORKING_TOKENS
    assert host(memory=1).context_that_fits == 0
    assert host(disk=None).runs, "nobody knows better"


def test_this_host_is_measured(tmp_path):
    host = measure_host(tmp_path / "not" / "there")
    assert host.disk_free_bytes > 0
    assert host.memory_available_bytes > 0


def test_a_prepared_directory_that_is_damaged(tmp_path):
    path = prepare("dummy:tiny", tmp_path)
    (path / "weights.bin").write_bytes(b"")
    assert "damaged" in inspect(str(path), tmp_path, ROOMY).problems[0]
    (path / "weights.bin").unlink()
    assert not inspect(str(path), tmp_path, ROOMY).runs


def test_the_command(tmp_path, directory):
    shown = run(directory, "--cache-dir", tmp_path)
    assert shown.exit_code == 0, shown.output
    for word in ("llama", "0.1 million", "F32", "untied", "512 bytes", "4,096 tokens", "with a chat template", "runs here"):
        assert word in shown.stdout
    fields = json.loads(run(directory, "--cache-dir", tmp_path, "--json").stdout)
    assert fields["runs"] is True
    assert fields["kv_bytes_full_context"] == 4096 * fields["kv_bytes_per_token"]
    assert "Examples:" in run("--help").output


@pytest.mark.parametrize("model", ["/nowhere", "", ".", "\0", "x" * 5000, "dummy:huge", "/dev/null", "dummy:{"])
def test_models_that_are_none_end_with_one_line_and_code_1(model):
    refused = run(model)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.startswith("mooncake-zmq: ")
    assert refused.stderr.count("\n") == 1
    fields = json.loads(run(model, "--json").stdout)
    assert fields["runs"] is False
    assert len(fields["problems"]) == 1


def test_a_name_cannot_write_to_the_terminal(tmp_path):
    fields = [("general.name", "a\x1b[2Jb\nc", gguf.GGUFValueType.STRING)]
    path = save_gguf(tmp_path / "model.gguf", *TINY, fields=fields)
    assert inspect(str(path), tmp_path, ROOMY).spec.name == "a?[2Jb?c"


def test_what_is_unsupported_ends_with_its_name(tmp_path):
    path = save_model_directory(tmp_path / "model", TINY[0] | {"model_type": "gemma3"}, TINY[1])
    refused = run(path)
    assert refused.exit_code == 1
    assert "'gemma3' is not supported" in refused.stderr


# Damage. Whatever is read either makes sense or is refused with the one error.


def survives(path, cache):
    with contextlib.suppress(ModelError):
        json.dumps(inspect(str(path), cache, ROOMY).as_json())


NUMBERS = st.sampled_from([0, 1, 2, 9, 255, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1])
DAMAGE = st.lists(st.tuples(st.integers(0, 14000), NUMBERS, st.sampled_from([1, 4, 8])), min_size=1, max_size=6)


@FUZZ
@given(damage=DAMAGE, share=st.floats(0, 1) | st.just(1.0))
def test_damaged_gguf_files(tmp_path, damage, share):
    whole = tmp_path / "whole.gguf"
    if not whole.exists():
        save_gguf(whole, *TINY)
    content = bytearray(whole.read_bytes())
    for at, number, width in damage:
        content[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    (tmp_path / "damaged.gguf").write_bytes(content[: int(len(content) * share)])
    survives(tmp_path / "damaged.gguf", tmp_path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["llama", "mistral", "yarn"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = [*TINY[0], "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "layer_types", "architectures"]
KEYS += ["quantization_config", "hidden_act", "partial_rotary_factor", "attention_bias", "original_max_position_embeddings"]


@FUZZ
@given(
    changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3), family=st.sampled_from(["llama", "mistral"])
)
def test_tampered_configs(tmp_path, changes, family):
    directory = tmp_path / "model"
    if not directory.exists():
        save_model_directory(directory, *TINY)
    (directory / "config.json").write_text(json.dumps(TINY[0] | {"model_type": family} | changes))
    survives(directory, tmp_path)


@FUZZ
@given(
    file=st.sampled_from(["tokenizer_config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"]),
    content=st.dictionaries(st.sampled_from(["chat_template", "bos_token", "eos_token", "eos_token_id", "weight_map"]), JSON)
    | JSON,
)
def test_tampered_neighbours_of_a_config(tmp_path, file, content):
    directory = tmp_path / "model"
    shutil.rmtree(directory, ignore_errors=True)
    save_model_directory(directory, *TINY)
    (directory / file).write_text(json.dumps(content))
    survives(directory, tmp_path)


@FUZZ
@given(key=st.sampled_from(["data_offsets", "shape", "dtype"]), value=JSON, length=st.none() | NUMBERS)
def test_tampered_safetensors_headers(tmp_path, key, value, length):
    directory = tmp_path / "model"
    if not directory.exists():
        save_model_directory(directory, *TINY)
        (directory / "m-0.safetensors").rename(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    header[sorted(header)[-1]][key] = value
    text = json.dumps(header).encode()
    written = len(text) if length is None else length
    (directory / "m-0.safetensors").write_bytes(written.to_bytes(8, "little") + text + whole[8 + size :])
    survives(directory, tmp_path)


@FUZZ
@given(part=st.sampled_from(["spec", "tensors", "format", "kind", "vocab_size"]), key=st.integers(0, 30), value=JSON)
def test_tampered_prepared_directories(tmp_path, part, key, value):
    whole, path = tmp_path / "whole", tmp_path / "prepared"
    if not whole.exists():
        prepare("dummy:tiny", tmp_path).rename(whole)
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(whole, path)
    file = path / ("conversation.json" if part in ("kind", "vocab_size") else "header.json")
    fields = json.loads(file.read_text())
    if part in ("spec", "tensors"):
        fields[part][sorted(fields[part])[key % len(fields[part])]] = value
    else:
        fields[part] = value
    file.write_text(json.dumps(fields))
    survives(path, tmp_path)


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\xff\xfe", b"null", b"[]", b"1"])
def test_json_files_that_are_no_objects(tmp_path, directory, content):
    for name in (
        "config.json",
        "tokenizer_config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
    ):
        kept = (directory / name).read_bytes() if (directory / name).exists() else None
        (directory / name).write_bytes(content)
        with pytest.raises(ModelError):
            inspect(str(directory), tmp_path, ROOMY)
        if kept is None:
            (directory / name).unlink()
        else:
            (directory / name).write_bytes(kept)
    assert inspect(str(directory), tmp_path, ROOMY).runs
