"""Run by path in a Python that has vLLM: what the connector refuses when an engine starts, each in one line."""

from types import SimpleNamespace as Told

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
from vllm.v1.core.kv_cache_utils import _promote_local_kv_cache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec

from mooncake_zmq.vllm.connector import MooncakeZmqConnector, _checked

ATTENTION = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**ATTENTION)
SLIDING = SlidingWindowSpec(**ATTENTION, sliding_window=64)
MAMBA = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))


def config(**changes: object) -> Told:
    extra = {"stores": "127.0.0.1:7300"} | dict(changes.pop("extra", {}))  # type: ignore[call-overload]
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1} | changes
    return Told(
        parallel_config=Told(**parallel),
        cache_config=Told(calculate_kv_scales=changes.get("scales", False)),
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


def without_hybrid_manager() -> None:
    """Check what docs/vllm.md says of vLLM without its hybrid manager: windows are full attention, states are refused."""
    assert not supports_hma(MooncakeZmqConnector)
    windows = _promote_local_kv_cache_specs({"full": FULL, "window": SLIDING})
    assert {type(each) for each in windows.values()} == {FullAttentionSpec}
    said = ""
    try:
        _promote_local_kv_cache_specs({"full": FULL, "state": MAMBA})
    except ValueError as error:
        said = str(error)
    assert "Failed to promote local KV cache specs to one unified type" in said, said or "not refused: states"


def main() -> None:
    without_hybrid_manager()
    assert _checked(config(), cache(FULL)).endpoints == ("tcp://127.0.0.1:7300",)
    refused(config(), cache(FULL, SLIDING), "2 KV cache groups; only one is supported")
    refused(config(), cache(FULL, MAMBA, MAMBA), "3 KV cache groups")
    refused(config(), cache(SLIDING), "KV of kind SlidingWindowSpec is not supported")
    refused(config(), cache(MAMBA), "KV of kind MambaSpec is not supported")
    refused(config(), cache(FULL, hashed=16), "block hashes are of 16 tokens")
    refused(config(decode_context_parallel_size=2), cache(FULL), "context parallelism")
    refused(config(scales=True), cache(FULL), "calculate_kv_scales")
    refused(config(extra={"stores": ""}), cache(FULL), "names no store")
    refused(config(extra={"colour": 1}), cache(FULL), "colour is no setting")


if __name__ == "__main__":
    main()
