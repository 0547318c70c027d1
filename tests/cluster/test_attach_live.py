"""`attach` with two stand-ins: from nothing to an answer that outlives the server that began it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import web
from attachable_vllm import AttachableVllm
from ports import free_port
from strange_model import write_model
from toy_cluster import Stream, eventually, greedy, until_none
from vllm_cluster import AttachedCluster, answering, expected

PROMPT = [3 + i % 40 for i in range(50)]
NAME = "org/strange"


@pytest.fixture
def stubs(directory: Path) -> Iterator[list[AttachableVllm]]:
    model, store = write_model(directory / "models" / "strange"), f"tcp://127.0.0.1:{free_port()}"
    both = [
        AttachableVllm(root=str(model), names=(NAME,), adapters=adapters, stores=store, events=events, answering=answering())
        for events, adapters in ((f"tcp://127.0.0.1:{free_port()}", ("tuned",)), ("", ("tuned", "rare")))
    ]
    yield both
    for stub in both:
        stub.close()


@pytest.fixture
def cluster(directory: Path, stubs: list[AttachableVllm]) -> Iterator[AttachedCluster]:
    made = AttachedCluster(directory, [stub.url for stub in stubs])
    try:
        made.start()
        yield made
        until_none(made.busy_gauges, 30)
        made.stop()
        assert [stub.well for stub in stubs] == [web.get(f"{stub.url}/health").status_code for stub in stubs]
    finally:
        made.kill()


def test_two_servers_are_served_through_one_address(cluster: AttachedCluster, stubs: list[AttachableVllm]) -> None:
    assert f"wrote {cluster.file}" in cluster.told()
    assert "--kv-events-config" in cluster.told(), "what they lack is said, and they are served"
    listed, *adapters = web.get(f"{cluster.url}/v1/models").json()["data"]
    assert [(adapter["id"], adapter["parent"]) for adapter in adapters] == [("tuned", NAME), ("rare", NAME)]
    assert f"{stubs[0].url} gets no requests for what it does not list: rare" in cluster.told()
    assert (listed["id"], listed["max_model_len"]) == (NAME, 3200), "as much as one server has room for"
    chat = {"model": NAME, "messages": [{"role": "user", "content": "the"}], "max_tokens": 4, "temperature": 0}
    assert web.post(f"{cluster.url}/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] == 4

    tuned = web.post(f"{cluster.url}/v1/chat/completions", json=chat | {"model": "tuned"}).json()
    assert (tuned["model"], tuned["usage"]["prompt_tokens_details"]["cached_tokens"]) == ("tuned", 0)
    asked = [body for stub in stubs for body in stub.asked if body.get("stream")]
    assert [body.get("model") for body in asked[-2:]].count("tuned") == 1
    assert len({body["cache_salt"] for body in asked[-2:]}) == 2

    eventually(lambda: "rare" in cluster.dumps()["conductor-0"]["actor"]["adapters"].get("vllm-1", ()), 10, "a list")
    for number in range(6):
        asked_for = {"model": "rare", "messages": [{"role": "user", "content": f"the {number}"}], "max_tokens": 2}
        assert web.post(f"{cluster.url}/v1/chat/completions", json=asked_for).status_code == 200
    served = [[body.get("model") for body in stub.asked if body.get("stream")].count("rare") for stub in stubs]
    assert served == [0, 6], "the only server that has it"

    ends: list[int] = []

    def ends_once() -> int | None:
        return None if ends else 5

    def mortal(body):
        yield from answering(0.002, dies_after=ends_once)(body)
        ends.append(1)

    for stub in stubs:
        stub.answering = mortal
    with Stream(cluster.url, greedy(model="tuned", prompt=PROMPT, max_tokens=40, stream=True)) as stream:
        assert stream.read() == expected(PROMPT, 40)
    assert not stream.errors
    assert [body.get("model") for stub in stubs for body in stub.asked if body.get("stream")].count("tuned") >= 3
