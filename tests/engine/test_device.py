"""The engine's arithmetic in another namespace than NumPy: a stand-in for CuPy whose arrays are never converted silently."""

from dataclasses import replace

import numpy as np
import pytest
from cuda_stand_in import FakeCupy, Gpu

from mooncake_zmq.engine import attention, device, llama
from mooncake_zmq.engine.device import DeviceLlama
from mooncake_zmq.engine.kv_cache import KEY_TILE
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.engine.matrices import panels
from mooncake_zmq.engine.prepared_files import stored_shapes
from mooncake_zmq.engine.spec import FAMILIES
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.transfer.cuda import Cuda, DeviceSequence

TOKENS = np.random.default_rng(1).integers(0, 500, 300).astype(np.int32)


@pytest.fixture(params=sorted(FAMILIES))
def family(request, tiny):
    """(spec, random tensors)"""
    spec = replace(tiny.spec, family=request.param, tied=request.param == "qwen3")
    random = np.random.default_rng(2)
    tensors = {name: random.standard_normal(shape, np.float32) * 0.1 for name, shape in stored_shapes(spec).items()}
    for name in tensors:
        if name.endswith("norm"):
            tensors[name] += 1
    tensors["inv_freq"] = np.abs(tensors["inv_freq"])
    return spec, tensors


@pytest.fixture
def cuda(tiny):
    spec = tiny.spec
    layout = BlockLayout(layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, block_tokens=16)
    opened = Cuda(FakeCupy(Gpu()), layout)
    yield opened
    opened.close()


@pytest.fixture
def engines(family, cuda, monkeypatch):
    """The same model on the CPU and on the device."""
    spec, tensors = family
    on_cpu = Llama(spec, tensors)
    for module in (device, llama):
        monkeypatch.setattr(module, "array_namespace", lambda device: cuda.xp if device == "cuda" else np)
    shape_of = lambda **shape: DeviceSequence(cuda, **shape)  # noqa: E731
    return on_cpu, DeviceLlama(spec, tensors, sequences=shape_of)


def test_prefill_and_decode_give_numpys_logits(engines, cuda):
    logits = []
    for engine in engines:
        one, two = engine.new_sequence(400), engine.new_sequence(100)
        engine.prefill(one, TOKENS[:130], logits_at=None)
        assert not cuda.xp.runtime.default_stream_is_busy, "a chunk without logits has ended too"
        of_prompt = engine.prefill(one, TOKENS[130:300], logits_at=(0, 63, -1))
        of_other = engine.prefill(two, TOKENS[:1])
        steps = [engine.decode([one, two], TOKENS[at : at + 2]) for at in range(3)]
        logits.append(np.concatenate([of_prompt, of_other, *steps]))
    assert type(logits[1]) is np.ndarray
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-4)


def test_a_chunk_takes_as_many_launches_however_long_it_and_its_prefix_are(engines, cuda, monkeypatch):
    """The host's cuts, into products that fit its caches, are not made on a GPU."""
    monkeypatch.setattr(attention, "SMALL_PRODUCT", 1000)
    monkeypatch.setattr(attention, "SCORES_ITEMS", 1000)
    monkeypatch.setattr(panels, "SMALL_PRODUCT", 10_000)
    _, engine = engines
    launches, tile = [], KEY_TILE  # whose multiples are stored in one go
    engine.prefill(engine.new_sequence(400), TOKENS[:300], logits_at=None)  # makes its scratch and activations
    for prefix, count in ((0, tile), (0, 4 * tile), (3 * tile, tile), (2 * tile, 2 * tile)):
        sequence = engine.new_sequence(400)
        if prefix:
            engine.prefill(sequence, TOKENS[:prefix], logits_at=None)
        before = cuda.xp.launches
        engine.prefill(sequence, TOKENS[prefix : prefix + count], logits_at=None)
        launches.append(cuda.xp.launches - before)
        before = cuda.xp.launches
        engine.decode([sequence], TOKENS[:1])
        launches.append(cuda.xp.launches - before)
    assert len(set(launches[::2])) == 1
    assert len(set(launches[1::2])) == 1


def test_a_step_takes_as_many_launches_however_many_sequences_it_has(engines, cuda):
    _, engine = engines
    sequences = [engine.new_sequence(100) for _ in range(9)]
    for length, sequence in enumerate(sequences, 1):
        engine.prefill(sequence, TOKENS[:length], logits_at=None)
    engine.decode(sequences, TOKENS[:9])  # makes its scratch and activations
    launches = []
    for count in (1, 4, 9):
        before = cuda.xp.launches
        engine.decode(sequences[:count], TOKENS[:count])
        launches.append(cuda.xp.launches - before)
    assert len(set(launches)) == 1


def test_a_step_of_short_and_long_sequences_is_numpys(engines):
    """Whose splits are many, one and none."""
    logits = []
    for engine in engines:
        sequences = [engine.new_sequence(700) for _ in range(4)]
        for sequence, length in zip(sequences, (600, 1, 63, 64), strict=True):
            for start in range(0, length, 300):
                engine.prefill(sequence, TOKENS[: min(300, length - start)], logits_at=None)
        logits.append(np.concatenate([engine.decode(sequences, TOKENS[at : at + 4]) for at in range(3)]))
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-4)


def test_heads_too_wide_for_the_kernels_are_told(family, monkeypatch):
    spec, tensors = family
    monkeypatch.setattr(device, "array_namespace", lambda _device: FakeCupy(Gpu()))
    with pytest.raises(ValueError, match="at most 256 dimensions"):
        DeviceLlama(replace(spec, head_dim=288), tensors)


def test_weights_leave_no_pinned_memory_behind(engines, cuda):
    assert cuda.xp.staging_bytes == 0


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_a_step_that_fails_has_ended_on_the_device(engines, cuda, step):
    """Its sequences are closed next, and their memory is used from other streams."""
    _, engine = engines
    sequence = engine.new_sequence(100)
    engine.prefill(sequence, TOKENS[:10])
    engine._layers[-1].down = None
    with pytest.raises(AttributeError):
        engine.prefill(sequence, TOKENS[:10]) if step == "prefill" else engine.decode([sequence], TOKENS[:1])
    assert not cuda.xp.runtime.default_stream_is_busy


def test_rows_are_one_chunk_on_a_device(cuda):
    assert panels.row_chunks(cuda.xp, 1000, 4096) == (1, 1000)
    assert panels.row_chunks(np, 1000, 4096)[0] > 1
    assert panels.rows_needed(cuda.xp, 1000, 4096) == 1000


def test_a_layer_that_is_told_of_is_stored(engines):
    on_cpu, on_device = engines
    reference = on_cpu.new_sequence(64)
    on_cpu.prefill(reference, TOKENS[:50])
    sequence = on_device.new_sequence(64)
    told = []

    def after(layer):
        got, expected = (np.zeros((2, 50, on_cpu.spec.kv_heads, on_cpu.spec.head_dim), np.float32) for _ in range(2))
        sequence.read_part(layer, 0, 50, got)  # the stand-in refuses it while the engine's stream is busy
        reference.read_part(layer, 0, 50, expected)
        np.testing.assert_allclose(got, expected, atol=2e-4)
        told.append(layer)

    on_device.prefill(sequence, TOKENS[:50], after_layer=after, logits_at=None)
    assert told == list(range(on_cpu.spec.layers))


def test_kv_that_another_thread_copied_in_continues_the_sequence(engines):
    on_cpu, on_device = engines
    source = on_cpu.new_sequence(200)
    expected = on_cpu.prefill(source, TOKENS[:150])
    part = np.zeros((2, 100, on_cpu.spec.kv_heads, on_cpu.spec.head_dim), np.float32)
    sequence = on_device.new_sequence(200)

    def load(layer):
        source.read_part(layer, 0, 100, part)
        sequence.write_part(layer, 0, part)
        sequence.settle()

    for layer in range(on_cpu.spec.layers):
        load(layer)
    sequence.set_length(100)
    np.testing.assert_allclose(on_device.prefill(sequence, TOKENS[100:150]), expected, atol=2e-4)
