"""A stand-in for a vLLM server that says what a real one says of itself, with each flag there or not."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgpack
import zmq
from stub_vllm import DONE, Pieces, StubVllm, event, usage

Answering = Callable[[dict[str, Any]], Pieces]
METRICS = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="{block_tokens}",cache_dtype="auto",enable_prefix_caching="{caching}",engine="0",\
kv_cache_size_tokens="{capacity}",num_gpu_blocks="{blocks}",sliding_window="None"}} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} 0.0
"""
CONNECTOR = """# HELP vllm:mooncake_zmq_stores_info Stores of this engine's pool, separated by commas.
# TYPE vllm:mooncake_zmq_stores_info gauge
vllm:mooncake_zmq_stores_info{{engine="0",model_name="m",stores="{stores}"}} 1.0
"""


def one_token(_body: dict[str, Any]) -> Pieces:
    yield event([1], "length")
    yield DONE


class AttachableVllm(StubVllm):
    """Serves with all flags by default. `events`: an endpoint where it publishes its KV events; empty: it does not."""

    def __init__(
        self,
        *,
        root: str,
        names: tuple[str, ...] = ("m",),
        adapters: tuple[str, ...] = ("tuned",),
        block_tokens: int = 32,
        blocks: int = 100,
        capacity: str = "None",
        max_model_len: int = 4096,
        stores: str | None = "tcp://127.0.0.1:7301",
        events: str = "",
        caching: bool = True,
        details: bool = True,
        scale_out: bool = True,
        tokens: list[int] | None = None,
        answering: Answering = one_token,
    ) -> None:
        super().__init__(self._answered)
        self.answering = answering
        self._details = details
        self._block_tokens = block_tokens
        self._known: set[str] = set()
        self._guard = threading.Lock()
        self._number = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        if events:
            self._publisher.bind(events)
        models = [
            {"id": name, "object": "model", "root": root, "parent": None, "max_model_len": max_model_len} for name in names
        ]
        models += [
            {"id": each, "object": "model", "root": f"/a/{each}", "parent": names[0], "max_model_len": None}
            for each in adapters
        ]
        metrics = METRICS.format(block_tokens=block_tokens, caching=caching, capacity=capacity, blocks=blocks)
        if stores is not None:
            metrics += CONNECTOR.format(stores=stores)
        self.pages = {
            "/v1/models": (200, json.dumps({"object": "list", "data": models}).encode()),
            "/metrics": (200, metrics.encode()),
            "/version": (200, b'{"version": "0.32.0"}'),
        }
        self.posts = {} if scale_out else {"/inference/v1/generate": (404, b"")}
        if tokens is not None:
            self.posts["/tokenize"] = (200, json.dumps({"count": len(tokens), "tokens": tokens}).encode())

    def _answered(self, body: dict[str, Any]) -> Iterator[bytes]:
        salt, tokens = body["cache_salt"], body["token_ids"]
        with self._guard:
            reused = self._block_tokens if salt in self._known and self._details else 0
            self._known.add(salt)
            if len(tokens) >= self._block_tokens:
                self._publish(salt, tokens[: self._block_tokens])
        for piece in self.answering(body):
            if b'"usage"' in piece:
                continue
            if piece == DONE:
                yield usage(reused)
            yield piece

    def _publish(self, salt: str, tokens: list[int]) -> None:
        stored = {
            "type": "BlockStored",
            "block_hashes": [self._number + 1],
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": len(tokens),
            "lora_id": None,
            "medium": "GPU",
            "extra_keys": [[salt]],
        }
        payload = msgpack.packb([time.time(), [stored], None])
        self._publisher.send_multipart([b"", self._number.to_bytes(8, "big"), payload])
        self._number += 1

    def close(self) -> None:
        super().close()
        with self._guard, suppress(zmq.ZMQError):
            self._context.destroy(linger=0)
