"""Requests served by vLLM nodes beside stand-ins: real processes, messages and HTTP; no token is lost or repeated."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import web
from strange_model import write_model
from stub_vllm import StubVllm
from toy_cluster import Stream, eventually, greedy, until_none
from vllm_cluster import ApartCluster, VllmCluster, answering, derender, expected, read, render, with_images

from mooncake_zmq.runtime.derender import DERENDER, RENDER
from mooncake_zmq.vllm.hints import as_parameters

PROMPT = [3 + i % 40 for i in range(50)]


@pytest.fixture
def stubs() -> Iterator[tuple[StubVllm, StubVllm]]:
    both = StubVllm(answering()), StubVllm(answering())
    for stub in both:
        stub.posts = {RENDER: render, DERENDER: derender}
    yield both
    for stub in both:
        stub.close()


@pytest.fixture
def cluster(directory: Path, stubs: tuple[StubVllm, StubVllm]) -> Iterator[VllmCluster]:
    model = write_model(directory / "models" / "strange")
    made = VllmCluster(directory, model, (stubs[0].url, stubs[1].url))
    with made.running():
        yield made


def answers_go_on_with_their_images(cluster: VllmCluster, stubs: tuple[StubVllm, StubVllm]) -> None:
    urls = ["data:image/png;base64,AAAA", "data:image/png;base64,AAAAAAAA"]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    wanted = expected(with_images([5, 2, 6, 5, 2, 6], urls), 40)
    deaths: list[int] = []

    def mortal(body):
        yield from answering(0.002, dies_after=lambda: None if deaths else 5)(body)
        deaths.append(1)

    for stub in stubs:
        stub.answer = mortal
    chat = {"model": cluster.model_name, "messages": [{"role": "user", "content": parts}], "max_tokens": 40, "temperature": 0}
    body = {**chat, "ignore_eos": True, "return_token_ids": True}
    answer = web.post(f"{cluster.url}/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["token_ids"] == wanted
    assert answer["usage"]["prompt_tokens"] == 84
    resumed = [body for stub in stubs for body in stub.asked if body["token_ids"] == [5, 2, 6, 5, 2, 6, *wanted[:5]]]
    assert [part["url"] for body in resumed for part in body["content_parts"]] == urls


def test_requests_outlive_the_engine_that_serves_them(cluster: VllmCluster, stubs: tuple[StubVllm, StubVllm]) -> None:
    name = cluster.model_name
    assert name == "strange"
    answer = cluster.complete_text(prompt=PROMPT, max_tokens=6)
    assert answer["choices"][0]["token_ids"] == expected(PROMPT, 6)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) - 1, "as vLLM says"
    assert not (cluster.runtime_dir / "cache" / "weights.bin").exists()

    # Whoever gets it first hangs up after five tokens.
    deaths: list[int] = []

    def dies_after() -> int | None:
        if deaths:
            return None
        return 5

    def mortal(body):
        yield from answering(0.002, dies_after=dies_after)(body)
        deaths.append(1)

    for stub in stubs:
        stub.answer = mortal
    with Stream(cluster.url, greedy(model=name, prompt=PROMPT, max_tokens=40, stream=True)) as stream:
        assert stream.read() == expected(PROMPT, 40)
    assert not stream.errors
    resumed = [body for stub in stubs for body in stub.asked if body["token_ids"] == PROMPT + expected(PROMPT, 5)]
    assert len(resumed) == 1

    # A client that goes away is hung up on at once.
    for stub in stubs:
        stub.answer = answering(0.01)
    with Stream(cluster.url, greedy(model=name, prompt=PROMPT, max_tokens=3000, stream=True)) as stream:
        stream.read(3)
    eventually(lambda: not any(stub.running for stub in stubs), 20, "both are idle")

    # An answer leaves a node that drains, and goes on at the other.
    with cluster.stream(model=name, prompt=PROMPT, max_tokens=300) as stream:
        stream.read(3)
        node = next(each for each, stub in zip(cluster.VLLMS, stubs, strict=True) if stub.running)
        web.post(f"{cluster.url}/admin/drain/{node}", timeout=10)
        assert stream.read() == expected(PROMPT, 300)
    served = stream.served
    assert (served["decode"] != node, served["attempts"], served["relocations"], stream.errors) == (True, 1, 1, [])
    web.request("DELETE", f"{cluster.url}/admin/drain/{node}", timeout=10)
    eventually(lambda: not cluster.dumps()[node]["actor"]["draining"], 20, "it serves again")

    answers_go_on_with_their_images(cluster, stubs)

    # A chat is read by the parsers of either, of which one is broken.
    stubs[0].posts[DERENDER] = 500, b"broken"
    for stub in stubs:
        stub.answer = answering(0.002)
    chat = {"model": name, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 60, "temperature": 0}
    for stream in (False, True):
        body = {**chat, "ignore_eos": True, "return_token_ids": True, "stream": stream}
        answers = web.post(f"{cluster.url}/v1/chat/completions", json=body).text.split("data: ")
        choices = [choice for each in answers if each.startswith("{") for choice in json.loads(each)["choices"]]
        said = [choice.get("delta") or choice.get("message") or {} for choice in choices]
        made = [token for choice in choices for token in choice.get("token_ids") or ()]
        assert (len(made), "".join(each.get("reasoning_content", "") for each in said)) == (60, read(made))
    assert cluster.dumps()["gateway-0"]["counts"].get("answers_unread", 0) == 0

    # With one of them gone all goes to the other, and the other way round.
    stubs[0].well = 503
    eventually(lambda: cluster.dumps()["vllm-a"]["actor"]["trouble"], 20, "it is missed")
    stubs[0].asked.clear()
    stubs[0].status = 503
    for stub in stubs:
        stub.answer = answering()
    for start in range(3):
        assert cluster.complete_text(prompt=PROMPT[start:], max_tokens=4)
    assert not stubs[0].asked
    stubs[0].well = stubs[0].status = 200
    eventually(lambda: not cluster.dumps()["vllm-a"]["actor"]["trouble"], 20, "it is back")

    stubs[1].well = stubs[1].status = 503
    eventually(lambda: cluster.dumps()["vllm-b"]["actor"]["trouble"], 20, "now the other is missed")
    cluster.complete_text(prompt=PROMPT, max_tokens=2)
    assert stubs[0].asked
    errors = [line for name in ("vllm-a", "vllm-b") for line in (cluster.runtime_dir / f"logs/{name}.log").open()]
    assert not [line for line in errors if '"level":"critical"' in line]


def test_one_prefills_and_another_decodes(directory: Path, stubs: tuple[StubVllm, StubVllm]) -> None:
    prefill, decode = stubs
    made = ApartCluster(directory, write_model(directory / "models" / "strange"), (prefill.url, decode.url))
    try:
        made.start()
        answer = made.complete_text(prompt=PROMPT, max_tokens=6)
        assert answer["choices"][0]["token_ids"] == expected(PROMPT, 6)
        assert (answer["mooncake"]["prefill"], answer["mooncake"]["decode"]) == ("prefill-a", "decode-b")
        assert [body["sampling_params"]["max_tokens"] for body in prefill.asked] == [1]
        (body,) = decode.asked
        assert body["token_ids"] == PROMPT + expected(PROMPT, 1)
        assert body["kv_transfer_params"] == as_parameters(["cache-a"], len(PROMPT))

        # The decode hangs up in mid-answer: what is missing is begun at the prefill once more.
        decode.answer = answering(dies_after=lambda: 5 if len(decode.asked) == 2 else None)
        with Stream(made.url, greedy(model=made.model_name, prompt=PROMPT, max_tokens=40, stream=True)) as stream:
            assert stream.read() == expected(PROMPT, 40)
        assert not stream.errors
        assert prefill.asked[-1]["token_ids"] == PROMPT + expected(PROMPT, 6)
        until_none(made.busy_gauges, 30)
        made.stop()
    finally:
        made.kill()
