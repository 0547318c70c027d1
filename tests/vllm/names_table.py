"""Run by path in a Python that has vLLM: it has every attribute that names are made of, and requests' keys follow adapters.

argv: where a store would be; nobody is there.
"""

import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace as Told

import torch
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from mooncake_zmq.kv.block_hash import salt_of
from mooncake_zmq.vllm import connector
from mooncake_zmq.vllm.adapters import Adapters
from mooncake_zmq.vllm.names import ADAPTER, TABLE, Engine
from mooncake_zmq.vllm.settings import read_settings

OWNERS = {
    "config": VllmConfig,
    "cache": KVCacheConfig,
    "speculation": SpeculativeConfig,
    "draft_model_config": ModelConfig,
    "model_config": ModelConfig,
    "multimodal_config": MultiModalConfig,
    "cache_config": CacheConfig,
    "load_config": LoadConfig,
    "attention_config": AttentionConfig,
    "parallel_config": ParallelConfig,
}


def is_there(path: str, owner: type) -> bool:
    """Whether each part of a path is an attribute of the part before it."""
    for part in path.split("."):
        if part not in getattr(owner, "__dataclass_fields__", ()) and not hasattr(owner, part):
            return False
        owner = OWNERS.get(part, owner)
    return True


def request(adapter: LoRARequest | None = None, images: tuple[str, ...] = ()) -> Told:
    salt = salt_of(bytes(16)) if images else None
    plain = {"resumable": False, "cache_salt": salt, "prompt_embeds": None, "block_hashes": [b"h" * 32] * 4}
    features = [Told(identifier=image, mm_position=Told(offset=3)) for image in images]
    return Told(all_token_ids=list(range(33)), lora_request=adapter, mm_features=features, **plain)


def keys_follow_what_requests_hold(address: str, directory: Path) -> None:
    transfer = Told(kv_load_failure_policy="recompute", is_kv_consumer=True, is_kv_producer=True)
    scheduler = Told(max_num_scheduled_tokens=64, max_num_batched_tokens=64)
    full = FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = Told(kv_cache_groups=[Told(kv_cache_spec=full)], num_blocks=8)
    config = Told(kv_transfer_config=transfer, scheduler_config=scheduler, lora_config=LoRAConfig(lora_dtype="auto"))
    half = connector._SchedulerHalf(config, cache, read_settings({"stores": address}))
    adapter = LoRARequest("a", 1, str(directory))
    (directory / "adapter_config.json").write_text("{}")

    def keys(asked: Told) -> list[bytes]:
        made = half._keys(asked)
        assert made is not None
        return made.upto(4)

    seen = [keys(request()), keys(request(images=("a" * 64,)))]
    for content in ("once", "again"):
        (directory / "adapter_model.safetensors").write_text(content)
        half._adapters = Adapters(time.time_ns() + 10**12)
        seen.append(keys(request(adapter)))
        assert seen[-1] == keys(request(adapter))
    assert not any(set(one) & set(other) for number, one in enumerate(seen) for other in seen[:number])
    half._adapters = Adapters(0)
    assert half._keys(request(adapter)) is None, "its files may have changed since the engine loaded them"
    assert half._keys(request(images=("holiday",))) is None, "a client's own name of an image says nothing of its content"
    half.close()


def main(address: str) -> None:
    of_adapter = {"config": LoRAConfig, "request": LoRARequest}
    missing = [path for row in TABLE if row.part == "DIGEST" for path in row.where if not is_there(path, Engine)]
    for path in ADAPTER.where[1:]:
        owner, _, rest = path.partition(".")
        missing += [] if is_there(rest, of_adapter[owner]) else [path]
    assert not missing, missing
    with tempfile.TemporaryDirectory() as directory:
        keys_follow_what_requests_hold(address, Path(directory))


if __name__ == "__main__":
    main(sys.argv[1])
