"""Weights in their files' own integers: exactly those of the gguf package, whatever the kind."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.matrices import compact, quantized
from mooncake_zmq.engine.matrices.quantized import Form
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.engine.sources import gguf_blocks
from mooncake_zmq.engine.sources.gguf_blocks import split

FACTORS = {  # offsets of a block's float16 scale (and minimum), which random bytes would make infinite
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
FORMS = {
    "Q5_0": Form.INT8,
    "Q8_0": Form.INT8,
    "Q6_K": Form.INT8,
    "Q5_1": Form.INT8_MINIMUM,
    "Q5_K": Form.INT8_MINIMUM,
}


def random_blocks(kind, rows=70, blocks=3, seed=1):
    rng = np.random.default_rng(seed)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    raw = rng.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    for at in FACTORS[kind.name]:
        raw[:, at : at + 2] = rng.standard_normal((len(raw), 1)).astype(np.float16).view(np.uint8)
    raw[0, : size // 2] = 0  # and scales of zero
    for at in FACTORS[kind.name]:
        raw[1, at : at + 2] = 0
    return raw.reshape(rows, blocks * size)


def unpacked(panels, rows):
    """Panels back to float32 [rows, in], by the formula."""
    values = panels.values
    if panels.form is Form.BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if panels.form is Form.INT4_MINIMUM:
        values = (values[:, :, None, :] >> (4 * np.arange(8, dtype=np.uint32))[:, None]) & 15
        values = values.reshape(len(values), -1, quantized.PANEL_WIDTH)
    values = values.astype(np.float32)
    for part, operation in ((panels.scales, np.multiply), (panels.minima, np.add)):
        if part is not None:
            values = operation(values, np.repeat(part, panels.group, axis=1))
    return values.transpose(0, 2, 1).reshape(-1, values.shape[1])[:rows]


@pytest.mark.parametrize("name", FACTORS)
def test_the_integers_give_exactly_the_weights(name, monkeypatch):
    monkeypatch.setattr(gguf_blocks, "ROWS_AT_ONCE", 33)
    kind = GGMLQuantizationType[name]
    raw = random_blocks(kind)
    expected = gguf.quants.dequantize(raw, kind)
    matrix = split(raw, kind)
    np.testing.assert_array_equal(matrix.dequantize(), expected)
    panels = quantized.quantized_panels(matrix)
    assert panels.form is FORMS.get(name, Form.INT4_MINIMUM)
    np.testing.assert_array_equal(unpacked(panels, len(raw)), expected)


def test_kinds_mixed_in_one_matrix_keep_their_weights():
    kinds = [GGMLQuantizationType[name] for name in ("Q4_K", "Q6_K", "Q4_0")]
    raws = [random_blocks(kind, blocks=blocks) for kind, blocks in zip(kinds, (1, 1, 8), strict=True)]
    matrix = quantized.concatenate([split(raw, kind) for raw, kind in zip(raws, kinds, strict=True)])
    expected = np.concatenate([gguf.quants.dequantize(raw, kind) for raw, kind in zip(raws, kinds, strict=True)])
    np.testing.assert_array_equal(unpacked(quantized.quantized_panels(matrix), 210), expected)


@pytest.mark.parametrize("name", ["IQ4_NL", "TQ1_0", "MXFP4"])
def test_other_kinds_stay_float32(name):
    kind = GGMLQuantizationType[name]
    assert split(np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind) is None


def test_weights_that_are_no_numbers_stay_float32():
    kind = GGMLQuantizationType.Q4_1
    raw = random_blocks(kind)
    raw[3, :2] = np.array([np.inf], dtype=np.float16).view(np.uint8)
    assert split(raw, kind) is None


def test_bfloat16_is_found_by_its_bits():
    weights_ = np.random.default_rng(1).standard_normal((40, 24), dtype=np.float32)
    assert quantized.bfloat16_panels(weights_) is None
    cut = (weights_.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    np.testing.assert_array_equal(unpacked(quantized.bfloat16_panels(cut), 40), cut)


def matrices():
    kind = GGMLQuantizationType.Q4_1
    return {"a": quantized.quantized_panels(split(random_blocks(kind), kind))}


def test_what_is_written_is_read(tmp_path):
    compact.write(tmp_path, matrices().items())
    assert compact.exists(tmp_path)
    read = compact.read(tmp_path, {"a": (70, 96)})
    for part, array in matrices()["a"].arrays().items():
        np.testing.assert_array_equal(read["a"].arrays()[part], array)


def test_a_failure_while_writing_leaves_nothing(tmp_path):
    def fail():
        yield from matrices().items()
        raise InterruptedError

    with pytest.raises(InterruptedError):
        compact.write(tmp_path, fail())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"a"', '"b"'),
        ("INT4_MINIMUM", "FLOAT32"),
        ("INT4_MINIMUM", "X"),
        ('"group": 32', '"group": 0'),
        ('"values": 0', '"values": -64'),
    ],
)
def test_a_damaged_table_is_refused(tmp_path, old, new):
    compact.write(tmp_path, matrices().items())
    table = tmp_path / compact.TABLE_FILE
    assert old in table.read_text()
    table.write_text(table.read_text().replace(old, new))
    with pytest.raises(ModelError, match="damaged"):
        compact.read(tmp_path, {"a": (70, 96)})


def test_a_truncated_file_is_refused(tmp_path):
    compact.write(tmp_path, matrices().items())
    (tmp_path / compact.COMPACT_FILE).write_bytes(b"short")
    with pytest.raises(ModelError, match="damaged"):
        compact.read(tmp_path, {"a": (70, 96)})


def test_a_prepared_model_gets_its_compact_form_when_asked(tmp_path):
    path = prepare("dummy:tiny", tmp_path)
    assert not compact.exists(path)
    assert prepare("dummy:tiny", tmp_path, backend="compiled", kernels=False) == path
    assert compact.exists(path)
    assert not list(tmp_path.glob(".*.tmp"))
