"""The cluster beside two real vLLMs, which `up` starts: REQUIRE_VLLM=PYTHON names the Python of an environment that has it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import web
from safetensors.numpy import save_file
from stopping import stop
from strange_model import VOCABULARY, write_model
from toy_cluster import ROOT, Stream, eventually, free_port, greedy, until_none
from vllm_cluster import ApartCluster, VllmCluster, cpu_s

from mooncake_zmq.prove.tiny_llama import HEAD, HEADS, HIDDEN, KV_HEADS, LAYERS, llama_config, write_weights

PYTHON = os.environ.get("REQUIRE_VLLM", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="REQUIRE_VLLM names no Python with vLLM"),
    pytest.mark.timeout(3600),
]
START_S = 1800.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}
PROMPT = [3 + i * 7 % 90 for i in range(300)]
LONG = 2000
"""Tokens of an answer that is still being computed when its vLLM is killed: some 2 ms each."""


MANY = 8192
"""Tokens of a long prompt."""


def write_llama(directory: Path, seed: int = 0, positions: int = 4096) -> Path:
    """Two layers of random normal weights, with a tokenizer that a gateway takes."""
    write_model(directory, **llama_config(VOCABULARY, positions), bos_token_id=VOCABULARY - 2)
    write_weights(directory, VOCABULARY, seed)
    return directory


def write_adapter(directory: Path, seed: int, base: str = "") -> Path:
    """A LoRA adapter of rank 8 with random weights, for queries and values of every layer. `base`: the model that it names."""
    directory.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none"}
    config |= {"base_model_name_or_path": base} if base else {}
    (directory / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj", "v_proj"]}))
    random, tensors = np.random.default_rng(seed), {}
    for layer in range(LAYERS):
        for part, rows in (("q_proj", HEADS * HEAD), ("v_proj", KV_HEADS * HEAD)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            tensors[f"{at}.lora_A.weight"] = random.standard_normal((8, HIDDEN), dtype=np.float32) / 4
            tensors[f"{at}.lora_B.weight"] = random.standard_normal((rows, 8), dtype=np.float32) / 4
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory


class RealCluster(VllmCluster):
    """`up` starts the servers too."""

    more_settings: tuple[str, ...] = ()

    def more_arguments(self, directory: Path) -> list[str]:
        """Further arguments of the servers."""
        return []

    @staticmethod
    def environment(directory: Path) -> dict[str, str]:
        """Further variables of the servers' environment."""
        return {}

    def __init__(self, directory: Path, model: Path) -> None:
        ports = free_port(), free_port()
        urls = f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
        serve = json.dumps(["--dtype", "float32", "--enforce-eager", *self.more_arguments(directory)])
        settings = (f"vllm.serve_arguments={serve}", "gateway.requests.stall_s=120", *self.more_settings)
        super().__init__(directory, model, urls, settings)
        self.arguments += ["--engine", "vllm", "--vllm-python", PYTHON]
        self.urls = dict(zip(self.VLLMS, urls, strict=True))

    def start(self) -> None:
        process = self.up()
        eventually(lambda: process.poll() is not None or self.complete(), START_S, "the cluster starts")
        assert process.poll() is None, self.told()

    def server(self, node: str) -> int:
        """The pid of its vLLM."""
        port = self.urls[node].rpartition(":")[2]
        found = subprocess.run(["pgrep", "-f", f"api_server.*--port {port} "], capture_output=True, text=True).stdout.split()
        return int(found[0])

    def processes(self, node: str) -> list[int]:
        """The pids of its vLLM, its engine's too."""
        found = subprocess.run(["pgrep", "-g", str(self.server(node))], capture_output=True, text=True).stdout.split()
        return [int(pid) for pid in found]

    def computed(self) -> float:
        """Prompt tokens that both vLLMs have computed, neither reused nor loaded."""
        lines = [line for url in self.urls.values() for line in web.get(f"{url}/metrics").text.splitlines()]
        of = "vllm:prompt_tokens_by_source_total{"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(of) and '"local_compute"' in line)

    def running(self) -> float:
        """Requests in both vLLMs."""
        total = 0.0
        for url in self.urls.values():
            for line in web.get(f"{url}/metrics").text.splitlines():
                if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{")):
                    total += float(line.split()[-1])
        return total


class RealApart(RealCluster, ApartCluster):
    """One prefills, the other decodes, both with our connector over the stores of two hosts."""


class RealHosts(RealCluster):
    """Each on a host with a store, on which it saves every block, and on the other's."""

    CONFIG = "vllm-apart.toml"
    nodes = ("conductor-0", "cache-a", "cache-b", "prefill-a", "decode-b", "gateway-0")
    VLLMS = ("prefill-a", "decode-b")
    COPIES = 2

    def __init__(self, directory: Path, model: Path) -> None:
        model = write_llama(directory / "models" / "long", positions=2 * MANY)
        self.more_settings = (f"vllm.copies={self.COPIES}", f"model.max_model_len={2 * MANY}", "model.block_tokens=32")
        super().__init__(directory, model)
        config = Path(self.arguments[1])
        text = config.read_text()
        for part in ("prefill", "decode"):
            assert f'part = "{part}", ' in text
            text = text.replace(f'part = "{part}", ', "")
        config.write_text(text)

    def kill_host(self, vllm: str, cache: str) -> None:
        """Kill a vLLM with its node and the cache-node of its host, all at once."""
        for pid in [*self.processes(vllm), self.pid(vllm), self.pid(cache)]:
            os.kill(pid, signal.SIGKILL)


class RealHostsOneCopy(RealHosts):
    """The same with the usual one copy."""

    COPIES = 1


class RealAdapters(RealCluster):
    """Both with two adapters, and our connector over the one store."""

    more_settings = ('model.adapters=["poet", "sql"]',)

    def more_arguments(self, directory: Path) -> list[str]:
        names = {name: write_adapter(directory / name, seed) for seed, name in enumerate(("poet", "sql"))}
        modules = [f"{name}={path}" for name, path in names.items()]
        return ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", *modules]


class RealAdaptersOnDemand(RealCluster):
    """Both with vLLM's own plugin that loads an adapter from a directory when it is first asked for."""

    more_settings = ('model.adapters=["poet", "sql"]',)

    def more_arguments(self, directory: Path) -> list[str]:
        return ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]

    @staticmethod
    def environment(directory: Path) -> dict[str, str]:
        adapters = directory / "adapters"
        adapters.mkdir()
        for seed, name in enumerate(("poet", "sql")):
            write_adapter(adapters / name, seed, base=str(directory / "models" / "tiny"))
        return {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_PLUGINS": "lora_filesystem_resolver",
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(adapters),
        }


class RealModels(RealCluster):
    """The models "large" on the first server and "small" on the second, with our connector over the one store."""

    CONFIG = "vllm-models.toml"
    nodes = ("conductor-large", "conductor-small", "cache-a", "vllm-a", "vllm-b", "gateway-0")

    def __init__(self, directory: Path, model: Path) -> None:
        paths = {name: write_llama(directory / "models" / name, seed) for seed, name in enumerate(("large", "small"))}
        self.more_settings = tuple(f"models.{name}.path={path}" for name, path in paths.items())
        super().__init__(directory, model)


@contextlib.contextmanager
def running(kind: type[RealCluster]) -> Iterator[RealCluster]:
    with pytest.MonkeyPatch.context() as patched, contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mz-")))
        for name, value in (ENVIRONMENT | kind.environment(directory)).items():
            patched.setenv(name, value)
        made = kind(directory, write_llama(directory / "models" / "tiny"))
        try:
            made.start()
            yield made
            until_none(made.busy_gauges, 60)
            made.stop()
        finally:
            made.kill()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RealCluster]:
    with running(RealCluster) as made:
        yield made


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

    whole = cluster.complete_text(prompt=PROMPT, max_tokens=LONG)["choices"][0]["token_ids"]
    assert len(whole) == LONG
    with Stream(cluster.url, greedy(model=name, prompt=PROMPT, max_tokens=LONG, stream=True)) as stream:
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
        eventually(lambda: cluster.running() == 1, 30, "vLLM says that it runs one")
    gone_at = time.monotonic()
    eventually(lambda: cluster.running() == 0, 30, "vLLM is idle")
    print(f"idle {time.monotonic() - gone_at:.2f} s after the client hung up")


def test_a_burst_with_one_beginning_computes_it_once(cluster: RealCluster) -> None:
    beginning = [3 + i * 11 % 90 for i in range(1024)]
    before = cluster.computed()
    ask_all(cluster, [[*beginning, *[3 + (i + number) % 90 for i in range(20)]] for number in range(8)], 8)
    assert cluster.computed() - before <= 1.1 * (1024 + 8 * 20)


def test_a_stopped_vllm_is_left_with_the_same_tokens(cluster: RealCluster) -> None:
    name, home = cluster.model_name, served(cluster.complete_text(prompt=PROMPT, max_tokens=8))
    whole = cluster.complete_text(prompt=PROMPT, max_tokens=300)["choices"][0]["token_ids"]
    with Stream(cluster.url, greedy(model=name, prompt=PROMPT, max_tokens=300, stream=True)) as stream:
        stream.read(20)
        pids, stopped_at = cluster.processes(home), time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        stream.read(len(stream.tokens) + 60)
        print(f"tokens again {time.monotonic() - stopped_at:.2f} s after the stop")
        assert stream.read() == whole
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: not cluster.dumps()[home]["actor"]["trouble"], 60, "it serves again")


def ask_all(cluster: RealCluster, prompts: list[list[int]], tokens: int) -> None:
    """Ask all at once, and return when all answers are whole."""
    name, lengths = cluster.model_name, list[int]()

    def ask(prompt: list[int]) -> None:
        with Stream(cluster.url, greedy(model=name, prompt=prompt, max_tokens=tokens, stream=True)) as stream:
            lengths.append(len(stream.read()))

    askers = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert lengths == [tokens] * len(prompts)


def test_an_answer_says_which_weights_made_its_tokens(cluster: RealCluster) -> None:
    def name_weights(version: str) -> None:
        for url in cluster.urls.values():
            assert web.post(f"{url}/update_weight_version", json={"new_version": version}, timeout=60.0).json()["success"]

    def spans(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
        return [(span["version"], span["start"], span["end"]) for span in answer["choices"][0]["weight_versions"]]

    assert "weight_versions" not in cluster.complete_text(prompt=PROMPT[:64], max_tokens=8)["choices"][0]
    name_weights("step-6")
    try:
        if "weight_versions" not in cluster.complete_text(prompt=PROMPT[:64], max_tokens=8)["choices"][0]:
            pytest.skip("this release of vLLM does not report them")
        _named(cluster, name_weights, spans)
    finally:
        name_weights("default")


def _named(
    cluster: RealCluster, name_weights: Callable[[str], None], spans: Callable[[dict], list[tuple[str, int, int]]]
) -> None:
    assert spans(cluster.complete_text(prompt=PROMPT[:64], max_tokens=8)) == [("step-6", 0, 8)]
    with ThreadPoolExecutor(1) as asking:
        answer = asking.submit(cluster.complete_text, prompt=PROMPT[:64], max_tokens=LONG)
        eventually(lambda: cluster.running() == 1, 30, "vLLM says that it runs one")
        name_weights("step-7")
        ((first, start, turn), (second, turned, end)) = spans(answer.result())
    assert (first, start, second, end) == ("step-6", 0, "step-7", LONG)
    assert 0 < turn == turned < LONG


def test_what_a_node_costs(cluster: RealCluster) -> None:
    """Printed: a time is no test's to judge."""
    tokens = 150
    nodes = [cluster.pid(node) for node in ("vllm-a", "vllm-b")]
    before = sum(map(cpu_s, nodes))

    ask_all(cluster, [PROMPT[:64]] * 8, tokens)
    print(f"node and HTTP: {1e3 * (sum(map(cpu_s, nodes)) - before) / (8 * tokens):.2f} ms of CPU a token at 8 streams")


def alone(cluster: RealCluster, prompt: list[int], count: int, model: str | None = None) -> list[int]:
    """The tokens that the second vLLM gives by itself, nothing being reused."""
    body = {
        "model": model,
        "token_ids": prompt,
        "cache_salt": "alone",
        "sampling_params": {"max_tokens": count, "temperature": 0.0},
    }
    body["sampling_params"] |= {"ignore_eos": True, "detokenize": False}
    answer = web.post(f"{list(cluster.urls.values())[1]}/inference/v1/generate", json=body, timeout=120.0)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_one_prefills_another_decodes_and_its_death_loses_no_token() -> None:
    prompt = PROMPT + [9, 8, 7]
    with running(RealApart) as cluster:
        whole = alone(cluster, prompt, 200)
        counts = lambda: cluster.dumps()["decode-b"]["counts"]  # noqa: E731
        answer = cluster.complete_text(prompt=prompt, max_tokens=200, ignore_eos=True)
        assert answer["choices"][0]["token_ids"] == whole
        assert (answer["mooncake"]["prefill"], answer["mooncake"]["decode"]) == ("prefill-a", "decode-b")
        assert answer["mooncake"]["attempts"] == 1
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "the prefill computed it all"
        blocks = len(prompt) // 32 * 32
        assert counts()["taken_over_tokens_reused"] == blocks, "and the decode loaded it"

        with Stream(cluster.url, greedy(model=cluster.model_name, prompt=prompt, max_tokens=200, stream=True)) as stream:
            stream.read(20)
            os.kill(cluster.server("decode-b"), signal.SIGKILL)
            assert stream.read() == whole
        assert not stream.errors


@pytest.mark.parametrize("kind", [RealHosts, RealHostsOneCopy])
def test_with_two_copies_the_death_of_a_host_costs_no_prefill(kind: type[RealHosts]) -> None:
    prompts = [[3 + (seed + i * (7 + seed)) % 90 for i in range(MANY)] for seed in range(2)]
    with running(kind) as cluster:
        began = time.monotonic()
        cluster.complete_text(prompt=prompts[1], max_tokens=1)
        cold_s = time.monotonic() - began
        whole = cluster.complete_text(prompt=prompts[0], max_tokens=1000)
        home, caches = served(whole), dict(zip(cluster.VLLMS, ("cache-a", "cache-b"), strict=True))
        (left,) = {*cluster.VLLMS} - {home}
        computed = lambda: web.get(f"{cluster.urls[left]}/metrics").text.partition('"local_compute"')[2].split()[1]  # noqa: E731
        before = float(computed())
        with Stream(cluster.url, greedy(model=cluster.model_name, prompt=prompts[0], max_tokens=1000, stream=True)) as stream:
            stream.read(40)
            cluster.kill_host(home, caches[home])
            at = [time.monotonic()]
            while len(stream.tokens) < 900:
                stream.read(len(stream.tokens) + 1)
                at.append(time.monotonic())
            paused_s = max(np.diff(at))
            assert stream.read() == whole["choices"][0]["token_ids"]
        assert not stream.errors
        again = float(computed()) - before
        print(f"copies {kind.COPIES}: cold {cold_s:.2f} s, paused {paused_s:.2f} s, {again:.0f} prompt tokens computed again")
        assert (again < 100) == (kind.COPIES == 2)


def test_stopped_stores_cost_the_first_request_alone() -> None:
    """Printed: a time is no test's to judge."""
    with running(RealApart) as cluster:
        prompts = [[3 + (i * 7 + number) % 90 for i in range(300)] for number in range(8)]
        wholes = [alone(cluster, prompt, 20) for prompt in prompts]
        stores = [cluster.pid(cache) for cache in ("cache-a", "cache-b")]
        for pid in stores:
            stop(pid)
        for prompt, whole in zip(prompts, wholes, strict=True):
            began_at = time.monotonic()
            assert cluster.complete_text(prompt=prompt, max_tokens=20)["choices"][0]["token_ids"] == whole
            print(f"20 tokens in {time.monotonic() - began_at:.2f} s")
        for pid in stores:
            os.kill(pid, signal.SIGCONT)


def test_a_decode_that_stops_while_idle_is_replaced_by_the_prefill() -> None:
    with running(RealApart) as cluster:
        whole = alone(cluster, PROMPT, 20)
        assert cluster.complete_text(prompt=PROMPT, max_tokens=20)["choices"][0]["token_ids"] == whole
        engine = [pid for pid in cluster.processes("decode-b") if pid != cluster.server("decode-b")]
        for pid in engine:
            os.kill(pid, signal.SIGSTOP)
        began_at = time.monotonic()
        answer = cluster.complete_text(prompt=PROMPT, max_tokens=20)
        print(f"20 tokens in {time.monotonic() - began_at:.2f} s")
        assert answer["choices"][0]["token_ids"] == whole
        assert answer["mooncake"]["decode"] == "prefill-a"
        for pid in engine:
            os.kill(pid, signal.SIGCONT)


def test_adapters_are_models_that_share_no_kv_and_outlive_their_vllm() -> None:
    with running(RealAdapters) as cluster:
        name = cluster.model_name
        models = (name, "poet", "sql")
        assert [card["id"] for card in web.get(f"{cluster.url}/v1/models").json()["data"]] == list(models)
        wholes = {each: alone(cluster, PROMPT, LONG, each) for each in models}
        assert len({tuple(tokens) for tokens in wholes.values()}) == 3
        for each in models:
            answer = cluster.complete_text(model=each, prompt=PROMPT, max_tokens=20)
            assert answer["model"] == each
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "the others' KV is not its own"
            assert answer["choices"][0]["token_ids"] == wholes[each][:20]
        for each in models:
            answer = cluster.complete_text(model=each, prompt=PROMPT, max_tokens=20)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 288, "its own is"
            assert answer["choices"][0]["token_ids"] == wholes[each][:20]

        home = served(cluster.complete_text(model="poet", prompt=PROMPT, max_tokens=8))
        by_node = lambda: cluster.dumps()["conductor-0"]["actor"]["index"]["by_node"]  # noqa: E731
        known = lambda: sum(by_node().get(node, 0) for node in cluster.VLLMS)  # noqa: E731
        eventually(lambda: known() >= 3 * (len(PROMPT) // 32), 30, "adapters' blocks are known by their events")
        body = greedy(model="poet", prompt=PROMPT, max_tokens=LONG, ignore_eos=True, stream=True)
        with Stream(cluster.url, body) as stream:
            stream.read(20)
            os.kill(cluster.server(home), signal.SIGKILL)
            assert stream.read() == wholes["poet"]
        assert not stream.errors


def test_an_adapter_is_loaded_where_it_is_first_asked_for_and_answers_from_there() -> None:
    with running(RealAdaptersOnDemand) as cluster:
        listed = lambda url: [card["id"] for card in web.get(f"{url}/v1/models").json()["data"]]  # noqa: E731
        assert all("poet" not in listed(url) for url in cluster.urls.values())
        first = cluster.complete_text(model="poet", prompt=PROMPT, max_tokens=20)
        home = served(first)
        assert ["poet" in listed(url) for url in cluster.urls.values()] == [node == home for node in cluster.urls]
        known = lambda: cluster.dumps()["conductor-0"]["actor"]["adapters"].get(home, ())  # noqa: E731
        eventually(lambda: "poet" in known(), 30, "the conductor knows where it is")
        prompts = [[3 + (i * 5 + turn) % 90 for i in range(200)] for turn in range(6)]
        with ThreadPoolExecutor(6) as asking:
            answers = list(
                asking.map(lambda prompt: cluster.complete_text(model="poet", prompt=prompt, max_tokens=40), prompts)
            )
        assert [served(answer) for answer in answers] == [home] * 6, "it is loaded nowhere else"
        plain = cluster.complete_text(prompt=PROMPT, max_tokens=20)
        assert plain["choices"][0]["token_ids"] != first["choices"][0]["token_ids"]


ABOUT = {"a": {"enum": ["red", "green"]}, "b": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": ABOUT, "required": ["a", "b"], "additionalProperties": False}


def is_of_schema(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == ABOUT.keys() and found["a"] in ABOUT["a"]["enum"] and isinstance(found["b"], bool)


def test_models_share_an_address_and_a_store_and_no_kv_and_each_finds_its_own_after_kill_9() -> None:
    with running(RealModels) as cluster:
        prompts = [[3 + (i * 7 + turn) % 90 for i in range(300)] for turn in range(10)]
        tokens: dict[str, list[list[int]]] = {}
        for name in ("large", "small"):
            answers = [cluster.complete_text(model=name, prompt=prompt, max_tokens=20) for prompt in prompts]
            assert [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers] == [0] * len(prompts), name
            tokens[name] = [each["choices"][0]["token_ids"] for each in answers]
        assert all(one != other for one, other in zip(*tokens.values(), strict=True)), "random weights agree on no answer"

        saved = 2 * len(prompts) * 9
        eventually(lambda: stored(cluster) >= saved, 60, f"{saved} blocks are in the store")
        os.killpg(cluster.server("vllm-b"), signal.SIGKILL)
        assert cluster.complete_text(model="large", prompt=PROMPT, max_tokens=5)["usage"]["completion_tokens"] == 5
        eventually(lambda: cluster.complete() and serves(cluster, "small"), START_S, "the killed vLLM serves again")
        again = [cluster.complete_text(model="small", prompt=prompt, max_tokens=20) for prompt in prompts]
        assert [each["choices"][0]["token_ids"] for each in again] == tokens["small"]
        cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in again]
        print(f"cached tokens of 300 after kill -9: {cached}")
        assert min(cached) >= 256


def stored(cluster: RealCluster) -> float:
    """Blocks that both vLLMs have saved."""
    lines = [line for url in cluster.urls.values() for line in web.get(f"{url}/metrics").text.splitlines()]
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("vllm:mooncake_zmq_pool_total{") and '"saved_blocks"' in line
    )


def serves(cluster: RealCluster, model: str) -> bool:
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 1}
    with contextlib.suppress(httpx.TimeoutException):  # a request waits for its model's vLLM
        return web.post(f"{cluster.url}/v1/completions", json=body, timeout=10).status_code == 200
    return False


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"guided_choice": ["red", "green", "blue"]}, lambda text: text in ("red", "green", "blue")),
        ({"guided_regex": "[a-f]{4}[0-9]{2}"}, lambda text: re.fullmatch("[a-f]{4}[0-9]{2}", text)),
        ({"guided_grammar": 'start: ("ab" | "ba") "!"'}, lambda text: text in ("ab!", "ba!")),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}, is_of_schema),
    ],
)
def test_an_answer_has_the_form_that_is_asked_for(cluster: RealCluster, asked: dict, fits: Callable[[str], Any]) -> None:
    body = {"model": cluster.model_name, "prompt": PROMPT[:40], "max_tokens": 100, "temperature": 0, **asked}
    answer = web.post(f"{cluster.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert fits(choice["text"])


def test_a_prompts_probabilities_are_those_of_one_vllm_alone(cluster: RealCluster) -> None:
    prompt = PROMPT[:75]
    asked = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 2}
    name = cluster.model_name
    for _ in range(2):  # the second time its KV is cached, and its probabilities are whole all the same
        answer = web.post(f"{cluster.url}/v1/completions", json={"model": name, **asked}, timeout=300)
        assert answer.status_code == 200, answer.text
        ours = answer.json()["choices"][0]["logprobs"]
        sampling = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "prompt_logprobs": 2}
        body = {"token_ids": prompt, "cache_salt": "alone", "sampling_params": sampling}
        whole = web.post(f"{list(cluster.urls.values())[1]}/inference/v1/generate", json=body, timeout=300).json()
        theirs = [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], whole["prompt_logprobs"][1:], strict=True)]
        assert ours["token_logprobs"][0] is None
        assert ours["token_logprobs"][1 : len(prompt)] == pytest.approx(theirs, abs=1e-4)
        assert len(ours["token_logprobs"]) == len(prompt) + 3
        assert {len(top) for top in ours["top_logprobs"][1:]} <= {2, 3}, "the two likeliest, and the token itself"
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_greedy_tokens_are_the_likeliest_by_their_probabilities(cluster: RealCluster) -> None:
    body = {"model": cluster.model_name, "prompt": PROMPT[:40], "max_tokens": 12, "temperature": 0, "logprobs": 3}
    answer = web.post(f"{cluster.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=300)
    assert answer.status_code == 200, answer.text
    logprobs = answer.json()["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 12
    for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert len(top) == 3
        assert max(top, key=top.__getitem__) == token
        assert top[token] == logprob < 0
