"""The cluster beside two real vLLMs, which `up` starts: REQUIRE_VLLM=PYTHON names the Python of an environment that has it."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file
from toy_cluster import Stream, eventually, free_port, greedy, until_none
from vllm_cluster import VOCABULARY, VllmCluster, cpu_s, write_model

PYTHON = os.environ.get("REQUIRE_VLLM", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="REQUIRE_VLLM names no Python with vLLM"),
    pytest.mark.timeout(3600),
]
HIDDEN, HEADS, KV_HEADS, HEAD, INNER, LAYERS = 128, 4, 2, 32, 256, 2
START_S = 1800.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
PROMPT = [3 + i * 7 % 90 for i in range(300)]


def write_llama(directory: Path) -> Path:
    """Two layers of random normal weights."""
    write_model(
        directory,
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        hidden_act="silu",
        tie_word_embeddings=False,
        torch_dtype="float32",
        bos_token_id=VOCABULARY - 2,
    )
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32) * np.float32(3 / np.sqrt(shape[-1]))

    parts = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    tensors = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN), "lm_head.weight": normal(VOCABULARY, HIDDEN)}
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for layer in range(LAYERS):
        tensors |= {f"model.layers.{layer}.{name}.weight": normal(*shape) for name, shape in parts.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class RealCluster(VllmCluster):
    """`up` starts the servers too."""

    def __init__(self, directory: Path, model: Path) -> None:
        ports = free_port(), free_port()
        urls = f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
        serve = json.dumps(["--dtype", "float32", "--enforce-eager"])
        super().__init__(directory, model, urls, (f"vllm.serve_arguments={serve}", "gateway.requests.stall_s=120"))
        self.arguments += ["--engine", "vllm", "--vllm-python", PYTHON]
        self.urls = dict(zip(("vllm-a", "vllm-b"), urls, strict=True))

    def start(self) -> None:
        process = self.up()
        eventually(lambda: process.poll() is not None or self.complete(), START_S, "the cluster starts")
        assert process.poll() is None, self.told()

    def server(self, node: str) -> int:
        """The pid of its vLLM."""
        port = self.urls[node].rpartition(":")[2]
        found = subprocess.run(["pgrep", "-f", f"api_server.*--port {port} "], capture_output=True, text=True).stdout.split()
        return int(found[0])

    def running(self) -> float:
        """Requests in both vLLMs."""
        total = 0.0
        for url in self.urls.values():
            for line in httpx.get(f"{url}/metrics").text.splitlines():
                if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{")):
                    total += float(line.split()[-1])
        return total


@pytest.fixture(scope="module")
def cluster() -> Iterator[RealCluster]:
    with pytest.MonkeyPatch.context() as patched, contextlib.ExitStack() as stack:
        for name, value in ENVIRONMENT.items():
            patched.setenv(name, value)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mz-")))
        made = RealCluster(directory, write_llama(directory / "models" / "tiny"))
        try:
            made.start()
            yield made
            until_none(made.busy_gauges, 60)
            made.stop()
        finally:
            made.kill()


def served(answer: dict) -> str:
    return answer["mooncake"]["prefill"]


def test_a_prompt_goes_where_it_is_and_outlives_its_vllm(cluster: RealCluster) -> None:
    name = cluster.model_name
    first = cluster.complete_text(prompt=PROMPT, max_tokens=8)
    home = served(first)
    blocks = lambda: cluster.dumps()["conductor-0"]["actor"]["index"]["by_node"].get(home, 0)  # noqa: E731
    eventually(lambda: blocks() >= len(PROMPT) // 32, 30, "the conductor hears what vLLM holds")
    for more in ([], [5, 6, 7], [9]):
        again = cluster.complete_text(prompt=PROMPT + more, max_tokens=8)
        assert served(again) == home
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 288
    assert cluster.complete_text(prompt=PROMPT, max_tokens=8)["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]

    whole = cluster.complete_text(prompt=PROMPT, max_tokens=300)["choices"][0]["token_ids"]
    assert len(whole) == 300
    with Stream(cluster.url, greedy(model=name, prompt=PROMPT, max_tokens=300, stream=True)) as stream:
        stream.read(20)
        os.kill(cluster.server(home), signal.SIGKILL)
        killed_at = time.monotonic()
        stream.read(len(stream.tokens) + 60)
        print(f"tokens again {time.monotonic() - killed_at:.2f} s after the death")
        assert stream.read() == whole
    assert not stream.errors
    eventually(lambda: not cluster.dumps()[home]["actor"]["trouble"], START_S, "up has started it again")

    with Stream(cluster.url, greedy(model=name, prompt=PROMPT, max_tokens=3000, stream=True)) as stream:
        stream.read(5)
        assert cluster.running() == 1
    gone_at = time.monotonic()
    eventually(lambda: cluster.running() == 0, 30, "vLLM is idle")
    print(f"idle {time.monotonic() - gone_at:.2f} s after the client hung up")


def test_what_a_node_costs(cluster: RealCluster) -> None:
    """Printed: a time is no test's to judge."""
    name, tokens = cluster.model_name, 150
    nodes = [cluster.pid(node) for node in ("vllm-a", "vllm-b")]
    before = sum(map(cpu_s, nodes))

    def ask() -> None:
        with Stream(cluster.url, greedy(model=name, prompt=PROMPT[:64], max_tokens=tokens, stream=True)) as stream:
            assert len(stream.read()) == tokens

    askers = [threading.Thread(target=ask) for _ in range(8)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    print(f"node and HTTP: {1e3 * (sum(map(cpu_s, nodes)) - before) / (8 * tokens):.2f} ms of CPU a token at 8 streams")
