"""Two engines whose blocks differ in what they hold, or in the order of the bytes, find none of each other's."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mooncake_zmq.kv.block_hash import extend_keys, namespace, pack_tokens, salt_of
from mooncake_zmq.kv.codec import CODECS
from mooncake_zmq.kv.image_keys import digest_of, keys_with_images
from mooncake_zmq.pool.rules.engine_blocks import block_key
from mooncake_zmq.vllm import names
from mooncake_zmq.vllm.names import (
    ADAPTER,
    TABLE,
    Adapter,
    Engine,
    LayerOrder,
    chain_root,
    derived_keys,
    group_prefix,
    image_keys,
    is_of_content,
    object_names,
    stored_form,
    token_keys,
)
from mooncake_zmq.vllm.settings import LOOKUP_TIMEOUT_S, MOVE_TIMEOUT_S, read_settings
from mooncake_zmq.vllm.spans import BlockSpans, layer_spans, runs_of
from mooncake_zmq.vllm.weights import fingerprint, has_key_biases, identity

ROOT = Path(__file__).parents[2]
PROMPT = list(range(100))


@dataclass(frozen=True)
class Layer:
    """An attention layer of vLLM, as far as names read it."""

    backend: str = "CPU_ATTN"
    isa: str = "vec"
    kv_cache_dtype: str = "auto"
    _q_scale_float: float = 1.0
    _k_scale_float: float = 1.0
    _v_scale_float: float = 1.0

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self.backend)


def kv_group(kind: str = "FullAttentionSpec", block_size: int = 32, layers: tuple[str, ...] = ("a", "b")) -> Any:
    """A KV cache group of vLLM, as far as names read it."""
    spec = type(kind, (), {"block_size": block_size})()
    return SimpleNamespace(kv_cache_spec=spec, layer_names=list(layers))


LAYERS = (LayerOrder("a", (1, 2, 32, 64), (1, 2, 3), "float32"), LayerOrder("b", (1, 2, 32, 64), (1, 2, 3), "float32"))
LONG_ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096, "short_factor": [1.0], "long_factor": [4.0]}
VALUES: dict[str, Any] = {
    "version": "0.32.0",
    "weights": "w",
    "draft_weights": "w",
    "device": "cpu",
    "cpu": "AVX512",
    "attention": (Layer(), Layer()),
    "layers": LAYERS,
    "cache.kv_cache_layout": "LBHNC",
    "cache.kv_cache_groups": [kv_group()],
    "config.load_config.load_format": "auto",
    "config.load_config.model_loader_extra_config": {},
    "config.load_config.ignore_patterns": ["original/**/*"],
    "config.model_config.hf_config": {"layers": 2, "_name_or_path": "/models/a", "rope_parameters": LONG_ROPE},
    "config.model_config.hf_text_config": {"layers": 2},
    "config.model_config.max_model_len": 4096,
    "config.model_config.original_max_model_len": 4096,
    "config.model_config.trust_remote_code": False,
    "config.model_config.code_revision": None,
    "config.model_config.model_impl": "auto",
    "config.model_config.model_class_overrides": {},
    "config.model_config.disable_sliding_window": False,
    "config.model_config.dtype": "float32",
    "config.model_config.quantization": None,
    "config.model_config.quantization_config": None,
    "config.model_config.multimodal_config.language_model_only": False,
    "config.model_config.multimodal_config.media_io_kwargs": {},
    "config.model_config.multimodal_config.mm_processor_kwargs": None,
    "config.model_config.multimodal_config.mm_device_do_normalize": True,
    "config.model_config.multimodal_config.mm_encoder_attn_dtype": None,
    "config.model_config.multimodal_config.video_pruning_rate": None,
    "config.model_config.multimodal_config.video_pruning_method": "evs",
    "config.additional_config": {},
    "config.cache_config.cache_dtype": "auto",
    "config.cache_config.kv_cache_dtype_skip_layers": [],
    "config.attention_config.use_non_causal": False,
    "config.attention_config.use_prefill_query_quantization": False,
    "config.attention_config.disable_flashinfer_q_quantization": False,
    "config.attention_config.indexer_kv_dtype": "auto",
    "config.speculative_config.method": "eagle",
    "config.speculative_config.parallel_drafting": False,
    "config.speculative_config.kv_cache_dtype": None,
    "config.speculative_config.draft_model_config.hf_config": {"layers": 1},
    "config.speculative_config.draft_model_config.dtype": "float32",
    "config.speculative_config.draft_model_config.quantization": None,
    "config.speculative_config.draft_model_config.max_model_len": 4096,
    "config.parallel_config.pipeline_parallel_size": 1,
    "config.parallel_config.tensor_parallel_size": 1,
}
"""An engine, by the paths of its settings."""
MODEL, CACHE, DRAFT = "config.model_config", "config.cache_config", "config.speculative_config"
OTHERS: dict[str, list[dict[str, Any]]] = {
    "naming": [{"naming": names.NAMING + 1}],
    "version": [{"version": "0.33.0"}],
    "weights": [{"weights": "x"}],
    "config.load_config.load_format": [{"config.load_config.load_format": "pt"}],
    "config.load_config.model_loader_extra_config": [{"config.load_config.model_loader_extra_config": {"pattern": "b"}}],
    "config.load_config.ignore_patterns": [{"config.load_config.ignore_patterns": []}],
    f"{MODEL}.hf_config": [
        {f"{MODEL}.hf_config": {"layers": 2, "rope_parameters": LONG_ROPE | {"long_factor": [8.0]}}},
        {f"{MODEL}.hf_config": {"layers": 2, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}},
        {f"{MODEL}.hf_config": {"layers": 2, "rope_parameters": LONG_ROPE, "sliding_window": 8}},
    ],
    f"{MODEL}.hf_text_config": [{f"{MODEL}.hf_text_config": {"layers": 2, "rope_theta": 1e6}}],
    "max_model_len": [{f"{MODEL}.max_model_len": 8192}, {f"{MODEL}.original_max_model_len": -1}],
    f"{MODEL}.trust_remote_code": [{f"{MODEL}.trust_remote_code": True}],
    f"{MODEL}.code_revision": [{f"{MODEL}.code_revision": "c0ffee"}],
    f"{MODEL}.model_impl": [{f"{MODEL}.model_impl": "transformers"}],
    f"{MODEL}.model_class_overrides": [{f"{MODEL}.model_class_overrides": {"Llama": "mine:Llama"}}],
    f"{MODEL}.disable_sliding_window": [{f"{MODEL}.disable_sliding_window": True}],
    "config.additional_config": [{"config.additional_config": {"sparse": 1}}],
    f"{MODEL}.dtype": [{f"{MODEL}.dtype": "bfloat16"}],
    f"{MODEL}.quantization": [{f"{MODEL}.quantization": "fp8"}],
    f"{MODEL}.quantization_config": [{f"{MODEL}.quantization_config": {"moe": "mxfp4"}}],
    f"{CACHE}.cache_dtype": [{f"{CACHE}.cache_dtype": "fp8"}],
    f"{CACHE}.kv_cache_dtype_skip_layers": [{f"{CACHE}.kv_cache_dtype_skip_layers": ["0"]}],
    "kv_dtypes": [{"attention": (Layer(kv_cache_dtype="fp8"), Layer())}],
    "kv_scales": [
        {"attention": (Layer(_k_scale_float=0.5), Layer())},
        {"attention": (Layer(), Layer(_k_scale_float=0.5))},
        {"attention": (Layer(_v_scale_float=0.5), Layer())},
        {"attention": (Layer(_q_scale_float=0.5), Layer())},
    ],
    **{
        f"config.attention_config.{name}": [{f"config.attention_config.{name}": value}]
        for name, value in {
            "use_non_causal": True,
            "use_prefill_query_quantization": True,
            "disable_flashinfer_q_quantization": True,
            "indexer_kv_dtype": "fp8",
        }.items()
    },
    **{
        f"{MODEL}.multimodal_config.{name}": [{f"{MODEL}.multimodal_config.{name}": value}]
        for name, value in {
            "language_model_only": True,
            "media_io_kwargs": {"video": {"fps": 1}},
            "mm_processor_kwargs": {"max_pixels": 64},
            "mm_device_do_normalize": False,
            "mm_encoder_attn_dtype": "fp8",
            "video_pruning_rate": 0.5,
            "video_pruning_method": "other",
        }.items()
    },
    "draft_weights": [{"draft_weights": "d"}],
    "speculation.method": [{f"{DRAFT}.method": "eagle3"}, {DRAFT: None}],
    "speculation.parallel_drafting": [{f"{DRAFT}.parallel_drafting": True}],
    "speculation.kv_cache_dtype": [{f"{DRAFT}.kv_cache_dtype": "fp8"}],
    "speculation.draft_model_config.hf_config": [{f"{DRAFT}.draft_model_config.hf_config": {"layers": 2}}],
    "speculation.draft_model_config.dtype": [{f"{DRAFT}.draft_model_config.dtype": "float16"}],
    "speculation.draft_model_config.quantization": [{f"{DRAFT}.draft_model_config.quantization": "fp8"}],
    "speculation.draft_model_config.max_model_len": [{f"{DRAFT}.draft_model_config.max_model_len": 8192}],
    "device": [{"device": "cuda"}],
    "backends": [{"attention": (Layer("FLASH_ATTN"), Layer("FLASH_ATTN"))}],
    "instruction_sets": [{"cpu": "AVX2"}, {"attention": (Layer(isa="amx"), Layer(isa="amx"))}],
    "cache.kv_cache_layout": [{"cache.kv_cache_layout": "LBNHC"}],
    "block_tokens": [{"cache.kv_cache_groups": [kv_group(block_size=64)]}],
    "kv_groups": [
        {"cache.kv_cache_groups": [kv_group(kind="SlidingWindowSpec")]},
        {"cache.kv_cache_groups": [kv_group(layers=("a",)), kv_group(layers=("b",))]},
        {"cache.kv_cache_groups": [kv_group(layers=("a",)), kv_group(kind="MambaSpec", layers=("b",))]},
    ],
    "config.parallel_config.pipeline_parallel_size": [{"config.parallel_config.pipeline_parallel_size": 2}],
    "config.parallel_config.tensor_parallel_size": [{"config.parallel_config.tensor_parallel_size": 2}],
    "layers": [
        {"layers": LAYERS[:1]},
        {"layers": LAYERS[::-1]},
        {"layers": (replace(LAYERS[0], shape=(1, 2, 64, 32)), LAYERS[1])},
        {"layers": (replace(LAYERS[0], axes=(2, 1, 3)), LAYERS[1])},
        {"layers": (replace(LAYERS[0], dtype="bfloat16"), LAYERS[1])},
    ],
}
"""Engines that differ from it, by the path in the table."""
UNRELATED = {
    f"{MODEL}.model": "/models/b",
    f"{MODEL}.served_model_name": "b",
    f"{MODEL}.seed": 7,
    f"{MODEL}.hf_config": {"rope_parameters": dict(reversed(LONG_ROPE.items())), "_name_or_path": "/models/b", "layers": 2},
    f"{CACHE}.gpu_memory_utilization": 0.5,
    f"{CACHE}.num_gpu_blocks": 77,
    f"{CACHE}.prefix_caching_hash_algo": "xxhash",
    f"{DRAFT}.num_speculative_tokens": 3,
    "config.scheduler_config.max_num_seqs": 8,
    "config.parallel_config.data_parallel_size": 2,
}
LORA = {"lora_dtype": "float32", "target_modules": None, "enable_tower_connector_lora": False}
LORA |= {"enable_mixed_moe_lora_format": False}
OTHER_ADAPTERS = {
    "content": {"content": "two"},
    "config.lora_dtype": {"lora_dtype": "bfloat16"},
    "config.target_modules": {"target_modules": ["q_proj"]},
    "config.enable_tower_connector_lora": {"enable_tower_connector_lora": True},
    "config.enable_mixed_moe_lora_format": {"enable_mixed_moe_lora_format": True},
    "request.is_3d_lora_weight": {"is_3d_lora_weight": True},
}


def engine(changes: dict[str, Any] | None = None) -> Engine:
    """The engine of `VALUES` with changes by path; None at a path leaves out what is below it."""
    changes = changes or {}
    root = SimpleNamespace()
    for path, value in sorted((VALUES | changes).items()):
        at, parts = root, path.split(".")
        for part in parts[:-1]:
            if at is not None:
                at.__dict__.setdefault(part, SimpleNamespace())
                at = getattr(at, part)
        if at is not None:
            setattr(at, parts[-1], value)
    return Engine(**{each.name: getattr(root, each.name) for each in fields(Engine) if hasattr(root, each.name)})


def adapter(content: str = "one", is_3d_lora_weight: bool = False, **changes: Any) -> str:
    request = SimpleNamespace(lora_name="a", lora_path="/a", lora_int_id=1, is_3d_lora_weight=is_3d_lora_weight)
    return Adapter(content, SimpleNamespace(**(LORA | {"max_loras": 4} | changes)), request).identity


def found(by: Engine, rank: str = "0.0", root: bytes = b"", tokens: Sequence[int] = PROMPT) -> set[str]:
    """The names under which an engine saves and finds the blocks of a prompt."""
    return set(object_names([by.key_prefix(rank)], token_keys(root or chain_root(), tokens, 32).upto(3)))


def test_blocks_of_different_codecs_have_different_names_and_exact_ones_those_of_before():
    forms = [stored_form("torch.bfloat16", codec) for codec in (None, CODECS["int8"], CODECS["int4"])]
    assert forms[0] == "torch.bfloat16"
    assert len(set(forms)) == 3


def test_every_row_of_the_table_has_engines_that_differ_in_it():
    rows = [row for row in TABLE if row.part == "DIGEST"]
    assert {path for row in rows for path in row.where} == set(OTHERS)
    assert set(ADAPTER.where) == set(OTHER_ADAPTERS)
    assert len({row.what for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize("path", OTHERS)
def test_engines_that_differ_in_a_row_find_nothing_of_each_others(path):
    for changes in OTHERS[path]:
        assert not found(engine()) & found(engine(changes)), changes


def test_no_two_of_all_these_engines_share_a_name():
    all_names = [found(engine())] + [found(engine(changes)) for each in OTHERS.values() for changes in each]
    assert sum(map(len, all_names)) == len(set().union(*all_names))


def test_longrope_of_another_length_shares_nothing_and_of_the_same_length_everything():
    short, long = {f"{MODEL}.max_model_len": 4096}, {f"{MODEL}.max_model_len": 4097}
    assert not found(engine(short)) & found(engine(long))
    assert found(engine(long)) == found(engine(dict(long)))


def test_a_length_that_vllm_fitted_to_the_memory_shares_with_no_other_and_with_its_like():
    fitted = {f"{MODEL}.original_max_model_len": -1}
    assert found(engine(fitted | {f"{MODEL}.max_model_len": 2048})) == found(engine(fitted | {f"{MODEL}.max_model_len": 9000}))


@pytest.mark.parametrize("path", UNRELATED)
def test_engines_that_differ_in_anything_else_share_everything(path):
    assert found(engine({path: UNRELATED[path]})) == found(engine())
    assert found(engine(UNRELATED)) == found(engine())


@pytest.mark.parametrize("method", sorted(names.WITHOUT_KV))
def test_an_engine_that_guesses_by_text_alone_shares_with_one_that_does_not_guess(method):
    assert found(engine({f"{DRAFT}.method": method})) == found(engine({DRAFT: None}))


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_rows_and_of_paths_changes_nothing(seed):
    order = random.Random(seed)
    rows = [replace(row, where=tuple(order.sample(row.where, len(row.where)))) for row in TABLE]
    before = found(engine())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "TABLE", tuple(order.sample(rows, len(rows))))
        assert found(engine()) == before


def test_an_attribute_that_this_vllm_does_not_have_is_refused_rather_than_left_out():
    unknown = engine()
    del unknown.config.cache_config.cache_dtype
    with pytest.raises(ValueError, match="'cache_dtype'"):
        unknown.key_prefix("0.0")


def test_ranks_and_tenants_have_names_of_their_own():
    prefixes = {engine().key_prefix("0.0"), engine().key_prefix("0.1"), engine().key_prefix("1.0")}
    prefixes |= {group_prefix(prefix, group) for prefix in prefixes for group in (1, 2)}
    assert len(prefixes | {engine().key_prefix("0.0", "t/")}) == 10
    assert all(block_key(f"{prefix}{'0' * 32}") == bytes(16) for prefix in prefixes)


@pytest.mark.parametrize("path", OTHER_ADAPTERS)
def test_requests_with_another_adapter_or_none_share_nothing(path):
    one, other = chain_root(adapter=adapter()), chain_root(adapter=adapter(**OTHER_ADAPTERS[path]))
    assert not found(engine(), root=one) & found(engine(), root=other)
    assert not found(engine(), root=one) & found(engine())
    assert found(engine(), root=one) == found(engine(), root=chain_root(adapter=adapter(max_loras=9)))


def test_an_adapter_is_not_an_invalidation_and_tenants_do_not_share_one():
    roots = [chain_root(adapter="x"), chain_root(anew="x"), chain_root("s", adapter="x"), chain_root(adapter="x", anew="x")]
    roots.append(chain_root(salt_of(chain_root("t")), adapter="x"))
    assert len({chain_root(), *roots}) == 6


def test_only_images_named_by_their_content_have_names():
    assert is_of_content("0123456789abcdef" * 4)
    assert is_of_content("adapter:" + "a" * 128)
    assert not any(map(is_of_content, ("", "image-1", "g" * 64, "adapter:image-1", "a" * 32)))


def test_the_manual_has_the_table():
    page = (ROOT / "mooncake_zmq/docs/vllm.md").read_text()
    lines = [f"| {row.part} | {row.what} | {row.why} | {', '.join(f'`{path}`' for path in row.where)} |" for row in TABLE]
    assert "\n".join(lines) in page, "docs/vllm.md: the table of names is this:\n" + "\n".join(lines)


@given(st.lists(st.integers(0, 500), max_size=200), st.integers(1, 40), st.data())
def test_keys_made_bit_by_bit_are_those_made_at_once(tokens, block_tokens, data):
    root = chain_root("s")
    complete = len(tokens) // block_tokens
    whole = token_keys(root, tokens, block_tokens).upto(complete)
    growing: list[int] = []
    keys = token_keys(root, growing, block_tokens)
    for stop in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))):
        growing[:] = tokens[:stop]
        assert keys.upto(stop // block_tokens) == whole[: stop // block_tokens]
    growing[:] = tokens
    assert keys.upto(complete) == whole


def test_salt_and_any_token_before_change_every_key():
    tokens = list(range(64))
    base = token_keys(chain_root(), tokens, 16).upto(4)
    for other in (
        token_keys(chain_root(anew="n"), tokens, 16),
        token_keys(chain_root("tenant"), tokens, 16),
        token_keys(chain_root(), [7, *tokens[1:]], 16),
    ):
        assert not set(base) & set(other.upto(4))
    assert len(set(base)) == 4
    tail = token_keys(chain_root(), [*tokens[:-1], 7], 16).upto(4)
    assert tail[:3] == base[:3]
    assert tail[3] != base[3]


def test_images_are_named_as_gateways_name_them_by_content_and_place():
    tokens, cat, dog = [1, 9, 9, 9, 9, 2, 9, 9, 3], "ca" * 32, "d0" * 32
    names = image_keys(chain_root(), tokens, 2, [(1, cat), (6, dog)])
    assert len(names.upto(1)) == 1
    begins = [(1, digest_of(cat)), (6, digest_of(dog))]
    assert names.upto(4) == keys_with_images(chain_root(), pack_tokens(tokens), 2, begins)
    other = image_keys(chain_root(), tokens, 2, [(1, cat), (6, cat)]).upto(4)
    assert other[:3] == names.upto(3)
    assert other[3] != names.upto(4)[3]
    assert not set(names.upto(4)) & set(image_keys(chain_root(), tokens, 2, [(1, dog), (6, dog)]).upto(4))
    with_adapter = image_keys(chain_root(), tokens, 2, [(1, f"poet:{cat}"), (6, dog)])
    assert with_adapter.upto(4) == names.upto(4), "the root covers the adapter"


def test_what_is_more_than_text_and_images_is_named_by_the_engines_own_hashes():
    hashes = [bytes([number]) * 32 for number in range(3)]
    keys = derived_keys(chain_root(), hashes).upto(3)
    assert keys == derived_keys(chain_root(), hashes).upto(3)
    assert not set(keys) & set(derived_keys(chain_root("salt"), hashes).upto(3))
    assert not set(keys) & set(derived_keys(chain_root(anew="n"), hashes).upto(3))


def test_each_rank_has_a_name_for_each_block():
    keys = token_keys(chain_root(), list(range(8)), 4).upto(2)
    assert object_names(["a/", "b/"], keys) == [
        f"a/{keys[0].hex()}",
        f"b/{keys[0].hex()}",
        f"a/{keys[1].hex()}",
        f"b/{keys[1].hex()}",
    ]


def test_keys_under_a_gateways_salt_are_the_gateways_own():
    root = namespace(model="fingerprint", layout="blocks of 16", salt="tenant")
    tokens = list(range(64))
    assert token_keys(chain_root(salt_of(root)), tokens, 16).upto(4) == extend_keys(root, pack_tokens(tokens), 16)
    assert chain_root(salt_of(root), "anew") != root
    assert chain_root(salt_of(root) + "0") != root


def test_a_name_tells_its_blocks_key():
    (key,) = token_keys(chain_root(), [1, 2], 2).upto(1)
    for prefix in ("", "team-a/"):
        (name,) = object_names([engine().key_prefix("0.0", prefix)], [key])
        assert block_key(name) == key
    for name in (
        "",
        "vllm/a/0.0/00",
        f"vllm/a/0.0/{'x' * 32}",
        f"b/a/0.0/{'0' * 32}",
        "kv/" + "0" * 32,
    ):
        assert block_key(name) is None


# --- weights


def _model(directory: Path, **tensors: np.ndarray) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_weights_that_differ_in_one_tensor_have_another_identity(tmp_path):
    tensors = {f"t{number}": np.full((64, 1024), number, np.float32) for number in range(20)}
    one = _model(tmp_path / "one", **tensors)
    same = _model(tmp_path / "same", **tensors)
    other = _model(tmp_path / "other", **(tensors | {"t7": np.full((64, 1024), 7.5, np.float32)}))
    assert fingerprint(one) == fingerprint(same)
    assert fingerprint(one) != fingerprint(other)
    before = fingerprint(one)
    (one / "config.json").write_text('{"rope_theta": 1}')
    assert fingerprint(one) != before


def test_files_that_are_not_what_their_names_say_have_an_identity_all_the_same(tmp_path):
    for number, content in enumerate(
        [b"", b"\xff" * 20, (5).to_bytes(8, "little") + b"[1]  ", (4).to_bytes(8, "little") + b"nono"]
    ):
        model = tmp_path / str(number)
        model.mkdir()
        (model / "model.safetensors").write_bytes(content)
        assert len(fingerprint(model)) == 32
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(10_000))
    before = fingerprint(file)
    file.write_bytes(bytes(9_999) + b"x")
    assert fingerprint(file) != before


def test_the_embedding_of_one_token_makes_another_identity(tmp_path):
    rows = np.zeros((4000, 256), np.float32)
    found = []
    for number in range(2):
        rows[3000] = number
        found.append(fingerprint(_model(tmp_path / str(number), **{"model.embed_tokens.weight": rows, "b": np.ones(8)})))
    assert found[0] != found[1]


@pytest.mark.parametrize("name", ["preprocessor_config.json", "modeling_own.py"])
def test_how_images_are_cut_and_code_beside_the_weights_are_part_of_the_identity(tmp_path, name):
    model = _model(tmp_path / "one", t=np.zeros(4, np.float32))
    seen = [fingerprint(model)]
    for content in ("{}", '{"size": 224}'):
        (model / name).write_text(content)
        seen.append(fingerprint(model))
    assert len(set(seen)) == 3


def _of(model: str | Path, **changes: Any) -> Any:
    plain = {"model": str(model), "model_weights": "", "revision": None, "seed": 0, "hf_config": {}, "hf_config_path": None}
    return SimpleNamespace(**(plain | changes))


def test_weights_whose_files_are_not_at_hand_have_no_identity(tmp_path):
    model = _model(tmp_path / "one", t=np.zeros(4, np.float32))
    assert identity(_of(model), "auto") == fingerprint(model)
    assert identity(_of(model, seed=3), "dummy") != identity(_of(model), "dummy")
    assert identity(_of(model), "tensorizer") == "", "its files are elsewhere"
    assert identity(_of(model, model_weights="s3://bucket/model"), "runai_streamer") == ""
    (model / "model.safetensors").unlink()
    assert identity(_of(model), "auto") == ""
    assert identity(_of("/no/such/model"), "auto") == ""


def test_a_model_of_a_hub_without_files_here_is_known_by_its_commit_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    at = SimpleNamespace(_commit_hash="c0ffee")
    assert identity(_of("nobody/no-such-model"), "auto") == ""
    assert identity(_of("nobody/no-such-model", hf_config=at), "auto") == "nobody/no-such-model@c0ffee"
    assert identity(_of("nobody/no-such-model", hf_config=at, hf_config_path="other/model"), "auto") == ""


def test_a_model_of_a_hub_is_known_by_the_files_where_vllm_downloads_to(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for place, commit, weight in (("hub", "1" * 40, 1.0), ("elsewhere", "2" * 40, 2.0)):
        repository = tmp_path / place / "models--a--b"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs/main").write_text(commit)
        (repository / "snapshots").mkdir()
        _model(repository / "snapshots" / commit, t=np.full(4, weight))
    there = tmp_path / "elsewhere/models--a--b/snapshots" / ("2" * 40)
    assert identity(_of("a/b"), "auto", str(tmp_path / "elsewhere")) == fingerprint(there) != identity(_of("a/b"), "auto")
    (there / "model.safetensors").unlink()
    at = SimpleNamespace(_commit_hash="c0ffee")
    assert identity(_of("a/b", hf_config=at), "auto", str(tmp_path / "elsewhere")) == "a/b@c0ffee"


@pytest.mark.parametrize(
    ("tensor", "config", "expected"),
    [
        ("model.layers.0.self_attn.k_proj.bias", {}, True),
        ("transformer.h.0.attn.c_attn.bias", {}, True),
        ("model.layers.0.self_attn.k_proj.weight", {}, False),
        ("model.layers.0.mlp.down_proj.bias", {"attention_bias": False}, False),
        ("vision_model.encoder.layers.0.self_attn.k_proj.bias", {}, False),
        ("t", {"attention_bias": True}, True),
        ("t", {"model_type": "qwen2_moe"}, True),
        ("t", {"model_type": "gpt2"}, True),
        ("t", {"model_type": "chatglm", "add_qkv_bias": True}, True),
        ("transformer.encoder.layers.0.self_attention.query_key_value.bias", {}, True),
    ],
)
def test_biases_of_keys_are_found_by_names_of_tensors_or_the_configuration(tmp_path, tensor, config, expected):
    place = _model(tmp_path / "model", other=np.zeros(4, np.float32), **{tensor: np.zeros(4, np.float32)})
    assert has_key_biases(_of(place, hf_text_config=SimpleNamespace(**config))) is expected


def test_what_no_file_shows_has_no_biases_of_keys(tmp_path):
    (_model(tmp_path / "model", t=np.zeros(4)) / "model.safetensors").write_bytes(b"\xff" * 20)
    (_model(tmp_path / "dangling", t=np.zeros(4)) / "consolidated.safetensors").symlink_to(tmp_path / "gone")
    for name in (tmp_path / "model", tmp_path / "dangling", "nobody/no-such-model"):
        assert not has_key_biases(_of(name, hf_text_config=SimpleNamespace()))


# --- where bytes lie


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3)])
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_blocks_spans_hold_its_elements_and_no_others(axes, pieces):
    blocks, shape = 5, (5 * pieces, 3, 4, 6)
    memory = np.arange(np.prod(shape), dtype=np.int16).reshape([shape[axis] for axis in axes])
    array = memory.transpose(np.argsort(axes))
    assert array.shape == shape
    address = memory.__array_interface__["data"][0]
    spans = BlockSpans([layer_spans(address, array.shape, array.strides, 2, blocks)])
    assert spans.value_bytes == array[0].nbytes * pieces
    for block in range(blocks):
        found = [
            memory.reshape(-1)[(start - address) // 2 : (start - address + length) // 2].tolist()
            for start, length in spans.of(block)
        ]
        assert sorted(sum(found, [])) == sorted(array[block * pieces : (block + 1) * pieces].reshape(-1).tolist())


def test_contiguous_axes_are_one_run():
    assert runs_of((2, 3, 4), (48, 16, 4), 4) == ((0, 96),)
    assert runs_of((2, 3, 4), (96, 16, 4), 4) == ((0, 48), (96, 48))


def test_arrays_that_are_no_blocks_are_refused():
    with pytest.raises(ValueError, match="does not begin with 4 blocks"):
        layer_spans(0, (2, 4, 8), (32, 8, 1), 1, 4)
    with pytest.raises(ValueError, match="share memory"):
        layer_spans(0, (4, 2, 8), (8, 4, 1), 1, 4)


# --- settings


def test_settings_are_read_or_refused():
    settings = read_settings({"stores": ["10.0.0.1:7300", "ipc:///run/store.sock"], "prefix": "team-a/", "timeout_s": "5"})
    assert settings.endpoints == ("tcp://10.0.0.1:7300", "ipc:///run/store.sock")
    assert settings.prefix == "team-a/"
    assert settings.client.timeout_s == 5.0
    assert settings.asking.timeout_s == LOOKUP_TIMEOUT_S
    assert not settings.asking.share_memory
    assert read_settings({"stores": "a:1"}).client.timeout_s == MOVE_TIMEOUT_S
    assert read_settings({"stores": "a:1"}).codec is None
    assert all(read_settings({"stores": "a:1", "kv_codec": name}).codec == codec for name, codec in CODECS.items())
    assert read_settings({"stores": "a:1"}).load == "faster"
    assert read_settings({"stores": "a:1"}).images == "gateways"
    assert read_settings({"stores": "a:1,b:1", "copies": 2}).copies == 2
    for wrong in (0, 3):
        with pytest.raises(ValueError, match="copies"):
            read_settings({"stores": "a:1,b:1", "copies": wrong})
    assert read_settings({"stores": "a:1", "load": "always"}).load == "always"
    assert read_settings({"stores": "a:1", "lookup_timeout_s": 3}).asking.timeout_s == 3.0
    for told in (
        {},
        {"stores": ""},
        {"stores": "a:1", "colour": "red"},
        {"stores": "a:1", "load": "never"},
        {"stores": "a:1", "images": "some"},
        {"stores": "a:1", "ttl_s": 2},
        {"stores": "a:1", "ttl_s": 20, "lookup_timeout_s": 9.5},
        {"stores": "a:1", "kv_codec": "int3"},
        {"stores": "a:1", "staging_bytes": "many"},
    ):
        with pytest.raises(ValueError):
            read_settings(told)
