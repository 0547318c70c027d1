"""A cluster beside vLLM servers, stand-ins or real ones; and what a stand-in answers."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import web
from strange_model import VOCABULARY
from stub_vllm import DONE, Pieces, event, usage
from toy_cluster import ROOT, ToyCluster, free_port, until_none


def next_token(tokens: list[int]) -> int:
    """A pure function of all before it."""
    return hashlib.sha256(json.dumps(tokens).encode()).digest()[0] % (VOCABULARY - 2)


def expected(prompt: list[int], count: int) -> list[int]:
    """What an undisturbed answer is."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def answering(gap_s: float = 0.0, *, dies_after: Callable[[], int | None] = lambda: None) -> Callable[[dict[str, Any]], Pieces]:
    """Answers as vLLM does. `dies_after()`: so many tokens, and then it hangs up."""

    def answer(body: dict[str, Any]) -> Pieces:
        wanted = body["sampling_params"]["max_tokens"]
        tokens = with_images(body["token_ids"], [part["url"] for part in body.get("content_parts", ())])
        prompt = len(tokens)
        for made in range(1, wanted + 1):
            tokens.append(next_token(tokens))
            yield event([tokens[-1]], "length" if made == wanted else None)
            if dies_after() == made:
                return
            time.sleep(gap_s)
        yield usage(len(body["token_ids"]) - 1, prompt)
        yield DONE

    return answer


PLACEHOLDER, IMAGE_TOKENS = 2, 40


def with_images(tokens: list[int], urls: list[str]) -> list[int]:
    """What a stand-in makes of a prompt: each image is as many tokens, here with what they show."""
    rest, found = list(urls), list[int]()
    for token in tokens:
        found += [token] if token != PLACEHOLDER or not rest else [len(rest.pop(0))] * IMAGE_TOKENS
    return found


def render(body: dict[str, Any]) -> tuple[int, bytes]:
    """Writes a chat with images as two tokens for each, around as many placeholders; others it only names a parser for."""
    contents = [turn["content"] for turn in body["messages"] if isinstance(turn["content"], list)]
    urls = [part["image_url"]["url"] for parts in contents for part in parts if part["type"] == "image_url"]
    each = [5, *[PLACEHOLDER] * IMAGE_TOKENS, 6]
    places = [{"offset": 1 + at * len(each), "length": IMAGE_TOKENS} for at in range(len(urls))]
    hashes = [hashlib.sha256(url.encode()).hexdigest() for url in urls]
    features = {"mm_hashes": {"image": hashes}, "mm_placeholders": {"image": places}} if urls else None
    return 200, json.dumps({"token_ids": each * len(urls), "features": features, "reasoning_parser_kwargs": {}}).encode()


def read(tokens: list[int], first: int = 0) -> str:
    """What a stand-in's parsers read: each token's place and number."""
    return "".join(f"{place}:{token} " for place, token in enumerate(tokens, first))


def derender(body: dict[str, Any]) -> tuple[int, bytes]:
    """Reads tokens as vLLM's parser of reasoning would that finds nothing else."""
    if not body.get("stream"):
        (choice,) = body["generate_response"]["choices"]
        said = {"choices": [{"message": {"content": None, "reasoning": read(choice["token_ids"])}}]}
        return 200, json.dumps(said).encode()
    before = (body["stream_state"] or {"output_token_ids": []})["output_token_ids"]
    (choice,) = body["generate_chunk"]["choices"]
    said = {"chunk": {"choices": [{"delta": {"reasoning": read(choice["token_ids"], len(before))}}]}}
    said["stream_state"] = {"output_token_ids": before + choice["token_ids"]}
    return 200, json.dumps(said).encode()


class VllmCluster(ToyCluster):
    """One of our configs on free ports, beside the servers at `urls`."""

    CONFIG = "vllm.toml"
    VLLMS = ("vllm-a", "vllm-b")

    nodes = ("conductor-0", "cache-a", "vllm-a", "vllm-b", "gateway-0")

    def __init__(self, directory: Path, model: Path, urls: tuple[str, str], settings: tuple[str, ...] = ()) -> None:
        text = (ROOT / "configs" / self.CONFIG).read_text()
        for old, new in zip(("http://127.0.0.1:8001", "http://127.0.0.1:8002"), urls, strict=True):
            assert text.count(f'url = "{old}"') == 1
            text = text.replace(f'url = "{old}"', f'url = "{new}"')
        text = text.replace("ipc:///tmp/", f"ipc://{directory}/").replace("1_073_741_824", "134_217_728")
        for port in (7301, 7302):
            text = text.replace(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{free_port()}")
        config = directory / "vllm.toml"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        config.write_text(text)
        own = (f"model.path={model}", f"model.cache_dir={directory / 'cache'}", *settings)
        super().__init__(directory, config=str(config), settings=own)

    def complete(self) -> bool:
        detail = self.health()
        return detail is not None and detail["peers"].get("vllm") == sorted(self.VLLMS)

    def complete_text(self, **body: Any) -> dict[str, Any]:
        return super().complete_text(**{"model": self.model_name, **body})

    @property
    def model_name(self) -> str:
        return web.get(f"{self.url}/v1/models").json()["data"][0]["id"]


class ApartCluster(VllmCluster):
    """The first server prefills, the second one decodes."""

    CONFIG = "vllm-apart.toml"
    nodes = ("conductor-0", "cache-a", "cache-b", "prefill-a", "decode-b", "gateway-0")
    VLLMS = ("prefill-a", "decode-b")

    def start(self) -> None:
        super().start()
        until_none(self.missing, 30)  # a prefill passes requests on to a decode that is connected to it


class AttachedCluster(ToyCluster):
    """`mooncake-zmq attach` on free ports, in a directory of its own."""

    nodes = ("conductor-0", "cache-0", "vllm-0", "vllm-1", "gateway-0")

    def __init__(self, directory: Path, urls: list[str]) -> None:
        super().__init__(
            directory, settings=("cache_node.objects.object_bytes=134217728", f"model.cache_dir={directory}/cache")
        )
        self.file = directory / "attach.toml"
        self.arguments = [*urls, "--to", str(self.file), *self.arguments[2:]]

    def up(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"XDG_CACHE_HOME": str(self.runtime_dir / "cache")}
        with self.output.open("ab") as output:
            command = [sys.executable, "-m", "mooncake_zmq", "attach", *self.arguments]
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
            )
        return self.process

    def complete(self) -> bool:
        detail = self.health()
        return detail is not None and detail["peers"].get("vllm") == ["vllm-0", "vllm-1"]


def cpu_s(pid: int) -> float:
    """Of a process, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
