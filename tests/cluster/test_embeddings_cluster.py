"""Embeddings by vLLM nodes beside stand-ins: real processes, messages and HTTP."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import web
from strange_model import write_model
from stub_vllm import StubVllm
from toy_cluster import eventually, until_none
from vllm_cluster import VllmCluster

from mooncake_zmq.runtime.embedding import EMBEDDINGS


def vector(text: list[int], size: int) -> list[float]:
    """Return numbers that depend on all tokens of a text and are exact in float32."""
    return [float(sum(text) + place) for place in range(size)]


def embedding(body: dict[str, Any]) -> tuple[int, bytes]:
    """Embed as vLLM does a model without Matryoshka's dimensions."""
    if "dimensions" in body:
        return 400, json.dumps({"error": {"message": "no dimensions but 8"}}).encode()
    raw = [np.array(vector(text, 8), "<f4").tobytes() for text in body["input"]]
    data = [{"index": index, "embedding": base64.b64encode(each).decode()} for index, each in enumerate(raw)]
    return 200, json.dumps({"data": data}).encode()


def test_texts_are_embedded_also_where_a_server_fails(directory: Path) -> None:
    stubs = StubVllm(), StubVllm()
    asked: list[list[list[int]]] = []
    failures: list[int] = []

    def fails_once(body: dict[str, Any]) -> tuple[int, bytes]:
        asked.append(body["input"])
        if len(body["input"]) > 1 and not failures:
            failures.append(1)
            return 500, b"broken"
        return embedding(body)

    for stub in stubs:
        stub.posts = {EMBEDDINGS: fails_once}
    model = write_model(directory / "models" / "strange")
    made = VllmCluster(directory, model, (stubs[0].url, stubs[1].url), ("model.task=embed",))
    try:
        made.start()
        url = f"{made.url}/v1/embeddings"
        whole = web.post(url, json={"model": made.model_name, "input": [5, 6, 7]}).json()
        assert whole["data"] == [{"object": "embedding", "index": 0, "embedding": vector([5, 6, 7], 8)}]
        assert whole["usage"] == {"prompt_tokens": 3, "total_tokens": 3}

        # 100 texts are two requests, of which the first to arrive fails and is made again.
        asked.clear()
        texts = [[1 + index % 90, 2] for index in range(100)]
        whole = web.post(url, json={"input": texts, "encoding_format": "base64", "user": "u"}).json()
        found = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist() for each in whole["data"]]
        assert found == [vector(text, 8) for text in texts]
        assert [each["index"] for each in whole["data"]] == [*range(100)]
        assert (sorted(map(len, asked)), len(failures)) in (([36, 36, 64], 1), ([36, 64, 64], 1))

        refused = web.post(url, json={"input": "the th", "dimensions": 4})
        assert (refused.status_code, "no dimensions but 8" in refused.text) == (400, True)
        for path in ("completions", "chat/completions"):
            body = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
            refused = web.post(f"{made.url}/v1/{path}", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_not_supported")
        eventually(lambda: made.dumps()["gateway-0"]["actor"]["requests"] == [], 20, "none is left")
        until_none(made.busy_gauges, 30)
        made.stop()
    finally:
        made.kill()
        for stub in stubs:
            stub.close()
