"""One side of `bench vllm`: a vLLM engine with one KV connector, or none, that computes when asked.

Run by path, in vLLM's Python. Its argument is a JSON object: `side` (one of CONNECTORS), `model` (a directory), `stores` (an
endpoint), `longest` (tokens of a prompt), `blocks`. Requests and answers are lines of JSON, as in `engine_driver`.
"""

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

FIRST_ID = 100
"""Ids below are special in many vocabularies, and no text."""
CONNECTORS: dict[str, dict[str, Any] | None] = {
    "vLLM": None,
    "mooncake_zmq": {
        "kv_connector": "MooncakeZmqConnector",
        "kv_connector_module_path": "mooncake_zmq.vllm.connector",
        "kv_role": "kv_both",
    },
    "MooncakeStoreConnector": {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"},
}


class Engine:
    """vLLM's engine, driven step by step."""

    def __init__(self, order: dict[str, Any]) -> None:
        os.environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        vllm = importlib.import_module("vllm")
        self.version = vllm.__version__
        self._sampling_params = vllm.SamplingParams
        transfer = CONNECTORS[order["side"]]
        if transfer is not None:
            extra = {"stores": order["stores"]} if "kv_connector_module_path" in transfer else {}
            transfer = {**transfer, "kv_connector_extra_config": extra}
        self._engine = vllm.LLM(
            model=order["model"],
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=order["longest"] + 128,
            max_num_batched_tokens=order["longest"] + 128,
            num_gpu_blocks_override=order["blocks"],
            kv_transfer_config=transfer,
        ).llm_engine
        self._requests = 0

    def first_token(self, prompt: list[int]) -> dict[str, Any]:
        """Wall time until it, the token, and how much of the prompt was not computed."""
        wanted = self._sampling_params(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        self._requests += 1
        began = time.perf_counter()
        self._engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, wanted)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                last = output
        took_s = time.perf_counter() - began
        return {"s": took_s, "token": last.outputs[0].token_ids[0], "cached": last.num_cached_tokens or 0}

    def forget(self) -> None:
        """Its own prefix cache, once nothing keeps its blocks."""
        deadline = time.monotonic() + 60
        core = self._engine.engine_core.engine_core
        while not self._engine.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise TimeoutError("vLLM's prefix cache cannot be emptied")
            core.step_fn()
            time.sleep(0.01)


def _prompt(tokens: int, vocab_size: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(min(FIRST_ID, vocab_size // 2), vocab_size) for _ in range(tokens)]


def main(arguments: Sequence[str]) -> None:
    order = json.loads(arguments[0])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # engines print on standard output
    engine = Engine(order)
    answers.write(json.dumps({"version": engine.version}) + "\n")
    answers.flush()
    for line in sys.stdin:
        match json.loads(line):
            case {"do": "first", "tokens": tokens, "vocab_size": vocab_size, "seed": seed}:
                answer = engine.first_token(_prompt(tokens, vocab_size, seed))
            case {"do": "forget"}:
                engine.forget()
                answer = {}
            case request:
                raise ValueError(f"there is no request {request}")
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules would stand before others of their names
    main(sys.argv[1:])
