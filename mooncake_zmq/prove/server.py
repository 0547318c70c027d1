"""A vLLM server in a process of its own, in the Python of its own environment."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx

from mooncake_zmq.bench.others.store_driver import free_port

ROOT = Path(__file__).parents[2]
NAME = "tiny"
"""The name by which the model is served."""
START_S = 600.0
ANSWER_S = 300.0
LOG_CHARS = 2000
EXTERNAL = 'source="external_kv_transfer"'
BY_SOURCE = "vllm:prompt_tokens_by_source_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command line of a server. `transfer`: its `--kv-transfer-config`; None: no connector."""

    python: str
    model: Path
    transfer: Mapping[str, Any] | None = None
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        """Return the arguments of the process."""
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--served-model-name", NAME, "--enforce-eager", *self.arguments]
        return command + (["--kv-transfer-config", json.dumps(self.transfer)] if self.transfer else [])


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of an answer, and for each the difference between the logarithms of the two largest probabilities, if they
    were asked for."""

    tokens: list[int]
    margins: list[float]


class Server:
    """One run of a server, from construction until `kill`."""

    def __init__(self, launch: Launch, log: Path) -> None:
        """Start it; `ready` waits for it."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        environment = {
            "PYTHONPATH": str(ROOT),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
            **launch.environment,
        }
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                launch.command(port),
                env=os.environ | environment,
                stdout=out,
                stderr=out,
                cwd=log.parent,
                start_new_session=True,
            )
        self._client = httpx.Client(base_url=self.url, timeout=ANSWER_S)

    def ready(self) -> "Server":
        """Wait until it answers. Raises click.ClickException with the end of its log if it ends, or takes too long."""
        deadline = time.monotonic() + START_S
        while True:
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                what = "ended" if ended else f"did not answer within {START_S:.0f} s"
                raise click.ClickException(f"vLLM {what}; its log ends with:\n{self.log()[-LOG_CHARS:]}")
            with contextlib.suppress(httpx.TransportError):
                if self._client.get("/health").status_code == 200:
                    return self
            time.sleep(0.1)

    def log(self) -> str:
        """Return what it has written."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """End all its processes at once by SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ask(self, prompt: Sequence[int], count: int, *, margins: bool = False) -> Answer:
        """Return the greedy answer of `count` tokens. Raises httpx.HTTPError if there is none."""
        answer = self._client.post("/v1/completions", json=_body(prompt, count) | ({"logprobs": 2} if margins else {}))
        answer.raise_for_status()
        (choice,) = answer.json()["choices"]
        likely = choice["logprobs"]["top_logprobs"] if margins else ()
        return Answer(choice["token_ids"], [_margin(each) for each in likely])

    def stream(self, prompt: Sequence[int], count: int) -> Generator[int, None, None]:
        """Yield the tokens of the greedy answer as they come; closing the iterator hangs up. Raises httpx.HTTPError."""
        with self._client.stream("POST", "/v1/completions", json=_body(prompt, count) | {"stream": True}) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        yield from choice["token_ids"]

    def hang_up(self, prompt: Sequence[int], count: int, after_s: float) -> None:
        """Ask, and leave before an answer."""
        with contextlib.suppress(httpx.HTTPError):
            self._client.post("/v1/completions", json=_body(prompt, count), timeout=after_s)

    def loaded_tokens(self) -> float:
        """Return the number of prompt tokens whose KV a connector has loaded."""
        return self.metric(BY_SOURCE, EXTERNAL)

    def preemptions(self) -> float:
        """Return how often a request lost its KV for want of room."""
        return self.metric("vllm:num_preemptions_total")

    def metric(self, name: str, label: str = "") -> float:
        """Return the sum of a metric's samples, of those with this label if one is given."""
        lines = self._client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{") and label in line)


def _body(prompt: Sequence[int], count: int) -> dict[str, Any]:
    asked = {"model": NAME, "prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return asked | {"return_token_ids": True, "add_special_tokens": False}


def _margin(likely: Mapping[str, float]) -> float:
    values = sorted(likely.values(), reverse=True)
    return values[0] - values[1] if len(values) > 1 else float("inf")
