"""`bench longprompt` at toy size: a cluster and another router in front of servers that sleep, and those servers' answers."""

import json
import sys
from array import array
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from mooncake_zmq.bench import longprompt
from mooncake_zmq.bench.client_stream import Seen
from mooncake_zmq.bench.command import bench
from mooncake_zmq.bench.longprompt import LongPrompts, sleeping_servers
from mooncake_zmq.bench.sleeping_vllm import asked_tokens
from mooncake_zmq.prove.tiny_llama import write_model

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def model_with_template(directory: Path) -> Path:
    model = write_model(directory)
    settings = json.loads((model / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def test_each_side_has_its_rows(tmp_path: Path) -> None:
    model = model_with_template(tmp_path / "model")
    load = ["--tokens", "2000", "--rate", "5", "--seconds", "1", "--chats", "2", "--model", str(model)]
    beside = f"{sys.executable} -m mooncake_zmq.bench.sleeping_vllm {{port}}"
    result = CliRunner().invoke(bench, ["longprompt", *load, "--beside", beside, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["turns answered, 2,000 tokens, 5/s / sent"]["value"] == 5
    assert rows["turns answered / the other router's"]["reference"] == 5
    assert rows["TTFT added, p50, 2,000 tokens, 5/s / wanted"]["value"] > 0
    assert {each["name"] for each in report["memory"]} == {"conductor-0", "gateway-0", "vllm-0", "vllm-1"}
    assert not any("failed" in note for note in report["notes"])


def test_running_servers_are_measured_in_place_of_those_that_sleep(tmp_path: Path) -> None:
    model = model_with_template(tmp_path / "model")
    with sleeping_servers(1) as (url,):
        load = ["--tokens", "1000", "--rate", "5", "--seconds", "1", "--chats", "1", "--model", str(model), "--vllm", url]
        result = CliRunner().invoke(bench, ["longprompt", *load, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert {each["name"] for each in report["memory"]} == {"conductor-0", "gateway-0", "vllm-0"}
    assert {row["name"]: row["value"] for row in report["rows"]}["turns answered, 1,000 tokens, 5/s / sent"] == 5


def test_a_first_turn_that_fails_is_counted_and_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    first = iter([Seen(error="refused", said="not now"), Seen(finished=True, token_s=array("d", [0.5]))])

    async def asked(connections: object, body: bytes, tokens: int) -> Seen:
        return next(first, Seen(finished=True, token_s=array("d", [0.1] * tokens)))

    monkeypatch.setattr(longprompt, "_asked", asked)
    load = LongPrompts(tokens=1000, rate=50, seconds=1, chats=2)
    side = longprompt._side("ours", "http://127.0.0.1:9", "m", load, 0, {}, lambda text: None)
    assert side.first_s == [0.5]
    assert side.failed == ["a first turn: refused not now"]


def test_a_server_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(bench, ["longprompt", "--vllm", "http://127.0.0.1:9", "--tokens", "1000"])
    assert result.exit_code == 2
    assert "http://127.0.0.1:9 does not say which model it serves" in result.output


def test_a_router_that_does_not_start_is_said_so(tmp_path: Path) -> None:
    load = ["--tokens", "1000", "--rate", "5", "--seconds", "1", "--chats", "1", "--beside", "/nowhere/router {port}"]
    result = CliRunner().invoke(bench, ["longprompt", *load])
    assert result.exit_code != 0
    assert "the other router does not start" in result.output
    assert "the engine alone" not in result.output, "it is said before anything is measured"


@pytest.mark.parametrize(
    "path", ["/inference/v1/generate", "/v1/chat/completions", "/v1/completions"], ids=["ids", "chat", "text"]
)
def test_a_server_that_sleeps_streams_what_is_asked_for(path: str) -> None:
    with sleeping_servers(1) as (url,), httpx.Client(base_url=url) as client:
        for asked in (1, 3):
            answer = client.post(path, json={"messages": ["x" * 100_000], "max_tokens": asked, "stream": True})
            events = [line for line in answer.text.splitlines() if line.startswith("data: {")]
            assert len(events) == asked
            assert answer.text.endswith("data: [DONE]\n\n")
            choice = json.loads(events[-1].removeprefix("data: "))["choices"][0]
            assert choice["finish_reason"] == "length"
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == "sleeping"


def test_the_number_of_tokens_is_found_at_either_end_of_a_body() -> None:
    assert asked_tokens(b'{"max_tokens": 7, "messages": "' + b"x" * 10_000 + b'"}') == 7
    assert asked_tokens(b'{"messages": "' + b"x" * 10_000 + b'", "max_completion_tokens":8}') == 8
    assert asked_tokens(b"{}") == 16


def test_conversations_fit_into_the_context_that_is_served() -> None:
    load = LongPrompts(tokens=1000, rate=50, seconds=60, chats=5)
    assert load.longest > load.tokens + load.turns / load.chats * 400


def test_conversations_longer_than_a_message_are_refused() -> None:
    result = CliRunner().invoke(bench, ["longprompt", "--tokens", "1100000"])
    assert result.exit_code == 2
    assert "a prompt has 1,048,576 at most" in result.output
