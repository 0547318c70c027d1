"""Two engines that differ in what their blocks hold or in what orders the bytes never share a name."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mooncake_zmq.kv.block_hash import extend_keys, namespace, pack_tokens, salt_of
from mooncake_zmq.pool.rules.shelf import block_key
from mooncake_zmq.vllm.names import ByteOrder, LayerOrder, chain_root, derived_keys, object_names, token_keys
from mooncake_zmq.vllm.settings import LOOKUP_TIMEOUT_S, MOVE_TIMEOUT_S, read_settings
from mooncake_zmq.vllm.spans import BlockSpans, layer_spans, runs_of
from mooncake_zmq.vllm.weights import fingerprint

ORDER = ByteOrder(
    engine="vllm 0.32.0",
    weights="w",
    config="c",
    device="cpu",
    layout="LBHNC",
    backends=("CPU_ATTN",),
    instruction_sets=("AVX512", "vec"),
    block_tokens=32,
    ranks=(1, 1),
    layers=(
        LayerOrder("a", (1, 2, 32, 64), (1, 2, 3), "torch.float32"),
        LayerOrder("b", (1, 2, 32, 64), (1, 2, 3), "torch.float32"),
    ),
)
LAYER = ORDER.layers[0]
OTHERS = [
    replace(ORDER, engine="vllm 0.33.0"),
    replace(ORDER, weights="x"),
    replace(ORDER, config="d"),
    replace(ORDER, device="cuda"),
    replace(ORDER, layout="LBNHC"),
    replace(ORDER, backends=("FLASH_ATTN",)),
    replace(ORDER, instruction_sets=("AVX512", "amx")),
    replace(ORDER, block_tokens=64),
    replace(ORDER, ranks=(1, 2)),
    replace(ORDER, ranks=(2, 1)),
    replace(ORDER, layers=ORDER.layers[:1]),
    replace(ORDER, layers=ORDER.layers[::-1]),
    replace(ORDER, layers=(replace(LAYER, shape=(1, 2, 64, 32)), ORDER.layers[1])),
    replace(ORDER, layers=(replace(LAYER, axes=(2, 1, 3)), ORDER.layers[1])),
    replace(ORDER, layers=(replace(LAYER, dtype="torch.bfloat16"), ORDER.layers[1])),
]


def test_whatever_orders_the_bytes_differently_has_a_shelf_of_its_own():
    shelves = [order.shelf("0.0") for order in (ORDER, *OTHERS)] + [
        ORDER.shelf("0.1"),
        ORDER.shelf("1.0"),
        ORDER.shelf("0.0", "t/"),
    ]
    assert len(set(shelves)) == len(shelves)
    assert replace(ORDER).shelf("0.0") == shelves[0], "and the same again the same, in any process"


def test_no_two_orders_give_one_text():
    assert len({order.digest for order in (ORDER, *OTHERS)}) == 1 + len(OTHERS)


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


def test_what_is_more_than_text_is_named_by_the_engines_own_hashes():
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
        (name,) = object_names([ORDER.shelf("0.0", prefix)], [key])
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
    assert read_settings({"stores": "a:1"}).load == "faster"
    assert read_settings({"stores": "a:1", "load": "always"}).load == "always"
    assert read_settings({"stores": "a:1", "lookup_timeout_s": 3}).asking.timeout_s == 3.0
    for told in (
        {},
        {"stores": ""},
        {"stores": "a:1", "colour": "red"},
        {"stores": "a:1", "load": "never"},
        {"stores": "a:1", "staging_bytes": "many"},
    ):
        with pytest.raises(ValueError):
            read_settings(told)
