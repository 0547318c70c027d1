"""Run by path in a Python that has vLLM: what the connector refuses when an engine starts, each in one line."""

from dataclasses import replace
from types import SimpleNamespace as Told

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from mooncake_zmq.vllm.connector import MooncakeZmqConnector, _checked, _groups
from mooncake_zmq.vllm.groups import ATTENTION as ALL
from mooncake_zmq.vllm.groups import STATE, Group

ATTENTION = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**ATTENTION)
SLIDING = SlidingWindowSpec(**ATTENTION, sliding_window=64)
CHUNKED = ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64)
CROSS = CrossAttentionSpec(**ATTENTION)
STATES = {"block_size": 32, "shapes": ((4, 4),), "dtypes": (torch.float32,)}
MAMBA = MambaSpec(**STATES)
ALIGNED = MambaSpec(**STATES, mamba_cache_mode="align")


def config(**changes: object) -> Told:
    extra = {"stores": "127.0.0.1:7300"} | dict(changes.pop("extra", {}))  # type: ignore[call-overload]
    drafts = changes.pop("speculative_config", None)
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1} | changes
    return Told(
        parallel_config=Told(**parallel),
        speculative_config=drafts,
        cache_config=Told(calculate_kv_scales=changes.get("scales", False)),
        model_config=Told(model="nobody/none", revision=None, hf_text_config=Told(model_type=changes.get("family", "llama"))),
        load_config=Told(download_dir=None),
        kv_transfer_config=Told(kv_connector_extra_config=extra),
    )


def cache(*specs: object, hashed: int | None = None) -> Told:
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return Told(kv_cache_groups=groups, hash_block_size=hashed)


def refused(told: Told, kept: Told, words: str) -> None:
    said = ""
    try:
        _checked(told, kept)
    except ValueError as error:
        said = str(error)
    assert words in said, said or f"not refused: {words}"
    assert "\n" not in said


def groups_are_read() -> None:
    """Check that vLLM keeps its hybrid manager beside this connector, and what each kind of KV makes of a group."""
    assert supports_hma(MooncakeZmqConnector)
    kept = cache(FULL, SLIDING, CHUNKED, ALIGNED)
    assert _groups(kept) == (ALL, Group(window=64), Group(chunk=64), STATE)
    _checked(config(), kept)


def main() -> None:
    groups_are_read()
    assert _checked(config(), cache(FULL)).endpoints == ("tcp://127.0.0.1:7300",)
    assert _checked(config(), cache(SLIDING))
    refused(config(), cache(FULL, CROSS), "KV of kind CrossAttentionSpec is not supported")
    refused(config(), cache(FULL, MAMBA), "add --enable-prefix-caching --mamba-cache-mode align")
    refused(config(), cache(FULL, replace(SLIDING, block_size=16)), "blocks of different sizes, here [16, 32]")
    draft = Told(method="eagle", draft_model_config=Told(hf_config=None))
    refused(config(speculative_config=draft), cache(FULL, SLIDING), "speculation with drafts that have KV")
    refused(config(), cache(FULL, hashed=16), "block hashes are of 16 tokens")
    refused(config(decode_context_parallel_size=2), cache(FULL), "context parallelism")
    refused(config(scales=True), cache(FULL), "calculate_kv_scales")
    refused(config(extra={"stores": ""}), cache(FULL), "names no store")
    refused(config(extra={"kv_codec": "int4"}, family="qwen2"), cache(FULL), "kv_codec 'int4' ruins the answers")
    assert _checked(config(extra={"kv_codec": "int8"}, family="qwen2"), cache(FULL))
    assert _checked(config(extra={"kv_codec": "int4"}), cache(FULL))
    refused(config(extra={"colour": 1}), cache(FULL), "colour is no setting")


if __name__ == "__main__":
    main()
