"""The default model's KV through blocks: stored in a slot and loaded elsewhere, it gives the golden logits."""

from pathlib import Path

import numpy as np
import pytest
from one_block import load_layers

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import BlockLoad, SlotGrant
from mooncake_zmq.engine import weights
from mooncake_zmq.engine.prepare import default_cache_dir, prepare
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.transfer.block_copy import store_block
from mooncake_zmq.transfer.shared_memory import Segment

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2.npz"
BLOCK_TOKENS = 32
PREFIX_BLOCKS = 12


@pytest.fixture(scope="module")
def model():
    return weights.load_engine(prepare("default", default_cache_dir(), backend="auto", kernels=False))


def test_a_prefix_loaded_from_blocks_gives_the_golden_logits(model, tmp_path):
    with np.load(GOLDEN, allow_pickle=False) as archive:
        golden = dict(archive)
    number = int(np.flatnonzero(golden["prompt_lengths"] >= 500)[0])
    prompt = np.split(golden["prompts"], np.cumsum(golden["prompt_lengths"])[:-1])[number]
    prefix = PREFIX_BLOCKS * BLOCK_TOKENS
    spec = model.spec
    layout = BlockLayout(
        layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, block_tokens=BLOCK_TOKENS, dtype=spec.kv_dtype
    )
    segment = Segment.create(tmp_path, "test", "pool", layout, PREFIX_BLOCKS, 1)
    writer, reader = model.new_sequence(len(prompt)), model.new_sequence(len(prompt))
    model.prefill(writer, prompt[:prefix], logits_at=None)
    for block in range(PREFIX_BLOCKS):
        segment.set_generation(block, 1)
        checksum = store_block(writer, block, segment, SlotGrant("pool", 1, block, 1))
        segment.set_generation(block, 2)
        assert checksum == block_checksum(segment.parts(block).tolist())
        ref = SlotRef(node="pool", incarnation=1, slot=block, generation=2, checksum=checksum)
        loaded = load_layers(segment, BlockLoad(block, ref, 0, spec.layers, BLOCK_TOKENS), range(spec.layers), reader)
        assert loaded == segment.parts(block).tolist()
    reader.set_length(prefix)
    rows = [r for r in np.flatnonzero(golden["row_prompt"] == number) if golden["row_position"][r] >= prefix]
    assert len(rows) >= 2
    positions = [int(golden["row_position"][row]) - prefix for row in rows]
    logits = model.prefill(reader, prompt[prefix:], logits_at=positions)
    for row, found in zip(rows, logits, strict=True):
        np.testing.assert_allclose(found[golden["top_ids"][row]], golden["top_logits"][row], rtol=0, atol=1e-3)
        np.testing.assert_allclose(found[golden["fixed_ids"]], golden["fixed_logits"][row], rtol=0, atol=1e-3)
    writer.close()
    reader.close()
    segment.close()
