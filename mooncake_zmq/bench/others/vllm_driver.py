"""One side of `bench vllm`: a vLLM engine with one KV connector, or none, that computes when asked.

Run by path, in vLLM's Python. Its argument is a JSON object: `side` (one of CONNECTORS), `model` (a directory), `stores` (an
endpoint), `device` ("cpu" or "cuda"), `longest` (tokens of a prompt), `kv_tokens` (that its KV cache holds; half of them may be
kept for saving). A model without weights has vLLM's dummies. Requests and answers are lines of JSON, as in `engine_driver`.
"""

import importlib
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FIRST_ID = 100
"""Ids below are special in many vocabularies, and stand for no text."""
SPARE_TOKENS = 256
"""Extra length of a prompt, for tokens beyond its complete blocks and for an answer."""
CONNECTORS: dict[str, dict[str, Any] | None] = {
    "vLLM": None,
    "mooncake_zmq": {
        "kv_connector": "MooncakeZmqConnector",
        "kv_connector_module_path": "mooncake_zmq.vllm.connector",
        "kv_role": "kv_both",
    },
    "MooncakeStoreConnector": {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"},
}


METERED = {
    "connector.MooncakeZmqConnector": (
        *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
        *("update_connector_output", "request_finished", "start_load_kv", "wait_for_save", "get_finished"),
        *("get_block_ids_with_load_errors", "build_connector_worker_meta", "get_kv_connector_stats"),
    ),
    "mover.Mover": ("_load", "_save"),
    "lookups.Lookups": ("_work",),
    "worker._Share": ("run",),
}
"""All functions of our connector, on the engine's thread and on its own; some of them call others of these."""


class Meter:
    """CPU time that all threads spend in the functions of METERED, a call within another counted once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used_s = 0.0
        self._inside = threading.local()

    def install(self) -> None:
        for place, names in METERED.items():
            module, _, of = place.partition(".")
            kind = getattr(importlib.import_module(f"mooncake_zmq.vllm.{module}"), of)
            for name in names:
                setattr(kind, name, self._metered(getattr(kind, name)))

    def take_s(self) -> float:
        with self._lock:
            used_s, self._used_s = self._used_s, 0.0
            return used_s

    def _metered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def metered(*arguments: Any, **more: Any) -> Any:
            if getattr(self._inside, "one", False):
                return function(*arguments, **more)
            self._inside.one = True
            began = time.thread_time()
            try:
                return function(*arguments, **more)
            finally:
                self._inside.one = False
                with self._lock:
                    self._used_s += time.thread_time() - began

        return metered


DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "float32", "block_size": 128},
    "cuda": {"dtype": "bfloat16", "block_size": 16, "gpu_memory_utilization": 0.3},
}
"""Blocks of vLLM's default size; three engines share a GPU."""


class Engine:
    """vLLM's engine, driven step by step."""

    def __init__(self, order: dict[str, Any]) -> None:
        if order["device"] == "cpu":
            os.environ |= {
                "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
                "VLLM_CPU_KVCACHE_SPACE": "1",
            }
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        vllm = importlib.import_module("vllm")
        self.version = vllm.__version__
        self._sampling_params = vllm.SamplingParams
        self.meter = Meter()
        transfer = CONNECTORS[order["side"]]
        if transfer is not None and "kv_connector_module_path" in transfer:
            self.meter.install()
        if transfer is not None:
            extra = {"stores": order["stores"]} if "kv_connector_module_path" in transfer else {}
            transfer = {**transfer, "kv_connector_extra_config": extra}
        device = DEVICES[order["device"]]
        self._engine = vllm.LLM(
            model=order["model"],
            load_format="auto" if any(Path(order["model"]).glob("*.safetensors")) else "dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=order["longest"] + SPARE_TOKENS,
            max_num_batched_tokens=order["longest"] + SPARE_TOKENS,
            num_gpu_blocks_override=-(-order["kv_tokens"] // device["block_size"]),
            kv_transfer_config=transfer,
            **device,
        ).llm_engine
        self.device = importlib.import_module("vllm.platforms").current_platform.get_device_name()
        self._requests = 0

    def first_token(self, prompt: list[int]) -> dict[str, Any]:
        """Return the wall time until the first token, the token, and how much of the prompt was not computed."""
        began = time.perf_counter()
        self._add(prompt, 1)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                last = output
        took_s = time.perf_counter() - began
        return {"s": took_s, "token": last.outputs[0].token_ids[0], "cached": last.num_cached_tokens or 0}

    def stream(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Return all answers so far, once each has at least `count` tokens: they have not ended."""
        answers: dict[str, list[int]] = {self._add(prompt, SPARE_TOKENS): [] for prompt in prompts}
        while min(map(len, answers.values())) < count:
            for output in self._engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
        return list(answers.values())

    def _add(self, prompt: list[int], most: int) -> str:
        self._requests += 1
        wanted = self._sampling_params(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, wanted)
        return str(self._requests)

    def forget(self) -> None:
        """Clear its own prefix cache, once no request holds its blocks."""
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
    answers.write(json.dumps({"version": engine.version, "device": engine.device}) + "\n")
    answers.flush()
    for line in sys.stdin:
        match json.loads(line):
            case {"do": "first", "tokens": tokens, "vocab_size": vocab_size, "seed": seed, "answer": so_far}:
                answer = engine.first_token(_prompt(tokens, vocab_size, seed) + so_far)
            case {"do": "stream", "prompts": prompts, "count": count}:
                answer = {"tokens": engine.stream([_prompt(**prompt) for prompt in prompts], count)}
            case {"do": "forget"}:
                engine.forget()
                answer = {}
            case {"do": "connector"}:
                answer = {"s": engine.meter.take_s()}
            case request:
                raise ValueError(f"there is no request {request}")
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules would hide others of their names
    main(sys.argv[1:])
