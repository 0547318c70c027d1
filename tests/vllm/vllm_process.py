"""A vLLM server in a process of its own, in the Python of its own environment, and what tests ask of it over HTTP."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import web
from ports import free_port

from mooncake_zmq.prove.tiny_llama import VOCAB

ROOT = Path(__file__).parents[2]
START_S = 600.0


class Vllm:
    """One life of an engine. `stores`: the pool under it, if there is one. `ranks`: that share the model, each on a core."""

    def __init__(
        self,
        python: str,
        model: Path,
        log: Path,
        *,
        stores: str = "",
        block_tokens: int = 32,
        dtype: str = "float32",
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        ranks: int = 1,
        extra: dict[str, Any] | None = None,
        connector: tuple[str, str] = ("mooncake_zmq.vllm.connector", "MooncakeZmqConnector"),
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--dtype", dtype, "--enforce-eager", "--block-size", str(block_tokens)]
        command += ["--served-model-name", "tiny", "--enable-prompt-tokens-details", *arguments]
        command += ["--tensor-parallel-size", str(ranks)]
        if stores:
            transfer = {
                "kv_connector": connector[1],
                "kv_connector_module_path": connector[0],
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"stores": stores, **(extra or {})},
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        cores = sorted(os.sched_getaffinity(0))[:ranks]
        told = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            **(environment or {}),
        }
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, env=os.environ | told, stdout=out, stderr=out, cwd=log.parent, start_new_session=True
            )

    def wait(self) -> "Vllm":
        """Until it answers."""
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, f"vLLM ended:\n{self.log()[-4000:]}"
            assert time.monotonic() < deadline, f"vLLM did not start:\n{self.log()[-4000:]}"
            with contextlib.suppress(httpx.TransportError):
                if web.get(f"{self.url}/health").status_code == 200:
                    return self
            time.sleep(0.1)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """All its processes at once, as a machine that loses power."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()

    def ask(self, prompt: Sequence[int], count: int, **more: Any) -> tuple[list[int], int]:
        """(the greedy tokens, how many of the prompt were not computed)."""
        answer = web.post(f"{self.url}/v1/completions", json=_body(prompt, count, **more), timeout=120.0)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        details = told["usage"].get("prompt_tokens_details") or {}
        return told["choices"][0]["token_ids"], details.get("cached_tokens") or 0

    def ask_together(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """The greedy tokens of requests that come at once."""
        answer = web.post(f"{self.url}/v1/completions", json=_body([list(each) for each in prompts], count), timeout=300.0)
        assert answer.status_code == 200, answer.text
        return [each["token_ids"] for each in sorted(answer.json()["choices"], key=lambda each: each["index"])]

    def shortfalls(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """By how much each of an answer's tokens is less likely than the likeliest (logarithms), if it is computed as a prompt,
        without any cache."""
        answer = web.post(f"{self.url}/v1/completions", json=_body([*prompt, *tokens], 1, prompt_logprobs=1), timeout=120.0)
        assert answer.status_code == 200, answer.text
        of_answer = answer.json()["choices"][0]["prompt_logprobs"][len(prompt) :]
        return [
            max(each["logprob"] for each in likely.values()) - likely[str(token)]["logprob"]
            for likely, token in zip(of_answer, tokens, strict=True)
        ]

    def stream(self, prompt: Sequence[int], count: int) -> Iterator[int]:
        """Token by token."""
        body = _body(prompt, count, stream=True)
        with web.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120.0) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        yield from choice["token_ids"]

    def forget(self) -> None:
        """Its own prefix cache, once all saves are over, which keep their blocks."""
        deadline = time.monotonic() + 60
        while not web.post(f"{self.url}/reset_prefix_cache", timeout=60.0).json()["success"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a Prometheus metric's samples, of those with this label if one is given."""
        lines = web.get(f"{self.url}/metrics", timeout=60.0).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{") and label in line)

    def count(self, what: str) -> float:
        """What the connector has counted."""
        return self.metric("vllm:mooncake_zmq_pool_total", f'what="{what}"')


def prompt(number: int, tokens: int) -> list[int]:
    """A prompt of its own for each number."""
    source = random.Random(number)
    return [source.randrange(3, VOCAB) for _ in range(tokens)]


def _body(prompt: Sequence[Any], count: int, **more: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return asked | {"return_token_ids": True, "add_special_tokens": False} | more
